"""The functions inside keras.losses and keras.metrics objects, and their arguments.

Keras 3.15 (`keras/src/losses/losses.py`, `keras/src/metrics/reduction_metrics.py`) has no public
attribute for them, and the config of a MeanMetricWrapper has only functions that Keras knows. Can
be deleted when both are in `get_config()`.
"""

import keras
from keras.src.losses.losses import LossFunctionWrapper


def uses_logits(loss: object) -> bool | None:
    """Returns `from_logits` of `loss`, False if it has none; None if it wraps no function."""
    if not isinstance(loss, LossFunctionWrapper):
        return None
    return bool(loss._fn_kwargs.get("from_logits", False))


def copy_of_wrapper(metric: keras.metrics.MeanMetricWrapper) -> keras.metrics.MeanMetricWrapper:
    """A new metric with the function of `metric`, which is no object of a derived class."""
    return keras.metrics.MeanMetricWrapper(
        metric._fn, name=metric.name, dtype=metric.dtype, **metric._fn_kwargs
    )
