"""`--strategy=ps`: variables on parameter servers, gradients from workers that do not wait.

    executor = AsynchronousExecutor.connect(cluster, versions, connecting)  # in the chief

The chief hands out *tickets*: k consecutive batches, as a list of the records to read, or of the
rows to take if workers cache the examples. A worker reads them in the graph, so no input state is
lost with a worker. It computes k gradients, each of one batch, and each is applied to the variables
immediately. If a worker dies, its ticket is handed out again (at least once); the other workers
continue meanwhile.
"""

import collections
import concurrent.futures
import functools
import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from data.system.background import in_background
from strategies.base import value_of
from strategies.cluster.tf_config import Cluster
from strategies.metrics import Metrics
from strategies.position import Position, refuse_open_sub_batches
from strategies.ps.asynchronous_steps import AsynchronousSteps
from strategies.ps.closures import (
    closure_size,
    closure_sizes,
    fetched,
    pays_unrolling,
    unpacked,
)
from strategies.ps.executor import ParameterServerExecutor
from strategies.ps.former_tickets import DROPPED, HandedOut, counts_of, store_handed_out
from strategies.transfer import AS_COMPUTED, Transfer
from strategies.worker_stats import WorkerStats

# How often the chief stores what it has handed out.
_STORE_SECS = 1.0


