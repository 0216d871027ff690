"""Order -> tf.data: read the records of any batches, wherever they lie, and parse them.

    reader = Reader(split, order, parse)
    for images, labels in reader.batches(first_batch=1234, lanes=range(20)):
        ...

There is no shuffle buffer and no iterator to save: batch s holds what `data.order` says, whoever
reads it and wherever reading began. Two ways in:

* `batches`: a tf.data pipeline on this machine. Plans are made by numpy, ahead, in a Python
  generator.
* `ticket`: the plan of some batches as plain arrays. `read_ticket` and `parse_ticket` are graphs
  without py_function, so a ticket can be an argument of a closure that runs in another process.

Where the records come from, and what is parsed at once:

| way in | data | read by | parsed at once |
| --- | --- | --- | --- |
| `batches` | local files | this process, a window's byte ranges (`data.ranges`) | some batches |
| `batches` | URLs | TensorFlow, a window's pieces | some batches |
| `batches` | fits `cache_bytes` | as above, once, before the first batch | all there is |
| tickets | any | TensorFlow, the ticket's pieces | the ticket |
"""

import atexit
import dataclasses
import functools
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.order import Int64s, Order
from data.ranges import ByteRange, DamagedError, Window, Windows
from data.records import DataError, Split

Ticket = dict[str, npt.NDArray[np.generic]]
Parse = Callable[[tf.Tensor], tuple[Any, Any]]
Augment = Callable[[Any, Any, tf.Tensor], tuple[Any, Any]]

_READ_THROUGH_BYTES = 16 << 10  # Reading this much costs about what opening the file again does.
_MAX_RUN_BYTES = 16 << 20  # Records that one window's reading may hold at a time.
_GROUP_EXAMPLES = 1024  # Parsed at once: a call of `parse` costs about what 500 small examples do.
_GROUP_BYTES = 4 << 20  # So much of them, at most, before or after parsing.
_PREFETCH_BYTES = 8 << 20
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 4 << 10, 1 << 20
_MAX_THREADS = 8
_ALIGN_BYTES = 64  # Of TensorFlow's tensors.


