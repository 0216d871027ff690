"""A variational autoencoder: the divergence by `add_loss` in a layer, the rest as `loss`."""

from typing import Any

import keras
from keras import layers, ops

from tests.models.examples import SIZE, ModelConfig, config, parsed


def get_config() -> ModelConfig:
    return config(0.002)


def parse(serialized: Any) -> Any:
    image = parsed(serialized)["image"]
    return image, image


class Divergence(layers.Layer):
    """Adds the mean divergence of the code from a normal distribution."""

    def call(self, inputs: Any) -> Any:
        mean, log_var = inputs
        kl = -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=-1)
        self.add_loss(ops.mean(kl))
        return mean


def build_model(config: ModelConfig) -> keras.Model:
    image = keras.Input((SIZE, SIZE, 3))
    hidden = layers.Dense(32, "relu")(layers.Flatten()(image))
    code = Divergence()([layers.Dense(4)(hidden), layers.Dense(4)(hidden)])
    pixels = layers.Dense(SIZE * SIZE * 3, "sigmoid")(
        layers.Dense(32, "relu")(layers.GaussianNoise(1.0)(code))
    )
    return keras.Model(image, layers.Reshape((SIZE, SIZE, 3))(pixels))


def loss(labels: Any, outputs: Any) -> Any:
    return ops.sum(ops.square(labels - outputs), axis=(1, 2, 3))


metrics: dict[str, Any] = {}
