"""A linear model on numbered examples, of which one makes the loss of training nan.

Its metric `number` is the number of the example, so that the mean tells which were consumed.
"""

import dataclasses

import keras
from keras import ops

from strategies.base import Tensor
from tests.cluster.configs import straggler
from trainer.config import Config


@dataclasses.dataclass
class PoisonedConfig(Config):
    """Config with a field more.

    Attributes:
        poison: The number of the example.
    """

    poison: int = -1


def get_config() -> PoisonedConfig:
    """Less than the 25 batches of an epoch, so that no example comes twice."""
    return PoisonedConfig(
        batch_size=32,
        learning_rate=0.01,
        train_steps=14,
        steps_per_call=2,
        log_every_steps=1,
        checkpoint_every_steps=4,
        export=False,
    )


def build_model(config: PoisonedConfig) -> keras.Model:
    """Numbers [B, 1], in thousands -> [B, 1]."""

    class Poison(keras.layers.Layer):
        def call(self, numbers: Tensor, training: bool = False) -> Tensor:
            is_poison = ops.equal(ops.round(numbers * 1000), config.poison)
            return ops.where(is_poison, float("nan"), numbers) if training else numbers

    return keras.Sequential([keras.Input((1,)), Poison(), keras.layers.Dense(1)])


def loss(labels: Tensor, outputs: Tensor) -> Tensor:
    return ops.square(labels / 1000 - outputs[:, 0])


parse, metrics = straggler.parse, straggler.metrics
