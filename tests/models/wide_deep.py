"""Wide & Deep: words through lookup tables and crossed hashes, numbers through dense layers."""

from typing import Any

import keras
from keras import layers

from tests.models.examples import ModelConfig, config, parsed

get_config = config


def parse(serialized: Any) -> Any:
    example = parsed(serialized)
    inputs = {"numbers": example["numbers"], "word": example["word"][:, None]}
    return inputs, keras.ops.cast(example["label"] < 5, "int64")


def build_model(config: ModelConfig) -> keras.Model:
    numbers = keras.Input((4,), name="numbers")
    word = keras.Input((1,), dtype="string", name="word")
    index = layers.StringLookup(vocabulary=["red", "green", "blue"])(word)
    wide = layers.CategoryEncoding(4, output_mode="one_hot")(index)
    hashed = layers.Embedding(8, 4)(layers.Hashing(8)(word))
    scaled = layers.Normalization(mean=[1.0] * 4, variance=[2.0] * 4)(numbers)
    deep = layers.Concatenate()([scaled, layers.Flatten()(hashed)])
    deep = layers.Dense(16, "relu")(layers.Dense(16, "relu")(deep))
    joined = layers.Concatenate()([wide, deep])
    return keras.Model({"numbers": numbers, "word": word}, layers.Dense(1, "sigmoid")(joined))


loss = "binary_crossentropy"
metrics = ["accuracy", keras.metrics.AUC(name="auc")]
