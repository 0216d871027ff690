"""Tickets that name rows of examples cached in the worker.

    source = CachedTickets(reader)
    source.ticket(first_batch=7, num_batches=4)["gather"]       # record numbers, int64 [4, n]

No ticket reads a file: `prepare` fills the cache, once in each run, and the process keeps it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator

import tensorflow as tf
from typing_extensions import override

from data.order import Plan
from data.reader import Batch, Examples, Nest, Reader
from data.system.compat.autograph import autograph, no_autograph
from data.tfrecord.pieces import Pieces
from data.tickets.base import PackedTickets, Spec, TicketSource


class CachedTickets(TicketSource):
    """Tickets with the arrays of `Reader.row_plan`, for training."""

    def __init__(self, reader: Reader) -> None:
        self.order, self._reader = reader.order, reader
        # A server may still hold the examples of an earlier run: they are not used.
        self._owner = f"{os.getpid()}-{time.time_ns()}"

    @override
    def ticket_runs(self, first_batch: int) -> Iterator[tuple[int, int]]:
        # A single run: rows of memory are read equally fast in any order.
        yield first_batch, sys.maxsize

    @override
    def ticket(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Plan:
        return self._reader.row_plan(first_batch, num_batches, lanes)

    @override
    def ticket_spec(self, num_batches: int | None = None, lanes: range | None = None) -> Spec:
        return self._reader.row_spec(num_batches, lanes)

    @override
    @no_autograph
    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> Batch:
        with tf.control_dependencies([self.prepare()]):
            return self._gather(ticket)

    @override
    @no_autograph
    def sub_batch(
        self, batch: tf.Tensor, index: tf.Tensor, packed: PackedTickets, cache_name: str
    ) -> Batch:
        row, ticket = packed.unpack(batch, index, packed.names)
        size = packed.sizes[0] if len(set(packed.sizes)) == 1 else None
        plan = {}
        for name, part in ticket.items():
            plan[name] = tf.ensure_shape(part[row], [size, *packed.specs[0][name].shape[2:]])
        return self._gather(plan)

    @override
    @no_autograph
    def prepare(self) -> tf.Tensor:
        """Fills the cache, unless it holds the examples of this run."""
        with tf.device("CPU:0"):
            key = tf.constant([0], tf.int64)
            table = tf.raw_ops.MutableHashTableV2(
                key_dtype=tf.int64, value_dtype=tf.string, shared_name=f"owner of {self._key}"
            )

            def unless_filled(fill: Callable[[], tf.Tensor]) -> tf.Tensor:
                find = tf.raw_ops.LookupTableFindV2
                owner = find(table_handle=table, keys=key, default_value="none")[0]
                return tf.cond(tf.equal(owner, self._owner), lambda: tf.constant(True), fill)

            def fill() -> tf.Tensor:
                insert = tf.raw_ops.LookupTableInsertV2
                with tf.control_dependencies([self._fill()]):
                    owned = insert(table_handle=table, keys=key, values=[self._owner])
                with tf.control_dependencies([owned]):
                    return tf.constant(True)

            def fill_alone() -> tf.Tensor:
                # A worker that was considered lost may run a closure that was given out again.
                mutex = tf.raw_ops.MutexV2(shared_name=f"filling {self._key}")
                lock = tf.raw_ops.MutexLock(mutex=mutex)
                with tf.control_dependencies([lock]):
                    filled = unless_filled(fill)
                with tf.control_dependencies([filled]):
                    released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
                with tf.control_dependencies([released]):
                    return tf.identity(filled)

            return unless_filled(fill_alone)

    def _gather(self, plan: dict[str, tf.Tensor]) -> Batch:
        def rows(numbers: tf.Tensor) -> Nest:
            def gather(handle: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
                return tf.raw_ops.ResourceGather(resource=handle, indices=numbers, dtype=spec.dtype)

            return tf.nest.map_structure(gather, self._handles(), self._reader.cached_specs)

        with tf.device("CPU:0"):
            return self._reader.gather_rows(rows, plan)

    def _fill(self) -> tf.Tensor:
        allocated = tf.nest.flatten(
            tf.nest.map_structure(self._allocate, self._handles(), self._reader.cached_specs)
        )

        def store(first: tf.Tensor, examples: Examples) -> tf.Tensor:
            values = tf.nest.flatten(examples)
            end = first + tf.shape(values[0], tf.int64)[0]
            # A function of a dataset does not inherit the device of its caller.
            with tf.device("CPU:0"):
                handles, rows = tf.nest.flatten(self._handles()), tf.range(first, end)
                stored = [
                    tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=rows, updates=value)
                    for handle, value in zip(handles, values, strict=True)
                ]
            with tf.control_dependencies(stored):
                return tf.identity(end)

        # Every example once, by record number, as `cached_specs` of a group each.
        group_examples = self._reader.group_examples(self._reader.cached_specs)
        records = Pieces(self._reader.split).all_records().batch(group_examples)
        parse = autograph(self._reader.cached_parse)
        examples = records.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        with tf.control_dependencies(allocated):
            num_cached = examples.reduce(tf.constant(0, tf.int64), store)
        is_complete = tf.equal(num_cached, self.order.num_examples)
        message = f"A file of split {self._reader.split.name} is shorter than its index says."
        with tf.control_dependencies([tf.debugging.Assert(is_complete, [message])]):
            return tf.identity(num_cached)

    def _allocate(self, handle: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        """Allocates the cache, unless it is there: an earlier run's closure may still read it."""

        def allocate() -> tf.Tensor:
            # tf.zeros would become a constant, which each closure keeps in memory.
            shape = [self.order.num_examples, *spec.shape[1:]]
            zeros = tf.raw_ops.Empty(shape=shape, dtype=spec.dtype, init=True)
            assigned = tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
            with tf.control_dependencies([assigned]):
                return tf.constant(True)

        is_allocated = tf.raw_ops.VarIsInitializedOp(resource=handle)
        return tf.cond(is_allocated, lambda: tf.constant(True), allocate)

    def _handles(self) -> Nest:
        specs, handles = self._reader.cached_specs, []
        for index, spec in enumerate(tf.nest.flatten(specs)):
            shape, name = [self.order.num_examples, *spec.shape[1:]], f"{self._key}, {index}"
            handle = tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=shape, shared_name=name)
            handles.append(handle)
        return tf.nest.pack_sequence_as(specs, handles)

    @property
    def _key(self) -> str:
        specs = tf.nest.flatten(self._reader.cached_specs)
        types = " ".join(f"{spec.dtype.name}{spec.shape[1:]}" for spec in specs)
        return f"cached examples, {self.order.num_examples} of {types}"
