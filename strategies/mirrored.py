"""`--strategy=mirrored`: one process, a replica on each of its devices, gradients summed.

    executor = MirroredExecutor.on(replica_devices(2, use_gpus(None)))

The inner loop runs in one graph: n steps per call, without Python between them. The training step
is the function `step`: gradients, all-reduce, apply. It reads this process's part of the batch once
and cuts it into one slice per replica, so a batch has the same examples for any number of replicas.
On GPUs, the next batch is gathered from memory and copied while a step computes. With
`config.local_steps` each replica applies its own gradients, and local_steps.py averages them.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from typing_extensions import override

from data.batch_feeds import open_feed
from data.disk_reader import DiskReader
from data.order import replica_lanes
from data.reader import Reader
from data.system.compat.autograph import no_autograph
from data.system.errors import UsageError
from strategies.base import STEPS, Batch, Executor, Learner, Tensor
from strategies.gradients.all_reduce import (
    TOTALS_KEY,
    all_reduced,
    averaged_over_replicas,
    summed_with_key,
)
from strategies.gradients.parts import gradients_of_virtual_replicas, totals_of_parts
from strategies.metrics import Metrics, add_metrics
from strategies.position import Position, Reached, refuse_open_sub_batches

if TYPE_CHECKING:
    from strategies.gradients.compression import Compression
    from strategies.local_steps import LocalRounds
    from strategies.step_marks import StepMarks

# A part of the message if the next batch could not be read or parsed.
_NEXT_BATCH = "IteratorGetNext"
# The sizes of buckets between GPUs (those of PyTorch's DistributedDataParallel have 25 MB), and
# between logical CPUs, where 32 MiB are no faster than one vector.
_GPU_BUCKET_BYTES, _CPU_BUCKET_BYTES = 32 << 20, 8 << 20


class MirroredExecutor(Executor):
    """All replicas of a step in this process; in a subclass, this process's part of them."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        compression: "Compression | None" = None,
        process_index: int = 0,
    ) -> None:
        """Uses `strategy`, a MirroredStrategy or one that runs steps in the same way.

        `compression` rounds gradients before they are summed. `process_index` counts the processes
        that train; each has the same number of replicas.
        """
        super().__init__(strategy, int(strategy.num_replicas_in_sync))
        self._compression = compression
        self._bucket_bytes: float = _GPU_BUCKET_BYTES if self._has_gpus else _CPU_BUCKET_BYTES
        num_local = len(strategy.extended.worker_devices)
        self._local_replicas = range(process_index * num_local, (process_index + 1) * num_local)
        self._num_parts = 0  # Of the share of a replica, with config.virtual_replicas.
        self._marks: StepMarks | None = None
        self._rounds: LocalRounds | None = None
        self._seconds = {"run": 0.0, "evaluate": 0.0}
        self._next_batch: Batch = ()  # On the devices of the replicas, if they are read ahead.

    @classmethod
    def on(cls, devices: Sequence[str]) -> "MirroredExecutor":
        """One replica on each of `devices`, which are all GPUs or all CPUs.

        Logical devices of one CPU or GPU sum in its memory. NCCL cannot run between them, and a
        ring is slower.
        """
        kind = devices[0].partition(":")[0]
        num_physical = len(tf.config.get_visible_devices(kind))
        is_divided = len(tf.config.list_logical_devices(kind)) > num_physical
        sums = tf.distribute.ReductionToOneDevice() if is_divided else None
        return cls(tf.distribute.MirroredStrategy(list(devices), cross_device_ops=sums))

    @override
    def _prepare(self, source: Reader, position: Position) -> None:
        local = self._learner.local_steps
        if local and local.overlap and self._has_gpus and self.num_replicas > 1:
            raise UsageError(
                "config.local_steps.overlap is for CPUs: sums between GPUs need one order, and two "
                "graphs that sum at the same time have none. Leave it out, or type --num_gpus=0."
            )
        self._source = source
        self._set_position(position)
        self._prepare_run()
        self.start_evaluation(self._learner, self._evaluation)

    def _prepare_run(self) -> None:
        learner, (_, offsets) = self._learner, self._own_part(self._source)
        local = learner.local_steps
        is_timed = local is not None and local.every_secs > 0
        marks = self._marks = self._new_marks()
        if local and marks:
            from strategies.local_steps import LocalRounds  # Few runs choose them.

            sums = self._all_reduced, self._summed_over_replicas
            self._rounds = LocalRounds(self.strategy, local, marks, *sums)

        def step(totals: tf.Tensor, batch: Batch) -> tf.Tensor:
            if local:
                gradients, metrics = learner.gradients(batch)
                learner.apply(local.own(gradients))
            else:
                gradients, metrics = self._gradients(batch)
                gradients = self._all_reduced(gradients)
                learner.apply(marks.begun(gradients) if marks else gradients)
            return totals + metrics

        run_step = self._in_all_replicas(step, compiles=self._compiles_complete_steps)
        reads_ahead = self._reads_ahead
        signature = [
            self._feed.signature,
            tf.nest.map_structure(tf.type_spec_from_value, self._next_batch),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([2], tf.float64),
        ]

        # `taken` is what the feed's `take` returned: an iterator, or a dict of tensors. With
        # `reads_ahead`, `following` is the first batch, and `taken` has the batches after it.
        @tf.function(input_signature=signature)
        def run(
            taken: Any, following: Batch, num_steps: tf.Tensor, status: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, Batch]:
            totals = self.strategy.run(self._zero_totals, args=(learner.virtual_replicas,))
            for index in tf.range(num_steps):
                read = self._slice_for_replicas(self._feed.batch(taken, index), offsets)
                batch, following = (following, read) if reads_ahead else (read, ())
                # Not compiled by XLA, which lacks ops, and draws other random numbers.
                batch = self.strategy.run(self._feed.finished, args=(batch,))
                totals = run_step(totals, batch if local else self._after_complete_step(batch))
            if not local:
                totals = self._after_complete_step(totals)
            # By time, the caller sums: it measures these steps without the wait for others.
            summed = (totals, status) if is_timed else self._summed_totals(totals, status)
            return *summed, following

        self._run_in_graph = run

    @property
    def _compiles_complete_steps(self) -> bool:
        """True if XLA may compile a step as a whole: no other replica takes part in it.

        Otherwise sums, and marks of complete steps, are between the gradient and the rest.
        """
        is_only_one = self.num_replicas == 1 and self.peers is None
        is_alone = is_only_one or self._learner.local_steps is not None
        return is_alone and len(self._local_replicas) == 1

    def _in_all_replicas(
        self, step: Callable[[tf.Tensor, Batch], tf.Tensor], *, compiles: bool
    ) -> Callable[[tf.Tensor, Batch], tf.Tensor]:
        """`step` in all local replicas; compiled by XLA if that is asked for and possible."""

        def run_step(totals: tf.Tensor, batch: Batch) -> tf.Tensor:
            return self.strategy.run(step, args=(totals, batch))

        if not (compiles and self._learner.compiles):
            return no_autograph(run_step)
        compiled: Callable[[tf.Tensor, Batch], tf.Tensor] = tf.function(
            run_step, jit_compile=True, autograph=False
        )
        return compiled

    @no_autograph
    def _gradients(self, batch: Batch) -> tuple[Sequence[Tensor], tf.Tensor]:
        """`Learner.gradients`, with equal states of layers on all replicas."""
        learner = self._learner
        if self._num_parts:
            return gradients_of_virtual_replicas(
                learner, batch, self._num_parts, self._summed_over_replicas
            )
        with averaged_over_replicas(learner.layer_state):
            return learner.gradients(batch)

    def _new_marks(self) -> "StepMarks | None":
        """The marks of complete steps; None if a failure finds no step that has begun."""
        if (local := self._learner.local_steps) is None:
            return None
        from strategies.step_marks import StepMarks  # As LocalRounds.

        return StepMarks(self.strategy, self._learner.step, local.changing)

    @no_autograph
    def _after_complete_step(self, tensors: Batch) -> Batch:
        """Called in the graph where all changes of a step are made, and none of the next step.

        Returns `tensors`, on which the next step depends.
        """
        if self._marks is None:
            return tensors
        with tf.control_dependencies([self._marks.complete()]):
            return tf.nest.map_structure(tf.identity, tensors)

    def _all_reduced(
        self, gradients: Sequence[Tensor], exact: Sequence[Tensor] = ()
    ) -> Sequence[Tensor]:
        """The sums over all replicas of `gradients`, then those of `exact`: never in 16 bits."""
        return self._summed_over_replicas(gradients, exact)

    @no_autograph
    def _summed_over_replicas(
        self, gradients: Sequence[Tensor], exact: Sequence[Tensor] = ()
    ) -> Sequence[Tensor]:
        by_tree, bucket_bytes = self._num_parts > 0, self._bucket_bytes
        summed = all_reduced(gradients, self._compression, bucket_bytes, by_tree=by_tree)
        return [*summed, *all_reduced(exact, bucket_bytes=self._bucket_bytes)]

    @override
    def _steps_of_call(self, num_steps: int) -> int:
        if local := self._learner.local_steps:
            rounds = self._sizes_of_rounds(num_steps)
            return sum(rounds) if local.overlap else rounds[0]
        return super()._steps_of_call(num_steps)

    def _sizes_of_rounds(self, num_steps: int) -> list[int]:
        """The steps from each average to the next, up to the first one after `num_steps`."""
        local = self._learner.local_steps
        return local.rounds(int(self._learner.step.numpy()), num_steps) if local else [num_steps]

    @override
    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        self._used_graphs.add("run")
        rounds, sizes = self._rounds, self._sizes_of_rounds(num_steps)
        if rounds:
            rounds.begin()
        metrics, seconds = Metrics(), 0.0
        for index, size in enumerate(sizes):
            started = time.monotonic()
            try:
                finished = self._run_by_time(size)
                if finished is None:
                    arguments = self._feed.take(size), self._next_batch, tf.constant(size, tf.int64)
                    finished = self._run_in_graph(*arguments, self._own_status("run"))
                totals, summed_status, self._next_batch = finished
            except tf.errors.OpError as error:
                if self._learner.stop_compiling(error):
                    self._prepare(self._source, self.position)
                    return self._run(num_steps)
                # An iteration of the loop in the graph begins, with this op, when all ops of the
                # one before have ended; and no variable changes without the batch.
                if _NEXT_BATCH in error.message and rounds is None:
                    self._changing = ""
                raise
            more, own_seconds = self._finished("run", totals, summed_status, started)
            metrics, seconds = add_metrics(metrics, more), seconds + own_seconds
            waited = self._feed.waited_secs()
            self.stopwatch.carve("input wait", waited)
            if not self._has_gpus:  # A GPU computes while this process waits.
                self._input_secs += waited
            if rounds is None:
                continue
            if self.stopping or index == len(sizes) - 1:
                self.stopwatch.carve("sum wait", rounds.end())
                break
            self.stopwatch.carve("sum wait", rounds.go_on())
            self.on_progress()
        return metrics, seconds

    def _run_by_time(self, _: int) -> tuple[tf.Tensor, tf.Tensor, Batch] | None:
        """Runs a round of `local_steps.every_secs`, which only several workers have."""
        return None

    @property
    @override
    def position(self) -> Position:
        """One batch a step after the position at which this process began."""
        num_steps = int(self._learner.step.numpy()) - self._first_step
        return dataclasses.replace(self._first, next_batch=self._first.next_batch + num_steps)

    @override
    def _set_position(self, position: Position) -> None:
        refuse_open_sub_batches(position, self._source.order)
        self._first = position
        self._first_step = int(self._learner.step.numpy())
        lanes, offsets = self._own_part(self._source)
        self._feed = open_feed(
            self._source, position.next_batch, lanes, finishes_in_graph=self._has_gpus
        )
        if self._reads_ahead:
            read = self._feed.batch(self._feed.take(1), tf.constant(0, tf.int64))
            self._next_batch = self._slice_for_replicas(read, offsets)

    @property
    def _reads_ahead(self) -> bool:
        """True if batches are gathered and copied while the step before computes.

        Only from memory: a batch on disk may be damaged, and perhaps no step needs it.
        """
        local = self._learner.local_steps
        is_timed = local is not None and local.every_secs > 0  # The next batch is not known then.
        return self._has_gpus and self._feed.is_in_memory and not is_timed

    @override
    def return_to_complete_step(self) -> Reached | None:
        marks = self._marks if self._changing == STEPS else None
        if marks is not None and marks.return_to_complete() is not None:
            self._changing = ""
        return super().return_to_complete_step()

    @override
    def _drop_kept(self) -> None:
        compression = self._compression
        if compression:
            compression.forget_residuals()
        if self._learner.local_steps or (compression and compression.is_lossy):
            self._prepare_run()

    def start_evaluation(self, learner: Learner, evaluation: Reader) -> None:
        """Prepares only `evaluate`, as the evaluator task needs it; `start` calls it too."""
        self._learner = learner
        self._num_parts = learner.virtual_replicas // self.num_replicas
        self._evaluation = evaluation
        lanes, offsets = self._own_part(evaluation)
        # On a GPU, batches are finished there; on CPUs, by the threads that read them.
        read = evaluation.narrow if self._has_gpus else evaluation
        self._evaluation_dataset = DiskReader(read).evaluation_batches(lanes)

        def step(totals: tf.Tensor, batch: Batch) -> tf.Tensor:
            batch = evaluation.finished(batch) if self._has_gpus else batch
            if self._num_parts:
                return totals + totals_of_parts(learner.evaluate, batch, self._num_parts)
            return totals + learner.evaluate(batch)

        run_step = self._in_all_replicas(step, compiles=len(self._local_replicas) == 1)

        @tf.function(reduce_retracing=True)
        def evaluate(
            batches: Iterator[Batch], num_batches: tf.Tensor, totals: tf.Tensor, status: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            for _ in tf.range(num_batches):
                batch = self._slice_for_replicas(next(batches), offsets)
                totals = run_step(totals, batch)
            return *self._summed_totals(totals, status), totals

        self._evaluate_in_graph = evaluate
        self._zero_totals_in_graph = tf.function(lambda: self.strategy.run(self._zero_totals))

    @override
    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        started = time.monotonic()
        if first_batch == 0:
            self._evaluation_batches = iter(self._evaluation_dataset)
            self._evaluation_totals = self._zero_totals_in_graph()
        try:
            totals, summed_status, self._evaluation_totals = self._evaluate_in_graph(
                self._evaluation_batches,
                tf.constant(num_batches, tf.int64),
                self._evaluation_totals,
                self._own_status("evaluate"),
            )
        except tf.errors.OpError as error:
            if not self._learner.stop_compiling(error):
                raise
            self.start_evaluation(self._learner, self._evaluation)
            return self._evaluate(first_batch, num_batches)
        return self._finished("evaluate", totals, summed_status, started)

    def _own_status(self, call: str) -> tf.Tensor:
        """[stop requested, seconds of this process's last `call`: "run" or "evaluate"], float64."""
        return tf.constant([self.stop_requested, self._seconds[call]], tf.float64)

    def _finished(
        self, call: str, totals: tf.Tensor, summed_status: tf.Tensor, started: float
    ) -> tuple[Metrics, float]:
        """Metrics and mean duration; sets `stopping`. Sums over all replicas: all tasks agree."""
        num_stops, seconds = summed_status.numpy()
        self.stopping = bool(num_stops > 0)
        self._seconds[call] = time.monotonic() - started
        metrics = self._learner.to_metrics(totals.numpy())
        return metrics, float(seconds) / self.num_replicas

    @property
    def _has_gpus(self) -> bool:
        """True if the replicas of this process are on GPUs."""
        device = tf.DeviceSpec.from_string(self.strategy.extended.worker_devices[0])
        return bool(device.device_type == "GPU")

    def _own_part(self, source: Reader) -> tuple[range, list[int]]:
        """The lanes of this process in a batch, and the offsets of its replicas in these rows.

        Local replica i has the rows [offsets[i], offsets[i + 1]).
        """
        order = source.order
        lanes = [replica_lanes(order.lanes, i, self.num_replicas) for i in self._local_replicas]
        first, rows = lanes[0].start, order.batch_size // order.lanes
        offsets = [0, *((of_replica.stop - first) * rows for of_replica in lanes)]
        return range(first, lanes[-1].stop), offsets

    @no_autograph
    def _slice_for_replicas(self, batch: Batch, offsets: Sequence[int]) -> Batch:
        """Cuts this process's part of a batch into one slice for each local replica.

        Copies each slice to the device of its replica.
        """
        if len(self._local_replicas) == 1 and not self._has_gpus:
            return batch
        devices = self.strategy.extended.worker_devices

        def slice_of(context: tf.distribute.ReplicaContext | None = None) -> Batch:
            i = context.replica_id_in_sync_group - self._local_replicas.start if context else 0

            def copied(tensor: tf.Tensor) -> tf.Tensor:
                if len(self._local_replicas) > 1:
                    with tf.device("CPU:0"):
                        tensor = tensor[offsets[i] : offsets[i + 1]]
                with tf.device(devices[i]):
                    return tf.identity(tensor)

            return tf.nest.map_structure(copied, batch)

        if len(self._local_replicas) == 1:
            return slice_of()
        return self.strategy.experimental_distribute_values_from_function(slice_of)

    @no_autograph
    def _zero_totals(self, num_digests: int = 0) -> tf.Tensor:
        return tf.zeros([self._learner.num_totals + num_digests], tf.float64)

    @no_autograph
    def _summed_totals(self, totals: tf.Tensor, status: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums metric totals and `status` over all replicas, in one all-reduce."""
        joined = self.strategy.run(lambda t: tf.concat([t, status], axis=0), args=(totals,))
        summed = summed_with_key(joined, self.strategy, TOTALS_KEY)
        num_totals = summed.shape[0] - status.shape[0]
        return summed[:num_totals], summed[num_totals:]
