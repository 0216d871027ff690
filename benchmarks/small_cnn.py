"""A config for benchmarks: images of 28 x 28 bytes, a small convolutional network."""

from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras


def get_config() -> Config:
    """Read from files, and never from memory."""
    return Config(dataset="images", batch_size=128, optimizer="sgd", learning_rate=0.01)


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 28, 28, 1] in [0, 1] -> logits [B, 10]."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((28, 28, 1)),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
