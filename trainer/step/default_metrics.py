"""The metrics of a config file without `metrics`: accuracy where labels are classes.

metrics = default_metrics("binary_crossentropy", outputs)       # as `metrics` of a config file
"""

from collections.abc import Mapping
from functools import partial

import keras
import tensorflow as tf

from strategies.base import Batch
from trainer.step.keras_losses import LossSpec, is_keras
from trainer.step.keras_metrics import MetricSpec, Renamed
from trainer.step.losses import accuracy

_NAME = "accuracy"
_SPARSE = ("sparsecategoricalcrossentropy", "categoricalgeneralizedcrossentropy")
_CATEGORICAL = ("categoricalcrossentropy", "categoricalfocalcrossentropy")
_BINARY = ("binarycrossentropy", "binaryfocalcrossentropy")


def default_metrics(loss: LossSpec, outputs: Batch) -> MetricSpec:
    """Returns the accuracy that suits `loss`; no metric for losses of numbers.

    `outputs` are those of the model, a nest of specs; None if they are not known. A `loss` that is
    a function says nothing: whether labels are classes, only their specs show. Functions and not
    objects are returned: this is called where a model is built, and metrics make variables.
    """
    if not is_keras(loss):
        return {_NAME: accuracy}
    if isinstance(loss, (list, tuple, Mapping)) and len(loss) == 1:
        (loss,) = loss.values() if isinstance(loss, Mapping) else loss
    outputs = tf.nest.flatten(outputs)
    if len(outputs) > 1:
        return []
    name = getattr(loss, "__name__", loss if isinstance(loss, str) else type(loss).__name__)
    kind = name.replace("_", "").lower()
    if "crossentropy" not in kind and kind != "ce":
        return []
    # Accuracy would count the examples that the loss ignores, or compare along another axis.
    if getattr(loss, "ignore_class", None) is not None or getattr(loss, "axis", -1) != -1:
        return []
    if kind in _SPARSE:
        return [Renamed(_NAME, keras.metrics.sparse_categorical_accuracy)]
    if kind in _CATEGORICAL:
        return [Renamed(_NAME, keras.metrics.categorical_accuracy)]
    if kind in _BINARY or (outputs and outputs[0] is not None and outputs[0].shape[-1] == 1):
        threshold = 0.0 if getattr(loss, "from_logits", False) else 0.5
        return [Renamed(_NAME, partial(_binary_accuracy, threshold=threshold))]
    return [_NAME]


def _binary_accuracy(labels: tf.Tensor, outputs: tf.Tensor, threshold: float) -> tf.Tensor:
    """Keras' binary_accuracy, but a label is a probability: 0.9 agrees with each output above."""
    is_one = labels if labels.dtype == tf.bool else labels > tf.cast(0.5, labels.dtype)
    return keras.metrics.binary_accuracy(is_one, outputs, threshold=threshold)
