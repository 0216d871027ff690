"""What a worker of synchronous parameter servers reads one step ahead: `--embedding_staleness=1`.

    ahead = nothing(specs_of(read))                 # before the first step; `read` returns an Ahead
    is_ahead = ahead.is_for(sub_batch, step)        # in a step: else all is read now

While a worker computes the gradients of a sub-batch, it reads the next one and its rows of tables.
So the next step does not wait for rows. They lack the update of one step; dense variables lack
none.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from strategies.base import Batch, Tensor
from strategies.lookups import Lookup
from strategies.ps.sync.protocol import NONE


class Ahead(NamedTuple):
    """A sub-batch that was read before its assignment, with its lookups."""

    sub_batch: Tensor  # Its number, int64; NONE if nothing was read.
    step: Tensor  # The number of updates that the rows have, int64.
    batch: Batch
    lookups: Sequence[Lookup]

    def is_for(self, sub_batch: Tensor, step: Tensor) -> Tensor:
        """True if an assignment of `sub_batch` at `step` can use it."""
        return tf.equal(self.sub_batch, sub_batch) & (self.step + 1 >= step)


def specs_of(read: Callable[[], Ahead]) -> Ahead:
    """The specs of what `read` returns; nothing is read."""
    outputs = tf.function(read, autograph=False).get_concrete_function().structured_outputs
    specs: Ahead = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs)
    return specs


def nothing(like: Ahead) -> Ahead:
    """As `like`, specs or tensors, but nothing was read: dimensions of any size are 0."""
    empty: Ahead = tf.nest.map_structure(
        lambda spec: tf.zeros([size or 0 for size in spec.shape], spec.dtype), like
    )
    none = tf.constant(NONE, tf.int64)
    return empty._replace(sub_batch=none, step=none)


def tensors_of(ahead: Ahead | None) -> list[Tensor]:
    """The tensors, or specs, of `ahead`; [] if it is None."""
    return [] if ahead is None else list(tf.nest.flatten(ahead))
