"""What both kinds of parameter servers share: the chief, which hands out work and does not train.

    executor = AsynchronousExecutor.connect(cluster, versions, connecting)  # or SynchronousExecutor
    learner = executor.build(make_learner)          # places the variables on the servers
    executor.start(learner, source, evaluation, Position())
    metrics = executor.run(100)
    executor.close()                                # ends all worker and ps tasks

The base class connects, places the variables, evaluates, watches the other tasks and ends them. The
subclasses train.
"""

import abc
import contextlib
import gc
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import tensorflow as tf
from typing_extensions import override

from data.order import Plan
from data.reader import Reader
from data.system.compat.closure_threads import own_executors
from data.system.compat.connections import cut_connections
from data.system.compat.lookup_tables import capture_outside_of_branches
from data.tickets import DiskTickets, ticket_source
from strategies.base import STEPS, Executor, Made, Tensor
from strategies.cluster.peers import (
    AbsentPeerError,
    all_answer,
    host_of,
    identify,
    port_of,
    wait_for_servers,
)
from strategies.cluster.ports import free_ports
from strategies.cluster.rendezvous import Connecting
from strategies.cluster.tf_config import Cluster, Task
from strategies.cluster.watching import silence_of, watch_peers
from strategies.gradients.coalescing import read_together
from strategies.gradients.compression import Compression
from strategies.lost_peers import PeerLostError, losses_explained
from strategies.metrics import Metrics
from strategies.position import Position, Reached
from strategies.ps.closures import STEPS_PER_CLOSURE, Closure, fetched
from strategies.ps.former_state import NamedTensors, ps_device
from strategies.ps.placement import dry_run, place, placed
from strategies.ps.recovery import ServerRecovery
from strategies.ps.servers import check_versions, end_servers, listen_for_losses, listen_for_stop
from strategies.ps.worker_step import compute_metrics
from strategies.tables import ID_BYTES
from strategies.transfer import Transfer
from strategies.worker_stats import WorkerStats, added, with_shares

log = logging.getLogger(__name__)

_LEASE_SECS = 0.5
_ASK_AGAIN_SECS = 10.0

# Executors live until the process ends: destructors of closures would call servers that have ended.
_KEEP_ALIVE: list["ParameterServerExecutor"] = []


@dataclass
class ServerPeers:
    """The worker and ps tasks. Training continues without a silent worker, until it answers."""

    cluster: Cluster

    def watch(self, timeout_secs: float, on_lost: Callable[[str], None]) -> None:
        """Calls `on_lost` for a silent ps; has the work of a silent worker done by another one."""

        def on_silent(task: Task) -> None:
            if task.job == "ps":
                on_lost(silence_of(self.cluster, [task]))
            # The coordinator then gives the worker's closure to another worker.
            address = self.cluster.address_of(task)
            with contextlib.suppress(socket.gaierror):
                cut_connections(host_of(address), port_of(address))

        watch_peers(self.cluster, timeout_secs, on_silent)

    def abandon(self, why: str) -> bool:
        """Not possible: calls to a silent server have no end."""
        return False


