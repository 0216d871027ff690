"""Classifiers of sequences: `--config=tests/models/sequences.py:bilstm`."""

import functools
from typing import Any

import keras
from keras import layers

from tests.models.examples import CLASSES, LENGTH, ModelConfig, config, parsed

transformer, bilstm = (functools.partial(config, model=n) for n in ("transformer", "bilstm"))


def parse(serialized: Any) -> Any:
    example = parsed(serialized)
    return example["tokens"][:, :-1], example["label"]


def build_model(config: ModelConfig) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(32, 16)(tokens)
    if config.model == "bilstm":
        # Not LSTM(dropout=...): its masks depend on the first example of a replica.
        x = layers.Dropout(0.1)(layers.Bidirectional(layers.LSTM(8))(x))
        return keras.Model(tokens, layers.Dense(CLASSES)(x))
    attention = layers.MultiHeadAttention(2, 8)
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attention(x, x)))
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, "gelu")(x)))
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
