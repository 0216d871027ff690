"""Batches for a loop in a graph: read ahead from disk, or gathered from examples in memory.

    feed = open_feed(reader, first_batch=1234, lanes=range(20))

    @tf.function(input_signature=[feed.signature, tf.TensorSpec([], tf.int64)])
    def run(taken, num_steps):
        for i in tf.range(num_steps):
            batch = feed.batch(taken, i)                # on the CPU
            inputs, labels = feed.finished(batch)       # on the device that computes
            ...

    run(feed.take(100), 100)        # batches 1234 to 1333
    run(feed.take(100), 100)        # and the 100 after these

Cached examples do not pass through tf.data: the loop itself gathers the rows of a batch, and widens
and augments them. Only the numbers of the rows are computed ahead.
"""

import concurrent.futures
import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.disk_reader import DiskReader
from data.order import Plan
from data.reader import Batch, Examples, Nest, Part, Reader
from data.system.compat.autograph import no_autograph
from data.tfrecord.byte_ranges import aligned


class StreamedFeed:
    """Batches one after another, for a graph that asks for as many as its caller has taken.

    They are the elements of a tf.data pipeline, which reads and parses ahead.

    Attributes:
        signature: The type of the result of `take`: of an iterator, or of the arrays of a plan.
        is_in_memory: True if no `batch` can fail, because all examples have been read.
        finished: In the graph: makes a result of `batch`, or some rows of one, complete.
    """

    is_in_memory = False

    def __init__(
        self,
        dataset: tf.data.Dataset,
        waited: tf.Variable | None = None,
        finish: Callable[[Batch], Batch] | None = None,
        parts: list[Part] | None = None,
    ) -> None:
        """To `waited` the elements of `dataset` add the seconds for which they were waited.

        An iterator of `dataset` reads `parts` as they are when it begins. `take_parts` changes
        them; without them it may not be called.
        """
        self._dataset, self._parts = dataset, parts or []
        self._next = self._parts[:1]
        self._waited, self._waited_before = waited, 0.0
        self.finished = finish or no_autograph(lambda batch: batch)
        self.signature = tf.data.IteratorSpec(dataset.element_spec)
        self._iterator = iter(dataset)

    def take(self, num_batches: int) -> Nest:
        """Takes the next `num_batches` batches. The result is an argument of the graph."""
        return self._iterator

    def take_parts(self, parts: Sequence[Part]) -> Nest:
        """As `take`, but of the batches of `parts`, which have as many lanes as those of `take`.

        It is faster if the lanes of the last part continue in the first part of the next call. A
        feed has either calls of `take`, or of this.
        """
        *others, last = parts
        endless = last._replace(num_batches=None)
        if others or self._next != [endless]:
            self._parts[:] = [*others, endless]
            self._iterator = iter(self._dataset)
        self._next = [endless._replace(first_batch=last.first_batch + (last.num_batches or 0))]
        return self._iterator

    @no_autograph
    def batch(self, taken: Nest, index: tf.Tensor) -> Batch:
        """In the graph: batch `index` of `taken`. Called exactly once for each, in order.

        It is on the CPU, and lacks what `finished` does.
        """
        batch: Batch = next(taken)
        return batch

    def waited_secs(self) -> float:
        """The time that the caller and its graph waited for input, since the last call of this."""
        if self._waited is None:
            return 0.0
        before, self._waited_before = self._waited_before, float(self._waited.numpy())
        return self._waited_before - before


