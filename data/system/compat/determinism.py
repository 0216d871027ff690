"""What TensorFlow cannot do while it runs deterministic ops only.

TF_DETERMINISTIC_OPS and tf.config.experimental.enable_op_determinism both enable this, and no
public function tells if it is enabled. `tf.timestamp` is refused then (TensorFlow 2.21). tf.data
makes a `map` with a Python function serial, and prints an error about an unknown attribute. Can be
deleted when `tf.timestamp` is allowed, and nothing is printed.
"""

import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled


def timestamp() -> tf.Tensor:
    """The time in seconds, float64; always 0 with deterministic ops, so waits are 0 then."""
    return tf.constant(0.0, tf.float64) if is_op_determinism_enabled() else tf.timestamp()


def parallel_calls(num_calls: int) -> int | None:
    """`num_parallel_calls` of a `map` with a Python function: `num_calls`, or None: serial."""
    return None if is_op_determinism_enabled() else num_calls
