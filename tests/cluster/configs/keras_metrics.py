"""Losses and metrics as Keras users write them: objects at the top of the file, weights, one-hot.

The learning rate is so small that no weight changes: each report is of the initial weights.
"""

from typing import Any

import keras
import tensorflow as tf

from trainer.config import Config


@keras.saving.register_keras_serializable("tests")
class Perplexity(keras.metrics.Mean):
    """The exponential of the mean cross entropy."""

    def __init__(self, name: str = "perplexity", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Takes one-hot labels, and probabilities."""
        losses = keras.losses.categorical_crossentropy(y_true, y_pred)
        super().update_state(losses, sample_weight)

    def result(self) -> Any:
        """The exponential of the mean."""
        return keras.ops.exp(super().result())


loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
metrics = [
    "accuracy",
    keras.metrics.AUC(),
    keras.metrics.F1Score(average="macro", threshold=0.11),
    keras.metrics.Precision(thresholds=0.11),
    keras.metrics.OneHotMeanIoU(num_classes=10),
    Perplexity(),
]
weighted_metrics = [keras.metrics.Recall(thresholds=0.11), keras.metrics.AUC(name="weighted_auc")]


def get_config() -> Config:
    """One epoch of three batches, and evaluation batches of which the last is smaller."""
    return Config(
        dataset="digits",
        batch_size=479,
        eval_batch_size=50,
        optimizer="sgd",
        learning_rate=1e-30,
        train_steps=3,
        log_every_steps=3,
        best_metric="auc",
    )


def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Records, string [n] -> images, one-hot labels, and weights from 0.25 to 2."""
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    example = tf.io.parse_example(serialized, features)
    pixels = tf.io.decode_raw(example["image"], tf.uint8, fixed_length=64)
    images = tf.cast(tf.reshape(pixels, [-1, 8, 8, 1]), tf.float32) / 255
    weights = tf.cast(1 + tf.strings.to_hash_bucket_fast(serialized, 8), tf.float32) / 4
    return images, tf.one_hot(example["label"], 10), weights


def build_model(config: Config) -> keras.Model:
    """A linear model with softmax."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(10, activation="softmax")]
    )
