"""Counts the ids that layers look up in a training step, for reports.

    begin_counting()                    # before the forward pass, in the thread that traces it
    add_lookup(layer, unique, all)      # in a layer: scalar tensors
    lookups_of(layers)                  # after it: float64 [layers, 2], the sums of (unique, all)

Each replica is traced in its own thread, so it has its own counts.
"""

from collections.abc import Sequence
from contextvars import ContextVar

import tensorflow as tf

_lookups: ContextVar[list[tuple[object, tf.Tensor]] | None] = ContextVar("lookups", default=None)


def begin_counting() -> None:
    """Forgets the lookups so far."""
    _lookups.set([])


def add_lookup(layer: object, num_unique: tf.Tensor, num_ids: tf.Tensor) -> None:
    """Counts a lookup of `layer`; does nothing unless `begin_counting` was called."""
    found = _lookups.get()
    if found is not None:
        found.append((layer, tf.cast(tf.stack([num_unique, num_ids]), tf.float64)))


def lookups_of(layers: Sequence[object]) -> tf.Tensor:
    """The sums of the counts of each layer, float64 [layers, 2]; the counting ends."""
    found = _lookups.get() or []
    _lookups.set(None)
    zeros = tf.zeros([2], tf.float64)
    sums = [tf.add_n([zeros, *(n for one, n in found if one is layer)]) for layer in layers]
    return tf.stack(sums) if sums else tf.zeros([0, 2], tf.float64)
