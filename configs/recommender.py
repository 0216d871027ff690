"""Wide & Deep on clicks: a linear model of all ids, and an MLP on their rows.

    python -m data.prepare clicks
    python -m trainer --config=configs/recommender.py --strategy=ps --ps=2 --sync_replicas

Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016. As in the paper, FTRL trains the
wide part and Adagrad the table of the deep part. The numbers of ids, and the AUC that a perfect
model would have, are in the clicks.json of the data.
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
NUM_DENSE = 13


@dataclass
class RecommenderConfig(Config):
    """What this file adds to a config.

    Attributes:
        width: The numbers in a row of the deep part's table.
        table_learning_rate: The rate of both tables; learning_rate is that of the MLP.
    """

    width: int = 16
    table_learning_rate: float = 0.05


def get_config() -> RecommenderConfig:
    """500 steps of 2,048 examples: 10 epochs of the default clicks."""
    return RecommenderConfig(
        dataset="clicks",
        batch_size=2048,
        learning_rate=0.001,
        train_steps=500,
        log_every_steps=50,
        eval_every_steps=250,
        best_metric="AUC",
        data=DataConfig(inputs=("numbers", "categorical")),
    )


def build_model(config: RecommenderConfig) -> "keras.Model":
    """Inputs numbers [B, 13] and categorical [B, columns] -> the probability of a click, [B, 1]."""
    from keras import Input, Model, layers, ops

    from trainer.embeddings import FTRL, Adagrad, ShardedEmbedding

    sizes = json.loads(read_text(join(data_dir(config), "clicks.json")))["cardinalities"]
    dense = Input((NUM_DENSE,), name="numbers")
    ids = Input((len(sizes),), dtype="int32", name="categorical")
    rate = config.table_learning_rate
    wide = ShardedEmbedding(sizes, 1, optimizer=FTRL(rate, l1=1e-4), initializer="zeros")(ids)
    deep = ShardedEmbedding(sizes, config.width, optimizer=Adagrad(rate))(ids)
    hidden = layers.Concatenate()([dense, layers.Flatten()(deep)])
    for units in (256, 128):
        hidden = layers.Dense(units, activation="relu")(hidden)
    outputs = layers.Dense(1)(layers.Concatenate()([hidden, dense]))
    total = outputs + ops.sum(wide, axis=1)
    return Model({"numbers": dense, "categorical": ids}, layers.Activation("sigmoid")(total))
