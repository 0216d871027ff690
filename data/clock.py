"""The time in graphs."""

import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled


def timestamp() -> tf.Tensor:
    """The time in seconds, float64; always 0 with TF_DETERMINISTIC_OPS=1, which refuses the op.

    So waits that are measured with it are 0 then.
    """
    # No public function says whether determinism was asked for (TensorFlow 2.21).
    return tf.constant(0.0, tf.float64) if is_op_determinism_enabled() else tf.timestamp()
