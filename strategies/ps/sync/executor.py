"""`--strategy=ps --sync_replicas`: a step is the first n gradients computed on the same variables.

    executor = SynchronousExecutor.connect(cluster, versions, connecting, replicas_to_aggregate=2)

If a step has fewer gradients than there are workers, the other workers are backups (Chen et al.,
"Revisiting Distributed Synchronous SGD", 2016): a step does not wait for the slowest. TensorFlow 1
had this in SyncReplicasOptimizer; TensorFlow 2 does not.

A batch is cut into n *sub-batches*, by lanes, as a batch of n replicas is. `__init__.py` says what
the servers and the workers do; the chief also keeps the state between two calls. The servers store
one gradient of each variable for each worker. That is more memory than an accumulator needs, but
the gradients are added in a fixed order, so a run is repeatable with any number of workers.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any  # Any: futures of different results.

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from data.order import replica_lanes
from data.system.background import in_background
from data.tickets import pack_tickets
from strategies.base import Tensor, value_of
from strategies.cluster.tf_config import Cluster
from strategies.gradients.coalescing import is_small
from strategies.lost_peers import PeerLostError, losses_explained
from strategies.metrics import Metrics
from strategies.position import Position, refuse_open_sub_batches
from strategies.ps.closures import fetched
from strategies.ps.executor import ParameterServerExecutor
from strategies.ps.former_rounds import Rounds, counts_of, in_flight, position_of, stored_rounds
from strategies.ps.protocol import IDLE, NONE, Counters, EndReason, Kind, Progress, WorkerSlot, pack
from strategies.ps.sync.aggregator import Aggregator
from strategies.ps.sync.gradient_buffers import GradientBuffers
from strategies.ps.sync.worker_loop import WorkerLoop
from strategies.transfer import AS_COMPUTED, Transfer
from strategies.worker_stats import WorkerStats

# If no step is made for this time, or for four times the duration of a step, workers may be
# missing.
_PATIENCE_SECS = 2.0

# Assignments in one iteration of a worker loop, if its call has at least _LONG times as many
# rounds: up to three assignments after the last one are skipped. If a call has fewer rounds, either
# they are slow, or the caller wants few.
_UNROLLED = 4
_LONG = 8

# The assumed duration of the first round of a graph, which is traced and sent before.
_FIRST_ROUND_SECS = 30.0

# Loops may take so long to end by themselves before they are told to end; they are told so often.
_SHUTDOWN_GRACE_SECS = 0.05
_POLL_SECS = 1.0


class SynchronousExecutor(ParameterServerExecutor):
    """The chief of synchronous parameter servers."""

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        cluster: Cluster,
        replicas_to_aggregate: int,
        transfer: Transfer = AS_COMPUTED,
    ) -> None:
        """A step is the first `replicas_to_aggregate` gradients.

        With fewer workers than that, each computes several sub-batches of a step, one at a time.
        """
        super().__init__(strategy, cluster, transfer)
        self.replicas_per_step = self._num_sub_batches = replicas_to_aggregate
        self._num_slots = max(self.num_replicas, replicas_to_aggregate)
        self._num_gradient_buffers = self._num_slots
        self._shares_workers = self.num_replicas < self._num_slots
        self._next_slot = 0  # The worker slot whose loop begins next, if slots share workers.
        # The future EndReason of each worker slot whose loop was not seen to end.
        self._running: dict[int, concurrent.futures.Future[int]] = {}
        self._next_attempt = 0
        # Workers that were seen since some were found missing; None while no worker is missing.
        self._seen_workers: set[int] | None = set() if self._shares_workers else None

    @property
    @override
    def position(self) -> Position:
        """Sub-batches in flight are not consumed: their gradients will come too late."""
        open_numbers = [*self._returned, *in_flight(self._slots)]
        return position_of(self._next_sub_batch, open_numbers, self._lanes, self._skipped)

    @override
    def _counts_since_start(self) -> WorkerStats:
        return counts_of(self._counters, self._workers())

    @override
    def _store_progress(
        self, saved: Sequence[tf.Variable]
    ) -> tuple[Sequence[tf.Variable], dict[str, object]]:
        self._buffers.keep(saved)
        step = self._learner.step.read_value()
        for mark in self._buffers.marks:
            mark.assign(step)
        numbers = np.int64(self._next_sub_batch), np.array(self._returned, np.int64)
        self._stored.store(
            Rounds(tf.cast(step, tf.int64), *numbers, pack(self._slots), self._counters)
        )
        return [*self._buffers.marks, *self._buffers.variables], self._facts(
            saved,
            kind="synchronous",
            num_marks=len(self._buffers.marks),
            lanes=[[lanes[0], lanes[-1] + 1] for lanes in self._lanes],
            skipped=self._skipped,
        )

    @override
    def _make_graphs(self) -> None:
        number, num_lanes = self._num_sub_batches, self._source.order.lanes
        self._lanes = [replica_lanes(num_lanes, index, number) for index in range(number)]
        # Of each window, by its first batch: the batch after it, bytes [sub-batches, parts].
        self._tickets: dict[int, tuple[int, npt.NDArray[np.object_]]] = {}
        self._secs_per_round = _FIRST_ROUND_SECS
        learner, source, strategy, lanes = self._learner, self._source, self.strategy, self._lanes
        self._buffers = GradientBuffers(learner, strategy, num_slots=self._num_slots)
        self._stored = stored_rounds(self._buffers.step_device)
        self._aggregator = Aggregator(learner, source, strategy, self._buffers, lanes, self._stored)
        self._short_loop = self._long_loop = WorkerLoop(
            learner,
            source,
            strategy,
            self._compression,
            self._buffers,
            lanes,
            num_unrolled=1,
            read_dtype=self._read_dtype,
        )
        dense = learner.variables[: learner.num_dense]
        if all(map(is_small, dense)):  # Large ones travel for skipped assignments too.
            self._long_loop = dataclasses.replace(self._short_loop, num_unrolled=_UNROLLED)

    @override
    def _set_position(self, position: Position) -> None:
        if any(
            range(first, last + 1) not in self._lanes
            for _, first, last in position.open_sub_batches
        ):
            refuse_open_sub_batches(position, self._source.order)
        self._skipped = position.skipped
        self._counters = np.zeros([self._num_slots, len(Counters._fields)], np.int64)
        self._slots = WorkerSlot(*np.tile(np.array(IDLE)[:, np.newaxis], self._num_slots))
        self._next_sub_batch = position.next_batch * self._num_sub_batches
        self._returned = [
            batch * self._num_sub_batches + self._lanes.index(range(first, last + 1))
            for batch, first, last in position.open_sub_batches
        ]

    @override
    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        started = time.monotonic()
        plan = self._plan(num_steps)
        self._end_old_loops()
        loop = self._traced_loop(num_steps)
        aggregator = in_background(lambda: self._aggregate(num_steps))
        try:
            self._keep_loops_running(aggregator, plan, loop)
        except BaseException:
            if not aggregator.done():
                with contextlib.suppress(tf.errors.OpError):  # Perhaps its ps was lost.
                    self._buffers.tell(Kind.STOP, self._num_sub_batches)
            raise
        totals = aggregator.result()
        seconds = time.monotonic() - started
        if self._seen_workers is None or self._shares_workers:
            self._secs_per_round = seconds / num_steps
        self.stopping = self.stop_requested
        return self._learner.to_metrics(totals), seconds

    def _aggregate(self, num_rounds: int) -> npt.NDArray[np.float64]:
        """Runs the rounds and updates what is known; returns metric totals. Runs on a thread."""
        loops_give_way = int(self._seen_workers is not None)
        before = Progress(num_rounds, loops_give_way, self._next_sub_batch, self._next_attempt)
        results = self._aggregator.graph(
            np.array(before), pack(self._slots), np.array(self._returned, np.int64), self._counters
        )
        progress, slots, returned, totals, counters = map(value_of, results)
        after = Progress(*progress.tolist())
        self._next_sub_batch, self._next_attempt = after.next_sub_batch, after.next_attempt
        self._slots = WorkerSlot(*slots.T.copy())
        self._returned = returned.tolist()
        in_this_call = counters - self._counters
        self._counters = counters
        if after.loops_give_way and self._seen_workers is None:
            # Workers that were seen in this call may have been lost later in it.
            self._seen_workers = set()
        elif self._seen_workers is not None:
            self._seen_workers.update(np.flatnonzero(in_this_call.any(axis=1)).tolist())
            if len(self._seen_workers) == self._num_slots:
                self._seen_workers = None
        return totals

    def _end_old_loops(self) -> None:
        """Ends the loops of former calls after their current assignment: they lack new tickets."""
        is_idle = self._slots.sub_batch == NONE
        has_last = self._slots.end_reason != EndReason.CONTINUES
        # These have done their last assignment and end without END_ASSIGNMENT, which would stay in
        # the queue for the next loop of that worker slot.
        may_end = is_idle & has_last
        ending = [future for slot, future in self._running.items() if may_end[slot]]
        timeout_secs = min(_POLL_SECS, max(_SHUTDOWN_GRACE_SECS, 4 * self._secs_per_round))
        concurrent.futures.wait(ending, timeout_secs)
        self._take_ended()
        for slot in range(self._num_slots):
            self._slots.is_old[slot] = slot in self._running
            if slot in self._running:
                if is_idle[slot] or not has_last[slot]:
                    self._buffers.end_loop(slot)
            elif is_idle[slot]:
                self._buffers.clear_queue(slot)

    def _keep_loops_running(
        self,
        aggregator: concurrent.futures.Future[npt.NDArray[np.float64]],
        plan: tuple[Tensor, Tensor, Tensor],
        loop: WorkerLoop,
    ) -> None:
        """Begins `loop` for each worker slot, and again when it ends, until the rounds are done.

        Sends a NUDGE when the step counter has not changed for `patience` seconds.
        """
        progressed, step = time.monotonic(), -1
        old = set(self._running)
        done: set[int] = set()  # Slots whose loop of this call ended with the last round.
        while not aggregator.done():
            for slot in self._slots_to_begin(done):
                self._begin_loop(slot, plan, loop)
            patience = max(_PATIENCE_SECS, 4 * self._secs_per_round)
            futures: list[concurrent.futures.Future[Any]] = [aggregator, *self._running.values()]
            timeout_secs = progressed + patience - time.monotonic()
            concurrent.futures.wait(futures, timeout_secs, concurrent.futures.FIRST_COMPLETED)
            ended = self._take_ended()
            final = {slot for slot, reason in ended.items() if reason == EndReason.FINAL}
            done |= final - old
            old -= set(ended)
            if time.monotonic() >= progressed + patience:
                latest = int(value_of(self._learner.step))
                if latest == step:
                    # Makes each assignment the last of its loop from now on, and ends loops that
                    # wait. A worker that is present can then take over that of a missing worker.
                    self._buffers.tell(Kind.NUDGE, self._num_sub_batches)
                    done.clear()  # The last round may have to be repeated.
                progressed, step = time.monotonic(), latest

    def _slots_to_begin(self, done: Collection[int]) -> list[int]:
        """The worker slots whose loops begin now; `done` need none any more.

        If slots share workers, loops begin in turn. In another order a loop that waits for the next
        round could hold the only worker before the last sub-batch of this round is computed.
        """
        slots = [(self._next_slot + i) % self._num_slots for i in range(self._num_slots)]
        needed = [slot for slot in slots if slot not in done]
        if not self._shares_workers:
            return [slot for slot in needed if slot not in self._running]
        found = list(itertools.takewhile(lambda slot: slot not in self._running, needed))
        if found:
            self._next_slot = (found[-1] + 1) % self._num_slots
        return found

    def _traced_loop(self, num_rounds: int) -> WorkerLoop:
        """The loop for a call of `num_rounds`.

        It is traced before the aggregator, which changes only variables that have gradients.
        """
        # If the call begins while workers are missing, each assignment is the last of its loop.
        num_rounds = num_rounds if self._seen_workers is None else 1
        loop = self._long_loop if num_rounds >= _LONG * _UNROLLED else self._short_loop
        traced = [one for one in (self._short_loop, self._long_loop) if one.closure.is_traced]
        if traced and loop not in traced and not self._may_send_graph():
            (loop,) = traced
        if loop not in traced:
            self._used_graphs.add(f"worker loop, {loop.num_unrolled}")
            self._secs_per_round = _FIRST_ROUND_SECS
            with tf.device(self.io_device):
                loop.closure.trace(self.strategy)
        return loop

    def _begin_loop(self, slot: int, plan: tuple[Tensor, Tensor, Tensor], loop: WorkerLoop) -> None:
        inputs = loop.inputs(slot, *plan)
        with tf.device(self.io_device):
            ending = loop.closure.schedule(self._coordinator, inputs)
        self._running[slot] = in_background(lambda: int(fetched(ending)))

    def _take_ended(self) -> dict[int, int]:
        """Forgets the loops that have ended; returns the EndReasons by worker slot.

        Raises:
            PeerLostError: a loop failed because a parameter server was lost.
        """
        ended = {slot: future for slot, future in self._running.items() if future.done()}
        for slot in ended:
            del self._running[slot]
        with losses_explained():
            return {slot: future.result() for slot, future in ended.items()}

    def _end_loops(self) -> None:
        """Tells all loops to end, after some time to end by themselves.

        Must be called again until no loop is left: the worker that was told may have died, and
        another one may have taken over its loop.
        """
        concurrent.futures.wait(self._running.values(), timeout=_SHUTDOWN_GRACE_SECS)
        self._take_ended()
        with losses_explained():
            for slot in self._running:
                self._buffers.end_loop(slot)

    @override
    def _drain(self) -> None:
        """A gradient that arrives after the step counter was set back would seem to be in time."""
        while self._running:
            self._end_loops()
            concurrent.futures.wait(self._running.values(), timeout=_POLL_SECS)

    @override
    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        """Workers that are late with a gradient take part when it is done."""
        is_over = threading.Event()

        def end_loops() -> None:
            while not is_over.wait(_POLL_SECS):
                with contextlib.suppress(PeerLostError):  # The evaluation raises it too.
                    self._end_loops()

        self._end_loops()
        ending = in_background(end_loops)
        try:
            return super()._evaluate(first_batch, num_batches)
        finally:
            is_over.set()
            ending.result()

    def _plan(self, num_rounds: int) -> tuple[Tensor, Tensor, Tensor]:
        """Plans all sub-batches that may be assigned in `num_rounds`.

        Returns the first batch of each window, int64 [windows], in ascending order; the batch after
        all windows; and the tickets of each window, string [windows, sub-batches, parts].
        """
        # A late worker gets another sub-batch.
        most = num_rounds * (self._num_sub_batches + self._num_slots) + self._num_slots
        open_numbers = [*self._returned, *in_flight(self._slots)]
        open_batches = [number // self._num_sub_batches for number in open_numbers]
        first = self._next_sub_batch // self._num_sub_batches
        end = (self._next_sub_batch + most) // self._num_sub_batches + 1
        oldest = min([first, *open_batches])
        self._tickets = {
            begin: window for begin, window in self._tickets.items() if window[0] > oldest
        }
        for batch in open_batches:
            self._plan_window(batch)
        while first < end:
            first = self._plan_window(first)
        begins = sorted(self._tickets)
        tickets = np.array([self._tickets[begin][1] for begin in begins], object)
        last = max(window_end for window_end, _ in self._tickets.values())
        return tf.constant(begins, tf.int64), tf.constant(last, tf.int64), tf.constant(tickets)

    def _plan_window(self, batch: int) -> int:
        """Plans the window of `batch`, unless it is planned; returns the batch after the window."""
        for begin, (end, _) in self._tickets.items():
            if begin <= batch < end:
                return end
        begin, count = next(self._source.order.windows(batch))
        tickets = pack_tickets(self._source, begin, count, self._lanes)
        self._tickets[begin] = (begin + count, tickets)
        return begin + count
