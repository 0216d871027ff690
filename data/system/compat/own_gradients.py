"""A gradient of one's own for an operation with any inner operations.

`tf.custom_gradient` passes its arguments and results through IdentityN ops, so that rows which are
rounded on another task would also be sent as they are. The functions that record gradients are in
TensorFlow 2.21's `tensorflow/python/eager/record.py`. Can be deleted when `tf.custom_gradient` adds
no IdentityN.
"""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import record


def with_gradient(
    name: str,
    compute: Callable[[], tf.Tensor],
    source: tf.Tensor,
    gradient: Callable[[tf.Tensor], tf.Tensor | tf.IndexedSlices],
) -> tf.Tensor:
    """Returns `compute()`, whose gradient with respect to `source` is `gradient(upstream)`."""
    with record.stop_recording():
        result = compute()
    record.record_operation(name, [result], [source], lambda upstream: [gradient(upstream)])
    return result
