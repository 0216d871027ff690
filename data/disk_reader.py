"""The batches of a `Reader` as tf.data pipelines: files are read and parsed on this machine.

    for images, labels in DiskReader(reader).batches(first_batch=1234, lanes=range(20)):
        ...

A Python generator reads the byte ranges of runs of batches ahead, in blocks of groups of batches.
If all records have one layout, values are sliced out of their bytes instead of parsed. Of files at
s3://, local copies are read, and what they lack is fetched some runs ahead. TensorFlow reads the
files of other file systems (URLs), by pieces.
"""

import atexit
import collections
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from data.features import ExampleParse
from data.order import Int64s, Plan
from data.reader import Batch, Part, Reader
from data.system.compat.autograph import no_autograph
from data.system.compat.determinism import parallel_calls, timestamp
from data.system.cores import num_cores
from data.system.files import is_url
from data.tfrecord.byte_ranges import Buffers, ByteRanges, DamagedError, Window, Windows
from data.tfrecord.crc import FOOTER_BYTES, HEADER_BYTES
from data.tfrecord.fixed_layout import Layout, find_layout
from data.tfrecord.pieces import PIECE_NAMES, Pieces

# (first batch, number of batches, lanes) -> `Reader.extras`.
_Extras = Callable[[int, int, range], Plan]

# Groups handed to tf.data at once: a handover costs about as much as 1,000 small records.
_BLOCK_BYTES = 4 << 20
_MAX_THREADS = 8
_FETCHED_RUNS = 3  # Runs of batches that are fetched ahead, if the files are at s3://.


