"""Replicas for unit tests, on logical CPUs."""

import functools
from collections.abc import Callable

import tensorflow as tf

from strategies.base import Batch
from strategies.gradients.all_reduce import all_reduced
from strategies.gradients.compression import Compression
from strategies.gradients.layer_state import averaged_over_replicas
from trainer.learner import Learner


@functools.cache
def replicas(num: int) -> tf.distribute.Strategy:
    """A strategy with `num` replicas, the same one for all tests of a process.

    With two such strategies TensorFlow confuses their collectives, and refuses different shapes.
    """
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)])


def update_of(learner: Learner) -> Callable[[Batch], tf.Tensor]:
    """A step on a replica's part of a batch, as the mirrored strategies do it."""

    def update(batch: Batch) -> tf.Tensor:
        with averaged_over_replicas(learner.layer_state):
            gradients, metrics = learner.gradients(batch)
        learner.apply(all_reduced(gradients, Compression()))
        return metrics

    return update
