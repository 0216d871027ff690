"""Classifiers of images: `--config=tests/models/images.py:resnet50`."""

import functools
from typing import Any

import keras
from keras import layers

from configs import cifar10_resnet
from tests.models.examples import CLASSES, SIZE, ModelConfig, config, parsed

SHAPE = (SIZE, SIZE, 3)


mobilenetv2, efficientnetv2b0, resnet20, mlp, subclassed, pooled, normed = (
    functools.partial(config, model=name)
    for name in (
        *("mobilenetv2", "efficientnetv2b0", "resnet20", "mlp"),
        *("subclassed", "pooled", "normed"),
    )
)
resnet50 = functools.partial(config, 0.01, model="resnet50")


def parse(serialized: Any) -> Any:
    example = parsed(serialized)
    return example["image"], example["label"]


class Residual(keras.layers.Layer):
    """A layer with layers; not registered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = layers.Conv2D(width, 3, padding="same", activation="relu")
        self.second = layers.Conv2D(width, 3, padding="same")

    def call(self, x: Any) -> Any:
        return x + self.second(self.first(x))


class Subclassed(keras.Model):
    """Without `build`, and without an input shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = layers.Conv2D(8, 3, strides=2)
        self.blocks = [Residual(8), Residual(8)]
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(CLASSES)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(keras.ops.mean(self.norm(x), axis=(1, 2)))


def build_model(config: ModelConfig) -> keras.Model:
    if config.model == "subclassed":
        return Subclassed()
    if config.model == "pooled":
        return keras.Sequential(
            [
                keras.Input(SHAPE),
                layers.Conv2D(8, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(16, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dropout(0.5),
                layers.Dense(CLASSES),
            ]
        )
    if config.model == "normed":
        return keras.Sequential(
            [
                keras.Input(SHAPE),
                layers.Conv2D(8, 3, strides=2, use_bias=False),
                # Its statistics move fast, so evaluations after few steps make sense.
                layers.BatchNormalization(momentum=0.8),
                layers.ReLU(),
                layers.GlobalAveragePooling2D(),
                layers.Dense(CLASSES),
            ]
        )
    if config.model == "mlp":
        hidden = [layers.Flatten(), layers.Dense(100, "relu"), layers.Dense(CLASSES)]
        return keras.Sequential([keras.Input(SHAPE), *hidden])
    if config.model == "resnet20":
        return cifar10_resnet.build_model(cifar10_resnet.get_config())
    kinds = {
        "mobilenetv2": keras.applications.MobileNetV2,
        "efficientnetv2b0": keras.applications.EfficientNetV2B0,
        "resnet50": keras.applications.ResNet50,
    }
    return kinds[config.model](
        weights=None, input_shape=SHAPE, classes=CLASSES, classifier_activation=None
    )
