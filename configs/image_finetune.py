r"""A model of keras.applications with a new last layer, on folders of images: two runs.

    python -m data.prepare folder:images --source=DIRECTORY_WITH_A_FOLDER_FOR_EACH_CLASS
    python -m trainer --config=image_finetune --model_dir=runs/head --config.freeze=backbone \
        --config.warm_start.path=backbone.keras --config.warm_start.exclude=head
    python -m trainer --config=image_finetune --model_dir=runs/all --learning_rate=1e-5 \
        --config.warm_start.path=runs/head

The first run trains the last layer only: `freeze` keeps the backbone as it is. The second run
begins with the weights of the first, and trains all layers, at a low rate. With other folders, add
--config.classes=NUMBER and --config.dataset=NAME to both. backbone.keras is a file of yours. On a
machine with the network, Python makes it of the weights that Keras offers:

    model = keras.applications.MobileNetV2((96, 96, 3), 0.35, include_top=False, pooling="avg")
    model.save("backbone.keras")

Batch normalization stays as it is in that file, in both runs: it does not mix examples. So weights
are equal on any number of replicas.
"""

import dataclasses
from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

SIZE = 96


@dataclasses.dataclass
class ImageConfig(Config):
    """Adds the number of classes and the width of the backbone.

    Attributes:
        classes: The number of folders.
        alpha: The width of MobileNetV2: 0.35, 0.5, 0.75, 1.0, 1.3 or 1.4.
    """

    classes: int = 10
    alpha: float = 0.35


def get_config() -> ImageConfig:
    """1,000 steps of 32 images."""
    return ImageConfig(
        dataset="images",
        batch_size=32,
        learning_rate=0.001,
        train_steps=1000,
        eval_every_steps=500,
        best_metric="accuracy",
    )


def parse(
    serialized: "tf.Tensor", seeds: "tf.Tensor | None" = None
) -> "tuple[tf.Tensor, tf.Tensor]":
    """Records -> images uint8 [n, SIZE, SIZE, 3], and classes, int64 [n].

    In training, `seeds` of the examples decide which part of an image is taken.
    """
    import tensorflow as tf

    from data.images import random_resized_crops, resized

    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    example = tf.io.parse_example(serialized, spec)
    if seeds is None:
        return resized(example["image"], SIZE), example["label"]
    return random_resized_crops(example["image"], seeds, SIZE), example["label"]


def build_model(config: ImageConfig) -> "keras.Model":
    """Images in [0, 255] -> logits of the classes."""
    import keras
    from keras import layers

    backbone = keras.applications.MobileNetV2(
        (SIZE, SIZE, 3),
        config.alpha,
        include_top=False,
        weights=None,
        pooling="avg",
        name="backbone",
    )
    for layer in backbone.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    images = keras.Input((SIZE, SIZE, 3))
    features = backbone(layers.Rescaling(1 / 127.5, offset=-1)(images))
    return keras.Model(images, layers.Dense(config.classes, name="head")(features))
