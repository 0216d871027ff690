"""The digits with a perceptron of any size, for benchmarks.large_models.

python -m trainer --strategy=ps --config=benchmarks/large.py --config.megabytes=100
"""

import dataclasses
import math
from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras

_BYTES = 4  # float32


@dataclasses.dataclass
class LargeConfig(Config):
    """Config with the size of the model.

    Attributes:
        megabytes: Size of the weights in 10^6 bytes, at least 1.
    """

    megabytes: int = 100


def get_config() -> LargeConfig:
    """Batches of 48, and no export."""
    return LargeConfig(
        learning_rate=0.001,
        batch_size=48,
        steps_per_call=4,
        log_every_steps=4,
        checkpoint_every_steps=0,
        eval_every_steps=0,
        export=False,
    )


def build_optimizer(config: LargeConfig) -> "keras.Optimizer":
    """Momentum: one more copy of the weights."""
    import keras

    return keras.optimizers.SGD(config.learning_rate, momentum=0.9)


def build_model(config: LargeConfig) -> "keras.Model":
    """Images float32 [B, 8, 8, 1] in [0, 1] -> logits [B, 10].

    The kernels have about 1/2, 1/4, 1/8, 1/16 ... of the weights. Sums of layers of equal width
    give a variable several gradients.
    """
    import keras
    from keras import layers

    width = int(math.sqrt(config.megabytes * 1e6 / 2 / _BYTES))
    images = keras.Input((8, 8, 1))
    hidden = layers.Dense(width, activation="relu")(layers.Flatten()(images))
    hidden = layers.Add()([hidden, layers.Dense(width, activation="relu")(hidden)])
    narrow = layers.Dense(width // 2, activation="relu")(hidden)
    narrow = layers.Add()([narrow, layers.Dense(width // 2, activation="relu")(narrow)])
    narrower = layers.Dense(width // 4, activation="relu")(narrow)
    narrower = layers.Add()([narrower, layers.Dense(width // 4, activation="relu")(narrower)])
    return keras.Model(images, layers.Dense(10)(narrower))
