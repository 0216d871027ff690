"""A copy of a metric with its function.

The config of a MeanMetricWrapper of Keras 3.15 has only functions that Keras knows, and there is no
public attribute for the function: `keras/src/metrics/reduction_metrics.py`. Can be deleted when
`from_config(get_config())` makes a metric of any function.
"""

import keras


def copy_of_wrapper(metric: keras.metrics.MeanMetricWrapper) -> keras.metrics.MeanMetricWrapper:
    """A new metric with the function of `metric`, which is no object of a derived class."""
    return keras.metrics.MeanMetricWrapper(
        metric._fn, name=metric.name, dtype=metric.dtype, **metric._fn_kwargs
    )
