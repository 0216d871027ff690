"""Order -> tf.data: read the records of any batches, wherever they lie, and parse them.

    reader = Reader(split, order, parse)
    for images, labels in reader.batches(first_batch=1234, lanes=range(20)):
        ...

There is no shuffle buffer and no iterator to save: batch s holds what `data.order` says, whoever
reads it and wherever reading began. Three ways in. Where examples are kept it is the last one, as
data/feeds.py and, for tickets, data/kept.py choose:

* `batches`: a tf.data pipeline on this machine. Plans are made by numpy, ahead, in a Python
  generator.
* `ticket`: the plan of some batches as plain arrays. `read_ticket` and `parse_ticket` are graphs
  without py_function, so a ticket can be an argument of a closure that runs in another process.
* `picks` and `pick`: rows of examples that are all in memory: `kept_examples`, or a worker's own.

Where the records come from, and what is parsed at once:

| way in | data | read by | parsed at once |
| --- | --- | --- | --- |
| `batches` | local files | this process, a window's byte ranges (`data.ranges`) | some batches |
| `batches` | URLs | TensorFlow, a window's pieces | some batches |
| `picks` | fits `cache_bytes` | as `batches`, once, before the first | all there is |
| tickets that pick | fits `cache_bytes` | TensorFlow, once, by the first | all there is |
| tickets | any | TensorFlow, the ticket's pieces | the ticket |
"""

import atexit
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.cores import num_cores
from data.crc import FOOTER_BYTES, FRAME_BYTES, HEADER_BYTES
from data.features import ExampleParse
from data.files import DataError, is_url
from data.graphs import converted, plain
from data.layout import Layout, find_layout
from data.order import Int64s, Order
from data.ranges import Buffers, ByteRanges, DamagedError, Window, Windows, aligned
from data.records import Split

Ticket = dict[str, npt.NDArray[np.generic]]
Parse = Callable[[tf.Tensor], tuple[Any, Any]]
Augment = Callable[[Any, Any, tf.Tensor], tuple[Any, Any]]

_READ_THROUGH_BYTES = 16 << 10  # Reading this much costs about what opening the file again does.
_MAX_RUN_BYTES = 16 << 20  # Records that one window's reading may hold at a time.
_GROUP_EXAMPLES = 1024  # Parsed at once: a call of `parse` costs about what 500 small examples do.
_GROUP_BYTES = 4 << 20  # So much of them, at most, before or after parsing.
_BLOCK_BYTES = 4 << 20  # Groups handed to tf.data at once: it costs what 1,000 small records do.
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 4 << 10, 1 << 20
_MAX_THREADS = 8


def _read_pieces(
    paths: tf.Tensor, byte_offsets: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, buffer_bytes: int
) -> tf.Tensor:
    """Records [skip[i], skip[i] + take[i]) from byte byte_offsets[i] of paths[i], end to end.

    `paths`: string [m]; `byte_offsets`, `skip`, `take`: int64 [m]; the records: string [sum(take)].
    """
    pieces = tf.data.Dataset.from_tensor_slices((paths, byte_offsets, skip, take))
    records = pieces.flat_map(functools.partial(_piece, buffer_bytes=buffer_bytes))
    return records.batch(tf.reduce_sum(take)).get_single_element()


