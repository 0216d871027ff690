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
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.order import Int64s, Order
from data.records import DataError, Split

Ticket = dict[str, npt.NDArray[np.generic]]
Parse = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

_READ_THROUGH_BYTES = 16 << 10  # Reading this much costs about what opening the file again does.
_MAX_RUN_BYTES = 32 << 20  # Records that one window's reading may hold at a time.
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 4 << 10, 1 << 20
_MAX_THREADS = 8


def read(
    paths: tf.Tensor,
    byte_offsets: tf.Tensor,
    skip: tf.Tensor,
    take: tf.Tensor,
    gather: tf.Tensor,
    buffer_bytes: int = 256 << 10,
) -> tf.Tensor:
    """Read pieces of files and put them together: string, shaped as `gather`.

    Piece i is records [skip[i], skip[i] + take[i]) counted from byte byte_offsets[i] of paths[i];
    `gather` indexes the pieces' records laid end to end. Every record's CRC is checked
    (DataLossError). A graph function without py_function.

    `paths`: string [m]; `byte_offsets`, `skip`, `take`: int64 [m]; `gather`: int64, any shape.
    """
    return tf.gather(_read_pieces(paths, byte_offsets, skip, take, buffer_bytes), gather)


def _read_pieces(
    paths: tf.Tensor, byte_offsets: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, buffer_bytes: int
) -> tf.Tensor:
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
    and take any n, and must not draw random numbers with a state. `num_threads` of this process
    read and parse; 0: as many as this process may run on, at most 8.

    Raises:
        DataError: the order was made for another split.
    """

    split: Split
    order: Order
    parse: Parse
    num_threads: int = 0

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
        stop = None if num_batches is None else first_batch + num_batches
        make = functools.partial(self.ticket, lanes=lanes)
        return self._dataset(make, self.ticket_spec(lanes=lanes), first_batch, stop)

    def evaluation_batches(self, lanes: range) -> tf.data.Dataset:
        """Every record exactly once, as (inputs, labels, weights float32 [n]).

        All `num_evaluation_batches` batches have the same shape. What fills up the last one are
        repeated records of weight 0, so sums over weights are exact on any number of replicas.
        """
        make = functools.partial(self.evaluation_ticket, lanes=lanes)
        spec = self.ticket_spec(lanes=lanes, weights=True)
        return self._dataset(make, spec, 0, self.num_evaluation_batches)

    def ticket(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Ticket:
        """The plan of some batches, as arrays to hand to `read_ticket` or `parse_ticket`.

        Of m pieces: "shards", "byte_offsets", "skip", "take" int64 [m]; m varies from ticket to
        ticket. "gather" int64 [num_batches, n].
        """
        # Within a window chunks are read once; where a ticket is cut is the caller's choice, and
        # Order.windows the best one.
        reads = self.order.reads(first_batch, num_batches, lanes, self._read_through)
        offsets, begins = self._chunk_offsets
        return {
            "shards": reads.shards,
            "byte_offsets": offsets[begins[reads.shards] + reads.chunks],
            "skip": reads.skip,
            "take": reads.take,
            "gather": reads.gather,
        }

    def evaluation_ticket(
        self, first_batch: int, num_batches: int, lanes: range | None = None
    ) -> Ticket:
        """`ticket`, with "weights" float32 [num_batches, n]: each record counts once.

        Weight 1 for a record's first time, else 0. Batches past the end have weight 0
        throughout, so the last ticket may be as long as the others.
        """
        positions = self.order.positions(first_batch, num_batches, lanes)
        weights = (positions < self.split.num_examples).astype(np.float32)
        return {**self.ticket(first_batch, num_batches, lanes), "weights": weights}

    def ticket_spec(
        self, num_batches: int | None = None, lanes: range | None = None, *, weights: bool = False
    ) -> dict[str, tf.TensorSpec]:
        """The input signature of a ticket: a function traced with it is not traced again."""
        pieces = tf.TensorSpec([None], tf.int64)
        batches = [num_batches, self._share_examples(lanes)]
        spec = dict.fromkeys(("shards", "byte_offsets", "skip", "take"), pieces)
        spec["gather"] = tf.TensorSpec(batches, tf.int64)
        if weights:
            spec["weights"] = tf.TensorSpec(batches, tf.float32)
        return spec

    def read_ticket(self, ticket: dict[str, tf.Tensor]) -> tf.Tensor:
        """The records of a ticket, unparsed: string [num_batches, n]; without py_function."""
        return read(
            tf.gather(self._paths, ticket["shards"]),
            ticket["byte_offsets"],
            ticket["skip"],
            ticket["take"],
            ticket["gather"],
            self._buffer_bytes,
        )

    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """The batches of a ticket, stacked: inputs and labels, each [num_batches, n, ...].

        With "weights" in the ticket, they follow. A graph without py_function.
        """
        serialized = self.read_ticket(ticket)
        leading = tf.shape(serialized)
        parsed = self.parse(tf.reshape(serialized, [-1]))

        def stacked(value: tf.Tensor) -> tf.Tensor:
            folded = tf.reshape(value, tf.concat([leading, tf.shape(value)[1:]], 0))
            return tf.ensure_shape(folded, serialized.shape.concatenate(value.shape[1:]))

        outputs = tf.nest.map_structure(stacked, tuple(parsed))
        return (*outputs, ticket["weights"]) if "weights" in ticket else outputs

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

    def _dataset(
        self,
        make: Callable[[int, int], Ticket],
        spec: dict[str, tf.TensorSpec],
        first_batch: int,
        stop: int | None,
    ) -> tf.data.Dataset:
        """One element a batch: inputs, labels, and the weights of tickets that have them."""
        paths = self._paths

        def read_pieces(ticket: dict[str, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            records = _read_pieces(
                tf.gather(paths, ticket["shards"]),
                ticket["byte_offsets"],
                ticket["skip"],
                ticket["take"],
                self._buffer_bytes,
            )
            return records, {name: ticket[name] for name in ticket.keys() & {"gather", "weights"}}

        def one_by_one(records: tf.Tensor, batches: dict[str, tf.Tensor]) -> tf.data.Dataset:
            # Every batch shares the run's records: no string is copied before parsing needs it.
            shared = tf.data.Dataset.from_tensors(records).repeat()
            return tf.data.Dataset.zip(shared, tf.data.Dataset.from_tensor_slices(batches))

        def parse(records: tf.Tensor, batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, ...]:
            outputs = tuple(self.parse(tf.gather(records, batch["gather"])))
            return (*outputs, batch["weights"]) if "weights" in batch else outputs

        num_threads = self.num_threads or min(_MAX_THREADS, _num_cores())
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False
        options.threading.private_threadpool_size = num_threads
        return (
            tf.data.Dataset.from_generator(
                lambda: itertools.starmap(make, self._runs(first_batch, stop)),
                output_signature=spec,
            )
            .prefetch(2)
            .map(read_pieces, num_parallel_calls=num_threads)
            .flat_map(one_by_one)
            .map(parse, num_parallel_calls=num_threads)
            .prefetch(2 * num_threads)
            .with_options(options)
        )

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


def _num_cores() -> int:
    """Cores that this process may run on; a container's share where the system can tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
