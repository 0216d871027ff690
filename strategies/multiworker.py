"""`--strategy=multiworker`: many processes, each with its replicas, gradients summed over a ring.

    executor = MultiWorkerExecutor.connect(cluster, Transfer(communication="ring"))

The step is that of mirrored.py: every worker runs the same graph on its part of each batch. The
all-reduce of the gradients synchronises the workers. On CPUs it is TensorFlow's ring, but two
workers exchange small vectors (gradients/all_reduce.py). On GPUs `--communication=nccl` is
NVIDIA's NCCL. Gradients are summed in buckets while the backward pass continues; their size follows
from the latency and the bandwidth of the network, which are measured once a run.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from data.system.compat.autograph import no_autograph
from data.system.compat.collective_abort import abort_collectives
from data.system.compat.determinism import timestamp
from data.system.compat.interpreter_lock import interpreter_lock_released
from data.system.errors import UsageError
from strategies.base import Batch, Tensor, num_bytes, present
from strategies.cluster.peers import AbsentPeerError, answer_at
from strategies.cluster.rendezvous import Connecting, Processes, wait_for_peers, watch_restarts
from strategies.cluster.tf_config import Cluster
from strategies.cluster.watching import silence_of, watch_peers
from strategies.division import Division, parts_of
from strategies.gradients.all_reduce import (
    GATHER_KEY,
    LEAST_BYTES,
    Network,
    all_reduced,
    best_bucket_mb,
    cpu_of_worker,
    summed_with_key,
)
from strategies.gradients.compression import Compression
from strategies.lost_peers import LOSSES, PeerLostError, loss_of
from strategies.metrics import Metrics
from strategies.mirrored import MirroredExecutor
from strategies.step_marks import StepMarks
from strategies.tables import ID_BYTES
from strategies.transfer import AS_COMPUTED, Transfer

log = logging.getLogger(__name__)

# Measured vectors, and how often each is summed in a measurement.
_SMALL_BYTES, _LARGE_BYTES = 1 << 8, 4 << 20
_SMALL_SUMS, _LARGE_SUMS = 20, 2
_MEASUREMENTS = 3
_LINGER_SECS = 0.3

# The errors TensorFlow raises when a peer of a collective has died or has given up.
_LOST = (*LOSSES, tf.errors.CancelledError)


@dataclass
class WorkerPeers:
    """The other workers. None can continue without them."""

    cluster: Cluster
    processes: Processes
    has_trained: threading.Event

    def watch(self, timeout_secs: float, on_lost: Callable[[str], None]) -> None:
        """Watches each other worker.

        In training a failed sum shows at once that a worker has died. Before its first step, until
        TensorFlow's heartbeat is missed, only its next process does.
        """
        watch_restarts(self.cluster, self.processes, on_lost, self.has_trained)
        watch_peers(self.cluster, timeout_secs, lambda t: on_lost(silence_of(self.cluster, [t])))

    def abandon(self, why: str) -> bool:
        """Ends all sums that wait for other workers."""
        abort_collectives(why)
        return True


class MultiWorkerExecutor(MirroredExecutor):
    """This worker's part of the replicas of every step."""

    _compression: Compression

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        cluster: Cluster,
        processes: Processes,
        transfer: Transfer = AS_COMPUTED,
    ) -> None:
        """`start` chooses the size of buckets if `transfer` has none."""
        self._cluster = cluster
        self._has_trained = threading.Event()
        compression = Compression(transfer.wire_dtype, int(strategy.num_replicas_in_sync))
        super().__init__(strategy, compression, cluster.trainers.index(cluster.task))
        self.is_chief = cluster.is_chief
        self.peers = WorkerPeers(cluster, processes, self._has_trained)
        self._transfer = transfer
        self._division: Division | None = None  # Of local steps that are counted by time.
        # Seconds of this worker from its last gradient to the last sum, in all steps so far.
        self._waited = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self._waited_before = 0.0

        @tf.function
        def gather(number: tf.Tensor) -> tf.Tensor:
            def at_own_index() -> tf.Tensor:
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                return tf.one_hot(replica, self.num_replicas, number, tf.zeros_like(number))

            # The sum of vectors that are zero at all indices but the replica's own.
            return summed_with_key(strategy.run(at_own_index), strategy, GATHER_KEY)

        self._gather_in_graph = gather

    @classmethod
    def connect(
        cls,
        cluster: Cluster,
        transfer: Transfer = AS_COMPUTED,
        connecting: Connecting = lambda *_: contextlib.nullcontext(),
    ) -> "MultiWorkerExecutor":
        """Joins the other workers; waits until all of them have started.

        Must be called before any TensorFlow op of this process. There is one replica for each
        visible GPU, or one on the CPU. The context of `connecting` watches the other workers while
        TensorFlow connects them.

        Raises:
            ClusterError: another program serves at a worker's address, or workers use different
                numbers of GPUs.
            PeerLostError: a worker started and died again meanwhile, or the name of its host stays
                unknown for a minute.
        """
        # The resolver reads the environment; evaluators do not belong to the training cluster.
        os.environ["TF_CONFIG"] = cluster.training_tf_config()
        try:
            processes = wait_for_peers(cluster, len(tf.config.get_visible_devices("GPU")))
        except AbsentPeerError as error:
            raise PeerLostError("A worker cannot be reached", error) from error
        log.info("All %d workers are there; connecting.", cluster.num("worker"))
        experimental = tf.distribute.experimental
        implementation = experimental.CommunicationImplementation[transfer.communication.upper()]
        options = experimental.CommunicationOptions(implementation=implementation)
        try:
            with connecting(cluster, processes), interpreter_lock_released():
                strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        except tf.errors.OpError as error:
            if not isinstance(error, _LOST) and loss_of(error) is None:
                raise
            raise PeerLostError("The workers could not connect to each other", error) from error
        return cls(strategy, cluster, processes, transfer)

    @override
    def _choose(self, recorded: Mapping[str, float]) -> Mapping[str, float]:
        """Chooses the given size of buckets, the recorded one, or the best one for the network.

        All workers use the chief's size: it decides in which order each element is summed.
        """
        learner = self._learner
        if learner.virtual_replicas and not cpu_of_worker(self.strategy):
            raise UsageError(
                f"config.virtual_replicas={learner.virtual_replicas} under multiworker needs one "
                "replica on the CPU of each worker: the order of sums between GPUs is that of "
                "NCCL. Type --replicas=1 --num_gpus=0, or --strategy=mirrored."
            )
        if self._has_gpus:
            self._transfer.check_between_gpus()
        gradient_bytes = sum(map(num_bytes, learner.variables[: learner.num_dense]))
        if self._transfer.bucket_mb is not None:
            recorded = {"bucket_mb": self._transfer.bucket_mb}
        bucket_bytes = self._bucket_bytes_of(recorded)
        if not bucket_bytes and gradient_bytes > LEAST_BYTES and self.num_replicas > 1:
            network = self.measure_network()
            recorded = {
                "bucket_mb": best_bucket_mb(gradient_bytes, network),
                "latency_ms": round(1e3 * network.latency_secs, 3),
                "mb_per_sec": round(1e-6 * network.bytes_per_sec, 1),
            }
            bucket_bytes = self._bucket_bytes_of(recorded)
        self._bucket_bytes = bucket_bytes or math.inf
        return recorded

    def _bucket_bytes_of(self, recorded: Mapping[str, float]) -> int:
        """The chief's bucket size; 0 if the chief has none."""
        return self.gathered(int(recorded.get("bucket_mb", 0) * 2**20))[0]

    def measure_network(self) -> Network:
        """The time of a small all-reduce, and the rate of a large one."""

        @tf.function
        def sum_repeatedly(vector: tf.Tensor, num_times: tf.Tensor) -> tf.Tensor:
            for _ in tf.range(num_times):  # Zeros, so that sums of sums do not overflow.
                vector = self.strategy.run(lambda v: all_reduced([v])[0], (vector,))
            return vector

        def secs_of(size: int, num_times: int) -> float:
            began = time.monotonic()
            sum_repeatedly(tf.zeros([size // 4]), tf.constant(num_times)).numpy()
            return (time.monotonic() - began) / num_times

        with self._losses_explained("while the network was measured"):
            for size in (_SMALL_BYTES, _LARGE_BYTES):
                secs_of(size, 1)  # Traces the graph.
            latency = min(secs_of(_SMALL_BYTES, _SMALL_SUMS) for _ in range(_MEASUREMENTS))
            large = min(secs_of(_LARGE_BYTES, _LARGE_SUMS) for _ in range(_MEASUREMENTS))
        return Network(latency, _LARGE_BYTES / max(large - latency, 1e-6))

    @override
    def row_bytes(self, width: int, value_bytes: int) -> int:
        """The id, and the gradient of its row, to each other worker."""
        sent = width * self._compression.value_bytes(value_bytes)
        return len(self._cluster.other_trainers) * (ID_BYTES + sent)

    @override
    def run(self, num_steps: int) -> Metrics:
        """Runs as many steps as the chief asks for: it has more hooks than the other workers."""
        return super().run(self.gathered(num_steps)[0])

    @override
    def gathered(self, number: int) -> list[int]:
        with self.stopwatch.spend("sum wait"), self._losses_explained("between steps"):
            gathered = self._gather_in_graph(tf.constant(number, tf.int64)).numpy()
        return [int(n) for n in gathered]

    @override
    def _new_marks(self) -> StepMarks:
        """A worker that is lost leaves sums without an end, so that each step is marked."""
        learner = self._learner
        return super()._new_marks() or StepMarks(self.strategy, learner.step, learner.forward_state)

    @override
    def _prepare_run(self) -> None:
        super()._prepare_run()
        local = self._learner.local_steps
        if local and local.every_secs:
            self._division = Division(local.every_secs, len(self._cluster.trainers))
            self._sum_in_graph = tf.function(self._summed_totals)

    @override
    def _sizes_of_rounds(self, num_steps: int) -> list[int]:
        local, division = self._learner.local_steps, self._division
        if local is None or division is None:
            return super()._sizes_of_rounds(num_steps)
        left = local.last_step - int(self._learner.step.numpy())
        return division.sizes(num_steps, left if left > 0 else math.inf)

    @override
    def _run_by_time(self, num_steps: int) -> tuple[tf.Tensor, tf.Tensor, Batch] | None:
        """Makes this worker's part of the steps of a round of `num_steps` batches."""
        division, rounds = self._division, self._rounds
        if division is None or rounds is None:
            return None
        trainers, began = self._cluster.trainers, time.monotonic()
        numbers, worker = division.of(num_steps), trainers.index(self._cluster.task)
        own, num_lanes = numbers[worker], self._source.order.lanes // len(trainers)
        lanes = [range(i * num_lanes, (i + 1) * num_lanes) for i in range(len(trainers))]
        parts = parts_of(worker, numbers, self._next_batch_of_rounds, lanes)
        totals, status, following = self._run_in_graph(
            self._feed.take_parts(parts),
            self._next_batch,
            tf.constant(own, tf.int64),
            self._own_status("run"),
        )
        for of_replica in self.strategy.experimental_local_results(totals):
            of_replica.numpy()  # Waits for the steps, also on a GPU.
        seconds = time.monotonic() - began
        rates = tf.one_hot(worker, len(trainers), own / seconds, dtype=tf.float64)
        summed, joined = self._sum_in_graph(totals, tf.concat([status, rates], axis=0))
        self.stopwatch.carve("sum wait", time.monotonic() - began - seconds)
        rounds.weight = tf.constant(own / num_steps, tf.float32)
        self._next_batch_of_rounds += num_steps
        # Each replica of a worker has added the rate.
        division.learn(joined.numpy()[2:] * len(trainers) / self.num_replicas)
        return summed, joined[:2], following

    @override
    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        self._next_batch_of_rounds = self.position.next_batch
        finished = super()._run(num_steps)
        self._has_trained.set()
        before, self._waited_before = self._waited_before, float(self._waited.numpy())
        self.stopwatch.carve("sum wait", self._waited_before - before)
        return finished

    @override
    @no_autograph
    def _all_reduced(
        self, gradients: Sequence[Tensor], exact: Sequence[Tensor] = ()
    ) -> Sequence[Tensor]:
        """Also measures the wait. On GPUs that is not possible: ops end before their kernels."""
        if not cpu_of_worker(self.strategy):
            return super()._all_reduced(gradients, exact)
        summed = super()._all_reduced(gradients, exact)
        # Created after the sums: a graph runs stateful ops that use no resource, such as timestamps
        # and handles, in the order of their creation, and a sum needs a handle.
        with tf.control_dependencies(present([*gradients, *exact])):
            computed = timestamp()
        with tf.control_dependencies(present(summed)):
            self._waited.assign_add(timestamp() - computed)
        return summed

    @override
    def close(self, exit_code: int = 0) -> None:
        """Waits for all workers, because the coordination service kills those that remain.

        The last sum is complete here a moment before another worker has received all of it, so this
        worker stays a little longer.
        """
        self.gathered(0)
        time.sleep(_LINGER_SECS)

    @override
    @contextlib.contextmanager
    def _losses_explained(self, when: str) -> Iterator[None]:
        """Raises PeerLostError for a failed collective; names the workers that do not answer.

        TensorFlow's own heartbeat may detect it before `peers.watch` does, but gives no name.
        """
        try:
            yield
        except _LOST as error:
            cluster, gone = self._cluster, ("silent", None)
            others = cluster.other_trainers
            absent = [task for task in others if answer_at(cluster.address_of(task)) in gone]
            what = f"{silence_of(cluster, absent)}: lost" if absent else "A worker was lost"
            raise PeerLostError(f"{what} {when}", error) from error
