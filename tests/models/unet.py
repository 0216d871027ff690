"""U-Net: a class for each pixel."""

from typing import Any

import keras
from keras import layers, ops

from tests.models.examples import SIZE, ModelConfig, config, parsed

get_config = config


def parse(serialized: Any) -> Any:
    image = parsed(serialized)["image"]
    return image, ops.cast(image[..., 0] > 0.5, "int64")


def build_model(config: ModelConfig) -> keras.Model:
    image = keras.Input((SIZE, SIZE, 3))
    first = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
    second = layers.Conv2D(16, 3, padding="same", activation="relu")(layers.MaxPooling2D()(first))
    up = layers.Conv2DTranspose(8, 2, strides=2, activation="relu")(layers.Dropout(0.1)(second))
    joined = layers.Concatenate()([first, up])
    return keras.Model(image, layers.Conv2D(2, 1, activation="softmax")(joined))


loss = "sparse_categorical_crossentropy"
metrics = ["accuracy", keras.metrics.MeanIoU(2, sparse_y_pred=False, name="iou")]
