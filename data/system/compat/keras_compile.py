"""What `model.compile` does with losses and metrics, without `compile` and `fit`.

`fit` fails under two of the three strategies (keras#20585, keras#18624), so this program chooses
losses and metrics as `compile` does. Keras 3.15, `keras/src/trainers/compile_utils.py`. Can be
deleted when `fit` works under all strategies, or when `keras.trainers` has these names.
"""

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics, get_loss, get_metric

__all__ = ["CompileMetrics", "get_loss", "get_metric"]


def is_lower_better(metric: keras.metrics.Metric) -> bool | None:
    """Returns True if a lower value of `metric` is better; None if Keras does not know."""
    is_loss = isinstance(getattr(metric, "_fn", None), keras.Loss)
    if is_loss or isinstance(metric, (keras.metrics.FalsePositives, keras.metrics.FalseNegatives)):
        return True
    if isinstance(metric, (keras.metrics.TruePositives, keras.metrics.TrueNegatives)):
        return False
    direction = getattr(metric, "_direction", None)
    return None if direction is None else direction == "down"


def compute_loss(
    model: keras.Model, inputs: Any, labels: Any, outputs: Any, weights: Any, *, training: bool
) -> tf.Tensor:
    """Calls `compute_loss` of `model`, with `training` only if it has this argument.

    Keras' own argument `training` is of Keras 3.3, so that a user's method may lack it.
    """
    return model._compute_loss(
        x=inputs, y=labels, y_pred=outputs, sample_weight=weights, training=training
    )
