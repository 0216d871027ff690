"""`--strategy=mirrored`: one process, a replica on each of its devices, gradients summed.

    executor = MirroredExecutor.on(replica_devices(2, use_gpus(None)))

The inner loop runs in one graph: n steps a call, without Python between them. Each step reads this
process's share of the batch once and cuts it into its replicas' slices, so a batch has the same
examples whatever the number of replicas.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from data.feeds import open_feed
from data.graphs import plain
from data.order import share
from strategies.base import (
    Batch,
    Executor,
    Learner,
    Metrics,
    Position,
    Tensor,
    refuse_open_shares,
    to_metrics,
)
from strategies.exchange import Exchange
from strategies.wire import Wire


class DeviceError(ValueError):
    """More devices asked for than there are. Exit code 2."""


def use_gpus(num_gpus: int | None) -> int:
    """Makes `num_gpus` GPUs visible, None all, with memory that grows; returns how many those are.

    Must be called before TensorFlow has touched a device.

    Raises:
        DeviceError: there are fewer.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if num_gpus is not None:
        if num_gpus > len(gpus):
            raise DeviceError(
                f"--num_gpus={num_gpus}, but TensorFlow sees {len(gpus)} GPU(s) here. "
                "Use fewer, or install the `cuda` extra: pip install -e '.[cuda]'"
            )
        gpus = gpus[:num_gpus]
        tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    return len(gpus)


def replica_devices(num_replicas: int, num_gpus: int) -> list[str]:
    """The devices of this process's replicas; 0 replicas means one for each GPU, or one CPU.

    Without GPUs the CPU is divided into logical ones, so this too must be called before TensorFlow
    has touched a device.

    Raises:
        DeviceError: more replicas than GPUs.
    """
    if num_gpus:
        if num_replicas > num_gpus:
            raise DeviceError(
                f"--replicas={num_replicas}, but there are {num_gpus} GPU(s). "
                "Use at most one replica a GPU, or --num_gpus=0 for replicas on the CPU."
            )
        return [f"GPU:{i}" for i in range(num_replicas or num_gpus)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    num_replicas = num_replicas or 1
    if num_replicas > 1:
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_replicas)]
        tf.config.set_logical_device_configuration(cpu, logical)
    return [f"CPU:{i}" for i in range(num_replicas)]


