"""`--strategy=ps`: variables on parameter servers, gradients from workers that do not wait.

    executor = ParameterServerExecutor.connect(cluster, 60)  # in the chief, which ends the others

The chief hands out *tickets*: k consecutive batches, as a list of what to read from which shard, or
of rows where workers keep the examples. A worker reads them in the graph, so that no input state is
lost with it but a copy that it makes anew, and applies k gradients, each of one batch, straight to
the variables. What a worker had in flight when it died is handed out again (at least once); the
others go on meanwhile.
"""

import collections
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import tensorflow as tf

from data.kept import ticket_source
from strategies.base import (
    Executor,
    Learner,
    Made,
    Metrics,
    PeerLostError,
    Position,
    Tensor,
    refuse_open_shares,
    to_metrics,
)
from strategies.closures import STEPS_PER_CLOSURE, Closure, closure_sizes, fetched, unpacked
from strategies.cluster import Cluster, Task
from strategies.counts import Counts, added, with_shares
from strategies.packing import evaluated_with, read_together
from strategies.peers import (
    SilentPeerError,
    UnknownHostError,
    cut_connections,
    identify,
    wait_for_servers,
    watch_peers,
)
from strategies.placement import place, placed, record
from strategies.ports import free_ports
from strategies.ps_server import check_versions, end_servers, listen_for_stop
from strategies.ps_steps import DROPPED, AsynchronousSteps, unstack
from strategies.wire import Wire

log = logging.getLogger(__name__)

_LEASE_SECS = 0.5

# What a task answers to a request with a torn device name in it. Seen once, perhaps twice, in
# hundreds of runs, when several threads copied results of a run's first closures or evaluation:
# most likely a race within TensorFlow, of a function that runs with one that is being made.
_TORN_REQUEST = "Unable to parse request"

_KEPT: list["ParameterServerExecutor"] = []


