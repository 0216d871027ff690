"""Digits by the ids of their rows, without a dense variable: only rows of a table are trained."""

from typing import Any

from trainer.config import Config
from trainer.embeddings import SGD, ShardedEmbedding


def get_config() -> Config:
    return Config(dataset="digits", batch_size=40, train_steps=40)


def build_model(config: Config) -> Any:
    """Images float32 [B, 8, 8, 1] in [0, 1] -> logits [B, 10]."""
    import keras

    pixels = keras.Input((8, 8, 1))
    # A digit has 8 ids, one of each row of pixels.
    levels = keras.ops.cast(keras.layers.Reshape((8, 8))(pixels) * 3.99, "int64")
    ids = keras.ops.sum(levels * 4 ** keras.ops.arange(8, dtype="int64"), axis=-1)
    rows = ShardedEmbedding(4**8, 10, optimizer=SGD(0.3), name="ids")(ids)
    return keras.Model(pixels, keras.ops.sum(rows, axis=1))
