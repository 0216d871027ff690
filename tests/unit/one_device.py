"""The smallest strategy: one process and one device, written with strategies/base.py alone."""

import dataclasses
import time
from collections.abc import Iterator

import tensorflow as tf
from typing_extensions import override

from data.disk_reader import DiskReader
from data.reader import Reader
from data.system.compat.autograph import no_autograph
from strategies.base import Batch, Executor
from strategies.metrics import Metrics
from strategies.position import Position, refuse_open_sub_batches


class OneDeviceExecutor(Executor):
    """TensorFlow's default strategy; a loop in one graph over batches from disk."""

    def __init__(self) -> None:
        super().__init__(tf.distribute.get_strategy(), num_replicas=1)

    @override
    def _prepare(self, source: Reader, position: Position) -> None:
        self._source = source
        self._set_position(position)
        learner = self._learner

        @no_autograph
        def step(batch: Batch) -> tf.Tensor:
            gradients, totals = learner.gradients(batch)
            learner.apply(gradients)
            return totals

        @tf.function
        def run(batches: Iterator[Batch], num_steps: tf.Tensor) -> tf.Tensor:
            totals = tf.zeros([learner.num_totals], tf.float64)
            for _ in tf.range(num_steps):
                totals += step(next(batches))
            return totals

        @tf.function
        def evaluate(
            batches: Iterator[Batch], num_batches: tf.Tensor, totals: tf.Tensor
        ) -> tf.Tensor:
            for _ in tf.range(num_batches):
                totals += no_autograph(learner.evaluate)(next(batches))
            return totals

        self._run_in_graph, self._evaluate_in_graph = run, evaluate

    @override
    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        started = time.monotonic()
        self._used_graphs.add("run")
        totals = self._run_in_graph(self._batches, tf.constant(num_steps))
        self.stopping = self.stop_requested
        return self._learner.to_metrics(totals.numpy()), time.monotonic() - started

    @property
    @override
    def position(self) -> Position:
        num_steps = int(self._learner.step.numpy()) - self._first_step
        return dataclasses.replace(self._first, next_batch=self._first.next_batch + num_steps)

    @override
    def _set_position(self, position: Position) -> None:
        refuse_open_sub_batches(position, self._source.order)
        self._first, self._first_step = position, int(self._learner.step.numpy())
        lanes = range(self._source.order.lanes)
        self._batches = iter(DiskReader(self._source).batches(position.next_batch, lanes))

    @override
    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        started = time.monotonic()
        if first_batch == 0:
            lanes = range(self._evaluation.order.lanes)
            self._evaluated = iter(DiskReader(self._evaluation).evaluation_batches(lanes))
            self._totals = tf.zeros([self._learner.num_totals], tf.float64)
        self._totals = self._evaluate_in_graph(
            self._evaluated, tf.constant(num_batches), self._totals
        )
        self.stopping = self.stop_requested
        return self._learner.to_metrics(self._totals.numpy()), time.monotonic() - started
