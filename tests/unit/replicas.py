"""The replicas of the unit tests, on logical CPUs."""

import functools
from typing import Any

import tensorflow as tf


@functools.cache
def replicas(num: int) -> Any:
    """A strategy with `num` replicas, one for all tests of a process.

    TensorFlow takes the collectives of two such strategies for each other's, and refuses those
    whose shapes differ.
    """
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)])