class MirroredExecutor(Executor):
    """All replicas of a step in this process, or, in a subclass, this process's share of them."""

    def __init__(
        self, strategy: Any, *, wire_dtype: str = "float32", exchange: Exchange | None = None
    ) -> None:
        """Uses `strategy`, a MirroredStrategy or one that runs steps in the same way.

        `exchange`: see Wire.
        """
        super().__init__()
        self.strategy = strategy
        self._wire = Wire(wire_dtype, self.num_replicas, exchange)
        self._local_replicas = self._replicas_of_this_process()
        self._seconds = {"run": 0.0, "evaluate": 0.0}

    @classmethod
    def on(cls, devices: Sequence[str]) -> "MirroredExecutor":
        """One replica on each of `devices`."""
        return cls(tf.distribute.MirroredStrategy(list(devices)))

    @property
    def num_replicas(self) -> int:
        """Replicas over all processes."""
        return int(self.strategy.num_replicas_in_sync)

    @property
    def position(self) -> Position:
        """One batch a step, from wherever this process began."""
        num_steps = int(self._learner.step.numpy()) - self._first_step
        return dataclasses.replace(self._first, next_batch=self._first.next_batch + num_steps)

    def start(self, learner: Learner, source: Any, evaluation: Any, position: Position) -> None:
        """See Executor."""
        self._learner = learner
        self._source = source
        self._seek(position)
        self._run_in_graph = self._make_run()
        self.start_evaluation(learner, evaluation)

    def _forget(self) -> None:
        """See Executor."""
        if self._wire.rounds:
            self._wire.forget()
            self._run_in_graph = self._make_run()

    def _make_run(self) -> Any:
        learner, train_cuts = self._learner, self._cuts(self._source)
        num_steps_spec, say_spec = tf.TensorSpec([], tf.int64), tf.TensorSpec([2], tf.float64)

        @tf.function(input_signature=[self._feed.signature, num_steps_spec, say_spec])
        def run(taken: Any, num_steps: Tensor, say: Tensor) -> tuple[Tensor, Tensor]:
            def step(index: Tensor, sums: Tensor) -> Tensor:
                batch = self._split(self._feed.batch(taken, index), train_cuts)
                return self.strategy.run(
                    lambda s, b: s + self._wire.update(learner, b), args=(sums, batch)
                )

            sums = self.strategy.run(self._zeros)
            for index in tf.range(num_steps):
                sums = step(index, sums)
            return self._reduce(sums, say)

        return run

    def _seek(self, position: Position) -> None:
        """See Executor."""
        refuse_open_shares(position, self._source.order)
        self._first = position
        self._first_step = int(self._learner.step.numpy())
        self._feed = open_feed(self._source, position.next_batch, self._lanes(self._source))

    def start_evaluation(self, learner: Learner, evaluation: Any) -> None:
        """Prepares `evaluate` of `learner` on `evaluation`; a part of `start`, or all of it."""
        self._learner = learner
        self._evaluation = evaluation
        self._evaluation_dataset = evaluation.evaluation_batches(self._lanes(evaluation))
        evaluation_cuts = self._cuts(evaluation)

        @tf.function(reduce_retracing=True)
        def evaluate(
            batches: Any, num_batches: Tensor, sums: Tensor, say: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            for _ in tf.range(num_batches):
                batch = self._split(next(batches), evaluation_cuts)
                sums = self.strategy.run(lambda s, b: s + learner.evaluate(b), args=(sums, batch))
            return *self._reduce(sums, say), sums

        self._evaluate_in_graph = evaluate
        self._no_sums_in_graph = tf.function(lambda: self.strategy.run(self._zeros))

    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        """See Executor. Exactly `num_steps`."""
        started = time.monotonic()
        sums, said = self._run_in_graph(
            self._feed.take(num_steps), tf.constant(num_steps, tf.int64), self._say("run")
        )
        seconds = self._heard("run", said, started)
        return to_metrics(self._learner.metric_names, sums.numpy()), seconds

    @property
    def _num_evaluation_batches(self) -> int:
        return int(self._evaluation.num_evaluation_batches)

    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        """See Executor. Every task calls it at the same step."""
        started = time.monotonic()
        if first_batch == 0:
            self._evaluation_batches = iter(self._evaluation_dataset)
            self._evaluation_sums = self._no_sums_in_graph()
        total, said, self._evaluation_sums = self._evaluate_in_graph(
            self._evaluation_batches,
            tf.constant(num_batches, tf.int64),
            self._evaluation_sums,
            self._say("evaluate"),
        )
        seconds = self._heard("evaluate", said, started)
        return to_metrics(self._learner.metric_names, total.numpy()), seconds

    def _say(self, call: str) -> Tensor:
        """What this process adds to a sum over all: a wish to stop, and what `call` last took."""
        return tf.constant([self._stop_requested, self._seconds[call]], tf.float64)

    def _heard(self, call: str, said: Tensor, started: float) -> float:
        """Takes the sum of what all say; returns the mean of their seconds.

        They are those of the call before: this one's reduction was over when its own were known.
        """
        num_stops, seconds = said.numpy()
        self._stopping = bool(num_stops > 0)
        self._seconds[call] = time.monotonic() - started
        return float(seconds) / self.num_replicas

    def _replicas_of_this_process(self) -> range:
        return range(self.num_replicas)

    def _lanes(self, source: Any) -> range:
        """The lanes that this process reads: those of its replicas, which are neighbours."""
        lanes, replicas = source.order.lanes, self._local_replicas
        first = share(lanes, replicas[0], self.num_replicas)
        last = share(lanes, replicas[-1], self.num_replicas)
        return range(first.start, last.stop)

    def _cuts(self, source: Any) -> list[int]:
        """Where this process's share of a batch is cut into its replicas' slices."""
        order = source.order
        rows = order.batch_size // order.lanes
        sizes = [
            len(share(order.lanes, replica, self.num_replicas)) * rows
            for replica in self._local_replicas
        ]
        return [0, *np.cumsum(sizes).tolist()]

    @plain
    def _split(self, batch: Batch, cuts: Sequence[int]) -> Batch:
        """Per-replica slices of this process's share of a batch."""
        if len(self._local_replicas) == 1:
            return batch

        def slice_of(context: Any) -> Batch:
            i = context.replica_id_in_sync_group - self._local_replicas.start
            return tf.nest.map_structure(lambda t: t[cuts[i] : cuts[i + 1]], batch)

        return self.strategy.experimental_distribute_values_from_function(slice_of)

    @plain
    def _zeros(self) -> Tensor:
        return tf.zeros([len(self._learner.metric_names), 2], tf.float64)

    @plain
    def _reduce(self, sums: Tensor, say: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over all replicas, of metrics and of what each process says, in one reduction."""
        flat = self.strategy.run(
            lambda s: tf.concat([tf.reshape(s, [-1]), say], axis=0), args=(sums,)
        )
        total = self.strategy.reduce("SUM", flat, axis=None)
        num_sums = 2 * len(self._learner.metric_names)
        return tf.reshape(total[:num_sums], [-1, 2]), total[num_sums:]
