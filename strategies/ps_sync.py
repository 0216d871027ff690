"""`--strategy=ps --sync_replicas`: a step is the first n gradients computed on the same variables.

    executor = SynchronousParameterServerExecutor.connect(cluster, replicas_to_aggregate=2)

With fewer gradients to a step than workers, the others are backups (Chen et al., "Revisiting
Distributed Synchronous SGD", 2016): a step does not wait for the slowest. TensorFlow 1 had this in
SyncReplicasOptimizer; TensorFlow 2 does not.

A batch is cut into n *shares*, by lanes, as a batch of n replicas is. Which worker computes which,
which gradients are in time, and their sum are decided on the parameter servers themselves
(strategies/ps_rounds.py), for as many rounds as `run` wants; the chief plans what is read, starts
the workers, looks after the rounds, and keeps what is known between two calls. Gradients are kept
beside their variables, one for each worker: more memory than an accumulator needs, but their sum
has one order, so a run is repeatable with any number of workers.
"""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.order import share
from strategies.base import (
    Learner,
    Made,
    Metrics,
    PeerLostError,
    Position,
    refuse_open_shares,
    to_metrics,
)
from strategies.closures import fetched
from strategies.cluster import Cluster
from strategies.counts import Counts
from strategies.ps import ParameterServerExecutor, losses_explained
from strategies.ps_conductor import (
    ATTEMPT,
    DROPPED,
    EXAMPLES,
    FINISHED,
    IS_OLD,
    LAST,
    NUM_COLUMNS,
    REPEATED,
    SHARE,
)
from strategies.ps_rounds import Rounds
from strategies.ps_staging import GOES_ON, IS_FINAL, NOBODYS

# Without a step for so long, or for four times as long as steps take, workers may be missing.
_PATIENCE_SECS = 2.0

# Before the first round of a graph it is made.
_FIRST_ROUND_SECS = 30.0

# How long after a round its shifts may take to end before they are told to, and then, again.
_FAREWELL_SECS = 0.05
_LOOK_SECS = 1.0


