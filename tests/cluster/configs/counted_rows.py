"""Digits by the ids of their rows. A row counts the examples that used it, whenever it was read."""

from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.embeddings import SGD, ShardedEmbedding

if TYPE_CHECKING:
    import keras

# A power of two: all counts are exact.
BATCH = 32


def get_config() -> Config:
    return Config(dataset="digits", batch_size=BATCH, train_steps=50)


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 8, 8, 1] in [0, 1] -> sums of rows [B, 10]."""
    import keras

    pixels = keras.Input((8, 8, 1))
    # A digit has 8 ids, one of each row of pixels.
    levels = keras.ops.cast(keras.layers.Reshape((8, 8))(pixels) * 3.99, "int64")
    ids = keras.ops.sum(levels * 4 ** keras.ops.arange(8, dtype="int64"), axis=-1)
    found = [
        ShardedEmbedding(rows, 10, optimizer=SGD(1.0), initializer="zeros", name=name)(ids)
        for name, rows in (("fixed", 4**8), ("dynamic", None))
    ]
    return keras.Model(pixels, keras.ops.sum(keras.layers.Add()(found), axis=1))


def loss(labels: Any, outputs: Any) -> Any:
    """The gradient of each row is minus the number of examples of each label."""
    import tensorflow as tf

    return -tf.gather(outputs, labels, batch_dims=1)
