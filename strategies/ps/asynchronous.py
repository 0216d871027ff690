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
import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from data.tickets import TicketSource
from strategies import locks
from strategies.base import Batch, Learner, Tensor, read_now, value_of
from strategies.cluster.tf_config import Cluster
from strategies.gradients.coalescing import is_small
from strategies.gradients.compression import Compression
from strategies.lost_peers import losses_explained
from strategies.metrics import Metrics
from strategies.position import Position, refuse_open_sub_batches
from strategies.ps.closures import (
    FEW_STEPS,
    STEPS_PER_CLOSURE,
    Closure,
    closure_size,
    closure_sizes,
    fetched,
    in_background,
    packed,
    pays_unrolling,
    unpacked,
)
from strategies.ps.executor import ParameterServerExecutor
from strategies.ps.former_tickets import (
    DROPPED,
    EMPTY_ROW,
    LOG_ROWS,
    HandedOut,
    counts_of,
    log_place,
    store_handed_out,
)
from strategies.ps.worker_step import compute_gradients, read_variables, send_to_servers, unstack
from strategies.worker_stats import WorkerStats

# Between two times that the chief stores what it has handed out.
_STORE_SECS = 1.0


class AsynchronousExecutor(ParameterServerExecutor):
    """The chief of asynchronous parameter servers: a step is one worker's gradient."""

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        cluster: Cluster,
        *,
        max_staleness: int | None = None,
        wire_dtype: str = "float32",
        read_dtype: str = "float32",
    ) -> None:
        """A gradient that is older than `max_staleness` steps when it arrives is dropped.

        Its batch is handed out again. None applies all gradients.
        """
        super().__init__(strategy, cluster, wire_dtype=wire_dtype, read_dtype=read_dtype)
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

    @property
    @override
    def own_variables(self) -> list[tf.Variable]:
        return [self._steps.applied, self._steps.log]

    @override
    def facts(self, saved: Sequence[tf.Variable]) -> dict[str, object]:
        return {
            **super().facts(saved),
            "kind": "asynchronous",
            "step_device": self._learner.step.device,
            "last_lane": self._source.order.lanes - 1,
            "batch_size": self._source.order.batch_size,
            "first_step": self._first_step,
            "skipped": self._skipped,
        }

    @override
    def store_progress(self, saved: Sequence[tf.Variable]) -> None:
        self._store_handed_out(())

    def _store_handed_out(self, tickets: Iterable[tuple[int, int]]) -> None:
        """Stores what is handed out; `tickets`, (first batch, size), have not come back yet."""
        waiting = [batch for first, size in tickets for batch in range(first, first + size)]
        ages = {worker: dict(of_worker) for worker, of_worker in self._ages.items()}
        num_before = self._num_handed_out - len(waiting)
        open_batches = (*self._open_batches, *waiting)
        handed_out = HandedOut(self._next_batch, open_batches, num_before, ages)
        store_handed_out(self._learner.step.device, handed_out)

    @functools.cached_property
    def _steps(self) -> "_Steps":
        """Made once: graphs that are traced again use the same counters and locks."""
        return _Steps(
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

        But not before the time of a step is known, nor when a graph is used for the first time: the
        time of such a call counts as the graph's. In the second case the call traces the graph.
        """
        if self.pace.secs_per_step() is None:
            return 2 * self.num_replicas  # Each worker uses its graph for the first time.
        size = self._closure_size(num_steps)
        if not self._lacks_graph(size, num_steps) or not self._may_send_graph():
            return num_steps
        self._size_to_trace = size
        return min(num_steps, 2 * size * self.num_replicas)

    def _lacks_graph(self, size: int, num_steps: int) -> bool:
        """Returns True if closures of `size` steps would be faster with a graph of their own.

        At the end of an epoch, or of a window of batches, tickets are shorter: perhaps all are.
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

        Each worker has a ticket, and another one waits for it. After a stop request no ticket is
        handed out, but for batches of dropped gradients.
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
            with losses_explained():
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
                with losses_explained():
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
                    self._join()  # Raises the first error of all closures.
                    raise
                closure_totals, worker, ages = unpacked(result, len(totals))
                totals += closure_totals
                self._ages[f"worker {worker}"].update(ages.tolist())
                # Batches of dropped gradients are handed out again, one by one.
                again.extend((first + int(i), 1) for i in np.flatnonzero(ages == DROPPED))
            self.on_progress()
        self._join()
        self.stopping = self.stop_requested
        return self._learner.to_metrics(totals), time.monotonic() - started

    def _schedule_ticket(self, first: int, size: int) -> tf.distribute.coordinator.RemoteValue:
        train = self._train_looped
        if size in self._train_unrolled and self._train_unrolled[size].is_traced:
            train = self._train_unrolled[size]
        self._used_graphs.add("looped" if train is self._train_looped else f"{size} unrolled")
        ticket = self._source.ticket(first, size)
        return self._schedule(train, {"first": np.array(first, np.int64), **ticket})


class _Steps:
    """The graphs: a worker computes a gradient, and the servers apply it immediately."""

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        learner: Learner,
        source: TicketSource,
        compression: Compression,
        *,
        num_workers: int,
        max_staleness: int | None,
        read_dtype: str,
    ) -> None:
        """`strategy` has placed the variables of `learner`; workers parse tickets of `source`."""
        self._strategy = strategy
        self._learner = learner
        self._source = source
        self._compression = compression
        self._max_staleness = max_staleness
        self._read_dtype = read_dtype
        # `applied` counts the applied gradients of each worker; former_tickets.py has the log.
        with strategy.scope(), strategy.extended.colocate_vars_with(learner.step):
            self.applied = tf.Variable(tf.zeros([num_workers], tf.int64), trainable=False)
            with tf.device(learner.step.device):
                rows = tf.tile(tf.constant([EMPTY_ROW], tf.int64), [LOG_ROWS, 1])
            self.log = tf.Variable(rows, trainable=False)
        with tf.device(learner.step.device):
            self._locks = locks.make_locks("applying")

    def closures(self) -> tuple[dict[int, Closure], Closure]:
        """Closures of unrolled steps, by their number; and one with a loop, for any number.

        They return the argument of `unpacked`. Unrolled steps are faster than a loop in the graph.
        But each number of unrolled steps needs a graph, which takes seconds to trace and to send.
        """
        source, learner = self._source, self._learner
        step = self._unbounded_step if self._max_staleness is None else self._bounded_step
        step_device = learner.step.device

        def begin(ticket: dict[str, Tensor]) -> tuple[Batch, Tensor, Tensor]:
            """The batches of `ticket`, stacked; the worker's index; the origin of the first step.

            An origin, int64 [2] on the step device, is the worker's index and a batch's number.
            """
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            first = ticket["first"]
            stacked = source.parse_ticket({k: v for k, v in ticket.items() if k != "first"})
            origin = tf.stack([tf.cast(worker, tf.int64), first])  # One tensor is one transfer.
            with tf.device(step_device):
                return stacked, worker, tf.identity(origin)

        def origin_of(index: int | Tensor, first: Tensor) -> Tensor:
            with tf.device(step_device):
                return first + tf.stack([tf.constant(0, tf.int64), tf.cast(index, tf.int64)])

        def spec(num_batches: int | None = None) -> dict[str, tf.TensorSpec]:
            return {**source.ticket_spec(num_batches), "first": tf.TensorSpec([], tf.int64)}

        def unrolled(num_steps: int, ticket: dict[str, Tensor]) -> Tensor:
            stacked, worker, first = begin(ticket)
            batches = unstack(stacked, num_steps)
            totals: list[Tensor] = []
            ages: list[Tensor] = []
            former: _Sent | None = None
            for index, batch in enumerate(batches):
                step_totals, age, former = step(batch, origin_of(index, first), former)
                totals.append(step_totals)
                ages.append(age)
            with tf.device(step_device):  # The ages travel as one tensor.
                all_ages = tf.stack(ages)
            return _result(tf.stack(totals), worker, all_ages)

        @tf.function(input_signature=[spec()])
        def looped(ticket: dict[str, Tensor]) -> Tensor:
            # Called outside of the loop, because inner graphs do not know the worker's index.
            stacked, worker, first = begin(ticket)
            num_steps = tf.shape(ticket["gather"])[0]
            totals = tf.TensorArray(tf.float64, num_steps, element_shape=[learner.num_totals])
            ages = tf.TensorArray(tf.int64, num_steps, element_shape=[])
            for i in tf.range(num_steps):
                batch = tf.nest.map_structure(lambda t, i=i: t[i], stacked)
                step_totals, age, _ = step(batch, origin_of(i, first), None)
                totals = totals.write(i, step_totals)
                ages = ages.write(i, age)
            return _result(totals.stack(), worker, ages.stack())

        several = {
            size: Closure(
                tf.function(functools.partial(unrolled, size), input_signature=[spec(size)])
            )
            for size in (STEPS_PER_CLOSURE, FEW_STEPS)
        }
        return several, Closure(looped)

    def _unbounded_step(
        self, batch: Batch, origin: Tensor, former: "_Sent | None"
    ) -> tuple[Tensor, Tensor, "_Sent"]:
        """One step on the `batch` of `origin`: metric totals, staleness (int64), gradients.

        Staleness is the step counter at the application, less the counter before the variables were
        read: the number of steps of other workers that this gradient does not know of.

        `former` is the step before it in the same graph. Each variable is read when the gradient of
        `former` has been applied to it, not when all have: variables of this step and gradients of
        `former` travel at the same time, in opposite directions. So the counter is read before
        `former` is counted; `former` does not count as a step of another worker.
        """
        if former is None or former.counter is None:
            before = self._read_counter()
        else:
            # Not on the worker: variables are read after this, so each step would wait for it.
            with tf.device(self._learner.step.device):
                before = former.counter + 1
        sent, totals = self._compute(batch, before, former)
        # Before the gradient is applied: the graph orders reads and changes as they are created.
        with tf.control_dependencies(sent.first_to_arrive(self._learner.step.device)):
            sent.counter = self._read_counter()
        return totals, self._apply_and_count(sent.arrived, origin, before), sent

    def _bounded_step(
        self, batch: Batch, origin: Tensor, former: "_Sent | None"
    ) -> tuple[Tensor, Tensor, "_Sent"]:
        """`_unbounded_step`, but returns DROPPED if the gradient is too old when it arrives.

        No other gradient is applied between that check and the application. Only servers take part
        in both, so a worker that is unresponsive blocks no other worker. A dropped gradient also
        loses the residual of --wire_dtype that was added to it; its own residual stays. Variables
        are read when `former` is applied: an earlier read would make gradients older.
        """
        before = self._read_counter()
        sent, totals = self._compute(batch, before, former)
        arrived = sent.arrived
        waited_for = [origin]
        for gradient in arrived:
            if isinstance(gradient, tf.IndexedSlices):
                waited_for += [gradient.values, gradient.indices]
            elif gradient is not None:
                waited_for.append(gradient)
        with tf.device(self._learner.step.device):
            held = locks.take(self._locks, waited_for)
            with tf.control_dependencies(held):
                age = read_now(self._learner.step) - before
            # The age is below 0 if the counter was set back since the variables were read.
            if (age < 0) | (age > self._max_staleness):
                age = tf.constant(DROPPED, tf.int64)
            else:
                age = self._apply_and_count(arrived, origin, before)
            with tf.control_dependencies([locks.free(held, age)]):
                return totals, tf.identity(age), sent

    def _read_counter(self) -> Tensor:
        with tf.device(self._learner.step.device):
            return read_now(self._learner.step)

    def _compute(
        self, batch: Batch, before: Tensor, former: "_Sent | None"
    ) -> tuple["_Sent", Tensor]:
        """Gradients at variables read after the counter `before`; metric totals."""
        learner = self._learner
        arrived, values = read_variables(learner, before, self._read_dtype)
        if former is not None and self._compression.is_lossy:
            # The residual of one step goes into the next step.
            with tf.control_dependencies(_tensors(former.sent)):
                batch = tf.nest.map_structure(tf.identity, batch)
        gradients, totals = compute_gradients(
            values, arrived, learner, self._strategy, batch, self._read_dtype
        )
        sent = self._compression.compress_all(gradients)
        return _Sent(sent, send_to_servers(learner.variables, gradients, sent)), totals

    def _apply_and_count(self, arrived: Sequence[Tensor], origin: Tensor, before: Tensor) -> Tensor:
        """Applies gradients that have `arrived`, counts and logs them; returns the staleness.

        All ops are on the device of the step counter: an unrolled step sends gradients, and gets
        nothing back.
        """
        step = self._strategy.run(self._learner.apply, args=(arrived,))
        with tf.device(self._learner.step.device), tf.control_dependencies([step]):
            worker, batch = tf.unstack(origin)
            age = tf.cast(step - 1 - before, tf.int64)
            self.applied.scatter_nd_add([[worker]], tf.ones([1], tf.int64))
            self.log.scatter_nd_update([log_place(batch)], [tf.stack([batch, worker, age])])
            return age


