"""A model with one large variable; the chief writes down where all variables are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.hooks.base import Hook


def get_config() -> Config:
    return Config(batch_size=32, export=False, checkpoint_every_steps=0)


def build_model(config: Config) -> Any:
    """Images [B, 8, 8, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(20, use_bias=False, name="first"),
            layers.Dense(200, use_bias=False, name="large"),
            layers.Dense(10, use_bias=False, name="last"),
        ]
    )


class WriteDownDevices(Hook):
    """Name and bytes of each variable, by the index of its ps."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def end(self, step: int) -> None:
        import tensorflow as tf

        from strategies.ps.executor import _KEEP_ALIVE

        executor: Any = _KEEP_ALIVE[-1]
        learner = executor._learner
        devices: dict[str, list[tuple[str, int]]] = {}
        for variable in [*learner.model.variables, *learner.optimizer.variables]:
            task = tf.DeviceSpec.from_string(variable.value.device).task
            made = devices.setdefault(str(task), [])
            made.append((variable.path, variable.value.numpy().nbytes))
        self._path.write_text(json.dumps(devices))


def build_hooks(config: Config, model_dir: str) -> Sequence[Hook]:
    return [WriteDownDevices(Path(model_dir) / "devices.json")]
