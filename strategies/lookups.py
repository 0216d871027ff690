"""Rows of tables that a worker looks up in one step, and uses in the next.

    with lookups_recorded() as ahead:               # the forward pass of the next batch
        learner.look_up(batch)
    with lookups_given(EarlyLookups(ahead, are_valid)):     # in the next step
        learner.gradients_at(batch, values)

In both passes a layer calls `look_up`. Each thread has its own lookups.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import record

from strategies.base import Tensor


class Lookup(NamedTuple):
    """What one call of `look_up` found."""

    ids: Tensor  # int64 [n].
    rows: Tensor  # [n, width].


class EarlyLookups(NamedTuple):
    """Lookups of the step before."""

    made: Sequence[Lookup]  # In the order of the calls of `look_up`.
    are_valid: Tensor  # If not, rows are looked up again. A scalar, bool.


class _Given(NamedTuple):
    lookups: Iterator[Lookup]  # Those of the next calls of `look_up`.
    are_valid: Tensor


class _Recorded(NamedTuple):
    graph: tf.Graph
    lookups: list[Lookup]


_recorded: ContextVar[_Recorded | None] = ContextVar("recorded", default=None)
_given: ContextVar[_Given | None] = ContextVar("given", default=None)


def look_up(ids: Tensor, read: Callable[[], Tensor], handle: Tensor, places: Tensor) -> Tensor:
    """The rows of `ids`, int64 [n]: [n, width], looked up a step before, or by `read`.

    Rows of a step before are used if they are valid and `ids` are the same. Their gradient, like
    that of `read`, is that of the resource `handle`: (`places`, gradients of the rows).
    """
    recorded, given = _recorded.get(), _given.get()
    if recorded is not None:
        rows = read()
        if rows.graph is not recorded.graph:
            raise ValueError(
                "--embedding_staleness: the model calls a ShardedEmbedding in a loop or a branch "
                "of a graph, so its ids are not known before. Leave the flag out."
            )
        recorded.lookups.append(Lookup(ids, rows))
        return rows
    before = None if given is None else next(given.lookups, None)
    if given is None or before is None:
        return read()
    with record.stop_recording():
        is_same = tf.cond(
            given.are_valid & tf.equal(tf.size(before.ids), tf.size(ids)),
            lambda: tf.reduce_all(tf.equal(before.ids, ids)),
            lambda: tf.constant(False),
        )
        rows = tf.cond(is_same, lambda: tf.identity(before.rows), read)
    record.record_operation(
        "RowsLookedUp", [rows], [handle], lambda upstream: [tf.IndexedSlices(upstream, places)]
    )
    return rows


@contextlib.contextmanager
def lookups_recorded() -> Iterator[list[Lookup]]:
    """Yields a list, to which the lookups inside are added."""
    lookups: list[Lookup] = []
    token = _recorded.set(_Recorded(tf.zeros([]).graph, lookups))
    try:
        yield lookups
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def lookups_given(early: EarlyLookups | None) -> Iterator[None]:
    """Lookups inside use those of `early`, if they are valid."""
    token = _given.set(None if early is None else _Given(iter(early.made), early.are_valid))
    try:
        yield
    finally:
        _given.reset(token)
