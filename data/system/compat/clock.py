"""The time in graphs, which determinism forbids.

`tf.timestamp` is refused when determinism is enabled (TensorFlow 2.21). No public function tells if
it is: TF_DETERMINISTIC_OPS and tf.config.experimental.enable_op_determinism both enable it. Can be
deleted when `tf.timestamp` is allowed.
"""

import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled


def timestamp() -> tf.Tensor:
    """The time in seconds, float64; always 0 with TF_DETERMINISTIC_OPS=1, which refuses the op.

    So waits that are measured with it are 0 then.
    """
    return tf.constant(0.0, tf.float64) if is_op_determinism_enabled() else tf.timestamp()
