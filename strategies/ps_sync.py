"""`--strategy=ps --sync_replicas`: a step is the first n gradients computed on the same variables.

    executor = SynchronousParameterServerExecutor.connect(cluster, replicas_to_aggregate=2)

With fewer gradients to a step than workers, the others are backups (Chen et al., "Revisiting
Distributed Synchronous SGD", 2016): a step does not wait for the slowest. TensorFlow 1 had this in
SyncReplicasOptimizer; TensorFlow 2 does not.

A batch is cut into n *shares*, by lanes, as a batch of n replicas is. One round:

| who | does |
| --- | --- |
| chief | hands a share to each idle worker, with a *slot* of the staging area |
| worker | reads the step, then the variables; writes its gradient to the slot, then a tag |
| chief | takes the first n that are done, sums their slots in order, applies the sum, counts |
| chief | hands the shares of gradients that came too late out again |

The staging area is a variable on the ps, [slots, ...], beside each trainable one; the tag of a slot
is (attempt, step). It needs more memory than an accumulator, and buys three things. The sum has one
order, so a run is repeatable with any number of workers. A worker that dies between two of its
variables leaves no tag, so nothing of it is ever summed. And one that was given up but still writes
has changed the tag, so the round notices and does that share again.
"""

import collections
import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from data.order import share
from strategies.base import (
    Learner,
    Metrics,
    Position,
    Tensor,
    read_now,
    refuse_open_shares,
    to_metrics,
)
from strategies.cluster import Cluster
from strategies.counts import Counts
from strategies.ps import ParameterServerExecutor, losses_explained


@dataclasses.dataclass(frozen=True, order=True)
class Share:
    """The examples of batch `batch` in lanes [first_lane, last_lane]: what one gradient covers."""

    batch: int
    first_lane: int
    last_lane: int

    @property
    def lanes(self) -> range:
        """The lanes as a range."""
        return range(self.first_lane, self.last_lane + 1)


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """A share in the hands of a worker; its gradient goes to `slot` under the tag `number`."""

    number: int
    share: Share
    slot: int