class CachedFeed:
    """As `StreamedFeed`, but batches of examples that are all in memory."""

    is_in_memory = True

    def __init__(self, reader: Reader, first_batch: int, lanes: range) -> None:
        self._reader, self._examples = reader, cached_examples(reader)
        self.finished = reader.finished
        self.signature = reader.row_spec(lanes=lanes)
        self._plans = (reader.row_plan(*run, lanes) for run in reader.runs(first_batch))
        self._planner = concurrent.futures.ThreadPoolExecutor(1, "feed")
        self._ahead: concurrent.futures.Future[Plan] | None = None
        self._waited_secs = 0.0

    def take(self, num_batches: int) -> dict[str, tf.Tensor]:
        """Takes the row numbers of the next batches, and plans those of the next call ahead."""
        began = time.monotonic()
        plan = self._planned(self._ahead.result() if self._ahead else {}, num_batches)
        with tf.device("CPU:0"):
            taken = {name: tf.constant(values[:num_batches]) for name, values in plan.items()}
        self._waited_secs += time.monotonic() - began
        left = {name: values[num_batches:] for name, values in plan.items()}
        # While the graph runs, as many batches are planned for the next call.
        self._ahead = self._planner.submit(self._planned, left, num_batches)
        return taken

    def take_parts(self, parts: Sequence[Part]) -> dict[str, tf.Tensor]:
        """Takes the row numbers of the batches of `parts`."""
        began = time.monotonic()
        plans = [
            self._reader.row_plan(*run, lanes)
            for first, count, lanes in parts
            for run in self._reader.runs(first, first + (count or 0))
        ]
        with tf.device("CPU:0"):
            taken = {
                name: tf.constant(np.concatenate([p[name] for p in plans])) for name in plans[0]
            }
        self._waited_secs += time.monotonic() - began
        return taken

    def _planned(self, plan: Plan, num_batches: int) -> Plan:
        plans, num_planned = [plan] if plan else [], len(plan.get("gather", ()))
        while num_planned < num_batches:
            plans.append(next(self._plans))
            num_planned += len(plans[-1]["gather"])
        if len(plans) == 1:
            return plans[0]
        return {name: np.concatenate([p[name] for p in plans]) for name in self.signature}

    @no_autograph
    def batch(self, taken: dict[str, tf.Tensor], index: tf.Tensor) -> Batch:
        """Gathers the rows of a batch in the graph."""
        with tf.device("CPU:0"):
            plan = {name: tf.gather(values, index) for name, values in taken.items()}

            def rows(numbers: tf.Tensor) -> Nest:
                return tf.nest.map_structure(lambda t: tf.gather(t, numbers), self._examples)

            return self._reader.narrow.gather_rows(rows, plan)

    def waited_secs(self) -> float:
        """The time that the caller waited for plans, since the last call of this."""
        waited, self._waited_secs = self._waited_secs, 0.0
        return waited


Feed = StreamedFeed | CachedFeed


def open_feed(
    reader: Reader, first_batch: int, lanes: range, *, finishes_in_graph: bool = False
) -> Feed:
    """The batches of `reader` from `first_batch`: from memory if it caches its examples.

    The threads that read batches from disk also augment and widen them. With `finishes_in_graph`
    the graph widens batches that are not augmented, by `finished`, as it completes cached batches.
    """
    if reader.caches_examples:
        return CachedFeed(reader, first_batch, lanes)
    with tf.device("CPU:0"):
        waited = tf.Variable(0.0, dtype=tf.float64, trainable=False)
    widens = finishes_in_graph and reader.augment is None
    read = reader.narrow if widens else reader
    parts = [Part(first_batch, None, lanes)]
    dataset = DiskReader(read).batches_of(parts, lanes, waited=waited)
    return StreamedFeed(dataset, waited, reader.finished if widens else None, parts)


# A run that goes back to a checkpoint opens another feed of its reader.
_cached_examples: "weakref.WeakKeyDictionary[Reader, Examples]" = weakref.WeakKeyDictionary()


def cached_examples(reader: Reader) -> Examples:
    """All examples of `reader` by record number, as of `narrow`, on the CPU; parsed once."""
    if reader not in _cached_examples:
        _cached_examples[reader] = _parse_all(reader)
    return _cached_examples[reader]


def _parse_all(reader: Reader) -> Examples:
    specs, num_examples = reader.narrow.parsed_specs, reader.split.num_examples
    size = reader.group_examples(specs)
    in_order = dataclasses.replace(
        reader.order, batch_size=size, lanes=1, window_batches=1, shuffle=False
    )
    narrow = dataclasses.replace(reader.narrow, order=in_order)
    arrays: Nest = tf.nest.map_structure(
        lambda spec: _array([num_examples, *spec.shape[1:]], spec.dtype.as_numpy_dtype),
        specs,
    )
    batches = DiskReader(narrow).evaluation_batches(range(1))
    for first, batch in zip(range(0, num_examples, size), batches, strict=True):
        end = min(first + size, num_examples)
        parsed = tf.nest.flatten(batch[: len(specs)])  # The weights of the evaluation follow.
        for values, into in zip(parsed, tf.nest.flatten(arrays), strict=True):
            into[first:end] = values.numpy()[: end - first]
    with tf.device("CPU:0"):
        examples: Examples = tf.nest.map_structure(_as_tensor, arrays)
    return examples


def _array(shape: list[int], dtype: npt.DTypeLike) -> npt.NDArray[np.number]:
    """An array whose memory TensorFlow can use without a copy."""
    memory = aligned(math.prod(shape) * np.dtype(dtype).itemsize)
    return memory.view(dtype).reshape(shape)


def _as_tensor(array: npt.NDArray[np.number]) -> tf.Tensor:
    """A tensor in the memory of `array`, if DLPack knows its dtype; else a copy."""
    if array.dtype.kind in "iuf":
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)
