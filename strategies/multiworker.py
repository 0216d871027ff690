"""`--strategy=multiworker`: many processes, each with its replicas, gradients summed over a ring.

    executor = MultiWorkerExecutor.connect(cluster, communication="ring")

Every worker runs the same loop and the same graph on its share of each batch; the all-reduce of
the gradients is what keeps them in step. On CPUs the collectives are TensorFlow's own ring, but for
small gradients of two workers (strategies/exchange.py); on GPUs `--communication=nccl` uses
NVIDIA's.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from strategies.base import Metrics, PeerLostError
from strategies.cluster import Cluster, Task
from strategies.exchange import Exchange
from strategies.mirrored import MirroredExecutor
from strategies.peers import UnknownHostError, identify, wait_for_peers, watch_peers

# What TensorFlow raises when a peer of a collective is gone or has given up.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


def _exchange(strategy: Any, cluster: Cluster) -> Exchange | None:
    """For two processes of one replica each, on a CPU."""
    if not len(cluster.trainers) == strategy.num_replicas_in_sync == 2:
        return None
    (device,) = strategy.extended.worker_devices
    on_cpu = tf.DeviceSpec.from_string(device).device_type == "CPU"
    return Exchange(device) if on_cpu else None


class MultiWorkerExecutor(MirroredExecutor):
    """This worker's share of the replicas of every step."""

    def __init__(self, strategy: Any, cluster: Cluster, *, wire_dtype: str = "float32") -> None:
        """Uses `strategy`, a MultiWorkerMirroredStrategy of `cluster`."""
        self._cluster = cluster
        exchange = _exchange(strategy, cluster)
        super().__init__(strategy, wire_dtype=wire_dtype, exchange=exchange)
        self.is_chief = cluster.is_chief

        @tf.function
        def everyones(number: Any) -> Any:
            def at_own_place() -> Any:
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                return tf.one_hot(replica, self.num_replicas, number, tf.zeros_like(number))

            return strategy.reduce("SUM", strategy.run(at_own_place), axis=None)

        self._everyones = everyones

    @classmethod
    def connect(
        cls,
        cluster: Cluster,
        communication: str,
        unknown_host_secs: float,
        *,
        wire_dtype: str = "float32",
    ) -> "MultiWorkerExecutor":
        """Joins the other workers, however long they take to start.

        Must come before any TensorFlow op of this process. One replica for each GPU that is
        visible, or one CPU.

        Raises:
            ClusterError: the name of a host is still unknown after `unknown_host_secs`.
            PeerLostError: a worker came up and went away again.
        """
        # The resolver reads the environment; evaluators are no part of the training cluster.
        os.environ["TF_CONFIG"] = cluster.training_tf_config()
        wait_for_peers(cluster, unknown_host_secs)
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation[
                communication.upper()
            ]
        )
        try:
            strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        except _LOST as error:
            raise PeerLostError("The workers did not come together", error) from error
        return cls(strategy, cluster, wire_dtype=wire_dtype)

    def run(self, num_steps: int) -> Metrics:
        """See Executor. As many steps as the chief asks for: it has more hooks than the others."""
        return super().run(self.everyones(num_steps)[0])

    def everyones(self, number: int) -> list[int]:
        """See Executor."""
        try:
            numbers: list[int] = self._everyones(tf.constant(number, tf.int64)).numpy().tolist()
        except _LOST as error:
            raise self._lost("between steps", error) from error
        return numbers

    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        """See Executor. Together with all other workers."""
        try:
            return super()._run(num_steps)
        except _LOST as error:
            raise self._lost("during a step", error) from error

    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        try:
            return super()._evaluate(first_batch, num_batches)
        except _LOST as error:
            raise self._lost("in evaluation", error) from error

    def watch_peers(self, timeout_secs: float, on_lost: Callable[[str], None]) -> None:
        """See Executor. Nobody can go on without all others."""
        watch_peers(
            self._cluster,
            self._others,
            timeout_secs,
            lambda task: on_lost(f"{task} does not answer"),
        )

    def close(self, exit_code: int = 0) -> None:
        """Waits for all: the coordination service ends those whom a worker leaves behind."""
        self._barrier()

    def _barrier(self) -> None:
        @tf.function
        def meet() -> Any:
            return self.strategy.reduce("SUM", self.strategy.run(lambda: tf.ones([])), axis=None)

        try:
            meet()
        except _LOST as error:
            raise PeerLostError("A worker was lost at the end", error) from error

    def _lost(self, when: str, cause: Exception) -> PeerLostError:
        """The error of a collective that failed; names the first worker that stands still.

        TensorFlow's own heartbeat may find them before `watch_peers` does, and tells no names.
        """
        what = f"A worker was lost {when}"
        for task in self._others:
            with contextlib.suppress(UnknownHostError):
                if identify(self._cluster.address_of(task)) == "silent":
                    return PeerLostError(f"{what}; {task} does not answer", cause)
        return PeerLostError(what, cause)

    @property
    def _others(self) -> list[Task]:
        return [task for task in self._cluster.trainers if task != self._cluster.task]

    def _replicas_of_this_process(self) -> range:
        trainers = self._cluster.trainers
        per_worker = self.num_replicas // len(trainers)
        first = trainers.index(self._cluster.task) * per_worker
        return range(first, first + per_worker)
