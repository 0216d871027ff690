"""Ends the collective operations of this process that wait for other workers.

A collective has no time limit, and TensorFlow 2.21 has no public function to end it. Can be deleted
when `tf.distribute` has one.
"""

import tensorflow as tf
from tensorflow.python.eager import context


def abort_collectives(why: str) -> None:
    """Waiting collectives, and all later ones, raise tf.errors.UnavailableError with `why`."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, why)
