"""Two inputs and two outputs, as dicts, with a loss, a factor and metrics of each."""

from typing import Any

import keras
from keras import layers

from tests.models.examples import CLASSES, SIZE, ModelConfig, config, parsed


def get_config() -> ModelConfig:
    return config(0.02)


def parse(serialized: Any) -> Any:
    example = parsed(serialized)
    inputs = {"image": example["image"], "numbers": example["numbers"]}
    return inputs, {"digit": example["label"], "mean": example["numbers"][:, :1]}


def build_model(config: ModelConfig) -> keras.Model:
    image = keras.Input((SIZE, SIZE, 3), name="image")
    numbers = keras.Input((4,), name="numbers")
    seen = layers.Flatten()(layers.Conv2D(4, 5, strides=4, activation="relu")(image))
    joined = layers.Dense(16, "relu")(layers.Concatenate()([seen, numbers]))
    outputs = {
        "digit": layers.Dense(CLASSES, "softmax", name="digit")(joined),
        "mean": layers.Dense(1, name="mean")(joined),
    }
    return keras.Model({"image": image, "numbers": numbers}, outputs)


loss = {"digit": "sparse_categorical_crossentropy", "mean": "mse"}
loss_weights = {"mean": 0.5}
metrics = {"digit": ["accuracy"], "mean": ["mae"]}
