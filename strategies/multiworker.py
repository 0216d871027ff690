"""`--strategy=multiworker`: many processes, each with its replicas, gradients summed over a ring.

    executor = MultiWorkerExecutor.connect(cluster, communication="ring")

The step is that of mirrored.py: every worker runs the same graph on its part of each batch. The
all-reduce of the gradients synchronises the workers. On CPUs it is TensorFlow's ring, but two
workers exchange small vectors (gradients/all_reduce.py). On GPUs `--communication=nccl` is
NVIDIA's NCCL.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

import tensorflow as tf
from typing_extensions import override

from strategies.base import PeerLostError
from strategies.cluster.peers import UnknownHostError, identify, wait_for_peers, watch_peers
from strategies.cluster.tf_config import Cluster
from strategies.metrics import Metrics
from strategies.mirrored import MirroredExecutor

# The errors TensorFlow raises when a peer of a collective has died or has given up.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class MultiWorkerExecutor(MirroredExecutor):
    """This worker's part of the replicas of every step."""

    def __init__(
        self, strategy: tf.distribute.Strategy, cluster: Cluster, *, wire_dtype: str = "float32"
    ) -> None:
        self._cluster = cluster
        super().__init__(strategy, wire_dtype=wire_dtype)
        self.is_chief = cluster.is_chief

        @tf.function
        def gather(number: tf.Tensor) -> tf.Tensor:
            def at_own_index() -> tf.Tensor:
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                return tf.one_hot(replica, self.num_replicas, number, tf.zeros_like(number))

            # The sum of vectors that are zero at all indices but the replica's own.
            return strategy.reduce("SUM", strategy.run(at_own_index), axis=None)

        self._gather_in_graph = gather

    @classmethod
    def connect(
        cls, cluster: Cluster, communication: str, *, wire_dtype: str = "float32"
    ) -> "MultiWorkerExecutor":
        """Joins the other workers; waits until all of them have started.

        Must be called before any TensorFlow op of this process. There is one replica for each
        visible GPU, or one on the CPU.

        Raises:
            ClusterError: a host name cannot be resolved.
            PeerLostError: a worker started and died again meanwhile.
        """
        # The resolver reads the environment; evaluators do not belong to the training cluster.
        os.environ["TF_CONFIG"] = cluster.training_tf_config()
        wait_for_peers(cluster)
        experimental = tf.distribute.experimental
        implementation = experimental.CommunicationImplementation[communication.upper()]
        options = experimental.CommunicationOptions(implementation=implementation)
        try:
            strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        except _LOST as error:
            raise PeerLostError("The workers could not connect to each other", error) from error
        return cls(strategy, cluster, wire_dtype=wire_dtype)

    @override
    def run(self, num_steps: int) -> Metrics:
        """Runs as many steps as the chief asks for: it has more hooks than the other workers."""
        return super().run(self.gathered(num_steps)[0])

    @override
    def gathered(self, number: int) -> list[int]:
        with self._losses_explained("between steps"):
            gathered = self._gather_in_graph(tf.constant(number, tf.int64)).numpy()
        return [int(n) for n in gathered]

    @override
    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        with self._losses_explained("during a step"):
            return super()._run(num_steps)

    @override
    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        with self._losses_explained("in evaluation"):
            return super()._evaluate(first_batch, num_batches)

    @override
    def watch_peers(self, timeout_secs: float, on_lost: Callable[[str], None]) -> None:
        """Each worker watches all others: none can continue without them."""
        watch_peers(self._cluster, timeout_secs, lambda t: on_lost(f"{t} does not answer"))

    @override
    def close(self, exit_code: int = 0) -> None:
        """Waits for all workers, because the coordination service kills those that remain."""
        self.gathered(0)

    @contextlib.contextmanager
    def _losses_explained(self, when: str) -> Iterator[None]:
        """Raises PeerLostError for a failed collective; names the first unresponsive worker.

        TensorFlow's own heartbeat may detect it before `watch_peers` does, but gives no name.
        """
        try:
            yield
        except _LOST as error:
            what = f"A worker was lost {when}"
            for task in self._cluster.other_trainers:
                with contextlib.suppress(UnknownHostError):
                    if identify(self._cluster.address_of(task)) == "silent":
                        what += f"; {task} does not answer"
                        break
            raise PeerLostError(what, error) from error

    @override
    def _replicas_of_this_process(self) -> range:
        trainers = self._cluster.trainers
        per_worker = self.num_replicas // len(trainers)
        first = trainers.index(self._cluster.task) * per_worker
        return range(first, first + per_worker)
