"""The replicas of the unit tests, on logical CPUs."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from strategies.wire import Wire
from trainer.learner import Learner


@functools.cache
def replicas(num: int) -> Any:
    """A strategy with `num` replicas, one for all tests of a process.

    TensorFlow takes the collectives of two such strategies for each other's, and refuses those
    whose shapes differ.
    """
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)])


def update_of(learner: Learner) -> Callable[[Any], Any]:
    """A step on a replica's share of a batch, as the mirrored strategies do it."""
    return functools.partial(Wire().update, learner)