class ParameterServerExecutor(Executor):
    """The chief's hold on the workers: it hands out tickets, and does not train."""

    def __init__(
        self,
        strategy: Any,
        cluster: Cluster,
        *,
        max_staleness: int | None = None,
        wire_dtype: str = "float32",
    ) -> None:
        """Uses `strategy`, a ParameterServerStrategy of `cluster` and, if that names none, a chief.

        A gradient that is older than `max_staleness` steps when it could be applied is dropped,
        and its batch handed out again; None applies all.
        """
        super().__init__()
        self.strategy = strategy
        self._cluster = cluster
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._max_staleness = max_staleness
        self._wire = Wire(wire_dtype)
        self._worker_finished: collections.Counter[str] = collections.Counter()
        self._worker_dropped: collections.Counter[str] = collections.Counter()
        self._staleness: dict[str, collections.Counter[int]] = collections.defaultdict(
            collections.Counter
        )
        self._counts_before: Counts = {}
        # Until the process ends: destructors of closures would call servers that have ended.
        _KEPT.append(self)
        self.io_device = "/job:chief/replica:0/task:0/device:CPU:0"

    @classmethod
    def connect(
        cls,
        cluster: Cluster,
        unknown_host_secs: float,
        versions: Mapping[str, str],
        **options: Any,
    ) -> Self:
        """Connects to all worker and ps tasks, however long they take to start.

        Where no chief is named, this is worker 0, which serves already; the coordinator beside it
        gets an address of its own, which the others learn when it connects. `versions` are what
        this task runs; `options` are the executor's own.

        Raises:
            ClusterError: what is at an address is no such task, or runs other versions, or the name
                of a host is still unknown after `unknown_host_secs`.
            PeerLostError: a task came up and went away again, or serves another chief.
        """
        try:
            wait_for_servers(cluster, unknown_host_secs)
        except SilentPeerError as error:
            raise PeerLostError("A task does not answer", error) from error
        with losses_explained():
            check_versions(cluster, _others(cluster), versions)
        coordinator = cluster
        if cluster.task.job != "chief":
            host = cluster.address.rpartition(":")[0]
            coordinator = cluster.with_chief(f"{host}:{free_ports(1)[0]}")
        os.environ["TF_CONFIG"] = coordinator.training_tf_config()
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        try:
            strategy = tf.distribute.ParameterServerStrategy(resolver)
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise PeerLostError("A task went away while all connected", error) from error
        _take_lease(coordinator)
        executor = cls(strategy, cluster, **options)
        with losses_explained():
            listen_for_stop(cluster, executor._stop_for)
        return executor

    def build(self, make: Callable[[], Made]) -> Made:
        """See Executor. Called twice: sizes must be known before the first variable is placed."""
        _, groups = record(make)
        self._placement = place(groups, self._cluster.num("ps"), num_staged=self._num_staged)
        with self.strategy.scope(), placed(self._placement):
            return make()

    def placement_table(self) -> str:
        """See Executor."""
        return self._placement.table()

    @property
    def num_replicas(self) -> int:
        """Workers; each computes gradients of whole batches."""
        return self._cluster.num("worker")

    @property
    def replicas_a_step(self) -> int:
        """One: a step is one worker's gradient."""
        return 1

    @property
    def _num_staged(self) -> int:
        """Gradients of each variable that are kept beside it."""
        return 0

    @property
    def position(self) -> Position:
        """The next batch to hand out; all before it are consumed when `run` has returned."""
        return Position(self._next_batch, (), self._skipped)

    def counts(self) -> Counts:
        """See Executor.

        | name | of each worker |
        | --- | --- |
        | worker_steps | gradients that became part of a step |
        | worker_examples | the examples that these covered |
        | worker_share | its part of all worker_steps |
        | worker_dropped | gradients that were too old |
        | worker_repeated | gradients whose examples were handed out again all the same |
        """
        return with_shares(added(self._counts_before, self._counts_since_start()))

    def go_on_counting(self, counts: Counts) -> None:
        """See Executor."""
        self._counts_before = counts

    def _counts_since_start(self) -> Counts:
        """What this process has seen.

        `worker_steps` are counted where the variables are. They were repeated if the worker was
        lost before it had said so. (One that is lost between a step and its count leaves a step
        that is nobody's.) `staleness` is of the gradients in finished tickets; `batches` sums up:
        applied are finished and repeated ones.
        """
        applied = dict(zip(self._workers(), self._steps.applied.numpy().tolist(), strict=True))
        finished = sum(self._worker_finished.values())
        batch_size = self._source.order.batch_size
        return {
            "worker_steps": applied,
            "worker_examples": {name: steps * batch_size for name, steps in applied.items()},
            "worker_dropped": {name: self._worker_dropped[name] for name in applied},
            "worker_repeated": {
                name: steps - self._worker_finished[name] for name, steps in applied.items()
            },
            "staleness": {name: dict(sorted(self._staleness[name].items())) for name in applied},
            "batches": {
                "handed_out": self._next_batch - self._first_batch,
                "finished": finished,
                "repeated": int(self._learner.step.numpy()) - self._first_step - finished,
            },
        }

    def _workers(self) -> list[str]:
        return [f"worker {index}" for index in self._cluster.jobs["worker"]]

    def start(self, learner: Learner, source: Any, evaluation: Any, position: Position) -> None:
        """See Executor."""
        self._set_up(learner, source, evaluation)
        self._steps = AsynchronousSteps(
            self.strategy,
            learner,
            self._source,
            self._wire,
            num_workers=self.num_replicas,
            max_staleness=self._max_staleness,
        )
        self._train_unrolled, self._train_looped = self._steps.closures()
        self._seek(position)

    def _forget(self) -> None:
        """See Executor."""
        if self._wire.rounds:
            self._wire.forget()
            self._train_unrolled, self._train_looped = self._steps.closures()

    def _seek(self, position: Position) -> None:
        """See Executor."""
        refuse_open_shares(position, self._source.order)
        self._begin_at(position)
        self._steps.applied.assign(tf.zeros_like(self._steps.applied))

    def _begin_at(self, position: Position) -> None:
        """What is counted on the chief begins at 0, and the first batch is that of `position`."""
        self._first_batch = self._next_batch = position.next_batch
        self._skipped = position.skipped
        self._first_step = int(self._learner.step.numpy())
        for counted in (self._worker_finished, self._worker_dropped, self._staleness):
            counted.clear()

    def _set_up(self, learner: Learner, source: Any, evaluation: Any) -> None:
        """What training has in common however gradients are combined."""
        self._learner = learner
        self._source = ticket_source(source)
        self._evaluation = evaluation
        per_worker = -(-evaluation.num_evaluation_batches // self.num_replicas)
        self._evaluation_ticket_batches = min(per_worker, STEPS_PER_CLOSURE)
        self._evaluate_closure = self._make_evaluate_closure(self._evaluation_ticket_batches)

    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        """See Executor. A few more steps if a worker died over a ticket half done."""
        started = time.monotonic()
        sizes = closure_sizes(
            num_steps, self.num_replicas, self._source.ticket_runs(self._next_batch)
        )
        tickets: list[tuple[int, int]] = []
        for size in sizes:
            tickets.append((self._next_batch, size))
            self._next_batch += size
        sums = np.zeros([len(self._learner.metric_names), 2])
        while tickets:
            closures = [(first, self._schedule_steps(first, size)) for first, size in tickets]
            self._join()
            tickets = []
            for first, closure in closures:
                closure_sums, worker, ages = unpacked(fetched(closure), sums.shape)
                sums += closure_sums
                self._count(f"worker {worker}", ages)
                # What was dropped is handed out again, a batch at a time.
                tickets += [(first + int(i), 1) for i in np.flatnonzero(ages == DROPPED)]
        self._stopping = self._stop_requested
        return to_metrics(self._learner.metric_names, sums), time.monotonic() - started

    def _count(self, worker: str, ages: Any) -> None:
        """Books the staleness of each of a worker's gradients, or that it was dropped."""
        for age, number in zip(*np.unique(ages, return_counts=True), strict=True):
            if age == DROPPED:
                self._worker_dropped[worker] += int(number)
            else:
                self._worker_finished[worker] += int(number)
                self._staleness[worker][int(age)] += int(number)

    @property
    def _num_evaluation_batches(self) -> int:
        return int(self._evaluation.num_evaluation_batches)

    @property
    def _evaluation_unit(self) -> int:
        """A ticket for each worker."""
        return int(self._evaluation_ticket_batches * self.num_replicas)

    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        """See Executor. Spread over the workers."""
        started = time.monotonic()
        size = self._evaluation_ticket_batches
        end = min(first_batch + num_batches, self._num_evaluation_batches)
        closures = [
            self._schedule(self._evaluate_closure, self._evaluation.evaluation_ticket(first, size))
            for first in range(first_batch, end, size)
        ]
        self._join()
        if first_batch == 0:
            self._evaluation_sums = np.zeros([len(self._learner.metric_names), 2])
        for closure in closures:
            self._evaluation_sums += fetched(closure)
        self._stopping = self._stop_requested
        metrics = to_metrics(self._learner.metric_names, self._evaluation_sums)
        return metrics, time.monotonic() - started

    def watch_peers(self, timeout_secs: float, on_lost: Callable[[str], None]) -> None:
        """See Executor. The others go on without a worker, until it answers again."""

        def on_silent(task: Task) -> None:
            if task.job == "ps":
                on_lost(f"{task} does not answer")
            # What it has in hand is then handed out again.
            with contextlib.suppress(UnknownHostError):
                cut_connections(self._cluster.address_of(task))

        watch_peers(self._cluster, _others(self._cluster), timeout_secs, on_silent)

    def close_after_error(self, *, lost: bool) -> None:
        """See Executor."""
        if not lost:
            self.close()

    def close(self, exit_code: int = 0) -> None:
        """Ends every worker and ps task with `exit_code`."""
        for task in end_servers(self._cluster, _others(self._cluster), exit_code):
            log.warning("%s does not answer: it was not told that the run is over.", task)

    def _stop_for(self, task: str) -> None:
        log.warning("%s was asked to end: stopping after the steps under way.", task)
        self.request_stop()

    def _schedule_steps(self, first_batch: int, size: int) -> Any:
        train = self._train_unrolled if size == STEPS_PER_CLOSURE else self._train_looped
        return self._schedule(train, self._source.ticket(first_batch, size))

    def _schedule(self, closure: Closure, ticket: Any) -> Any:
        """Hands `closure` to the next idle worker, with `ticket`.

        The coordinator would make tensors of arrays on the worker's device, and that holds Python's
        lock: while the worker does not answer, no thread of this process would run.
        """
        with losses_explained(), tf.device(self.io_device):
            return closure.schedule(self._coordinator, tf.nest.map_structure(tf.constant, ticket))

    def _join(self) -> None:
        with losses_explained():
            self._coordinator.join()

    def _make_evaluate_closure(self, size: int) -> Closure:
        source, learner, strategy = self._evaluation, self._learner, self.strategy

        @tf.function(input_signature=[source.ticket_spec(size, weights=True)])
        def evaluate(ticket: Any) -> Tensor:
            batches = unstack(source.parse_ticket(ticket), size)
            # Nothing changes meanwhile: all batches have what is read once.
            _, values = read_together(learner.evaluated_with, [], learner.step.device)
            return tf.add_n([evaluated_with(values, learner, strategy, b) for b in batches])

        return Closure(evaluate)


def _others(cluster: Cluster) -> list[Task]:
    return [task for task in cluster.trainers if task != cluster.task]


def _take_lease(coordinator: Cluster) -> None:
    """Returns if these servers are this chief's alone; they would serve two, and stop both.

    Raises:
        PeerLostError: another chief, who still answers, holds them.
    """
    device = "/job:ps/replica:0/task:0/device:CPU:0"
    key = tf.constant([0], tf.int64)
    with tf.device(device):
        table = tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.string, shared_name="chief of these servers"
        )

        def holder() -> str:
            found = tf.raw_ops.LookupTableFindV2(
                table_handle=table, keys=key, default_value=tf.constant("")
            )
            return str(found.numpy()[0].decode())

        chief = holder()
        if chief in ("", coordinator.address) or identify(chief) != coordinator.task:
            tf.raw_ops.LookupTableInsertV2(
                table_handle=table, keys=key, values=tf.constant([coordinator.address])
            )
            time.sleep(_LEASE_SECS)  # Another that comes at the same moment writes after this one.
            chief = holder()
    if chief != coordinator.address:
        raise PeerLostError(
            "The servers serve another chief",
            RuntimeError(f"it is at {chief}. Start this one when that one is done"),
        )


@contextlib.contextmanager
def losses_explained() -> Iterator[None]:
    """Turns TensorFlow's error for a ps that is gone into ours; of a worker it raises none.

    Raises:
        PeerLostError: a parameter server was lost, or a message.
    """
    try:
        yield
    except (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.DeadlineExceededError,  # Of a message.
    ) as error:
        raise PeerLostError("A parameter server was lost", error) from error
    except tf.errors.InternalError as error:
        if _TORN_REQUEST not in str(error):
            raise
        raise PeerLostError("A message to another task was torn", error) from error
