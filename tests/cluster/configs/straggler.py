"""A linear model on numbered examples, where ps worker 0 takes `delay_ms` longer for a gradient.

Its metric `number` is the number of the example, so that the mean tells which were consumed.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from strategies.base import Tensor
from tests.cluster.delay import late_on_worker
from trainer.config import Config


@dataclasses.dataclass
class StragglerConfig(Config):
    """Config with a field more.

    Attributes:
        delay_ms: What a gradient of worker 0 takes longer.
    """

    delay_ms: int = 200


def get_config() -> StragglerConfig:
    return StragglerConfig(
        batch_size=32,
        optimizer="sgd",
        learning_rate=0.1,
        train_steps=40,
        log_every_steps=40,
        checkpoint_every_steps=0,
        export=False,
    )


def build_model(config: StragglerConfig) -> keras.Model:
    class Late(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return late_on_worker(0, inputs, config.delay_ms)

    return keras.Sequential([keras.Input((1,)), Late(), keras.layers.Dense(1)])


def parse(serialized: Tensor) -> tuple[Tensor, Tensor]:
    numbers = tf.io.parse_example(serialized, {"number": tf.io.FixedLenFeature([], tf.int64)})
    labels = tf.cast(numbers["number"], tf.float32)
    return labels[:, tf.newaxis] / 1000, labels


def loss(labels: Tensor, outputs: Tensor) -> Tensor:
    return tf.square(labels / 1000 - outputs[:, 0])


def number(labels: Tensor, outputs: Tensor) -> Tensor:
    return labels


metrics = {"number": number}