def _read_pieces(
    paths: tf.Tensor, byte_offsets: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, buffer_bytes: int
) -> tf.Tensor:
    """Records [skip[i], skip[i] + take[i]) from byte byte_offsets[i] of paths[i], end to end.

    `paths`: string [m]; `byte_offsets`, `skip`, `take`: int64 [m]; the records: string [sum(take)].
    """

    def piece(
        path: tf.Tensor, offset: tf.Tensor, skip: tf.Tensor, take: tf.Tensor
    ) -> tf.data.Dataset:
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=path[tf.newaxis],
            compression_type="",
            buffer_size=buffer_bytes,
            byte_offsets=offset[tf.newaxis],
        )
        records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
        return records.skip(skip).take(take)

    pieces = tf.data.Dataset.from_tensor_slices((paths, byte_offsets, skip, take))
    return pieces.flat_map(piece).batch(tf.reduce_sum(take)).get_single_element()


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads one split in one order. Holds no position: every call says where to begin.

    `parse`: string [n] -> (inputs [n, ...], labels [n, ...]); it must treat examples independently
    and take any n, since several batches are parsed at once, and must not draw random numbers with
    a state. `augment`: (inputs, labels, seeds int32 [n, 2]) -> (inputs, labels), of training
    batches alone; it too treats examples independently, and draws random numbers from each
    example's seed alone, which `Order.seeds` makes. `num_threads` of this process read and parse;
    0: as many as this process may run on, at most 8. `cache_bytes`: `batches` without an end keep
    the parsed examples in memory if all of them are no larger; they are parsed before the first
    batch. tf.data makes a copy of them, so they take twice as much.

    Raises:
        DataError: the order was made for another split.
    """

    split: Split
    order: Order
    parse: Parse
    num_threads: int = 0
    augment: Augment | None = None
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        """Check that order and split belong together."""
        ours = (self.split.shard_lengths, self.split.chunk_examples)
        theirs = (self.order.shard_lengths, self.order.chunk_examples)
        if ours != theirs:
            raise DataError(
                f"The order is over {self.order.num_examples} records in chunks of "
                f"{self.order.chunk_examples}, but split {self.split.name!r} has "
                f"{self.split.num_examples} in chunks of {self.split.chunk_examples}. "
                "Build it with Order(split.shard_lengths, split.chunk_examples, ...)."
            )

    @property
    def num_evaluation_batches(self) -> int:
        """How many batches hold each record once; the last may be padded."""
        return -(-self.split.num_examples // self.order.batch_size)

    def batches(
        self, first_batch: int, lanes: range, num_batches: int | None = None
    ) -> tf.data.Dataset:
        """Batches first_batch, first_batch + 1, ... as (inputs [n, ...], labels [n, ...]).

        n = len(lanes) * B / V, and static. Endless unless `num_batches` is given. The same elements
        in the same order, whatever the number of threads and wherever reading begins.
        """
        example_bytes, num_examples = self._example_bytes, self.split.num_examples
        if num_batches is None and example_bytes * num_examples <= self.cache_bytes:
            return self._from_cache(first_batch, lanes)
        stop = None if num_batches is None else first_batch + num_batches
        return self._from_disk(first_batch, stop, lanes)

    def evaluation_batches(self, lanes: range) -> tf.data.Dataset:
        """Every record exactly once, as (inputs, labels, weights float32 [n]).

        All `num_evaluation_batches` batches have the same shape. What fills up the last one are
        repeated records of weight 0, so sums over weights are exact on any number of replicas.
        """
        return self._from_disk(0, self.num_evaluation_batches, lanes, weights=True)

    def ticket(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Ticket:
        """The plan of some batches, as arrays to hand to `read_ticket` or `parse_ticket`.

        Of m pieces: "shards", "byte_offsets", "skip", "take" int64 [m]; m varies from ticket to
        ticket. "gather" int64 [num_batches, n]. With an `augment`, "seeds" int32
        [num_batches, n, 2].
        """
        # Within a window chunks are read once; where a ticket is cut is the caller's choice, and
        # Order.windows the best one.
        return {
            **self._plan(first_batch, num_batches, lanes),
            **self._extras(first_batch, num_batches, lanes),
        }

    def evaluation_ticket(
        self, first_batch: int, num_batches: int, lanes: range | None = None
    ) -> Ticket:
        """`ticket` for evaluation: no "seeds", but "weights" float32 [num_batches, n].

        Weight 1 for a record's first time, else 0. Batches past the end have weight 0
        throughout, so the last ticket may be as long as the others.
        """
        return {
            **self._plan(first_batch, num_batches, lanes),
            **self._extras(first_batch, num_batches, lanes, weights=True),
        }

    def ticket_spec(
        self, num_batches: int | None = None, lanes: range | None = None, *, weights: bool = False
    ) -> dict[str, tf.TensorSpec]:
        """The input signature of a ticket: a function traced with it is not traced again."""
        pieces = tf.TensorSpec([None], tf.int64)
        batches = [num_batches, self._share_examples(lanes)]
        spec = dict.fromkeys(("shards", "byte_offsets", "skip", "take"), pieces)
        spec["gather"] = tf.TensorSpec(batches, tf.int64)
        for name, value in self._extras(0, 1, range(1), weights=weights).items():
            spec[name] = tf.TensorSpec([*batches, *value.shape[2:]], value.dtype)
        return spec

    def read_ticket(self, ticket: dict[str, tf.Tensor]) -> tf.Tensor:
        """The records of a ticket, unparsed: string [num_batches, n]; without py_function.

        Every record's CRC is checked (DataLossError).
        """
        return tf.gather(self._read_pieces(ticket), ticket["gather"])

    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> tuple[Any, ...]:
        """The batches of a ticket, stacked: inputs and labels, each [num_batches, n, ...].

        With "weights" in the ticket, they follow. A graph without py_function.
        """
        return self.parse_records(self.read_ticket(ticket), ticket)

    def parse_records(self, serialized: tf.Tensor, extras: dict[str, tf.Tensor]) -> tuple[Any, ...]:
        """Parses what was read; augments it with the "seeds" in `extras`, passes "weights" on.

        `serialized`: string [..., n]. Inputs, labels and weights are shaped so too: [..., n, ...].
        """
        return self._finish(self.parse(tf.reshape(serialized, [-1])), serialized, extras)

    def _finish(
        self, parsed: tuple[Any, Any], batches: tf.Tensor, extras: dict[str, tf.Tensor]
    ) -> tuple[Any, ...]:
        """What was parsed, augmented, and in the shape of `batches`; with the weights."""
        if self.augment is not None and "seeds" in extras:
            parsed = self.augment(*parsed, tf.reshape(extras["seeds"], [-1, 2]))
        leading = tf.shape(batches)

        def stacked(value: tf.Tensor) -> tf.Tensor:
            folded = tf.reshape(value, tf.concat([leading, tf.shape(value)[1:]], 0))
            return tf.ensure_shape(folded, batches.shape.concatenate(value.shape[1:]))

        outputs = tf.nest.map_structure(stacked, tuple(parsed))
        return (*outputs, extras["weights"]) if "weights" in extras else outputs

    def _read_pieces(self, ticket: dict[str, tf.Tensor]) -> tf.Tensor:
        records = _read_pieces(
            tf.gather(self._paths, ticket["shards"]),
            ticket["byte_offsets"],
            ticket["skip"],
            ticket["take"],
            self._buffer_bytes,
        )
        # A dataset ends with its file, wherever that is.
        whole = tf.equal(tf.size(records, tf.int64), tf.reduce_sum(ticket["take"]))
        message = f"A file of split {self.split.name} is shorter than when its index was built."
        with tf.control_dependencies([tf.debugging.Assert(whole, [message])]):
            return tf.identity(records)

    def _plan(self, first_batch: int, num_batches: int, lanes: range | None) -> Ticket:
        reads = self.order.reads(first_batch, num_batches, lanes, self._read_through)
        offsets, begins = self._chunk_offsets
        return {
            "shards": reads.shards,
            "byte_offsets": offsets[begins[reads.shards] + reads.chunks],
            "skip": reads.skip,
            "take": reads.take,
            "gather": reads.gather,
        }

    def _extras(
        self, first_batch: int, num_batches: int, lanes: range | None, *, weights: bool = False
    ) -> Ticket:
        """What batches have beside their records: weights in evaluation, else seeds to augment."""
        if weights:
            positions = self.order.positions(first_batch, num_batches, lanes)
            return {"weights": (positions < self.split.num_examples).astype(np.float32)}
        if self.augment is None:
            return {}
        return {"seeds": self.order.seeds(first_batch, num_batches, lanes)}

    def _runs(self, first_batch: int, stop: int | None) -> Iterator[tuple[int, int]]:
        """Order.windows up to batch `stop`, in parts that are not too large for memory."""
        batch_bytes = self.order.batch_size * self.split.mean_record_bytes
        most = max(1, _MAX_RUN_BYTES // batch_bytes)
        for first, count in self.order.windows(first_batch):
            end = first + count if stop is None else min(stop, first + count)
            for begin in range(first, end, most):
                yield begin, min(most, end - begin)
            if end == stop:
                return

    def _group_batches(self, lanes: range) -> int:
        """Batches parsed at once, at most."""
        known = self._example_bytes if math.isfinite(self._example_bytes) else 0
        example_bytes = max(int(known), self.split.mean_record_bytes)
        most_examples = min(_GROUP_EXAMPLES, _GROUP_BYTES // example_bytes)
        return max(1, most_examples // self._share_examples(lanes))

    def _from_disk(
        self, first_batch: int, stop: int | None, lanes: range, *, weights: bool = False
    ) -> tf.data.Dataset:
        """One element a batch, its records read and parsed now."""
        spec = self.ticket_spec(lanes=lanes, weights=weights)
        extras = functools.partial(self._extras, lanes=lanes, weights=weights)
        if any("://" in path for path in self._paths):
            tickets = tf.data.Dataset.from_generator(
                lambda: (
                    {**self._plan(*run, lanes), **extras(*run)}
                    for run in self._runs(first_batch, stop)
                ),
                output_signature=spec,
            )
            return self._batched(self._read_by_tensorflow(tickets, lanes), self.parse_records)
        groups = tf.data.Dataset.from_generator(
            lambda: self._read_here(first_batch, stop, lanes, extras),
            output_signature={
                **{name: spec[name] for name in spec.keys() & {"seeds", "weights"}},
                "serialized": tf.TensorSpec(spec["gather"].shape, tf.string),
                "unread": tf.TensorSpec([4, None], tf.int64),
            },
        )

        def parse(group: dict[str, tf.Tensor]) -> tuple[Any, ...]:
            read, unread = group["serialized"], group["unread"]

            def read_unread() -> tf.Tensor:
                names = ("shards", "byte_offsets", "skip", "take")
                records = self._read_pieces(dict(zip(names, tf.unstack(unread), strict=True)))
                return tf.reshape(records, [-1, read.shape[1]])

            serialized = tf.cond(tf.size(unread) > 0, read_unread, lambda: read)
            return self.parse_records(tf.ensure_shape(serialized, read.shape), group)

        return self._batched(groups.prefetch(2), parse)

    def _read_here(
        self,
        first_batch: int,
        stop: int | None,
        lanes: range,
        extras: Callable[[int, int], Ticket],
    ) -> Iterator[Ticket]:
        """Groups of k batches: "serialized", string [k, n], and "unread", int64 [4, 0].

        Those that cannot be read or verified are "unread", int64 [4, k * n], a ticket's piece for
        each, and "serialized" is empty: TensorFlow's own reader then raises the error that names
        the fault.
        """
        most = self._group_batches(lanes)
        windows = Windows()
        for first, num_batches in self._runs(first_batch, stop):
            ranges, num_records, numbers = self._byte_ranges(first, num_batches, lanes)
            try:
                window = windows.read(ranges, num_records)
            except (DamagedError, OSError):
                window = None
            # Groups of one size, so that all threads that parse have as much to do.
            num_groups = -(-num_batches // most)
            cuts = [i * num_batches // num_groups for i in range(num_groups + 1)]
            for begin, end in itertools.pairwise(cuts):
                batches = (first + begin, end - begin)
                try:
                    read, unread = _records(window, numbers[begin:end]), np.zeros((4, 0), np.int64)
                except DamagedError:
                    read, unread = numbers[:0].astype(object), self._one_by_one(*batches, lanes)
                yield {"serialized": read, "unread": unread, **extras(*batches)}

    def _one_by_one(self, first_batch: int, num_batches: int, lanes: range) -> Int64s:
        """A ticket's piece for each record of some batches: int64 [4, num_batches * n]."""
        records = self.order.records(first_batch, num_batches, lanes).reshape(-1)
        lengths = np.array(self.split.shard_lengths)
        begins = np.cumsum(lengths) - lengths
        shards = np.searchsorted(begins, records, side="right") - 1
        chunks, skip = np.divmod(records - begins[shards], self.split.chunk_examples)
        offsets, first_chunks = self._chunk_offsets
        return np.stack(
            [shards, offsets[first_chunks[shards] + chunks], skip, np.ones_like(records)]
        )

    def _byte_ranges(
        self, first_batch: int, num_batches: int, lanes: range
    ) -> tuple[list[ByteRange], int, Int64s]:
        """Whole chunks with the records of some batches, how many they hold, and which those are.

        The numbers, int64 [num_batches, n], count the records of all ranges from 0.
        """
        reads = self.order.reads(first_batch, num_batches, lanes, self._read_through)
        chunk_examples, shards = self.split.chunk_examples, self.split.shards
        last = reads.chunks + (reads.skip + reads.take - 1) // chunk_examples
        lengths = np.array(self.split.shard_lengths)[reads.shards]
        held = np.minimum((last + 1) * chunk_examples, lengths) - reads.chunks * chunk_examples
        ranges = []
        for shard, begin, end in zip(
            reads.shards.tolist(), reads.chunks.tolist(), (last + 1).tolist(), strict=True
        ):
            path, offsets = shards[shard].path, shards[shard].offsets
            stop = int(offsets[end]) if end < len(offsets) else shards[shard].end
            ranges.append(ByteRange(path, int(offsets[begin]), stop))
        # From places among the records taken to places among those held.
        shift = np.cumsum(held) - held + reads.skip - (np.cumsum(reads.take) - reads.take)
        numbers = reads.gather + np.repeat(shift, reads.take)[reads.gather]
        return ranges, int(held.sum()), numbers

    def _read_by_tensorflow(self, tickets: tf.data.Dataset, lanes: range) -> tf.data.Dataset:
        """From tickets, groups of batches: string [k, n], and what they have beside."""

        def read_pieces(ticket: dict[str, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            pieces = self._read_pieces(ticket)
            of_batches = ticket.keys() - {"shards", "byte_offsets", "skip", "take"}
            return pieces, {name: ticket[name] for name in of_batches}

        def in_groups(records: tf.Tensor, batches: dict[str, tf.Tensor]) -> tf.data.Dataset:
            # Every group shares the run's records: no string is copied before it is needed.
            shared = tf.data.Dataset.from_tensors(records).repeat()
            groups = tf.data.Dataset.from_tensor_slices(batches).batch(self._group_batches(lanes))
            return tf.data.Dataset.zip(shared, groups)

        def gather(
            records: tf.Tensor, group: dict[str, tf.Tensor]
        ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            return tf.gather(records, group.pop("gather")), group

        read = tickets.prefetch(2).map(read_pieces, num_parallel_calls=self._threads)
        return read.flat_map(in_groups).map(gather)

    def _from_cache(self, first_batch: int, lanes: range) -> tf.data.Dataset:
        """One element a batch, its examples picked from those that were parsed before."""
        parsed_split = self._parsed_split
        most = self._group_batches(lanes)
        spec = self.ticket_spec(lanes=lanes)
        spec = {name: spec[name] for name in ("gather", "seeds") if name in spec}

        def groups() -> Iterator[Ticket]:
            for first, num_batches in self._runs(first_batch, None):
                records = self.order.records(first, num_batches, lanes)
                plan = {"gather": records, **self._extras(first, num_batches, lanes)}
                for begin in range(0, num_batches, most):
                    yield {name: value[begin : begin + most] for name, value in plan.items()}

        def pick(group: dict[str, tf.Tensor]) -> tuple[Any, ...]:
            rows = tf.reshape(group["gather"], [-1])
            parsed = tf.nest.map_structure(lambda values: tf.gather(values, rows), parsed_split)
            return self._finish(parsed, group["gather"], group)

        plans = tf.data.Dataset.from_generator(groups, output_signature=spec)
        return self._batched(plans.prefetch(2), pick)

    def _batched(
        self, groups: tf.data.Dataset, parse: Callable[..., tuple[Any, ...]]
    ) -> tf.data.Dataset:
        """One element a batch: inputs, labels, and the weights of those that have them."""
        _collect_iterators_at_exit()
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False
        options.threading.private_threadpool_size = self._threads
        parsed = groups.map(parse, num_parallel_calls=self._threads)
        batches = parsed.flat_map(lambda *stacked: tf.data.Dataset.from_tensor_slices(stacked))
        batch_bytes = sum(
            _num_bytes(spec.shape, spec.dtype) for spec in tf.nest.flatten(batches.element_spec)
        )
        num_ahead = min(2 * self._threads, max(2, int(_PREFETCH_BYTES // batch_bytes)))
        return batches.prefetch(num_ahead).with_options(options)

    @property
    def _threads(self) -> int:
        return self.num_threads or min(_MAX_THREADS, _num_cores())

    @functools.cached_property
    def _example_bytes(self) -> float:
        """Bytes of a parsed example; infinite where a shape is not known before, or for strings."""
        signature = [tf.TensorSpec([None], tf.string)]
        parse = tf.function(self.parse, input_signature=signature)
        outputs = tf.nest.flatten(parse.get_concrete_function().structured_outputs)
        return sum(_num_bytes(output.shape[1:], output.dtype) for output in outputs)

    @functools.cached_property
    def _parsed_split(self) -> Any:
        """All examples parsed, as (inputs, labels), by their record numbers."""
        example_bytes = max(int(self._example_bytes), self.split.mean_record_bytes, 1)
        size = max(1, min(_GROUP_EXAMPLES, _GROUP_BYTES // example_bytes))
        order = dataclasses.replace(
            self.order, batch_size=size, lanes=1, window_batches=1, shuffle=False
        )
        reader = dataclasses.replace(self, order=order, augment=None, cache_bytes=0)
        num_examples = self.split.num_examples
        kept: Any = None
        for first, batch in zip(
            range(0, num_examples, size),
            reader.evaluation_batches(range(1)),
            strict=True,
        ):
            parsed, end = batch[:2], min(first + size, num_examples)
            if kept is None:
                kept = tf.nest.map_structure(
                    lambda t: _aligned([num_examples, *t.shape[1:]], t.dtype.as_numpy_dtype), parsed
                )
            for values, of_all in zip(tf.nest.flatten(parsed), tf.nest.flatten(kept), strict=True):
                of_all[first:end] = values.numpy()[: end - first]
        with tf.device("CPU:0"):
            return tf.nest.map_structure(_as_tensor, kept)

    def _share_examples(self, lanes: range | None) -> int:
        rows = self.order.batch_size // self.order.lanes
        return rows * (self.order.lanes if lanes is None else len(lanes))

    @property
    def _buffer_bytes(self) -> int:
        # One read of the file for each chunk, and no more bytes than that.
        return min(max(self.split.max_chunk_bytes, _MIN_BUFFER_BYTES), _MAX_BUFFER_BYTES)

    @property
    def _read_through(self) -> int:
        return _READ_THROUGH_BYTES // self.split.mean_record_bytes

    @property
    def _paths(self) -> list[str]:
        return [shard.path for shard in self.split.shards]

    @functools.cached_property
    def _chunk_offsets(self) -> tuple[Int64s, Int64s]:
        """All shards' chunk offsets, and where each shard's begin among them."""
        counts = np.array([len(shard.offsets) for shard in self.split.shards])
        offsets = np.concatenate([shard.offsets for shard in self.split.shards])
        return offsets, np.cumsum(counts) - counts


def _records(window: Window | None, numbers: Int64s) -> npt.NDArray[np.object_]:
    """Records of a window, shaped as `numbers`.

    Raises:
        DamagedError: there is no window, or a record is damaged.
    """
    if window is None:
        raise DamagedError
    records = np.empty(numbers.size, object)
    records[:] = window.records(numbers.reshape(-1))
    return records.reshape(numbers.shape)


@functools.cache
def _collect_iterators_at_exit() -> None:
    """Has iterators that nothing refers to any more deleted while Python still runs.

    A tf.function and the iterator that it takes from are such a cycle. Deleting an iterator waits
    for the call of its generator; once Python has begun to end, that call never returns.
    """
    atexit.register(gc.collect)


def _aligned(shape: list[int], dtype: Any) -> npt.NDArray[Any]:
    """An array whose memory TensorFlow can use as a tensor's, so that there is no copy of it."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGN_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGN_BYTES
    array: npt.NDArray[Any] = memory[begin : begin + num_bytes].view(dtype).reshape(shape)
    return array


def _as_tensor(array: npt.NDArray[Any]) -> tf.Tensor:
    """A tensor in the memory of `array`, where its dtype is one that DLPack knows; else a copy."""
    if array.dtype.kind in "iuf":
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


def _num_cores() -> int:
    """Cores that this process may run on; a container's share where the system can tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_bytes(shape: tf.TensorShape, dtype: tf.DType) -> float:
    """Of a tensor; infinite if that is not known."""
    if dtype == tf.string or not shape.is_fully_defined():
        return math.inf
    return float(shape.num_elements() * dtype.size)
