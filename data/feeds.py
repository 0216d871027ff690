"""Batches for a loop in a graph: read ahead, or picked from examples that are kept in memory.

    feed = open_feed(reader, first_batch=1234, lanes=range(20))

    @tf.function(input_signature=[feed.signature, tf.TensorSpec([], tf.int64)])
    def run(taken, num_steps):
        for i in tf.range(num_steps):
            inputs, labels = feed.batch(taken, i)
            ...

    run(feed.take(100), 100)        # batches 1234 to 1333
    run(feed.take(100), 100)        # and the 100 after these

Examples that are kept do not pass through tf.data: a batch is a gather of their rows in the loop
itself, widened there, and only the numbers of the rows are made ahead.
"""

import abc
import concurrent.futures
from typing import Any

import numpy as np
import tensorflow as tf

from data.graphs import plain
from data.pipeline import Reader, Ticket


class Feed(abc.ABC):
    """Batches one after another, for a graph that asks for as many as its caller has taken.

    Attributes:
        signature: The type of what `take` returns.
    """

    signature: Any

    @abc.abstractmethod
    def take(self, num_batches: int) -> Any:
        """What a graph makes the next `num_batches` batches of; an argument of it."""

    @abc.abstractmethod
    def batch(self, taken: Any, index: tf.Tensor) -> tuple[Any, ...]:
        """In the graph: batch `index` of those that were taken, from 0; called in their order."""


def open_feed(reader: Reader, first_batch: int, lanes: range) -> Feed:
    """The batches of `reader` from `first_batch`: from memory if it keeps its examples."""
    if reader.keeps_examples:
        return KeptFeed(reader, first_batch, lanes)
    return StreamedFeed(reader.batches(first_batch, lanes))


class StreamedFeed(Feed):
    """The elements of a tf.data pipeline, which reads and parses ahead."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        """Begins to read."""
        self.signature = tf.data.IteratorSpec(dataset.element_spec)
        self._iterator = iter(dataset)

    def take(self, num_batches: int) -> Any:
        """See Feed."""
        return self._iterator

    @plain
    def batch(self, taken: Any, index: tf.Tensor) -> tuple[Any, ...]:
        """See Feed."""
        batch: tuple[Any, ...] = next(taken)
        return batch


class KeptFeed(Feed):
    """Batches of examples that are all in memory."""

    def __init__(self, reader: Reader, first_batch: int, lanes: range) -> None:
        """Parses all of them, unless `reader` has them already."""
        self._reader, self._kept = reader, reader.kept_examples
        self.signature = reader.pick_spec(lanes=lanes)
        self._plans = reader.picks(first_batch, lanes)
        self._planner = concurrent.futures.ThreadPoolExecutor(1, "feed")
        self._ahead: concurrent.futures.Future[Ticket] | None = None

    def take(self, num_batches: int) -> Any:
        """See Feed."""
        plan = self._planned(self._ahead.result() if self._ahead else {}, num_batches)
        with tf.device("CPU:0"):
            taken = {name: tf.constant(values[:num_batches]) for name, values in plan.items()}
        left = {name: values[num_batches:] for name, values in plan.items()}
        # While a graph runs, as many are planned for the next one.
        self._ahead = self._planner.submit(self._planned, left, num_batches)
        return taken

    def _planned(self, plan: Ticket, num_batches: int) -> Ticket:
        """`plan`, and after it enough of the order for `num_batches`."""
        plans, num_planned = [plan] if plan else [], len(plan.get("gather", ()))
        while num_planned < num_batches:
            plans.append(next(self._plans))
            num_planned += len(plans[-1]["gather"])
        if len(plans) == 1:
            return plans[0]
        return {name: np.concatenate([p[name] for p in plans]) for name in self.signature}

    @plain
    def batch(self, taken: Any, index: tf.Tensor) -> tuple[Any, ...]:
        """See Feed."""
        with tf.device("CPU:0"):
            plan = {name: tf.gather(values, index) for name, values in taken.items()}
            return self._reader.pick(self._rows, plan)

    def _rows(self, numbers: tf.Tensor) -> tuple[Any, Any]:
        """The examples of these record numbers."""
        rows: tuple[Any, Any] = tf.nest.map_structure(
            lambda values: tf.gather(values, numbers), self._kept
        )
        return rows