@plain
def _piece(
    path: tf.Tensor, offset: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, *, buffer_bytes: int
) -> tf.data.Dataset:
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=path[tf.newaxis],
        compression_type="",
        buffer_size=buffer_bytes,
        byte_offsets=offset[tf.newaxis],
    )
    records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
    return records.skip(skip).take(take)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads one split in one order. Holds no position: every call says where to begin.

    `parse`: string [n] -> (inputs [n, ...], labels [n, ...]); it must treat examples independently
    and take any n, since several batches are parsed at once, and must not draw random numbers with
    a state. `augment`: (inputs, labels, seeds int32 [n, 2]) -> (inputs, labels), of training
    batches alone; it too treats examples independently, and draws random numbers from each
    example's seed alone, which `Order.seeds` makes. `num_threads` of this process read and parse;
    0: as many as this process may run on, at most 8. `cache_bytes`: examples are kept in memory, as
    `kept_specs` says, if all of them are no larger. `prefetch_batches` of each
    dataset are ready before they are asked for, beside those that threads parse. `gives_seeds`:
    training batches end with these seeds, whatever `augment` did with them.

    Raises:
        DataError: the order was made for another split.
    """

    split: Split
    order: Order
    parse: Parse
    num_threads: int = 0
    augment: Augment | None = None
    cache_bytes: int = 0
    prefetch_batches: int = 0
    gives_seeds: bool = False

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

    @plain
    def batches(
        self, first_batch: int, lanes: range, num_batches: int | None = None
    ) -> tf.data.Dataset:
        """Batches first_batch, first_batch + 1, ... as (inputs [n, ...], labels [n, ...]).

        With `gives_seeds`, seeds int32 [n, 2] follow. n = len(lanes) * B / V, and static. Endless
        unless `num_batches` is given. The same elements in the same order, whatever the number of
        threads and wherever reading begins.
        """
        stop = None if num_batches is None else first_batch + num_batches
        return self._from_disk(first_batch, stop, lanes)

    @plain
    def evaluation_batches(self, lanes: range) -> tf.data.Dataset:
        """Every record exactly once, as (inputs, labels, weights float32 [n]).

        All `num_evaluation_batches` batches have the same shape. What fills up the last one are
        repeated records of weight 0, so sums over weights are exact on any number of replicas.
        """
        return self._from_disk(0, self.num_evaluation_batches, lanes, weights=True)

    def ticket_runs(self, first_batch: int) -> Iterator[tuple[int, int]]:
        """Runs of batches from `first_batch` on, (first, count): tickets should stay within them.

        Windows: where a ticket is cut is the caller's choice, but within one chunks are read once.
        """
        return self.order.windows(first_batch)

    def ticket(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Ticket:
        """The plan of some batches, as arrays to hand to `read_ticket` or `parse_ticket`.

        Of m pieces: "shards", "byte_offsets", "skip", "take" int64 [m]; m varies from ticket to
        ticket. "gather" int64 [num_batches, n]. With an `augment`, or if it `gives_seeds`, "seeds"
        int32 [num_batches, n, 2].
        """
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

    @plain
    def read_ticket(self, ticket: dict[str, tf.Tensor]) -> tf.Tensor:
        """The records of a ticket, unparsed: string [num_batches, n]; without py_function.

        Every record's CRC is checked (DataLossError).
        """
        return tf.gather(self._read_pieces(ticket), ticket["gather"])

    @plain
    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> tuple[Any, ...]:
        """The batches of a ticket, stacked: inputs and labels, each [num_batches, n, ...].

        With "weights" in the ticket, they follow, or "seeds" if it `gives_seeds`. A graph without
        py_function.
        """
        return self.parse_records(self.read_ticket(ticket), ticket)

    @plain
    def parse_records(self, serialized: tf.Tensor, extras: dict[str, tf.Tensor]) -> tuple[Any, ...]:
        """Parses what was read; augments it with the "seeds" in `extras`; passes extras on.

        `serialized`: string [..., n]. All that is returned is shaped so too: [..., n, ...].
        """
        parsed = converted(self.parse)(tf.reshape(serialized, [-1]))
        return self._finish(parsed, tf.shape(serialized), serialized.shape, extras)

    @property
    def keeps_examples(self) -> bool:
        """Whether all training examples fit in `cache_bytes`, so that they are kept."""
        if not self.cache_bytes:
            return False
        return _example_bytes(self.kept_specs) * self.split.num_examples <= self.cache_bytes

    @property
    def _kept_parse(self) -> Parse:
        """What makes the examples that are kept of records."""
        return self.parse.narrow if isinstance(self.parse, ExampleParse) else self.parse

    @functools.cached_property
    def kept_specs(self) -> Any:
        """The types of (inputs, labels) that are kept, each [n, ...]."""
        return _specs(self._kept_parse)

    @plain
    def all_examples(self) -> tf.data.Dataset:
        """Every example once, as it is kept, by record number, some at a time; no py_function."""
        shards = self.split.shards
        pieces = (
            self._paths,
            np.array([shard.offsets[0] for shard in shards], np.int64),
            np.zeros(len(shards), np.int64),
            np.array(self.split.shard_lengths, np.int64),
        )
        records = tf.data.Dataset.from_tensor_slices(pieces).flat_map(
            functools.partial(_piece, buffer_bytes=_MAX_BUFFER_BYTES)
        )
        parse = converted(self._kept_parse)
        return records.batch(self._kept_at_once).map(parse, num_parallel_calls=tf.data.AUTOTUNE)

    @property
    def _kept_at_once(self) -> int:
        """Examples that are parsed at once in order to be kept."""
        example_bytes = max(int(_example_bytes(self.kept_specs)), self.split.mean_record_bytes, 1)
        return max(1, min(_GROUP_EXAMPLES, _GROUP_BYTES // example_bytes))

    @functools.cached_property
    def kept_examples(self) -> Any:
        """All examples, parsed now: `kept_specs` by their record numbers, on the CPU."""
        size = self._kept_at_once
        order = dataclasses.replace(
            self.order, batch_size=size, lanes=1, window_batches=1, shuffle=False
        )
        reader = dataclasses.replace(
            self, order=order, parse=self._kept_parse, augment=None, gives_seeds=False
        )
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
                    lambda t: _array([num_examples, *t.shape[1:]], t.dtype.as_numpy_dtype), parsed
                )
            for values, of_all in zip(tf.nest.flatten(parsed), tf.nest.flatten(kept), strict=True):
                of_all[first:end] = values.numpy()[: end - first]
        with tf.device("CPU:0"):
            return tf.nest.map_structure(_as_tensor, kept)

    def picks(self, first_batch: int, lanes: range) -> Iterator[Ticket]:
        """Plans of all batches from `first_batch`, some at a time, for `pick` of each.

        "gather", record numbers int64 [m, n]; and "seeds" int32 [m, n, 2] where they are needed.
        """
        for run in self._runs(first_batch, None):
            yield self.pick_plan(*run, lanes)

    def pick_plan(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Ticket:
        """What `picks` gives, of these batches."""
        gather = self.order.records(first_batch, num_batches, lanes)
        return {"gather": gather, **self._extras(first_batch, num_batches, lanes)}

    def pick_spec(
        self, num_batches: int | None = None, lanes: range | None = None
    ) -> dict[str, tf.TensorSpec]:
        """The type of what `picks` gives."""
        spec = self.ticket_spec(num_batches, lanes)
        return {name: spec[name] for name in ("gather", "seeds") if name in spec}

    @plain
    def pick(
        self, rows_of: Callable[[tf.Tensor], tuple[Any, Any]], plan: dict[str, tf.Tensor]
    ) -> tuple[Any, ...]:
        """Batches of examples that are kept, augmented, each [..., n, ...]; `plan`: see `picks`.

        `rows_of`: record numbers, int64 [k] -> these of `kept_specs`, each [k, ...].
        """
        numbers = plan["gather"]
        parsed = rows_of(tf.reshape(numbers, [-1]))
        if isinstance(self.parse, ExampleParse):
            parsed = self.parse.widened(parsed)
        return self._finish(parsed, tf.shape(numbers), numbers.shape, plan)

    def _finish(
        self,
        parsed: tuple[Any, Any],
        leading: tf.Tensor,
        static: tf.TensorShape,
        extras: dict[str, tf.Tensor],
    ) -> tuple[Any, ...]:
        """What was parsed, augmented, in the shape of batches, `leading`; with weights or seeds.

        `static`: what is known of that shape when the graph is made.
        """
        if self.augment is not None and "seeds" in extras:
            parsed = converted(self.augment)(*parsed, tf.reshape(extras["seeds"], [-1, 2]))

        def stacked(value: tf.Tensor) -> tf.Tensor:
            inner = value.shape[1:]
            if static.rank != 1:
                value = tf.reshape(value, tf.concat([leading, tf.shape(value)[1:]], 0))
            return tf.ensure_shape(value, static.concatenate(inner))

        outputs = tf.nest.map_structure(stacked, tuple(parsed))
        passed = ["weights", "seeds"] if self.gives_seeds else ["weights"]
        return (*outputs, *(extras[name] for name in passed if name in extras))

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
        byte_offsets, skip = self._seek(reads.shards, reads.chunks, reads.skip)
        return {
            "shards": reads.shards,
            "byte_offsets": byte_offsets,
            "skip": skip,
            "take": reads.take,
            "gather": reads.gather,
        }

    def _seek(self, shards: Int64s, chunks: Int64s, skip: Int64s) -> tuple[Int64s, Int64s]:
        """The byte nearest before the records `skip` behind the chunks', and how many to skip.

        Where all records of a shard are of one length, that is where they begin.
        """
        offsets, begins = self._chunk_offsets
        frame_bytes = self._frame_bytes[shards]
        at_chunk = offsets[begins[shards] + chunks]
        return at_chunk + skip * frame_bytes, np.where(frame_bytes > 0, 0, skip)

    def _extras(
        self, first_batch: int, num_batches: int, lanes: range | None, *, weights: bool = False
    ) -> Ticket:
        """What batches have beside their records: weights in evaluation, else seeds if needed."""
        if weights:
            positions = self.order.positions(first_batch, num_batches, lanes)
            return {"weights": (positions < self.split.num_examples).astype(np.float32)}
        if self.augment is None and not self.gives_seeds:
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

    def _block_batches(self, lanes: range) -> int:
        """Batches that Python hands to tf.data at once, at most, in blocks of frames."""
        of_block = _BLOCK_BYTES // self.split.mean_record_bytes
        return max(self._group_batches(lanes), of_block // self._share_examples(lanes))

    def _group_batches(self, lanes: range) -> int:
        """Batches parsed at once, at most."""
        known = self._parsed_bytes if math.isfinite(self._parsed_bytes) else 0
        example_bytes = max(int(known), self.split.mean_record_bytes)
        most_examples = min(_GROUP_EXAMPLES, _GROUP_BYTES // example_bytes)
        return max(1, most_examples // self._share_examples(lanes))

    def _from_disk(
        self, first_batch: int, stop: int | None, lanes: range, *, weights: bool = False
    ) -> tf.data.Dataset:
        """One element a batch, its records read and parsed now."""
        spec = self.ticket_spec(lanes=lanes, weights=weights)
        extras = functools.partial(self._extras, lanes=lanes, weights=weights)
        if any(is_url(path) for path in self._paths):
            tickets = tf.data.Dataset.from_generator(
                lambda: (
                    {**self._plan(*run, lanes), **extras(*run)}
                    for run in self._runs(first_batch, stop)
                ),
                output_signature=spec,
            )
            groups = self._read_by_tensorflow(tickets, lanes)
            return self._batched(groups, self.parse_records, lanes)
        spec["serialized"] = tf.TensorSpec(spec["gather"].shape, tf.string)
        spec["unread"] = tf.TensorSpec([4, None], tf.int64)
        if (layout := self._layout) is not None:
            frame_bytes = len(layout.template) + FRAME_BYTES
            spec["frames"] = tf.TensorSpec([*spec["gather"].shape, frame_bytes], tf.uint8)
        of_groups = spec.keys() & {"seeds", "weights", "serialized", "unread", "frames"}
        blocks = tf.data.Dataset.from_generator(
            lambda: self._read_here(first_batch, stop, lanes, extras),
            output_signature={
                name: tf.TensorSpec([None, *spec[name].shape], spec[name].dtype)
                for name in of_groups
            },
        )

        def parse_read(group: dict[str, tf.Tensor]) -> tuple[Any, ...]:
            read, unread = group["serialized"], group["unread"]

            def read_unread() -> tf.Tensor:
                names = ("shards", "byte_offsets", "skip", "take")
                records = self._read_pieces(dict(zip(names, tf.unstack(unread), strict=True)))
                return tf.reshape(records, [-1, read.shape[1]])

            serialized = tf.cond(tf.size(unread) > 0, read_unread, lambda: read)
            return self.parse_records(tf.ensure_shape(serialized, read.shape), group)

        def parse(group: dict[str, tf.Tensor]) -> tuple[Any, ...]:
            if layout is None:
                return parse_read(group)
            frames = group["frames"]
            outputs: tuple[Any, ...] = tf.cond(
                tf.size(frames) > 0,
                lambda: self._slice_frames(layout, frames, group),
                lambda: parse_read(group),
            )
            return outputs

        if self._block_batches(lanes) == self._group_batches(lanes):
            # To slice it may copy all records, which are large.
            return self._batched(
                blocks.prefetch(1),
                lambda block: parse({name: tf.squeeze(t, 0) for name, t in block.items()}),
                lanes,
            )
        groups = blocks.prefetch(1).flat_map(tf.data.Dataset.from_tensor_slices)
        return self._batched(groups, parse, lanes)

    def _slice_frames(
        self, layout: Layout, frames: tf.Tensor, extras: dict[str, tf.Tensor]
    ) -> tuple[Any, ...]:
        """`parse_records`, of records of one layout with their framing: uint8 [k, n, bytes]."""
        assert isinstance(self.parse, ExampleParse)
        rows = tf.reshape(frames, [-1, frames.shape[-1]])
        parsed = self.parse.finish(layout.slice(rows, begin=HEADER_BYTES))
        return self._finish(parsed, tf.shape(frames)[:2], frames.shape[:2], extras)

    @functools.cached_property
    def _layout(self) -> Layout | None:
        """The layout of the first record, if `parse` can do with slices."""
        if not isinstance(self.parse, ExampleParse):
            return None
        shard = self.split.shards[0]
        first_chunk = ByteRanges(
            self._paths,
            np.zeros(1, np.int64),
            shard.offsets[:1],
            self._chunk_ends[:1],
            min(self.split.chunk_examples, shard.num_records),
        )
        try:
            (record,) = Windows().read(first_chunk).records(np.zeros(1, np.int64))
        except (DamagedError, OSError):
            return None  # Reading it will say why.
        return find_layout(record, self.parse.columns)

    def _read_here(
        self,
        first_batch: int,
        stop: int | None,
        lanes: range,
        extras: Callable[[int, int], Ticket],
    ) -> Iterator[Ticket]:
        """Blocks of g groups of k batches, in one of three forms; the others are empty.

        "frames": uint8 [g, k, n, bytes], records of the layout with their framing. "serialized":
        string [g, k, n], any records. "unread": int64 [1, 4, k * n], a ticket's piece for each
        record of a group of which some cannot be read or verified: TensorFlow's own reader then
        raises the error that names the fault.
        """
        most = self._group_batches(lanes)
        windows, buffers = Windows(), Buffers()
        for first, num_batches in self._runs(first_batch, stop):
            ranges, numbers = self._byte_ranges(first, num_batches, lanes)
            try:
                window: Window | None = windows.read(ranges)
            except (DamagedError, OSError):
                window = None
            for begin, num_groups, size in _blocks(num_batches, most, self._block_batches(lanes)):
                of_block = numbers[begin : begin + num_groups * size]
                of_block = of_block.reshape(num_groups, size, -1)
                blocks = [_block(window, of_block, self._layout, buffers)]
                if blocks[0] is None:
                    blocks = [_block(window, part[None], None, buffers) for part in of_block]
                at = first + begin
                for block in blocks:
                    held = num_groups // len(blocks)
                    if block is None:
                        block = {"unread": self._one_by_one(at, size, lanes)[None]}
                    beside = {
                        name: values.reshape(held, size, *values.shape[1:])
                        for name, values in extras(at, held * size).items()
                    }
                    yield {**self._no_records(held, lanes), **block, **beside}
                    at += held * size

    def _no_records(self, num_groups: int, lanes: range) -> Ticket:
        """What a block of `_read_here` has in place of the forms that it is not in."""
        num_examples = self._share_examples(lanes)
        empty: Ticket = {
            "serialized": np.empty((num_groups, 0, num_examples), object),
            "unread": np.empty((num_groups, 4, 0), np.int64),
        }
        if self._layout is not None:
            frame_bytes = len(self._layout.template) + FRAME_BYTES
            empty["frames"] = np.empty((num_groups, 0, num_examples, frame_bytes), np.uint8)
        return empty

    def _one_by_one(self, first_batch: int, num_batches: int, lanes: range) -> Int64s:
        """A ticket's piece for each record of some batches: int64 [4, num_batches * n]."""
        records = self.order.records(first_batch, num_batches, lanes).reshape(-1)
        lengths = np.array(self.split.shard_lengths)
        begins = np.cumsum(lengths) - lengths
        shards = np.searchsorted(begins, records, side="right") - 1
        chunks, skip = np.divmod(records - begins[shards], self.split.chunk_examples)
        return np.stack([shards, *self._seek(shards, chunks, skip), np.ones_like(records)])

    def _byte_ranges(
        self, first_batch: int, num_batches: int, lanes: range
    ) -> tuple[ByteRanges, Int64s]:
        """Where the records of some batches lie, and which of those in there are the batches'.

        Of records of many lengths, whole chunks. The numbers, int64 [num_batches, n], count the
        records of all ranges from 0.
        """
        reads = self.order.reads(first_batch, num_batches, lanes, self._read_through)
        chunk_examples = self.split.chunk_examples
        frame_bytes = self._frame_bytes[reads.shards]
        begins, skip = self._seek(reads.shards, reads.chunks, reads.skip)
        # Up to the end of the chunk that the last record is in, or of that record.
        last = reads.chunks + (reads.skip + reads.take - 1) // chunk_examples
        lengths = np.array(self.split.shard_lengths)[reads.shards]
        in_chunks = np.minimum((last + 1) * chunk_examples, lengths) - reads.chunks * chunk_examples
        held = np.where(frame_bytes > 0, reads.take, in_chunks)
        chunk_ends, first_chunks = self._chunk_ends, self._chunk_offsets[1]
        ends = np.where(
            frame_bytes > 0,
            begins + reads.take * frame_bytes,
            chunk_ends[first_chunks[reads.shards] + last],
        )
        ranges = ByteRanges(self._paths, reads.shards, begins, ends, int(held.sum()))
        # From places among the records taken to places among those held.
        shift = np.cumsum(held) - held + skip - (np.cumsum(reads.take) - reads.take)
        numbers = reads.gather + np.repeat(shift, reads.take)[reads.gather]
        return ranges, numbers

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

    def _batched(
        self, groups: tf.data.Dataset, parse: Callable[..., tuple[Any, ...]], lanes: range
    ) -> tf.data.Dataset:
        """One element a batch: inputs, labels, and the weights or seeds of those that have them.

        Each thread is ahead by the group that it parses. Another stage that makes batches ahead
        would cost small ones a tenth, and large ones their memory.
        """
        _collect_iterators_at_exit()
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False
        options.threading.private_threadpool_size = self._threads
        if self._group_batches(lanes) == 1:
            batches = groups.map(
                lambda *group: tf.nest.map_structure(lambda t: tf.squeeze(t, 0), parse(*group)),
                num_parallel_calls=self._threads,
            )
        else:
            # One more: to cut a group must not wait until the next one is parsed.
            options.threading.private_threadpool_size += 1
            batches = groups.map(parse, num_parallel_calls=self._threads).flat_map(
                lambda *stacked: tf.data.Dataset.from_tensor_slices(stacked)
            )
        if self.prefetch_batches:
            batches = batches.prefetch(self.prefetch_batches)
        return batches.with_options(options)

    @property
    def _threads(self) -> int:
        return self.num_threads or min(_MAX_THREADS, num_cores())

    @functools.cached_property
    def _parsed_bytes(self) -> float:
        return _example_bytes(_specs(self.parse))

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

    @functools.cached_property
    def _paths(self) -> list[str]:
        return [shard.path for shard in self.split.shards]

    @functools.cached_property
    def _chunk_offsets(self) -> tuple[Int64s, Int64s]:
        """All shards' chunk offsets, and where each shard's begin among them."""
        counts = np.array([len(shard.offsets) for shard in self.split.shards])
        offsets = np.concatenate([shard.offsets for shard in self.split.shards])
        return offsets, np.cumsum(counts) - counts

    @functools.cached_property
    def _chunk_ends(self) -> Int64s:
        """Where each chunk of all shards ends."""
        return np.concatenate(
            [np.append(shard.offsets[1:], shard.end) for shard in self.split.shards]
        )

    @functools.cached_property
    def _frame_bytes(self) -> Int64s:
        """Bytes of each record of a shard, or 0."""
        return np.array([shard.frame_bytes for shard in self.split.shards])


