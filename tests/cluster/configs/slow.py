"""The digits' default model, whose training takes long enough for something to happen to it."""

import dataclasses
import time
from collections.abc import Sequence

from configs.digits import build_model
from strategies.base import Metrics
from trainer.config import Config
from trainer.hooks import Hook

__all__ = ["build_hooks", "build_model", "get_config"]


@dataclasses.dataclass
class SlowConfig(Config):
    """Config with the seconds that are lost after every call of the executor, on the chief."""

    pause_secs: float = 0.1


def get_config() -> SlowConfig:
    return SlowConfig(
        train_steps=300,
        steps_per_call=10,
        log_every_steps=20,
        checkpoint_every_steps=0,
        export=False,
    )


class Pause(Hook):
    """Makes each call of the executor last `secs` longer."""

    def __init__(self, secs: float) -> None:
        self._secs = secs

    def __call__(self, step: int, metrics: Metrics) -> None:
        time.sleep(self._secs)


def build_hooks(config: SlowConfig, model_dir: str) -> Sequence[Hook]:
    return [Pause(config.pause_secs)]