@dataclasses.dataclass(frozen=True)
class _Done:
    """What a worker says when its gradient is staged."""

    attempt: _Attempt
    worker: str
    step: int
    sums: Any


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
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_slots, "gradients")
        self._in_flight: dict[concurrent.futures.Future[_Done], _Attempt] = {}
        self._attempts = 0
        self._worker_examples: collections.Counter[str] = collections.Counter()
        self._worker_repeated: collections.Counter[str] = collections.Counter()

    @property
    def replicas_a_step(self) -> int:
        """The gradients that are summed."""
        return self._num_shares

    @property
    def position(self) -> Position:
        """See Executor. Shares in flight are not consumed: their gradients will come too late."""
        items = [*self._returned, *self._waiting]
        items += (attempt.share for attempt in self._in_flight.values())
        shares = [(item.batch, item.first_lane, item.last_lane) for item in sorted(items)]
        return Position(self._next_batch, tuple(shares), self._skipped)

    @property
    def _num_staged(self) -> int:
        return self._num_slots

    def _counts_since_start(self) -> Counts:
        """What this process has seen.

        Gradients were repeated if they were computed on the right variables, but written over
        before they could be summed.
        """
        counters = {
            "worker_steps": self._worker_finished,
            "worker_examples": self._worker_examples,
            "worker_dropped": self._worker_dropped,
            "worker_repeated": self._worker_repeated,
        }
        return {
            name: {worker: counter[worker] for worker in self._workers()}
            for name, counter in counters.items()
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
        self._tickets: dict[range, tuple[int, int, Any]] = {}
        with self.strategy.scope():
            self._staging = [self._stage_for(variable) for variable in learner.variables]
            self._tags = tf.Variable(-tf.ones([self._num_slots, 2], tf.int64), trainable=False)
        self._compute = self._make_computes()
        self._apply = self._make_apply()

    def _forget(self) -> None:
        """See Executor."""
        if self._wire.rounds:
            self._wire.forget()
            self._compute = self._make_computes()

    def _settle(self) -> None:
        """See Executor. What comes after the step counter was set back would pass for timely."""
        with losses_explained():
            for future in concurrent.futures.as_completed(self._in_flight):
                future.result()
        self._in_flight.clear()

    def _seek(self, position: Position) -> None:
        """See Executor."""
        if any(
            range(first, last + 1) not in self._lanes for _, first, last in position.open_shares
        ):
            refuse_open_shares(position, self._source.order)
        self._begin_at(position)
        for counted in (self._worker_examples, self._worker_repeated):
            counted.clear()
        self._waiting = collections.deque[Share]()
        self._returned = collections.deque(Share(*item) for item in position.open_shares)
        self._current_step = self._first_step

    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        """See Executor. Exactly `num_steps`."""
        started = time.monotonic()
        sums = np.zeros([len(self._learner.metric_names), 2])
        last = self._current_step + num_steps
        while self._current_step < last:
            accepted = self._gather_gradients()
            if self._apply_gradients(accepted):
                sums += sum(done.sums for done in accepted)
        self._stopping = self._stop_requested
        return to_metrics(self._learner.metric_names, sums), time.monotonic() - started

    def _gather_gradients(self) -> list[_Done]:
        """The first n gradients computed on the current variables, in the order of their shares."""
        accepted: list[_Done] = []
        while len(accepted) < self._num_shares:
            self._hand_out(accepted)
            finished, _ = concurrent.futures.wait(
                self._in_flight, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in finished:
                attempt = self._in_flight.pop(future)
                with losses_explained():
                    done = future.result()
                if done.step == self._current_step and len(accepted) < self._num_shares:
                    accepted.append(done)
                else:
                    self._worker_dropped[done.worker] += 1
                    self._returned.append(attempt.share)
        return sorted(accepted, key=lambda done: done.attempt.share)

    def _apply_gradients(self, accepted: Sequence[_Done]) -> bool:
        """Applies the sum; False, with all shares returned, if a slot was written to meanwhile."""
        slots = tf.constant([done.attempt.slot for done in accepted], tf.int64)
        tags = tf.constant([[done.attempt.number, done.step] for done in accepted], tf.int64)
        with losses_explained():
            applied = bool(self._apply(slots, tags).numpy())
        rows = self._source.order.batch_size // self._source.order.lanes
        for done in accepted:
            if applied:
                self._worker_finished[done.worker] += 1
                self._worker_examples[done.worker] += len(done.attempt.share.lanes) * rows
            else:
                self._worker_repeated[done.worker] += 1
                self._returned.append(done.attempt.share)
        self._current_step += applied
        return applied

    def _hand_out(self, accepted: Sequence[_Done]) -> None:
        """Gives every idle worker a share. One whose gradient was accepted waits for the step.

        Returned shares go out at the start of a round, before others. A worker that is idle later
        is the slow one that has just returned a share: it would be late with it for ever.
        """
        taken = {attempt.slot for attempt in self._in_flight.values()}
        taken |= {done.attempt.slot for done in accepted}
        free = [slot for slot in range(self._num_slots) if slot not in taken]
        is_start = len(free) >= self._num_shares
        for slot in free:
            item = self._returned.popleft() if is_start and self._returned else self._next_share()
            attempt = _Attempt(self._attempts, item, slot)
            self._attempts += 1
            closure = self._coordinator.schedule(
                self._compute[len(attempt.share.lanes)], args=self._arguments(attempt)
            )
            self._in_flight[self._pool.submit(self._fetch, closure, attempt)] = attempt

    def _next_share(self) -> Share:
        if not self._waiting:
            self._waiting.extend(
                Share(self._next_batch, lanes[0], lanes[-1]) for lanes in self._lanes
            )
            self._next_batch += 1
        return self._waiting.popleft()

    def _arguments(self, attempt: _Attempt) -> tuple[Any, ...]:
        """What the worker's closure takes: a ticket of the rest of the window, and which row of it.

        The same tensors serve all batches of a window, so a plan is made once a window and share.
        """
        item = attempt.share
        first, count, ticket = self._tickets.get(item.lanes, (0, 0, None))
        if not first <= item.batch < first + count:
            first, count = next(self._source.order.windows(item.batch))
            arrays = self._source.ticket(first, count, item.lanes)
            ticket = tf.nest.map_structure(tf.constant, arrays)
            self._tickets[item.lanes] = (first, count, ticket)
        row = item.batch - first
        numbers = (row, item.batch, item.first_lane, attempt.slot, attempt.number)
        return (ticket, tf.constant(numbers, tf.int64))

    def _fetch(self, closure: Any, attempt: _Attempt) -> _Done:
        """On a thread of the pool, until the worker is done."""
        sums, worker, step = closure.fetch()
        return _Done(attempt, f"worker {int(worker)}", int(step), sums)

    def _stage_for(self, variable: Any) -> Any:
        """A slot for each gradient of `variable`, on its ps."""
        with self.strategy.extended.colocate_vars_with(variable):
            zeros = tf.zeros([self._num_slots, *variable.shape], variable.dtype)
            return tf.Variable(zeros, trainable=False)

    def _make_computes(self) -> dict[int, Any]:
        return {size: self._make_compute(size) for size in {len(lanes) for lanes in self._lanes}}

    def _make_compute(self, num_lanes: int) -> Any:
        """The worker's part: stages the gradient of a share of `num_lanes` lanes."""
        learner, source, strategy = self._learner, self._source, self.strategy
        lanes = range(num_lanes)
        run_id = f"{os.getpid()}-{time.time_ns()}"

        @tf.function(
            input_signature=[source.ticket_spec(lanes=lanes), tf.TensorSpec([5], tf.int64)]
        )
        def compute(ticket: Any, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            *where, slot, attempt = tf.unstack(numbers)
            records = _kept_or_read(source, ticket, where, run_id)
            extras = {"seeds": ticket["seeds"][where[0]]} if "seeds" in ticket else {}
            batch = source.parse_records(records, extras)
            # The step before the variables: apply writes it after them, so what is computed on
            # variables of two steps is tagged with the older one, and dropped.
            step = tf.cast(read_now(learner.step), tf.int64)
            with tf.control_dependencies([step]):
                gradients, sums = strategy.run(learner.gradients, args=(batch,))
            self._stage(gradients, slot, tf.stack([attempt, step]))
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            return sums, worker, step

        return compute

    def _stage(self, gradients: Sequence[Tensor], slot: Tensor, tag: Tensor) -> None:
        """Writes `gradients` to `slot`, with no tag while they are not whole, and `tag` after."""
        torn = self._tags.scatter_nd_update([[slot]], [[-1, -1]])
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        arrived = self._wire.sent_to(self._staging, dense)
        with tf.control_dependencies([torn]):
            writes = [
                stage.scatter_nd_update([[slot]], [gradient])
                for stage, gradient in zip(self._staging, arrived, strict=True)
                if gradient is not None
            ]
        with tf.control_dependencies(writes):
            self._tags.scatter_nd_update([[slot]], [tag])

    def _make_apply(self) -> Any:
        """The chief's part: sums slots in their order, applies, counts; True if tags were right."""
        num_shares, learner, strategy = self._num_shares, self._learner, self.strategy

        @tf.function(
            input_signature=[
                tf.TensorSpec([num_shares], tf.int64),
                tf.TensorSpec([num_shares, 2], tf.int64),
            ]
        )
        def apply(slots: Tensor, tags: Tensor) -> Tensor:
            summed = []
            for stage in self._staging:
                with tf.device(stage.device):
                    rows = tf.unstack(stage.sparse_read(slots))
                    total = rows[0]
                    for row in rows[1:]:
                        total += row
                    summed.append(total)
            # After the rows were read: whoever wrote to one before has changed its tag.
            with tf.control_dependencies(summed):
                whole = tf.reduce_all(tf.equal(self._tags.sparse_read(slots), tags))
            if whole:
                strategy.run(learner.apply, args=(summed,))
            return whole

        return apply


def _kept_or_read(source: Any, ticket: Any, numbers: Sequence[Tensor], run_id: str) -> Tensor:
    """The records of a share, string [n]: kept by this worker from a former share, or read now.

    Reading means the rest of the window, as its batches are spread over the same chunks. What is
    not needed now is kept for the batches to come, in a table of the worker's own: at most two
    windows for each share of a batch.
    """
    row, batch, first_lane = numbers
    size = ticket["gather"].shape[1]
    ring = tf.constant(2 * source.order.window_batches, tf.int64)

    # Found again by its name: it lives as long as the worker, and a worker that is back has none.
    table = tf.raw_ops.MutableHashTableOfTensorsV2(
        key_dtype=tf.int64,
        value_dtype=tf.string,
        value_shape=[1 + size],
        shared_name=f"records-{run_id}-{size}",
    )

    def place(batches: Tensor) -> Tensor:
        return first_lane * ring + batches % ring

    kept = tf.raw_ops.LookupTableFindV2(
        table_handle=table, keys=[place(batch)], default_value=tf.fill([1 + size], "")
    )[0]

    def read() -> Tensor:
        records = source.read_ticket({**ticket, "gather": ticket["gather"][row:]})
        batches = batch + tf.range(tf.shape(records, tf.int64)[0])
        values = tf.concat([tf.strings.as_string(batches)[:, tf.newaxis], records], axis=1)
        tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=place(batches), values=values)
        return records[0]

    records = tf.cond(tf.equal(kept[0], tf.strings.as_string(batch)), lambda: kept[1:], read)
    return tf.ensure_shape(records, [size])