@dataclasses.dataclass
class _Sent:
    """The gradients of a step.

    Attributes:
        sent: On the worker, as they are sent.
        arrived: On the servers, in the order of the variables.
        counter: The step counter, read when the first of them has arrived. None: not read.
    """

    sent: Sequence[Tensor]
    arrived: Sequence[Tensor]
    counter: Tensor | None = None

    def first_to_arrive(self, device: str) -> list[Tensor]:
        """A gradient that is computed early; of small ones, which travel together, one on `device`.

        The backward pass begins with the last variable.
        """
        tensors = _tensors(self.arrived)
        large = [tensor for tensor in tensors if not is_small(tensor)]
        here = [tensor for tensor in tensors if tensor.device == device]
        return (large or here or tensors)[-1:]


def _tensors(gradients: Sequence[Tensor]) -> list[Tensor]:
    """All tensors of gradients, which may be sparse, or None."""
    present = [gradient for gradient in gradients if gradient is not None]
    return list(tf.nest.flatten(present, expand_composites=True))


def _result(totals: Tensor, worker: Tensor, ages: Tensor) -> Tensor:
    """`packed`, with the sum of `totals`, [steps, num_totals], of gradients that were applied."""
    dropped = tf.equal(ages, DROPPED)[:, tf.newaxis]
    applied = tf.reduce_sum(tf.where(dropped, tf.zeros_like(totals), totals), axis=0)
    return packed(applied, worker, ages)