class SynchronousParameterServerExecutor(ParameterServerExecutor):
    """The chief of synchronous parameter servers."""

    def __init__(
        self,
        strategy: Any,
        cluster: Cluster,
        replicas_to_aggregate: int,
        *,
        wire_dtype: str = "float32",
    ) -> None:
        """A step is the first `replicas_to_aggregate` gradients of as many workers or more."""
        super().__init__(strategy, cluster, wire_dtype=wire_dtype)
        self._num_shares = replicas_to_aggregate
        self._num_slots = self.num_replicas
        # The shift of each slot whose closure has not ended.
        self._shifts: dict[int, concurrent.futures.Future[int]] = {}
        self._next_attempt = 0
        # Workers that have been seen since some were found missing; None while all are there.
        self._seen_workers: set[int] | None = None
        self._worker_counts = np.zeros([self._num_slots, 4], np.int64)

    @property
    def replicas_a_step(self) -> int:
        """The gradients that are summed."""
        return self._num_shares

    @property
    def position(self) -> Position:
        """See Executor. Shares in flight are not consumed: their gradients will come too late."""
        next_batch = -(-self._next_share // self._num_shares)
        numbers = [*self._returned, *range(self._next_share, next_batch * self._num_shares)]
        numbers += (number for number in self._slots[:, SHARE] if number != NOBODYS)
        shares = []
        for number in sorted(map(int, numbers)):
            batch, index = divmod(number, self._num_shares)
            shares.append((batch, self._lanes[index][0], self._lanes[index][-1]))
        return Position(next_batch, tuple(shares), self._skipped)

    @property
    def _num_staged(self) -> int:
        return self._num_slots

    def _counts_since_start(self) -> Counts:
        """What this process has seen.

        Gradients were repeated if they were computed on the right variables, but written over
        before they could be summed.
        """
        columns = {
            "worker_steps": FINISHED,
            "worker_examples": EXAMPLES,
            "worker_dropped": DROPPED,
            "worker_repeated": REPEATED,
        }
        return {
            name: dict(zip(self._workers(), self._worker_counts[:, column].tolist(), strict=True))
            for name, column in columns.items()
        }

    def start(
        self,
        learner: Learner,
        source: Any,
        evaluation: Any,
        position: Position,
    ) -> None:
        """See Executor."""
        self._set_up(learner, source, evaluation)
        lanes = source.order.lanes
        self._lanes = [share(lanes, i, self._num_shares) for i in range(self._num_shares)]
        self._seek(position)
        self._rounds = self._make_rounds()

    def _make_rounds(self) -> Rounds:
        self._tickets: dict[int, tuple[int, int, Any]] = {}
        self._graphs: set[Any] = set()  # Those of shifts that were begun.
        self._secs_per_round = _FIRST_ROUND_SECS
        return Rounds(
            self._learner,
            self._source,
            self.strategy,
            self._wire,
            lanes=self._lanes,
            num_slots=self._num_slots,
        )

    def _forget(self) -> None:
        """See Executor."""
        if self._wire.rounds:
            self._wire.forget()
            self._rounds = self._make_rounds()

    def _seek(self, position: Position) -> None:
        """See Executor."""
        if any(
            range(first, last + 1) not in self._lanes for _, first, last in position.open_shares
        ):
            refuse_open_shares(position, self._source.order)
        self._begin_at(position)
        self._worker_counts[:] = 0
        self._slots = np.zeros([self._num_slots, NUM_COLUMNS], np.int64)
        self._slots[:, [SHARE, ATTEMPT]] = NOBODYS
        self._next_share = position.next_batch * self._num_shares
        self._returned = [
            batch * self._num_shares + self._lanes.index(range(first, last + 1))
            for batch, first, last in position.open_shares
        ]

    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        """See Executor. Exactly `num_steps`."""
        started = time.monotonic()
        starts, tickets = self._plan(num_steps)
        with losses_explained():
            self._part_with_old_shifts()
        conductor = _in_background(self._conduct, num_steps)
        try:
            self._keep_shifts(conductor, starts, tickets, num_steps)
        except BaseException:
            if not conductor.done():
                with contextlib.suppress(tf.errors.OpError):  # The ps may be what was lost.
                    self._rounds.stop()
            raise
        with losses_explained():
            sums = conductor.result()
        seconds = time.monotonic() - started
        if self._seen_workers is None:
            self._secs_per_round = seconds / num_steps
        self._stopping = self._stop_requested
        return to_metrics(self._learner.metric_names, sums), seconds

    def _conduct(self, num_rounds: int) -> npt.NDArray[np.float64]:
        """Some rounds, on a thread: what is known of slots and shares after them; the metrics."""
        are_missing = int(self._seen_workers is not None)
        numbers = (num_rounds, are_missing, self._next_share, self._next_attempt)
        after, slots, returned, sums, counts = self._rounds.conduct(
            tf.constant(numbers, tf.int64),
            tf.constant(self._slots),
            tf.constant(self._returned, tf.int64, [len(self._returned)]),
        )
        _, are_missing, self._next_share, self._next_attempt = map(int, after.numpy())
        self._slots = slots.numpy()
        self._returned = returned.numpy().tolist()
        self._worker_counts += counts.numpy()
        if are_missing and self._seen_workers is None:
            # What was seen in this call may have been before.
            self._seen_workers = set()
        elif self._seen_workers is not None:
            self._seen_workers.update(np.flatnonzero(counts.numpy().any(axis=1)).tolist())
            if len(self._seen_workers) == self._num_slots:
                self._seen_workers = None
        found: npt.NDArray[np.float64] = sums.numpy()
        return found

    def _part_with_old_shifts(self) -> None:
        """Ends those of former calls, which do not know of the batches of this one.

        But for what they have in hand.
        """
        idle = self._slots[:, SHARE] == NOBODYS
        # Those that have done their last order end by themselves: an order to end would be left for
        # the next shift of that slot.
        ends = idle & (self._slots[:, LAST] != GOES_ON)
        ending = [shift for slot, shift in self._shifts.items() if ends[slot]]
        patience = min(_LOOK_SECS, max(_FAREWELL_SECS, 4 * self._secs_per_round))
        concurrent.futures.wait(ending, timeout=patience)
        self._look_for_ended()
        for slot in range(self._num_slots):
            self._slots[slot, IS_OLD] = slot in self._shifts
            if slot in self._shifts:
                if idle[slot] or self._slots[slot, LAST] == GOES_ON:
                    self._rounds.end(slot)
            elif idle[slot]:
                self._rounds.forget_orders(slot)

    def _keep_shifts(
        self, conductor: concurrent.futures.Future[Any], starts: Any, tickets: Any, num_rounds: int
    ) -> None:
        """Gives each slot a shift, and another one when it ends, until the conductor is done."""
        moved, step = time.monotonic(), -1
        old = set(self._shifts)
        done: set[int] = set()  # Slots whose shift of this call ended with the last round.
        while not conductor.done():
            for slot in range(self._num_slots):
                if slot not in self._shifts and slot not in done:
                    self._begin_shift(slot, starts, tickets, num_rounds)
            patience = max(_PATIENCE_SECS, 4 * self._secs_per_round)
            concurrent.futures.wait(
                [conductor, *self._shifts.values()],
                timeout=moved + patience - time.monotonic(),
                return_when=concurrent.futures.FIRST_COMPLETED,
            )
            ended = self._look_for_ended()
            done |= {slot for slot, last in ended.items() if last == IS_FINAL and slot not in old}
            old -= set(ended)
            if time.monotonic() >= moved + patience:
                with losses_explained():
                    latest = int(self._learner.step.numpy())
                    if latest == step:
                        self._rounds.nudge()
                        done.clear()  # The last round may have to be repeated.
                moved, step = time.monotonic(), latest

    def _begin_shift(self, slot: int, starts: Any, tickets: Any, num_rounds: int) -> None:
        # In a call that began while workers were missing each order is the last of its shift.
        num_rounds = num_rounds if self._seen_workers is None else 1
        graph, arguments = self._rounds.shift(slot, starts, tickets, num_rounds)
        if graph not in self._graphs:
            self._graphs.add(graph)
            self._secs_per_round = _FIRST_ROUND_SECS
        with losses_explained(), tf.device(self.io_device):
            closure = self._coordinator.schedule(graph, args=arguments)

        def last_flag() -> int:
            return int(fetched(closure))

        self._shifts[slot] = _in_background(last_flag)

    def _look_for_ended(self) -> dict[int, int]:
        """Slots whose shift has ended, and the flag of its last order."""
        ended = {slot: shift for slot, shift in self._shifts.items() if shift.done()}
        for slot in ended:
            del self._shifts[slot]
        with losses_explained():
            flags = {slot: shift.result() for slot, shift in ended.items()}
        return flags

    def _end_shifts(self) -> None:
        """Tells all shifts to end, once they have had the time to do so by themselves.

        It has to be said again: one that was told may have died of it, and another took its place.
        """
        concurrent.futures.wait(self._shifts.values(), timeout=_FAREWELL_SECS)
        self._look_for_ended()
        with losses_explained():
            for slot in self._shifts:
                self._rounds.end(slot)

    def _settle(self) -> None:
        """See Executor. What comes after the step counter was set back would pass for timely."""
        while self._shifts:
            self._end_shifts()
            concurrent.futures.wait(self._shifts.values(), timeout=_LOOK_SECS)

    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        """See Executor. Workers that are late with a gradient take part when it is done."""
        is_over = threading.Event()

        def end_shifts() -> None:
            while not is_over.wait(_LOOK_SECS):
                with contextlib.suppress(PeerLostError):  # Then the evaluation is told.
                    self._end_shifts()

        self._end_shifts()
        if not self._shifts:
            return super()._evaluate(first_batch, num_batches)
        ending = _in_background(end_shifts)
        try:
            return super()._evaluate(first_batch, num_batches)
        finally:
            is_over.set()
            ending.result()

    def _plan(self, num_rounds: int) -> tuple[Any, Any]:
        """What workers need to read whichever shares they may be given in so many rounds.

        The first batch of each window, int64 [windows], in their order, and its tickets.
        """
        in_flight = [int(number) for number in self._slots[:, SHARE] if number != NOBODYS]
        # A worker that is late gets another one.
        most = num_rounds * (self._num_shares + self._num_slots) + self._num_slots
        open_batches = [number // self._num_shares for number in (*self._returned, *in_flight)]
        first, end = (
            self._next_share // self._num_shares,
            (self._next_share + most) // self._num_shares + 1,
        )
        oldest = min([first, *open_batches])
        self._tickets = {
            begin: window for begin, window in self._tickets.items() if begin + window[1] > oldest
        }
        for batch in open_batches:
            self._plan_window(batch)
        while first < end:
            first = self._plan_window(first)
        begins = sorted(self._tickets)
        return tf.constant(begins, tf.int64), tf.constant(
            np.array([self._tickets[begin][2] for begin in begins], object)
        )

    def _plan_window(self, batch: int) -> int:
        """Plans the window of `batch`, if that was not done before; returns the batch after it."""
        begin: int
        count: int
        for begin, count, _ in self._tickets.values():
            if begin <= batch < begin + count:
                return begin + count
        begin, count = next(self._source.order.windows(batch))
        self._tickets[begin] = (begin, count, self._rounds.ticket(begin, count))
        return begin + count


def _in_background(function: Callable[..., Made], *args: Any) -> concurrent.futures.Future[Made]:
    """What `function` returns, on a thread that does not keep the process from its end."""
    future: concurrent.futures.Future[Made] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