def _blocks(num_batches: int, most: int, most_of_block: int) -> Iterator[tuple[int, int, int]]:
    """`num_batches` in groups of at most `most`, and those in blocks: (first batch, groups, size).

    A block has as many groups as would fit if each were of `most`: one, if it is no larger.
    Groups are of one size, so that all threads have as much to do; where none that is large enough
    goes into `num_batches`, the last is smaller, and a block of its own.
    """
    largest = -(-num_batches // -(-num_batches // most))
    sizes = range(largest, largest // 2, -1)
    size = next((size for size in sizes if num_batches % size == 0), largest)
    num_whole = num_batches // size
    groups_of_block = most_of_block // most
    for first in range(0, num_whole, groups_of_block):
        yield first * size, min(groups_of_block, num_whole - first), size
    if rest := num_batches % size:
        yield num_batches - rest, 1, rest


def _block(
    window: Window | None, numbers: Int64s, layout: Layout | None, buffers: Buffers
) -> Ticket | None:
    """Records of a window, shaped as `numbers` [g, k, n]: "frames" if possible, else "serialized".

    None if there is no window, or a record is damaged.
    """
    if window is None:
        return None
    if layout is not None:
        frame_bytes = len(layout.template) + FRAME_BYTES
        frames = buffers.array((*numbers.shape, frame_bytes))
        # One group after the other: what is checked is still in the processor's caches then.
        for wanted, rows in zip(numbers, frames, strict=True):
            rows = rows.reshape(-1, frame_bytes)
            if not window.frames(wanted.reshape(-1), rows):
                break
            if not layout.fits(rows[:, HEADER_BYTES:-FOOTER_BYTES]):
                break
        else:
            return {"frames": frames}
    records = np.empty(numbers.size, object)
    try:
        records[:] = window.records(numbers.reshape(-1))
    except DamagedError:
        return None
    return {"serialized": records.reshape(numbers.shape)}


@functools.cache
def _collect_iterators_at_exit() -> None:
    """Has iterators that nothing refers to any more deleted while Python still runs.

    A tf.function and the iterator that it takes from are such a cycle. Deleting an iterator waits
    for the call of its generator; once Python has begun to end, that call never returns.
    """
    atexit.register(gc.collect)


def _array(shape: list[int], dtype: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = aligned(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype)
    return array.reshape(shape)


def _as_tensor(array: npt.NDArray[Any]) -> tf.Tensor:
    """A tensor in the memory of `array`, where its dtype is one that DLPack knows; else a copy."""
    if array.dtype.kind in "iuf":
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


def _specs(parse: Parse) -> Any:
    """The types of what `parse` returns, each [n, ...]."""
    signature = [tf.TensorSpec([None], tf.string)]
    function = tf.function(converted(parse), input_signature=signature, autograph=False)
    outputs = function.get_concrete_function().structured_outputs
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs)


def _example_bytes(specs: Any) -> float:
    """Bytes of an example; infinite where a shape is not known before, or for strings."""
    return sum(_num_bytes(spec.shape[1:], spec.dtype) for spec in tf.nest.flatten(specs))


def _num_bytes(shape: tf.TensorShape, dtype: tf.DType) -> float:
    """Of a tensor; infinite if that is not known."""
    if dtype == tf.string or not shape.is_fully_defined():
        return math.inf
    return float(shape.num_elements() * dtype.size)
