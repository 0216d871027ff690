"""A variational autoencoder that overrides `compute_loss`, and has a `train_step`."""

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.models.examples import SIZE, ModelConfig, config, parsed


def get_config() -> ModelConfig:
    return config(0.002)


def parse(serialized: Any) -> Any:
    image = parsed(serialized)["image"]
    return image, image


class Autoencoder(keras.Model):
    """Samples in training only, so that evaluations can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [layers.Flatten(), layers.Dense(32, "relu"), layers.Dense(8)]
        )
        self.noise = layers.GaussianNoise(1.0)
        self.decoder = keras.Sequential(
            [
                layers.Dense(32, "relu"),
                layers.Dense(SIZE * SIZE * 3, "sigmoid"),
                layers.Reshape((SIZE, SIZE, 3)),
            ]
        )

    def call(self, image: Any, training: bool = False) -> Any:
        mean, log_var = ops.split(self.encoder(image), 2, axis=-1)
        noise = self.noise(ops.zeros_like(mean), training=training)
        code = mean + ops.exp(log_var / 2) * noise
        return {"image": self.decoder(code), "mean": mean, "log_var": log_var}

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        mean, log_var = y_pred["mean"], y_pred["log_var"]
        kl = -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=-1)
        return ops.mean(ops.sum(ops.square(y - y_pred["image"]), axis=(1, 2, 3)) + kl)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def build_model(config: ModelConfig) -> keras.Model:
    return Autoencoder()
