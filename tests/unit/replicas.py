"""Replicas for unit tests, on logical CPUs."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


@functools.lru_cache(maxsize=4)  # A test trains the same learner again and again.
def _compiled(learner: Learner, num: int) -> Callable[[Any], Any]:
    compiled: Callable[[Any], Any] = tf.function(
        lambda batch: replicas(num).run(update_of(learner), args=(batch,)), reduce_retracing=True
    )
    return compiled


def steps_on(learner: Learner, num: int, batches: Sequence[Batch]) -> Iterator[int]:
    """Trains on one or two replicas; yields the step counter after each batch.

    Of two replicas the first one gets 5 examples of each batch.
    """
    strategy, update = replicas(num), _compiled(learner, num)
    for batch in batches:
        size = len(tf.nest.flatten(batch)[0])
        ends = [0, 5, size] if num == 2 else [0, size]
        parts = [
            tf.nest.map_structure(lambda t, a=a, b=b: tf.constant(t[a:b]), batch)
            for a, b in itertools.pairwise(ends)
        ]
        update(
            strategy.experimental_distribute_values_from_function(
                lambda context, parts=parts: parts[context.replica_id_in_sync_group]
            )
        )
        yield int(learner.step.numpy())


def ancestors(op: tf.Operation) -> set[tf.Operation]:
    """All operations that must end before `op` begins."""
    found: set[tf.Operation] = set()
    waiting = [op]
    while waiting:
        last = waiting.pop()
        before = {*(tensor.op for tensor in last.inputs), *last.control_inputs} - found
        found |= before
        waiting += before
    return found