class AsynchronousExecutor(ParameterServerExecutor):
    """The chief of asynchronous parameter servers: a step is one worker's gradient."""

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        cluster: Cluster,
        *,
        max_staleness: int | None = None,
        transfer: Transfer = AS_COMPUTED,
    ) -> None:
        """A gradient that is older than `max_staleness` steps when it arrives is dropped.

        Its batch is handed out again. None applies all gradients.
        """
        super().__init__(strategy, cluster, transfer)
        self.replicas_per_step = 1
        self._max_staleness = max_staleness
        # Of each worker, the number of gradients of each staleness, and of DROPPED.
        self._ages = collections.defaultdict[str, collections.Counter[int]](collections.Counter)
        self._size_to_trace: int | None = None  # Of the graph that the next call traces first.

    @property
    @override
    def position(self) -> Position:
        """The next batch to hand out; when `run` returns, all before it but open ones are done."""
        last = self._source.order.lanes - 1
        open_batches = tuple((batch, 0, last) for batch in self._open_batches)
        return Position(self._next_batch, open_batches, self._skipped)

    @override
    def _counts_since_start(self) -> WorkerStats:
        return counts_of(
            value_of(self._steps.applied),
            self._ages,
            self._workers(),
            batch_size=self._source.order.batch_size,
            num_handed_out=self._num_handed_out,
            num_steps=int(value_of(self._learner.step)) - self._first_step,
        )

    @override
    def _store_progress(
        self, saved: Sequence[tf.Variable]
    ) -> tuple[Sequence[tf.Variable], dict[str, object]]:
        self._store_handed_out(())
        return [self._steps.applied, self._steps.log], self._facts(
            saved,
            kind="asynchronous",
            last_lane=self._source.order.lanes - 1,
            batch_size=self._source.order.batch_size,
            first_step=self._first_step,
            skipped=self._skipped,
        )

    def _store_handed_out(self, tickets: Iterable[tuple[int, int]]) -> None:
        """Stores what is handed out; `tickets`, (first batch, size), have not come back yet."""
        waiting = [batch for first, size in tickets for batch in range(first, first + size)]
        ages = {worker: dict(of_worker) for worker, of_worker in self._ages.items()}
        num_returned = self._num_handed_out - len(waiting)
        open_batches = (*self._open_batches, *waiting)
        handed_out = HandedOut(self._next_batch, open_batches, num_returned, ages)
        store_handed_out(self._learner.step.device, handed_out)

    @functools.cached_property
    def _steps(self) -> AsynchronousSteps:
        """Made once: graphs that are traced again use the same counters and locks."""
        return AsynchronousSteps(
            self.strategy,
            self._learner,
            self._source,
            self._compression,
            num_workers=self.num_replicas,
            max_staleness=self._max_staleness,
            read_dtype=self._read_dtype,
        )

    @override
    def _make_graphs(self) -> None:
        self._train_unrolled, self._train_looped = self._steps.closures()

    @override
    def _set_position(self, position: Position) -> None:
        last = self._source.order.lanes - 1
        if any(tuple(lanes) != (0, last) for _, *lanes in position.open_sub_batches):
            refuse_open_sub_batches(position, self._source.order)
        self._open_batches = [batch for batch, _, _ in position.open_sub_batches]
        self._next_batch = position.next_batch
        self._num_handed_out = 0
        self._skipped = position.skipped
        self._first_step = int(value_of(self._learner.step))
        self._ages.clear()
        self._steps.applied.assign(tf.zeros_like(self._steps.applied))

    @override
    def _steps_of_call(self, num_steps: int) -> int:
        """All steps, so that no worker waits for another one.

        Fewer if the call uses a graph for the first time, because the time of such a call counts as
        the graph's: in the first call, and when a graph of more steps should be traced.
        """
        if self.pace.secs_per_step() is None:
            # Each worker uses its graph for the first time.
            return min(num_steps, 2 * self.num_replicas)
        size = self._closure_size(num_steps)
        if not self._lacks_graph(size, num_steps) or not self._may_send_graph():
            return num_steps
        self._size_to_trace = size
        return min(num_steps, 2 * size * self.num_replicas)

    def _lacks_graph(self, size: int, num_steps: int) -> bool:
        """Returns True if closures of `size` steps would be faster with a graph of their own.

        The last ticket of an epoch, or of a window of batches, is shorter; perhaps each ticket is.
        """
        unrolled = self._train_unrolled.get(size)
        if unrolled is None or unrolled.is_traced:
            return False
        if not pays_unrolling(size, self._train_looped.trace_secs):
            return False
        return size in closure_sizes(num_steps, size, self._source.ticket_runs(self._next_batch))

    def _closure_size(self, num_steps: int) -> int:
        secs = self.pace.secs_per_step()
        secs_of_worker = None if secs is None else secs * self.num_replicas
        return closure_size(num_steps, self.num_replicas, secs_of_worker)

    @override
    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        """Runs a few more steps if a worker died when a part of its ticket was done.

        Each worker has a ticket, and a second ticket waits for it. After a stop request only
        batches of dropped gradients are handed out.
        """
        started = time.monotonic()
        # Batches of dropped gradients, and open ones of a former chief.
        again = collections.deque((batch, 1) for batch in self._open_batches[:num_steps])
        del self._open_batches[: len(again)]
        self._num_handed_out += len(again)
        runs = self._source.ticket_runs(self._next_batch)
        size_to_trace, self._size_to_trace = self._size_to_trace, None
        if size_to_trace is not None:
            self._used_graphs.add(f"{size_to_trace} unrolled")
            self._train_unrolled[size_to_trace].trace(self.strategy)
        sizes = closure_sizes(num_steps - len(again), self._closure_size(num_steps), runs)
        # Each is waited for on a thread: the coordinator cannot wait for the first of several.
        in_flight: dict[concurrent.futures.Future[npt.NDArray[np.float64]], tuple[int, int]] = {}
        totals = np.zeros([self._learner.num_totals])
        stored = -math.inf
        begun_at = self._next_batch
        while True:
            if self.recovery.is_published and time.monotonic() - stored >= _STORE_SECS:
                stored = time.monotonic()
                self._store_handed_out([*again, *in_flight.values()])
            while len(in_flight) < 2 * self.num_replicas:
                if again:
                    first, size = again.popleft()
                # A stop request that came before this call does not leave it without a step.
                elif (not self.stop_requested or self._next_batch == begun_at) and (
                    size := next(sizes, 0)
                ):
                    first = self._next_batch
                    self._next_batch += size
                    self._num_handed_out += size
                else:
                    break
                closure = self._schedule_ticket(first, size)
                in_flight[in_background(functools.partial(fetched, closure))] = first, size
            if not in_flight:
                break
            done, _ = concurrent.futures.wait(in_flight, return_when="FIRST_COMPLETED")
            for future in done:
                first, _ = in_flight.pop(future)
                try:
                    result = future.result()
                except Exception:
                    self._coordinator.join()  # Raises the first error of all closures.
                    raise
                closure_totals, worker, ages = unpacked(result, len(totals))
                totals += closure_totals
                self._ages[f"worker {worker}"].update(ages.tolist())
                # Batches of dropped gradients are handed out again, one by one.
                again.extend((first + int(i), 1) for i in np.flatnonzero(ages == DROPPED))
            self.on_progress()
        self._coordinator.join()
        self.stopping = self.stop_requested
        return self._learner.to_metrics(totals), time.monotonic() - started

    def _schedule_ticket(self, first: int, size: int) -> tf.distribute.coordinator.RemoteValue:
        unrolled = self._train_unrolled.get(size)
        train = unrolled if unrolled and unrolled.is_traced else self._train_looped
        self._used_graphs.add("looped" if train is self._train_looped else f"{size} unrolled")
        ticket = self._source.ticket(first, size)
        return self._schedule(train, {"first": np.array(first, np.int64), **ticket})
