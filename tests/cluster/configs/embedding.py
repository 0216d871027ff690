"""Digits as sequences of words for a Keras Embedding."""

from typing import Any

from trainer.config import Config


def get_config() -> Config:
    return Config(batch_size=64, optimizer="sgd", learning_rate=0.5, train_steps=20, export=False)


def build_model(config: Config) -> Any:
    """Images [B, 8, 8, 1] in [0, 1] -> logits [B, 10]; each brightness is a word."""
    import keras
    from keras import layers, ops

    images = keras.Input((8, 8, 1))
    words = ops.cast(16 * ops.reshape(images, (-1, 64)), "int32")
    rows = layers.Embedding(17, 8, name="words")(words)
    return keras.Model(images, layers.Dense(10)(layers.Flatten()(rows)))
