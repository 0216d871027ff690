"""A linear model with batch normalisation, and code of a user that fails as config.fault says."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import layers
from typing_extensions import override

from strategies.base import Tensor
from strategies.metrics import Metrics
from trainer.config import Config, DataConfig
from trainer.hooks.base import Hook

AT_STEP = 20
ARMED = ("hang", "size")  # Faults of an evaluation.


@dataclasses.dataclass
class FailingConfig(Config):
    """Config with a field more.

    Attributes:
        fault: What fails: "hook", "memory", "interrupt", "exit", "callback", "hang" or "size".
    """

    fault: str = ""


def get_config() -> FailingConfig:
    return FailingConfig(
        batch_size=48,
        learning_rate=0.01,
        train_steps=60,
        steps_per_call=10,
        log_every_steps=10,
        eval_every_steps=30,
        data=DataConfig(window_batches=4),  # Not all records are read before the first step.
        checkpoint_every_steps=0,
        export=False,
    )


class Trap(keras.layers.Layer):
    """Disturbs an evaluation when the hook of this file has made the file `armed`.

    It never ends, or it needs a tensor of 64 TiB if the fault is "size".
    """

    def __init__(self, armed: str, fault: str) -> None:
        super().__init__()
        self._armed, self._fault = armed, fault

    def call(self, images: Tensor, training: bool = False) -> Tensor:
        def is_armed(_: Tensor) -> Tensor:
            return tf.size(tf.io.matching_files(self._armed)) > 0

        if training or not self._armed:
            return images
        if self._fault == "size":
            side = tf.where(is_armed(images), 1 << 22, 1)
            return images + 0 * tf.reduce_sum(tf.fill([side, side], 1.0))
        rounds = tf.while_loop(is_armed, lambda number: [number + 1], [tf.constant(0)])
        with tf.control_dependencies(rounds):
            return tf.identity(images)


def build_model(config: FailingConfig) -> keras.Model:
    """Images [B, 8, 8, 1] -> logits [B, 10]."""
    armed = os.environ["TRAP"] if config.fault in ARMED else ""
    trap = Trap(armed, config.fault)
    inner = [trap, layers.Flatten(), layers.BatchNormalization(), layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *inner])


class FailAt(Hook):
    """Fails at AT_STEP."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    @override
    def next_step(self, step: int) -> int:
        return AT_STEP if step < AT_STEP else super().next_step(step)

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        if self._fault in ARMED:
            Path(os.environ["TRAP"]).touch()
        elif step >= AT_STEP:
            errors = {
                "hook": ValueError("the hook fails"),
                "memory": MemoryError("no memory"),
                "interrupt": KeyboardInterrupt("an interrupt"),
                "exit": SystemExit(3),
            }
            raise errors[self._fault]


def build_hooks(config: FailingConfig, model_dir: str) -> Sequence[Hook]:
    return [FailAt(config.fault)] if config.fault not in ("", "callback") else []


class FailAtEpochEnd(keras.callbacks.Callback):
    """Fails at the end of the first epoch: at step 30."""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        raise ValueError("the callback fails")


def build_callbacks(config: FailingConfig) -> list[keras.callbacks.Callback]:
    return [FailAtEpochEnd()] if config.fault == "callback" else []
