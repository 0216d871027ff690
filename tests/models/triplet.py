"""Triplets: one tower is used three times, inputs are a dict, and there are no labels.

The margin is smooth; triplet_hinge.py has the usual one.
"""

from typing import Any

import keras
from keras import layers, ops

from tests.models.examples import SIZE, ModelConfig, config, parsed

get_config = config


def parse(serialized: Any) -> Any:
    image = parsed(serialized)["image"]
    return {"anchor": image, "positive": image[:, ::-1], "negative": image[..., ::-1]}, ()


def build_model(config: ModelConfig) -> keras.Model:
    tower = keras.Sequential(
        [
            layers.Conv2D(8, 3, strides=2, activation="relu"),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(8),
            layers.UnitNormalization(),
        ]
    )
    inputs = {
        name: keras.Input((SIZE, SIZE, 3), name=name) for name in ("anchor", "positive", "negative")
    }
    codes = [tower(image) for image in inputs.values()]
    return keras.Model(inputs, layers.Concatenate()(codes))


def distances(outputs: Any) -> Any:
    """How much nearer the negative is than the positive, [B]."""
    anchor, positive, negative = ops.split(outputs, 3, axis=-1)
    near = ops.sum(ops.square(anchor - positive), axis=-1)
    return near - ops.sum(ops.square(anchor - negative), axis=-1)


def loss(labels: Any, outputs: Any) -> Any:
    return ops.softplus(distances(outputs) + 0.5)


metrics: dict[str, Any] = {}
