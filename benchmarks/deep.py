"""A perceptron of 12 hidden layers of 1,024 units, 49 MB of gradients; for benchmarks.network.

python -m trainer --strategy=multiworker --config=benchmarks/deep.py --data_dir=datasets/mnist

With `config.device_secs` each step also waits for so long, as for a device that computes: then what
is measured depends little on the load of the machine.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras
    import numpy as np
    import numpy.typing as npt
    import tensorflow as tf

WIDTH, DEPTH = 1024, 12
# Weights and biases, of 4 bytes each.
GRADIENT_BYTES = 4 * (785 * WIDTH + (DEPTH - 1) * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10)


@dataclass
class DeepConfig(Config):
    """The wait of each step."""

    device_secs: float = 0.0


def get_config() -> DeepConfig:
    """A report every 4 steps, and nothing else."""
    return DeepConfig(
        dataset="mnist",
        batch_size=1024,
        optimizer="sgd",
        learning_rate=0.001,
        train_steps=16,
        steps_per_call=4,
        log_every_steps=4,
        eval_every_steps=0,
        checkpoint_every_steps=0,
        export=False,
    )


def build_model(config: DeepConfig) -> "keras.Model":
    """Images float32 [B, 28, 28, 1] in [0, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    deep = [layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    images = keras.Input((28, 28, 1))
    waits = [layers.Lambda(_after(config.device_secs))] if config.device_secs else []
    return keras.Sequential([images, *waits, layers.Flatten(), *deep, layers.Dense(10)])


def _after(secs: float) -> "Callable[[tf.Tensor], tf.Tensor]":
    """Returns a function that returns its argument after `secs`."""
    import tensorflow as tf

    def sleep(images: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        time.sleep(secs)
        return images

    def wait(images: tf.Tensor) -> tf.Tensor:
        # Python in the process of a worker: for `mirrored` and `multiworker`.
        waited = tf.numpy_function(sleep, [images], images.dtype)  # noqa: TID251
        return tf.ensure_shape(waited, images.shape)

    return wait