class ParameterServerExecutor(Executor):
    """The chief of one kind of parameter servers, without the training."""

    recovery: ServerRecovery

    def __init__(
        self, strategy: tf.distribute.ParameterServerStrategy, cluster: Cluster, transfer: Transfer
    ) -> None:
        """`strategy` connects to the tasks of `cluster`, and to a chief if that has none.

        `transfer` has the types in which workers send gradients, and are sent the variables.
        """
        super().__init__(strategy, num_replicas=cluster.num("worker"))
        capture_outside_of_branches()
        self._cluster = cluster
        self.peers = ServerPeers(cluster)
        self.recovery = ServerRecovery(cluster, self._store_progress, self.reached)
        with own_executors():
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._compression = Compression(transfer.wire_dtype)
        self._read_dtype = transfer.read_dtype
        self._has_run = False
        self._ask_after = -math.inf  # Until this time `_may_send_graph` asks no task.
        # The number of gradients of each variable that its server stores.
        self._num_gradient_buffers = 0
        _KEEP_ALIVE.append(self)
        self.io_device = "/job:chief/replica:0/task:0/device:CPU:0"

    @classmethod
    def connect(
        cls,
        cluster: Cluster,
        versions: Mapping[str, str],
        connecting: Connecting,
        **options: Any,  # Arguments of __init__, which differ between the subclasses.
    ) -> Self:
        """Connects to all worker and ps tasks, and waits until they have started.

        If the cluster has no chief, this task is worker 0, which serves already. The coordinator in
        the same process then gets a second address, which the other tasks learn when it connects.
        `versions` are the versions of this task. The context of `connecting` watches the other
        tasks while TensorFlow connects to them.

        Raises:
            ClusterError: a task has another name or runs other versions than it should.
            PeerLostError: a task started and went away again, or serves another chief, or the name
                of its host stays unknown for a minute.
        """
        try:
            wait_for_servers(cluster)
        except AbsentPeerError as error:
            raise PeerLostError("A task cannot be reached", error) from error
        coordinator = cluster
        if cluster.task.job != "chief":
            host = cluster.address.rpartition(":")[0]
            coordinator = cluster.with_chief(f"{host}:{free_ports(1)[0]}")
        with losses_explained("A worker or parameter server was lost while this task connected"):
            with connecting(cluster, {}):
                check_versions(cluster, cluster.other_trainers, versions)
                os.environ["TF_CONFIG"] = coordinator.training_tf_config()
                resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
                strategy = tf.distribute.ParameterServerStrategy(resolver)
                _take_lease(coordinator)
            executor = cls(strategy, cluster, **options)
            listen_for_stop(cluster, executor._stop_for)
            listen_for_losses(cluster)
        return executor

    @override
    def build(self, make: Callable[[], Made]) -> Made:
        """Calls `make` twice: sizes must be known before the first variable is placed."""
        _, groups = dry_run(make)
        num_ps = self._cluster.num("ps")
        placement = place(groups, num_ps, num_gradient_buffers=self._num_gradient_buffers)
        self.placement = placement.table()
        with self.strategy.scope(), placed(placement):
            return make()

    @override
    def row_bytes(self, width: int, value_bytes: int) -> int:
        """The id goes to the server, the row to the worker, and both return with the gradient."""
        read = Compression(self._read_dtype).value_bytes(value_bytes)
        sent = self._compression.value_bytes(value_bytes)
        return 2 * ID_BYTES + width * (read + sent)

    @override
    def run(self, num_steps: int) -> Metrics:
        metrics = super().run(num_steps)
        if not self._has_run:
            self._has_run = True
            # Now, when all workers have just answered: in the middle of the run one of them may be
            # silent, and the graph of the evaluation would wait for it.
            if self._evaluation.num_evaluation_batches:
                with self.stopwatch.spend("graph"):
                    self._evaluate_closure.trace(self.strategy)
            # When a traced function is collected, TensorFlow waits until all tasks have removed it,
            # and holds Python's lock: no thread would run while a worker is silent. Building has
            # left such functions behind: they are removed now, and later collections skip the rest.
            gc.collect()
            gc.freeze()
        return metrics

    @override
    def _losses_explained(self, when: str) -> contextlib.AbstractContextManager[None]:
        return losses_explained()

    @override
    def worker_stats(self) -> WorkerStats:
        """Counts of the whole run.

        | name | of each worker |
        | --- | --- |
        | worker_steps | gradients that became part of a step |
        | worker_examples | the examples of these gradients |
        | worker_share | its part of all worker_steps |
        | worker_dropped | gradients that were too old |
        | worker_repeated | gradients whose examples were assigned again, see below |

        worker_repeated has another meaning in each kind. Asynchronous: gradients that were applied,
        but whose worker was lost before it reported them. Synchronous: gradients in time that were
        overwritten before they could be summed.
        """
        return with_shares(added(self.counts_before, self._counts_since_start()))

    @abc.abstractmethod
    def _counts_since_start(self) -> WorkerStats:
        """The counts of this process, which is a part of the run if the run was resumed."""

    def _workers(self) -> list[str]:
        return [f"worker {index}" for index in self._cluster.jobs["worker"]]

    @override
    def _prepare(self, source: Reader, position: Position) -> None:
        self._source, evaluation = ticket_source(source), self._evaluation
        per_worker = -(-evaluation.num_evaluation_batches // self.num_replicas)
        self._evaluation_tickets = DiskTickets(evaluation, weights=True)
        self._evaluation_ticket_batches = min(per_worker, STEPS_PER_CLOSURE)
        self._evaluate_closure = self._make_evaluate_closure()
        self._make_graphs()
        self._set_position(position)

    @override
    def return_to_complete_step(self) -> Reached | None:
        """After an error within a step: takes over what the servers keep, as a next chief would."""
        if self._changing != STEPS or not self.recovery.is_published:
            return super().return_to_complete_step()
        return self.recovery.return_to_complete_step()

    @abc.abstractmethod
    def _store_progress(
        self, saved: Sequence[tf.Variable]
    ) -> tuple[Sequence[tf.Variable], dict[str, object]]:
        """See recovery.StoreProgress."""

    def _facts(self, saved: Sequence[tf.Variable], **of_kind: object) -> dict[str, object]:
        """What the next chief must know besides `saved`, JSON values: `of_kind` and three more."""
        step = next(i for i, variable in enumerate(saved) if variable is self._learner.step)
        common = {"step": step, "workers": self._workers(), "counts_before": self.counts_before}
        return {**common, **of_kind}

    @override
    def roll_back(self, restore: Callable[[], tuple[Position, WorkerStats]]) -> None:
        with self.recovery.withdrawn():
            super().roll_back(restore)

    @override
    def _drop_kept(self) -> None:
        if self._compression.is_lossy:
            self._compression.forget_residuals()
            self._make_graphs()

    @abc.abstractmethod
    def _make_graphs(self) -> None:
        """Makes the graphs of training; called by `start`, and again after residuals are reset."""

    @property
    @override
    def _evaluation_unit(self) -> int:
        return self._evaluation_ticket_batches * self.num_replicas

    @override
    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        started = time.monotonic()
        size = self._evaluation_ticket_batches
        end = min(first_batch + num_batches, self._evaluation.num_evaluation_batches)
        closures = [
            self._schedule(self._evaluate_closure, self._evaluation_tickets.ticket(first, size))
            for first in range(first_batch, end, size)
        ]
        self._coordinator.join()
        if first_batch == 0:
            self._evaluation_totals = np.zeros([self._learner.num_totals])
        for closure in closures:
            self._evaluation_totals += fetched(closure)
        self.stopping = self.stop_requested
        metrics = self._learner.to_metrics(self._evaluation_totals)
        return metrics, time.monotonic() - started

    def _make_evaluate_closure(self) -> Closure:
        source, learner, strategy = self._evaluation_tickets, self._learner, self.strategy
        size = self._evaluation_ticket_batches

        @tf.function(input_signature=[source.ticket_spec(size)])
        def evaluate(ticket: dict[str, Tensor]) -> Tensor:
            stacked = source.parse_ticket(ticket)
            # Variables do not change during an evaluation, so they are read once for all batches.
            _, values = read_together(learner.evaluation_inputs, [], learner.step.device)
            totals = tf.zeros([learner.num_totals], tf.float64)
            # A loop: the first evaluation would wait for the tracing of `size` copies of the model.
            for i in tf.range(size):
                batch = tf.nest.map_structure(lambda t, i=i: t[i], stacked)
                totals += compute_metrics(values, learner, strategy, batch)
            return totals

        return Closure(evaluate)

    def _schedule(self, closure: Closure, ticket: Plan) -> tf.distribute.coordinator.RemoteValue:
        """Gives `closure` and `ticket` to the next idle worker; returns the remote result.

        Arrays become tensors of this process here. The coordinator would make the tensors on the
        worker's device, and would hold Python's global lock meanwhile: while the worker does not
        answer, no thread of this process would run.
        """
        with tf.device(self.io_device):
            return closure.schedule(self._coordinator, tf.nest.map_structure(tf.constant, ticket))

    def _may_send_graph(self) -> bool:
        """Returns True if all tasks answer, so that a new graph can be traced.

        TensorFlow sends it to all tasks, and waits for the answer of each of them. When a task did
        not answer, the next question comes _ASK_AGAIN_SECS later at the earliest.
        """
        if time.monotonic() < self._ask_after:
            return False
        if all_answer(self._cluster):
            return True
        self._ask_after = time.monotonic() + _ASK_AGAIN_SECS
        return False

    @override
    def close(self, exit_code: int = 0) -> None:
        """Ends every worker and ps task with `exit_code`."""
        for task in end_servers(self._cluster, exit_code):
            log.warning("%s does not answer: it was not told that the run is over.", task)

    def _stop_for(self, task: str) -> None:
        log.warning("%s was asked to end: stopping after the steps in flight.", task)
        self.request_stop()


def _take_lease(coordinator: Cluster) -> None:
    """Takes the servers for this chief: servers would serve two chiefs, and both could end them."""
    lease = NamedTensors(ps_device(0), "chief of these servers")
    chief = lease.load_json()
    if chief in (None, coordinator.address) or identify(chief) != coordinator.task:
        lease.store_json(coordinator.address)
        # If another chief comes at the same moment, the last writer gets the servers.
        time.sleep(_LEASE_SECS)
        chief = lease.load_json()
    if chief != coordinator.address:
        raise PeerLostError(
            "The servers serve another chief",
            RuntimeError(f"it is at {chief}. Start this chief when the other one has ended"),
        )
