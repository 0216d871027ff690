"""Tickets: batches described by arrays, for graphs that run in another process (ps workers).

    source = ticket_source(reader)

    @tf.function(input_signature=[source.ticket_spec(num_batches=16)])
    def closure(ticket):                        # runs in a worker
        inputs, labels = source.parse_ticket(ticket)

    coordinator.schedule(closure, args=(source.ticket(first_batch=32, num_batches=16),))

A ticket is a dictionary of arrays. No graph here has a py_function, so any process can run it.
A sub-batch is the part of a batch in one range of lanes. For synchronous ps workers `pack_tickets`
makes one ticket of each range for all batches of a run; `sub_batch` takes one row, a batch, of it.
"""

import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.order import Plan
from data.reader import Batch, Examples, Nest, Reader
from data.system.compat.autograph import autograph, no_autograph
from data.tfrecord.pieces import PIECE_NAMES, Pieces

Spec = dict[str, tf.TensorSpec]


class PackedTickets(NamedTuple):
    """The tickets of some runs of batches, in a worker's graph: one for each range of lanes.

    `specs` are the `ticket_spec` of each sub-batch. `starts`, int64 [runs], are the runs' first
    batches; `tickets`, string [runs, sub_batches, parts], comes from `pack_tickets`.
    """

    specs: Sequence[Spec]
    starts: tf.Tensor
    tickets: tf.Tensor

    @property
    def names(self) -> list[str]:
        """The arrays of a ticket, in the order of the parts."""
        return sorted(self.specs[0])

    @property
    def sizes(self) -> list[int]:
        """The examples of each sub-batch. They differ by a lane if the lanes do not divide."""
        return [int(spec["gather"].shape[1]) for spec in self.specs]

    def unpack(
        self, batch: tf.Tensor, index: tf.Tensor, names: Sequence[str]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The row of `batch` in its run, and these arrays of the ticket of sub-batch `index`."""
        window = tf.searchsorted(self.starts, [batch], side="right", out_type=tf.int64)[0] - 1
        parts = dict(zip(self.names, tf.unstack(self.tickets[window, index]), strict=True))
        ticket = {}
        for name in names:
            spec = self.specs[0][name]
            ticket[name] = tf.io.parse_tensor(parts[name], spec.dtype)
            ticket[name].set_shape([None] * spec.shape.rank)
        return batch - self.starts[window], ticket


class DiskTickets:
    """Tickets that name pieces of files: the worker that gets one reads and parses the records.

    They have the arrays of `Pieces.plan`: "shards", "byte_offsets", "skip", "take".

    With `weights`, tickets are for evaluation: they have "weights" instead of "seeds". Batches
    after the last evaluation batch have weight 0, so all tickets may have one length.
    """

    def __init__(self, reader: Reader, *, weights: bool = False) -> None:
        self.order, self._reader = reader.order, reader
        self._weights, self._pieces = weights, Pieces(reader.split)

    def ticket_runs(self, first_batch: int) -> Iterator[tuple[int, int]]:
        """Runs of batches from `first_batch` on, (first, count).

        A ticket of one whole run reads each chunk once; each of several may read it again.
        """
        return self.order.windows(first_batch)

    def ticket(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Plan:
        """The plan of some batches: "gather", int64 [num_batches, n], `Reader.extras` and more."""
        return {
            **self._pieces.plan(self.order, first_batch, num_batches, lanes),
            **self._reader.extras(first_batch, num_batches, lanes, weights=self._weights),
        }

    def ticket_spec(self, num_batches: int | None = None, lanes: range | None = None) -> Spec:
        """The input signature of a ticket: a function traced with it is not traced again."""
        pieces = dict.fromkeys(PIECE_NAMES, tf.TensorSpec([None], tf.int64))
        return {**pieces, **self._reader.row_spec(num_batches, lanes, weights=self._weights)}

    @no_autograph
    def read_ticket(self, ticket: dict[str, tf.Tensor]) -> tf.Tensor:
        """The records of a ticket, unparsed: string [num_batches, n]; their CRCs are checked."""
        return tf.gather(self._pieces.read(ticket), ticket["gather"])

    @no_autograph
    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> Batch:
        """In a graph: inputs and labels [num_batches, n, ...], and weights or seeds if given."""
        return self._reader.parse_records(self.read_ticket(ticket), ticket)

    def prepare(self) -> tf.Tensor:
        """In a graph: must run before `sub_batch`. Returns any tensor, to depend on."""
        return tf.constant(True)  # Every sub-batch is read when it is needed.

    @no_autograph
    def sub_batch(
        self, batch: tf.Tensor, index: tf.Tensor, packed: PackedTickets, cache_name: str
    ) -> Batch:
        """In a graph: sub-batch `index` of `batch`, parsed: inputs and labels [n, ...], seeds.

        Records that are read but not needed now are cached in the worker under `cache_name`.
        """
        records = self._cached_or_read(batch, index, packed, cache_name)
        extras = {}
        if "seeds" in packed.names:
            row, ticket = packed.unpack(batch, index, ["seeds"])
            extras["seeds"] = tf.ensure_shape(ticket["seeds"][row], [records.shape[0], 2])
        return self._reader.parse_records(records, extras)

    def _cached_or_read(
        self, batch: tf.Tensor, index: tf.Tensor, packed: PackedTickets, cache_name: str
    ) -> tf.Tensor:
        """The records of a sub-batch, string [n]: cached by this worker, or read now.

        The remaining window is read at once, because its batches are spread over the same chunks.
        The records of later batches are cached in a table in the worker, for at most two windows of
        each sub-batch.
        """
        sizes = packed.sizes
        most = max(sizes)
        ring = 2 * self.order.window_batches
        # The name makes it the same table in each call. A restarted worker has an empty one.
        table = tf.raw_ops.MutableHashTableOfTensorsV2(
            key_dtype=tf.int64,
            value_dtype=tf.string,
            value_shape=[1 + most],
            shared_name=f"records-{cache_name}",
        )
        begin, empty = index * ring, tf.fill([1 + most], "")
        find, key = tf.raw_ops.LookupTableFindV2, [begin + batch % ring]
        cached = find(table_handle=table, keys=key, default_value=empty)[0]

        def read_and_cache() -> tf.Tensor:
            row, ticket = packed.unpack(batch, index, packed.names)
            records = self.read_ticket({**ticket, "gather": ticket["gather"][row:]})
            batches = batch + tf.range(tf.shape(records, tf.int64)[0])
            columns = [tf.strings.as_string(batches)[:, tf.newaxis], records]
            padding = tf.fill([tf.size(batches), most - tf.shape(records)[1]], "")
            values = tf.ensure_shape(tf.concat([*columns, padding], axis=1), [None, 1 + most])
            keys = begin + batches % ring
            tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=values)
            return values[0]

        # The first string of a row is the number of its batch.
        is_cached = tf.equal(cached[0], tf.strings.as_string(batch))
        row = tf.ensure_shape(tf.cond(is_cached, lambda: cached, read_and_cache), [1 + most])
        return row[1:] if min(sizes) == most else row[1 : 1 + tf.gather(sizes, index)]


class CachedTickets:
    """Tickets that name rows of examples cached in the worker, for training.

    They have the arrays of `Reader.row_plan`. No ticket reads a file: `prepare` fills the cache,
    once in each run, and the process keeps it.
    """

    def __init__(self, reader: Reader) -> None:
        self.order, self._reader = reader.order, reader
        self.ticket, self.ticket_spec = reader.row_plan, reader.row_spec
        self._narrow = reader.narrow  # The cached examples are before `widen`.
        # A server may still hold the examples of an earlier run: they are not used.
        self._owner = uuid.uuid4().hex

    def ticket_runs(self, first_batch: int) -> Iterator[tuple[int, int]]:
        """A single run: rows of memory are read equally fast in any order."""
        yield first_batch, sys.maxsize

    @no_autograph
    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> Batch:
        """As `DiskTickets.parse_ticket`, of rows."""
        with tf.control_dependencies([self.prepare()]):
            return self._gather(ticket)

    @no_autograph
    def sub_batch(
        self, batch: tf.Tensor, index: tf.Tensor, packed: PackedTickets, cache_name: str
    ) -> Batch:
        """As `DiskTickets.sub_batch`; nothing is cached under `cache_name`."""
        row, ticket = packed.unpack(batch, index, packed.names)
        size = packed.sizes[0] if len(set(packed.sizes)) == 1 else None
        plan = {}
        for name, part in ticket.items():
            plan[name] = tf.ensure_shape(part[row], [size, *packed.specs[0][name].shape[2:]])
        return self._gather(plan)

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

            return tf.nest.map_structure(gather, self._handles(), self._narrow.parsed_specs)

        with tf.device("CPU:0"):
            return self._reader.gather_rows(rows, plan)

    def _fill(self) -> tf.Tensor:
        allocated = tf.nest.flatten(
            tf.nest.map_structure(self._allocate, self._handles(), self._narrow.parsed_specs)
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

        # Every example once, by record number, as `parsed_specs` of a group each.
        group_examples = self._reader.group_examples(self._narrow.parsed_specs)
        records = Pieces(self._reader.split).all_records().batch(group_examples)
        parse = autograph(self._narrow.parse)
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
        specs, handles = self._narrow.parsed_specs, []
        for index, spec in enumerate(tf.nest.flatten(specs)):
            shape, name = [self.order.num_examples, *spec.shape[1:]], f"{self._key}, {index}"
            handle = tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=shape, shared_name=name)
            handles.append(handle)
        return tf.nest.pack_sequence_as(specs, handles)

    @property
    def _key(self) -> str:
        specs = tf.nest.flatten(self._narrow.parsed_specs)
        types = " ".join(f"{spec.dtype.name}{spec.shape[1:]}" for spec in specs)
        return f"cached examples, {self.order.num_examples} of {types}"


TicketSource = DiskTickets | CachedTickets  # Made on the chief, used in the graphs of workers.


def ticket_source(reader: Reader) -> TicketSource:
    """Tickets for the training batches of `reader`."""
    return CachedTickets(reader) if reader.caches_examples else DiskTickets(reader)


def pack_tickets(
    source: TicketSource, first_batch: int, num_batches: int, lanes: Sequence[range]
) -> npt.NDArray[np.object_]:
    """The tickets of some batches for the lanes of each sub-batch: bytes [sub_batches, parts]."""
    tickets = [source.ticket(first_batch, num_batches, of_sub_batch) for of_sub_batch in lanes]
    parts = [[part for _, part in sorted(ticket.items())] for ticket in tickets]
    return np.array([[tf.io.serialize_tensor(p).numpy() for p in row] for row in parts], object)
