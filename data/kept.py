"""Tickets for workers that keep all examples in memory: they name rows, and nothing is read.

    source = ticket_source(reader)          # `reader` itself, if it keeps no examples

    @tf.function(input_signature=[source.ticket_spec(16)])
    def closure(ticket):                    # runs in another process
        inputs, labels = source.parse_ticket(ticket)

The examples are in the process that runs the graph, where the first ticket finds none and reads
them all. They live as long as it does: one that was started again finds none, and reads them again,
and its first ticket takes as much longer.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from data.graphs import plain
from data.order import Order
from data.pipeline import Reader, Ticket

_KEPT = "kept examples"
_NOBODY = "nobody"


def ticket_source(reader: Reader) -> "Reader | KeptTickets":
    """What makes tickets of training batches: `reader`, or what it keeps."""
    return KeptTickets(reader) if reader.keeps_examples else reader


class KeptTickets:
    """What a `Reader` has of tickets for training, for examples in a worker's memory.

    Attributes:
        order: That of the reader.
    """

    def __init__(self, reader: Reader) -> None:
        """Of the examples that `reader` would keep."""
        self.order: Order = reader.order
        self._reader = reader
        # What a former run has left in a process that still serves is not taken for ours.
        self._owner = f"{os.getpid()}-{time.time_ns()}"

    def ticket(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Ticket:
        """Record numbers "gather", int64 [num_batches, n]; and "seeds" where they are needed."""
        return self._reader.pick_plan(first_batch, num_batches, lanes)

    def ticket_runs(self, first_batch: int) -> Iterator[tuple[int, int]]:
        """See Reader. Any number: rows lie nowhere together."""
        yield first_batch, sys.maxsize

    def ticket_spec(
        self, num_batches: int | None = None, lanes: range | None = None
    ) -> dict[str, tf.TensorSpec]:
        """The input signature of a ticket."""
        return self._reader.pick_spec(num_batches, lanes)

    @plain
    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> tuple[Any, ...]:
        """See Reader. A graph without py_function."""
        with tf.control_dependencies([self.filled()]):
            return self.parse_filled(ticket)

    @plain
    def parse_filled(self, ticket: dict[str, tf.Tensor]) -> tuple[Any, ...]:
        """`parse_ticket`, in a graph where `filled` comes before."""
        with tf.device("CPU:0"):
            return self._reader.pick(self._rows, ticket)

    @plain
    def filled(self) -> tf.Tensor:
        """Something that comes after the examples are in the process that runs this."""
        with tf.device("CPU:0"):
            key = tf.constant([0], tf.int64)
            table = tf.raw_ops.MutableHashTableV2(
                key_dtype=tf.int64, value_dtype=tf.string, shared_name=f"owner of {self._key}"
            )

            def unless_filled(fill: Callable[[], tf.Tensor]) -> tf.Tensor:
                owner = tf.raw_ops.LookupTableFindV2(
                    table_handle=table, keys=key, default_value=_NOBODY
                )[0]
                is_ours = tf.equal(owner, self._owner)
                filled: tf.Tensor = tf.cond(is_ours, lambda: tf.constant(True), fill)
                return filled

            def fill() -> tf.Tensor:
                with tf.control_dependencies([self._fill()]):
                    filled = tf.raw_ops.LookupTableInsertV2(
                        table_handle=table, keys=key, values=[self._owner]
                    )
                with tf.control_dependencies([filled]):
                    return tf.constant(True)

            def fill_alone() -> tf.Tensor:
                # A worker that passed for lost may run a closure that was given out again.
                mutex = tf.raw_ops.MutexV2(shared_name=f"filling {self._key}")
                lock = tf.raw_ops.MutexLock(mutex=mutex)
                with tf.control_dependencies([lock]):
                    filled = unless_filled(fill)
                with tf.control_dependencies([filled]):
                    released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
                with tf.control_dependencies([released]):
                    return tf.identity(filled)

            return unless_filled(fill_alone)

    def _rows(self, numbers: tf.Tensor) -> tuple[Any, Any]:
        """The examples of these record numbers."""
        specs = self._reader.kept_specs
        rows: tuple[Any, Any] = tf.nest.map_structure(
            lambda handle, spec: tf.raw_ops.ResourceGather(
                resource=handle, indices=numbers, dtype=spec.dtype
            ),
            self._handles(),
            specs,
        )
        return rows

    def _fill(self) -> tf.Tensor:
        """Reads and parses all examples, some at a time; returns something that comes after."""
        num_examples = self.order.num_examples
        specs = tf.nest.flatten(self._reader.kept_specs)
        handles = tf.nest.flatten(self._handles())
        made = [self._make(handle, spec) for handle, spec in zip(handles, specs, strict=True)]

        def keep(first: tf.Tensor, examples: Any) -> tf.Tensor:
            values = tf.nest.flatten(examples)
            end = first + tf.shape(values[0], tf.int64)[0]
            # A function of a dataset does not know where it is called.
            with tf.device("CPU:0"):
                written = [
                    tf.raw_ops.ResourceScatterUpdate(
                        resource=handle, indices=tf.range(first, end), updates=value
                    )
                    for handle, value in zip(tf.nest.flatten(self._handles()), values, strict=True)
                ]
            with tf.control_dependencies(written):
                return tf.identity(end)

        with tf.control_dependencies(made):
            num_kept = self._reader.all_examples().reduce(tf.constant(0, tf.int64), keep)
        whole = tf.equal(num_kept, num_examples)
        message = f"A file of split {self._reader.split.name} is shorter than its index says."
        with tf.control_dependencies([tf.debugging.Assert(whole, [message])]):
            return tf.identity(num_kept)

    def _make(self, handle: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        """Makes room, unless there is: a closure of a former run may still take rows from there."""

        def make() -> tf.Tensor:
            # tf.zeros would become a constant, which each closure keeps for itself.
            shape = [self.order.num_examples, *spec.shape[1:]]
            room = tf.raw_ops.Empty(shape=shape, dtype=spec.dtype, init=True)
            made = tf.raw_ops.AssignVariableOp(resource=handle, value=room)
            with tf.control_dependencies([made]):
                return tf.constant(True)

        is_there = tf.raw_ops.VarIsInitializedOp(resource=handle)
        return tf.cond(is_there, lambda: tf.constant(True), make)

    def _handles(self) -> Any:
        """The examples in this process, of the reader's `kept_specs`."""
        specs = self._reader.kept_specs
        handles = [
            tf.raw_ops.VarHandleOp(
                dtype=spec.dtype,
                shape=[self.order.num_examples, *spec.shape[1:]],
                shared_name=f"{self._key}, {index}",
            )
            for index, spec in enumerate(tf.nest.flatten(specs))
        ]
        return tf.nest.pack_sequence_as(specs, handles)

    @property
    def _key(self) -> str:
        """Names what is kept; of another form it is something else, which has another name."""
        forms = [
            f"{spec.dtype.name}{spec.shape[1:]}"
            for spec in tf.nest.flatten(self._reader.kept_specs)
        ]
        return f"{_KEPT}, {self.order.num_examples} of {' '.join(forms)}"
