"""Digits by the ids of their rows: a table of fixed rows, and two tables of dynamic ids."""

from typing import Any

from trainer.config import Config
from trainer.embeddings import SGD, Adagrad, ShardedEmbedding


def get_config() -> Config:
    return Config(
        dataset="digits", batch_size=40, learning_rate=0.1, optimizer="sgd", train_steps=50
    )


def build_model(config: Config) -> Any:
    import keras

    pixels = keras.Input((8, 8, 1))
    # A digit has 8 ids, one of each row of pixels. The product wraps around: any int64 occurs.
    levels = keras.ops.cast(keras.layers.Reshape((8, 8))(pixels) * 3.99, "int64")
    ids = keras.ops.sum(levels * 4 ** keras.ops.arange(8, dtype="int64"), axis=-1)
    spread = ids * 2_654_435_761_000_003
    found = [
        ShardedEmbedding(4**8, 8, optimizer=Adagrad(0.1))(ids),
        ShardedEmbedding(None, 8, optimizer=SGD(0.3), name="all")(spread),
        ShardedEmbedding(
            None,
            8,
            optimizer=Adagrad(0.1),
            admit_after=2,
            evict_after=12,
            max_rows=150,
            evict_every=5,
            name="few",
        )(spread),
    ]
    rows = keras.layers.Flatten()(keras.layers.Concatenate()(found))
    return keras.Model(pixels, keras.layers.Dense(10)(rows))
