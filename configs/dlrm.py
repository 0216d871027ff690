"""DLRM on clicks: 13 numbers and 26 columns of ids -> whether an advertisement is clicked.

    python -m data.prepare clicks
    python -m trainer --config=configs/dlrm.py --strategy=ps --ps=2

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
2019: an MLP turns the numbers into a vector as wide as a row of the table; the products of all
pairs of vectors, and the first vector, go into a second MLP. The numbers of ids, and the AUC
that a perfect model would have, are in the clicks.json of the data. configs/criteo_x1.py has the
same model with dynamic ids.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.system.files import join, read_text
from trainer.config import Config, DataConfig, data_dir

if TYPE_CHECKING:
    import keras

loss = "binary_crossentropy"
metrics = ["AUC"]
NUM_DENSE, NUM_COLUMNS = 13, 26


@dataclass
class DlrmConfig(Config):
    """What this file adds to a config.

    Attributes:
        width: The numbers in a row of the table.
        bottom_units: Units of each hidden layer of the MLP of the numbers. A layer of `width` units
            follows.
        top_units: Units of each hidden layer of the MLP of the products.
        table_learning_rate: The rate of the table; learning_rate is that of the MLPs.
    """

    width: int = 16
    bottom_units: tuple[int, ...] = (64,)
    top_units: tuple[int, ...] = (256, 128)
    table_learning_rate: float = 0.05


def get_config() -> DlrmConfig:
    """500 steps of 2,048 examples: 10 epochs of the default clicks."""
    return DlrmConfig(
        dataset="clicks",
        batch_size=2048,
        learning_rate=0.001,
        train_steps=500,
        log_every_steps=50,
        eval_every_steps=250,
        best_metric="AUC",
        data=DataConfig(inputs=("numbers", "categorical")),
    )


def build_model(config: DlrmConfig) -> "keras.Model":
    """Inputs numbers [B, 13] and categorical [B, 26] -> the probability of a click, [B, 1]."""
    sizes = json.loads(read_text(join(data_dir(config), "clicks.json")))["cardinalities"]
    return model_of(config, sizes)


def model_of(config: DlrmConfig, sizes: list[int] | None) -> "keras.Model":
    """The model with `sizes`, the number of ids of each column; None for dynamic ids."""
    from keras import Input, Model, layers, ops

    from trainer.embeddings import Adagrad, ShardedEmbedding

    dense = Input((NUM_DENSE,), name="numbers")
    ids = Input((NUM_COLUMNS,), dtype="int64" if sizes is None else "int32", name="categorical")
    vector = dense
    for units in (*config.bottom_units, config.width):
        vector = layers.Dense(units, activation="relu")(vector)
    table = ShardedEmbedding(sizes, config.width, optimizer=Adagrad(config.table_learning_rate))
    vectors = layers.Concatenate(axis=1)([layers.Reshape((1, config.width))(vector), table(ids)])
    num_vectors = NUM_COLUMNS + 1
    products = ops.matmul(vectors, ops.transpose(vectors, (0, 2, 1)))
    pairs = [row * num_vectors + column for row in range(num_vectors) for column in range(row)]
    products = ops.take(ops.reshape(products, (-1, num_vectors**2)), pairs, axis=1)
    hidden = layers.Concatenate()([vector, products])
    for units in config.top_units:
        hidden = layers.Dense(units, activation="relu")(hidden)
    outputs = layers.Dense(1, activation="sigmoid")(hidden)
    return Model({"numbers": dense, "categorical": ids}, outputs)
