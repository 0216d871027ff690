"""One variable for a process, inside the scope of a strategy that makes a copy for each replica.

    with tf.variable_creator_scope(variable_of_process):        # in the scope of the strategy
        tf.Variable(...)                                        # on CPU:0, no copies

A table is in the memory of the host, once, whatever the number of GPUs. TensorFlow 2.21's mirrored
strategies offer no variable without copies. This calls what stands at the end of their chain of
creators (`tensorflow/python/ops/variables.py`). Can be deleted when they offer one.
"""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.ops import variables


def variable_of_process(_: Callable[..., tf.Variable], **arguments: object) -> tf.Variable:
    """A creator: makes the variable of `arguments`, and does not call the strategy's creator."""
    with tf.device("CPU:0"):
        return variables.default_variable_creator_v2(None, **arguments)
