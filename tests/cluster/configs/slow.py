"""Digits with dropout, and training that takes long enough for something to happen to it."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from strategies.metrics import Metrics
from trainer.config import Config
from trainer.hooks.base import Hook


@dataclasses.dataclass
class SlowConfig(Config):
    """Config with two fields more.

    Attributes:
        pause_secs: Lost after every call of the executor, on the chief.
        units: Of its hidden layer; a checkpoint has about 3,200 bytes for each.
    """

    pause_secs: float = 0.1
    units: int = 64


def get_config() -> SlowConfig:
    return SlowConfig(
        train_steps=300,
        steps_per_call=10,
        log_every_steps=20,
        checkpoint_every_steps=0,
        export=False,
    )


def build_model(config: SlowConfig) -> Any:
    """Images float32 [B, 8, 8, 1] in [0, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(config.units, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


class Pause(Hook):
    """Makes each call of the executor last `secs` longer."""

    def __init__(self, secs: float) -> None:
        self._secs = secs

    def __call__(self, step: int, metrics: Metrics) -> None:
        time.sleep(self._secs)


def build_hooks(config: SlowConfig, model_dir: str) -> Sequence[Hook]:
    return [Pause(config.pause_secs)]
