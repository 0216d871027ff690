"""One weight that counts the updates applied to it: its gradient is always -1, its rate 1."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strategies.metrics import Metrics
from trainer.config import Config
from trainer.hooks.base import Hook


@dataclasses.dataclass
class CountingConfig(Config):
    """Config with two fields more.

    Attributes:
        hold_dir: Where files `hold-<worker>` hold ps workers back, and `pause` slows the chief.
        apply_ms: What an application takes, where the weight is.
    """

    hold_dir: str = ""
    apply_ms: int = 0


def get_config() -> CountingConfig:
    return CountingConfig(
        batch_size=16,
        optimizer="sgd",
        learning_rate=1.0,
        train_steps=1000,
        export=False,
    )


def build_model(config: CountingConfig) -> Any:
    """Images [B, 8, 8, 1] -> the weight, [B, 1]."""
    import keras
    from keras import layers, ops

    from tests.cluster.gates import Hold

    class Weight(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.add_weight(shape=(), initializer="zeros", name="weight")

        def call(self, images: Any) -> Any:
            weight = self.weight
            if hold := Hold.of(config.hold_dir):
                weight = hold.gradient_of(weight, "weight", waits=True)
            return ops.zeros((ops.shape(images)[0], 1)) + weight

    images = keras.Input((8, 8, 1))
    return keras.Model(images, Weight()(images))


def build_optimizer(config: CountingConfig) -> Any:
    import keras
    import tensorflow as tf

    from tests.cluster.delay import late

    class SlowSGD(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            if config.apply_ms:
                gradient = late(tf.ensure_shape(gradient, []), config.apply_ms)
            super().update_step(gradient, variable, learning_rate)

    return SlowSGD(config.learning_rate)


def loss(labels: Any, outputs: Any) -> Any:
    """-weight, so that every example's gradient is -1."""
    return -outputs[:, 0]


class Pause(Hook):
    """Makes calls of the executor last longer while there is a file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, step: int, metrics: Metrics) -> None:
        if self._path.exists():
            time.sleep(0.5)


def build_hooks(config: CountingConfig, model_dir: str) -> Sequence[Hook]:
    return [Pause(Path(config.hold_dir) / "pause")] if config.hold_dir else []


metrics: dict[str, Any] = {}