class DiskReader:
    """Reads batches of `reader` from its files; the caller says where each dataset begins."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._pieces = Pieces(reader.split)
        self._read_into = reader.split.copies.read_into if reader.split.copies else None
        self._threads = reader.num_threads or min(_MAX_THREADS, num_cores())

    @no_autograph
    def batches(
        self, first_batch: int, lanes: range, num_batches: int | None = None
    ) -> tf.data.Dataset:
        """Batches first_batch, first_batch + 1, ... as (inputs [n, ...], labels [n, ...]).

        If the reader `gives_seeds`, seeds int32 [n, 2] follow. n = len(lanes) * B / V, and static.
        Endless unless `num_batches` is given. The elements of a batch and their order do not depend
        on the number of threads or on `first_batch`.
        """
        return self.batches_of([Part(first_batch, num_batches, lanes)], lanes)

    @no_autograph
    def evaluation_batches(self, lanes: range) -> tf.data.Dataset:
        """Every record, as (inputs, labels, weights float32 [n]).

        All `num_evaluation_batches` batches have the same shape. Over all lanes each record has
        weight 1 once, and repeats in the last batch have weight 0: weighted sums are exact.
        """
        all_batches = Part(0, self._reader.num_evaluation_batches, lanes)
        return self.batches_of([all_batches], lanes, weights=True)

    @no_autograph
    def batches_of(
        self,
        parts: Sequence[Part],
        lanes: range,
        *,
        weights: bool = False,
        waited: tf.Variable | None = None,
    ) -> tf.data.Dataset:
        """As `batches`, but of `parts`, one after another, each with as many lanes as `lanes`.

        An iterator reads the parts that are in the list `parts` when it begins. `weights`: as of
        `Reader.extras`. The seconds for which a consumer waits are added to `waited`, a float64
        variable on the CPU.
        """
        extras = functools.partial(self._reader.extras, weights=weights)
        spec = self._reader.row_spec(lanes=lanes, weights=weights)
        if any(is_url(path) for path in self._pieces.paths):
            return self._by_tensorflow(parts, lanes, extras, spec, waited)
        group_shape = spec.pop("gather").shape
        spec["serialized"] = tf.TensorSpec(group_shape, tf.string)
        spec["unread"] = tf.TensorSpec([len(PIECE_NAMES), None], tf.int64)
        layout = self._layout
        if layout is not None:
            spec["frames"] = tf.TensorSpec([*group_shape, layout.frame_bytes], tf.uint8)
        blocks = tf.data.Dataset.from_generator(
            lambda: itertools.chain.from_iterable(
                self._blocks(part.first_batch, _stop(part), part.lanes, extras)
                for part in list(parts)
            ),
            output_signature={
                name: tf.TensorSpec([None, *of_group.shape], of_group.dtype)
                for name, of_group in spec.items()
            },
        )

        def parse_read(group: dict[str, tf.Tensor]) -> Batch:
            read, unread = group["serialized"], group["unread"]

            def read_unread() -> tf.Tensor:
                pieces = dict(zip(PIECE_NAMES, tf.unstack(unread), strict=True))
                return tf.reshape(self._pieces.read(pieces), [-1, read.shape[1]])

            serialized = tf.cond(tf.size(unread) > 0, read_unread, lambda: read)
            return self._reader.parse_records(tf.ensure_shape(serialized, read.shape), group)

        def parse(group: dict[str, tf.Tensor]) -> Batch:
            if layout is None:
                return parse_read(group)
            are_frames = tf.size(group["frames"]) > 0
            slices = functools.partial(self._slice, layout, group)
            batches: Batch = tf.cond(are_frames, slices, lambda: parse_read(group))
            return batches

        if self._block_batches(lanes) == self._group_batches(lanes):
            # A block is one group. from_tensor_slices might copy its records, which are large.
            return self._batched(
                blocks.prefetch(1),
                lambda block: parse({name: tf.squeeze(t, 0) for name, t in block.items()}),
                lanes,
                waited,
            )
        groups = blocks.prefetch(1).flat_map(tf.data.Dataset.from_tensor_slices)
        return self._batched(groups, parse, lanes, waited)

    def _blocks(
        self, first_batch: int, stop: int | None, lanes: range, extras: _Extras
    ) -> Iterator[Plan]:
        """Blocks of g groups of k batches, with their `extras`, in one of three forms.

        "frames": uint8 [g, k, n, bytes], records of the layout with their framing. "serialized":
        string [g, k, n], any records. "unread": int64 [g, 4, k * n], a piece for each record, of a
        block with records that cannot be read or verified: TensorFlow's own reader then raises the
        error that names the fault. The two other forms are empty.
        """
        most = self._group_batches(lanes)
        order, copies = self._reader.order, self._pieces.copies
        windows, buffers = Windows(self._read_into), Buffers()
        for first, num_batches, ranges, numbers in self._planned(first_batch, stop, lanes):
            window = _read(windows, ranges)
            for begin, num_groups, size in _cut(num_batches, most, self._block_batches(lanes)):
                of_block = numbers[begin : begin + num_groups * size].reshape(num_groups, size, -1)
                block = _block(window, of_block, self._layout, buffers)
                if block is None and copies is not None:
                    # Perhaps the copies are damaged, and not the files at s3://.
                    copies.forget(ranges)
                    window = _read(windows, ranges)
                    block = _block(window, of_block, self._layout, buffers)
                    if block is None:
                        copies.make_whole(ranges)  # For TensorFlow, which names the fault.
                at = first + begin
                if block is None:
                    records = order.records(at, num_groups * size, lanes).reshape(num_groups, -1)
                    block = {"unread": self._pieces.plan_one_by_one(records)}
                yield {
                    **self._empty_block(num_groups, lanes),
                    **block,
                    **{
                        name: values.reshape(num_groups, size, *values.shape[1:])
                        for name, values in extras(at, num_groups * size, lanes).items()
                    },
                }

    def _planned(
        self, first_batch: int, stop: int | None, lanes: range
    ) -> Iterator[tuple[int, int, ByteRanges, Int64s]]:
        """The runs of batches, (first, count), with their byte ranges, fetched ahead if needed."""
        copies = self._pieces.copies
        planned: collections.deque[tuple[int, int, ByteRanges, Int64s]] = collections.deque()
        for run in self._reader.runs(first_batch, stop):
            ranges, numbers = self._pieces.byte_ranges(self._reader.order, *run, lanes)
            planned.append((*run, ranges, numbers))
            if copies is not None:
                copies.fetch(ranges)
                if len(planned) <= _FETCHED_RUNS:
                    continue
            yield planned.popleft()
        yield from planned

    def _empty_block(self, num_groups: int, lanes: range) -> Plan:
        shape = num_groups, 0, self._reader.batch_examples(lanes)
        empty: Plan = {
            "serialized": np.empty(shape, object),
            "unread": np.empty((num_groups, len(PIECE_NAMES), 0), np.int64),
        }
        if self._layout is not None:
            empty["frames"] = np.empty((*shape, self._layout.frame_bytes), np.uint8)
        return empty

    def _slice(self, layout: Layout, group: dict[str, tf.Tensor]) -> Batch:
        """`parse_records` for "frames", uint8 [k, n, bytes]: records of one layout."""
        parse, frames = self._reader.parse, group["frames"]
        assert isinstance(parse, ExampleParse)
        rows = tf.reshape(frames, [-1, frames.shape[-1]])
        parsed = parse.finish(layout.slice(rows, HEADER_BYTES))
        return self._reader.finish(parsed, tf.shape(frames)[:2], frames.shape[:2], group)

    @functools.cached_property
    def _layout(self) -> Layout | None:
        parse = self._reader.parse
        if not isinstance(parse, ExampleParse):
            return None
        try:
            window = Windows(self._read_into).read(self._pieces.first_chunk())
            (record,) = window.records(np.zeros(1, np.int64))
        except (DamagedError, OSError):
            return None  # `_blocks` meets the same fault, and TensorFlow's reader then names it.
        return find_layout(record, parse.columns)

    def _by_tensorflow(
        self,
        parts: Sequence[Part],
        lanes: range,
        extras: _Extras,
        spec: dict[str, tf.TensorSpec],
        waited: tf.Variable | None,
    ) -> tf.data.Dataset:
        """Batches whose records TensorFlow reads, by the pieces of each run."""
        order, piece = self._reader.order, tf.TensorSpec([None], tf.int64)
        plans = tf.data.Dataset.from_generator(
            lambda: (
                {**self._pieces.plan(order, *run, part.lanes), **extras(*run, part.lanes)}
                for part in list(parts)
                for run in self._reader.runs(part.first_batch, _stop(part))
            ),
            output_signature={**dict.fromkeys(PIECE_NAMES, piece), **spec},
        )

        def in_groups(records: tf.Tensor, rows: dict[str, tf.Tensor]) -> tf.data.Dataset:
            # Every group shares the run's records: no string is copied before it is needed.
            shared = tf.data.Dataset.from_tensors(records).repeat()
            groups = tf.data.Dataset.from_tensor_slices(rows).batch(self._group_batches(lanes))
            return tf.data.Dataset.zip(shared, groups)

        runs = plans.prefetch(2).map(
            lambda plan: (self._pieces.read(plan), {name: plan[name] for name in spec}),
            num_parallel_calls=parallel_calls(self._threads),
        )
        groups = runs.flat_map(in_groups).map(
            lambda records, rows: (tf.gather(records, rows.pop("gather")), rows)
        )
        return self._batched(groups, self._reader.parse_records, lanes, waited)

    def _batched(
        self,
        groups: tf.data.Dataset,
        parse: Callable[..., Batch],
        lanes: range,
        waited: tf.Variable | None,
    ) -> tf.data.Dataset:
        """One element a batch: inputs, labels, and weights or seeds if the batches have any.

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
                num_parallel_calls=parallel_calls(self._threads),
            )
        else:
            # One more thread: cutting a group must not wait until the next one is parsed.
            options.threading.private_threadpool_size += 1
            parsed = groups.map(parse, num_parallel_calls=parallel_calls(self._threads))
            if waited is not None and not self._reader.prefetch_batches:
                # Once for each group: a consumer waits for the first batch of a group.
                add = functools.partial(_timed, waited)
                batches = _asked(parsed).flat_map(
                    lambda asked, group: tf.data.Dataset.from_tensor_slices(add(asked, group))
                )
                waited = None
            else:
                batches = parsed.flat_map(
                    lambda *stacked: tf.data.Dataset.from_tensor_slices(stacked)
                )
        if self._reader.prefetch_batches:
            batches = batches.prefetch(self._reader.prefetch_batches)
        if waited is not None:
            batches = _asked(batches).map(functools.partial(_timed, waited))
        return batches.with_options(options)

    def _group_batches(self, lanes: range) -> int:
        group_examples = self._reader.group_examples(self._reader.parsed_specs)
        return max(1, group_examples // self._reader.batch_examples(lanes))

    def _block_batches(self, lanes: range) -> int:
        block_examples = _BLOCK_BYTES // self._reader.split.mean_record_bytes
        return max(self._group_batches(lanes), block_examples // self._reader.batch_examples(lanes))


def _stop(part: Part) -> int | None:
    return None if part.num_batches is None else part.first_batch + part.num_batches


def _asked(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` as (time of the request, element)."""
    # `zip` asks its inputs one after the other.
    clock = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: timestamp())
    return tf.data.Dataset.zip(clock, dataset)


def _timed(waited: tf.Variable, asked: tf.Tensor, element: Batch) -> Batch:
    """`element`, which arrives now; adds the time since it was `asked` for to `waited`."""
    with tf.control_dependencies([waited.assign_add(timestamp() - asked)]):
        same: Batch = tf.nest.map_structure(tf.identity, element)
        return same


def _cut(num_batches: int, most: int, most_of_block: int) -> Iterator[tuple[int, int, int]]:
    """Cuts `num_batches` into groups and blocks of groups: (first batch, groups, size of a group).

    A group has at most `most` batches, a block at most `most_of_block // most` groups. Groups have
    one size, for equal work of all threads: the size for the fewest groups, or less, but more than
    half, to divide `num_batches`. Else the last group is smaller, and a block by itself.
    """
    largest = -(-num_batches // -(-num_batches // most))
    sizes = range(largest, largest // 2, -1)
    size = next((size for size in sizes if num_batches % size == 0), largest)
    num_full = num_batches // size
    groups_of_block = most_of_block // most
    for first in range(0, num_full, groups_of_block):
        yield first * size, min(groups_of_block, num_full - first), size
    if left := num_batches % size:
        yield num_batches - left, 1, left


def _read(windows: Windows, ranges: ByteRanges) -> Window | None:
    """The bytes of `ranges`, or None if they cannot be read."""
    try:
        return windows.read(ranges)
    except (DamagedError, OSError):
        return None


def _block(
    window: Window | None, numbers: Int64s, layout: Layout | None, buffers: Buffers
) -> Plan | None:
    """Records of a window, shaped as `numbers` [g, k, n]: "frames" if possible, else "serialized".

    None if there is no window, or a record is damaged.
    """
    if window is None:
        return None
    if layout is not None:
        frames = buffers.array((*numbers.shape, layout.frame_bytes))
        # One group at a time, so that its bytes are checked while they are in the CPU's caches.
        for group, into in zip(numbers, frames, strict=True):
            into = into.reshape(-1, layout.frame_bytes)
            are_complete = window.copy_frames(group.reshape(-1), into)
            if not are_complete or not layout.fits(into[:, HEADER_BYTES:-FOOTER_BYTES]):
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
    """Makes Python delete unreachable iterators at exit, before it shuts down.

    A tf.function and the iterator that it takes from are a reference cycle. Deleting an iterator
    waits for the call of its generator; once Python shuts down, that call never returns.
    """
    atexit.register(gc.collect)
