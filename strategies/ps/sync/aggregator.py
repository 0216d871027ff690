"""What decides the steps of synchronous parameter servers: a loop on the server that counts steps.

    aggregator = Aggregator(learner, source, strategy, buffers, lanes)
    progress, slots, returned, totals, counters = aggregator.graph(
        progress, slots, returned, counters
    )

A step needs n gradients. While h of them are held, the aggregator takes n - h messages together
from the queue, or one while loops give way. If all of them are gradients in time, it handles them
together. Otherwise it handles them one by one: `judge` says what a message means, and
`Aggregator._answer` gives its sender the next assignment.

After each round the aggregator stores what a chief would need to continue from that step, on its
server (../former_rounds.py): the chief may die during a call.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import tensorflow as tf

from data.tickets import TicketSource
from strategies.base import Learner, Tensor, read_now
from strategies.ps.former_rounds import Rounds
from strategies.ps.former_state import NamedTensors
from strategies.ps.protocol import (
    END,
    END_ASSIGNMENT,
    NONE,
    Assignment,
    Counters,
    EndReason,
    Kind,
    Message,
    Progress,
    WorkerSlot,
    pack,
    unpack,
)
from strategies.ps.sync.gradient_buffers import GradientBuffers


class Verdict(NamedTuple):
    """What a message means. All are bool, scalars or [n]; see `judge`."""

    hold: Tensor  # The gradient is in time: it waits for the others of its step.
    drop: Tensor  # The gradient is late: its sub-batch is to be assigned again.
    loop_begun: Tensor
    loop_ended: Tensor
    assign_same: Tensor  # The sender gets the sub-batch of its worker slot again.
    assign_other: Tensor  # The sender gets another sub-batch.
    end_loop: Tensor  # The sender gets END_ASSIGNMENT.
    end_waiting: Tensor  # Every worker loop with an empty queue gets END_ASSIGNMENT.
    stop: Tensor  # No more rounds.


def judge(message: Message, slot: WorkerSlot, step: Tensor, num_queued: Tensor) -> Verdict:
    """What `message` means if `slot` is the sender's, with `num_queued` assignments in its queue.

    | message | state of the worker slot | verdict |
    | --- | --- | --- |
    | DONE, attempt and step are right | loop continues | hold |
    | DONE, attempt and step are right | it was the loop's last | hold, loop_ended |
    | DONE, attempt is right, step is not | loop continues | drop, assign_other |
    | DONE, attempt is right, step is not | it was the loop's last | drop, loop_ended |
    | DONE, attempt is END | has a sub-batch, queue is empty | loop_ended, assign_same |
    | DONE, attempt is END | any other | loop_ended |
    | BEGUN, queue was empty | has a sub-batch: another worker took it | loop_begun, assign_same |
    | BEGUN | no sub-batch | loop_begun, assign_other |
    | BEGUN | no sub-batch, loop is old | loop_begun, end_loop |
    | BEGUN | any other | loop_begun |
    | NUDGE | any | end_waiting |
    | STOP | any | stop |

    A sub-batch whose gradient is held counts as "any other". Ignored: NOTHING, a repeated DONE
    (the gradient is held), and the DONE of an abandoned attempt (its number is another one).
    A late worker gets another sub-batch, and not the one that it returned: on that it might be late
    again and again. An old loop must end because it cannot read new sub-batches.
    """
    is_done, has_begun = tf.equal(message.kind, Kind.DONE), tf.equal(message.kind, Kind.BEGUN)
    is_free = tf.equal(slot.is_held, 0)
    has_sub_batch = slot.sub_batch >= 0
    is_expected = is_done & has_sub_batch & is_free & tf.equal(slot.attempt, message.attempt)
    is_in_time = tf.equal(message.step, step)
    continues = tf.equal(slot.end_reason, EndReason.CONTINUES)
    is_end = is_done & tf.equal(message.attempt, END)
    was_queued = tf.where(is_end, num_queued, message.attempt)
    begins = has_begun & is_free & ~has_sub_batch
    is_old = slot.is_old > 0
    return Verdict(
        hold=is_expected & is_in_time,
        drop=is_expected & ~is_in_time,
        loop_begun=has_begun,
        loop_ended=is_end | (is_expected & ~continues),
        assign_same=(has_begun | is_end) & is_free & has_sub_batch & tf.equal(was_queued, 0),
        assign_other=(begins & ~is_old) | (is_expected & ~is_in_time & continues),
        end_loop=begins & is_old,
        end_waiting=tf.equal(message.kind, Kind.NUDGE),
        stop=tf.equal(message.kind, Kind.STOP),
    )


class _State(NamedTuple):
    """What the aggregator carries from message to message. Scalars are int64."""

    slots: Tensor  # Packed WorkerSlot, int64 [worker slots, 7].
    returned: Tensor  # Sub-batches to assign again, int64 [any].
    held_totals: Tensor  # The metric totals of held gradients, float64 [worker slots, num_totals].
    metric_totals: Tensor  # Of the rounds that are done, float64 [num_totals].
    counters: Tensor  # Packed Counters of the run so far, int64 [workers, 4].
    num_left: Tensor  # Rounds to run.
    step: Tensor  # The step counter, which is the number of the round.
    next_sub_batch: Tensor
    next_attempt: Tensor
    loops_give_way: Tensor  # 1 if each assignment is the last of its worker loop.
    is_stopped: Tensor  # 1 after Kind.STOP.
    num_held: Tensor  # Gradients of this round that are held.

    def pack(self) -> tuple[Tensor, ...]:
        """With all scalars in one tensor: each tensor costs at a loop or a branch."""
        return *self[:_NUM_TENSORS], tf.stack(self[_NUM_TENSORS:])

    @classmethod
    def unpack(cls, packed: Sequence[Tensor]) -> Self:
        *tensors, scalars = packed
        return cls(*tensors, *tf.unstack(scalars))


# Fields of _State that are not scalars.
_NUM_TENSORS = 5


@dataclass(frozen=True, eq=False)
class Aggregator:
    """The loop. `lanes` are the lanes of each sub-batch of a batch of `source`.

    The state after each round is stored in `stored`, on the device of the step counter.
    """

    learner: Learner
    source: TicketSource
    strategy: tf.distribute.Strategy
    buffers: GradientBuffers
    lanes: Sequence[range]
    stored: NamedTensors

    @property
    def _num_slots(self) -> int:
        return len(self.buffers.queues)

    @functools.cached_property
    def graph(self) -> tf.types.experimental.PolymorphicFunction:
        """A tf.function that takes and returns the state between two calls."""
        num_totals = self.buffers.num_totals

        @tf.function(
            input_signature=[
                tf.TensorSpec([len(Progress._fields)], tf.int64),
                tf.TensorSpec([self._num_slots, len(WorkerSlot._fields)], tf.int64),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([self._num_slots, len(Counters._fields)], tf.int64),
            ],
            autograph=False,
        )
        def aggregate(
            progress: Tensor, slots: Tensor, returned: Tensor, counters: Tensor
        ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            """Runs the rounds of `progress`, a packed Progress, from packed worker `slots`.

            `returned` are sub-batches to assign again, `counters` the packed counters of each
            worker. Returns these four as they are then, and before the last the metric totals.
            """
            with tf.device(self.buffers.step_device):
                zero = tf.constant(0, tf.int64)
                begin = unpack(Progress, tf.identity(progress))
                state = _State(
                    slots=tf.identity(slots),
                    returned=tf.identity(returned),
                    held_totals=tf.zeros([self._num_slots, num_totals], tf.float64),
                    metric_totals=tf.zeros([num_totals], tf.float64),
                    counters=tf.identity(counters),
                    num_left=begin.num_rounds,
                    step=tf.cast(read_now(self.learner.step), tf.int64),
                    next_sub_batch=begin.next_sub_batch,
                    next_attempt=begin.next_attempt,
                    loops_give_way=begin.loops_give_way,
                    is_stopped=zero,
                    num_held=zero,
                )
                state = self._assign_all(state)

                def continues(*packed: Tensor) -> Tensor:
                    state = _State.unpack(packed)
                    return tf.equal(state.is_stopped, 0) & (state.num_left > 0)

                packed = tf.while_loop(
                    continues,
                    lambda *packed: self._take_turn(_State.unpack(packed)).pack(),
                    state.pack(),
                    shape_invariants=_shapes(state),
                    parallel_iterations=1,
                )
                state = _State.unpack(packed)
                num_done = begin.num_rounds - state.num_left
                end = Progress(
                    num_done, state.loops_give_way, state.next_sub_batch, state.next_attempt
                )
                found = pack(end), state.slots, state.returned
                return *found, state.metric_totals, state.counters

        return aggregate

    def _take_turn(self, state: _State) -> _State:
        state = self._receive(state)
        is_full = tf.equal(state.num_held, len(self.lanes)) & tf.equal(state.is_stopped, 0)
        packed = tf.cond(is_full, lambda: self._assign_all(self._finish(state)).pack(), state.pack)
        return _State.unpack(packed)

    def _receive(self, state: _State) -> _State:
        # At least this number of messages will come, one from each worker slot whose gradient is
        # not held. But while loops give way, a worker may serve several slots, one at a time.
        num_due = len(self.lanes) - state.num_held
        num_due = tf.where(state.loops_give_way > 0, tf.ones_like(num_due), num_due)
        rows, totals = self.buffers.receive(num_due)
        messages = unpack(Message, rows)
        slots = unpack(WorkerSlot, tf.gather(state.slots, messages.worker_slot))
        verdicts = judge(messages, slots, state.step, num_queued=tf.zeros_like(messages.kind))
        are_in_time = verdicts.hold & ~verdicts.loop_ended  # Whatever is queued.

        def hold_all() -> tuple[Tensor, ...]:
            held = slots._replace(is_held=tf.ones_like(slots.is_held), worker=messages.worker)
            places = messages.worker_slot[:, tf.newaxis]
            update = tf.tensor_scatter_nd_update
            return state._replace(
                slots=update(state.slots, places, pack(held)),
                held_totals=update(state.held_totals, places, totals),
                num_held=state.num_held + tf.size(messages.kind, tf.int64),
            ).pack()

        def handle_each() -> tuple[Tensor, ...]:
            def handle(i: Tensor, *packed: Tensor) -> tuple[Tensor, ...]:
                state = self._handle(_State.unpack(packed), rows[i], totals[i])
                return i + 1, *state.pack()

            number = tf.shape(rows)[0]
            _, *handled = tf.while_loop(
                lambda i, *_: i < number,
                handle,
                (tf.constant(0), *state.pack()),
                shape_invariants=(tf.TensorShape([]), *_shapes(state)),
                parallel_iterations=1,
            )
            return tuple(handled)

        return _State.unpack(tf.cond(tf.reduce_all(are_in_time), hold_all, handle_each))

    def _handle(self, state: _State, row: Tensor, totals: Tensor) -> _State:
        message = unpack(Message, row)
        slot = unpack(WorkerSlot, state.slots[message.worker_slot])
        num_queued = tf.stack([self.buffers.num_queued(i) for i in range(self._num_slots)])
        of_sender = tf.cast(num_queued[message.worker_slot], tf.int64)
        verdict = judge(message, slot, state.step, of_sender)
        hold, drop = _int(verdict.hold), _int(verdict.drop)
        none, zero = tf.constant(NONE, tf.int64), tf.constant(0, tf.int64)
        has_loop = tf.maximum(slot.has_loop, _int(verdict.loop_begun))
        state = state._replace(
            returned=tf.concat([state.returned, tf.repeat(slot.sub_batch, drop)], axis=0),
            held_totals=tf.where(
                verdict.hold,
                _put(state.held_totals, message.worker_slot, totals),
                state.held_totals,
            ),
            counters=_count(state.counters, message.worker[tf.newaxis], dropped=drop[tf.newaxis]),
            loops_give_way=tf.maximum(state.loops_give_way, _int(verdict.end_waiting)),
            is_stopped=tf.maximum(state.is_stopped, _int(verdict.stop)),
            num_held=state.num_held + hold,
        )
        slot = slot._replace(
            sub_batch=tf.where(verdict.drop, none, slot.sub_batch),
            has_loop=tf.where(verdict.loop_ended, zero, has_loop),
            is_old=tf.where(verdict.loop_ended, zero, slot.is_old),
            is_held=tf.maximum(slot.is_held, hold),
            worker=tf.where(verdict.hold | verdict.drop, message.worker, slot.worker),
        )
        return self._answer(state, slot, message, verdict, num_queued)

    def _answer(
        self,
        state: _State,
        slot: WorkerSlot,
        message: Message,
        verdict: Verdict,
        num_queued: Tensor,
    ) -> _State:
        """Gives the sender its next assignment, or ends loops; `slot` is the sender's.

        The next assignment has (1) the same sub-batch, if its worker died; (2) a sub-batch that was
        returned; (3) a new one, if none was returned or the sender has just been late.
        """
        takes_returned = verdict.assign_other & verdict.loop_begun & (tf.size(state.returned) > 0)
        first_returned = tf.concat([state.returned, tf.constant([NONE], tf.int64)], axis=0)[0]
        other = tf.where(takes_returned, first_returned, state.next_sub_batch)
        assigns = verdict.assign_same | verdict.assign_other
        assignment = Assignment(
            attempt=state.next_attempt,
            sub_batch=tf.where(verdict.assign_other, other, slot.sub_batch),
            end_reason=_end_reason(state, slot.is_old),
            step=state.step,
        )
        is_sender = tf.equal(tf.range(self._num_slots, dtype=tf.int64), message.worker_slot)
        receives = is_sender & (assigns | verdict.end_loop)
        receives |= verdict.end_waiting & tf.equal(num_queued, 0)
        end = tf.constant(END_ASSIGNMENT, tf.int64)
        row = tf.where(assigns, pack(assignment), end)
        self._assign(tf.broadcast_to(row, [self._num_slots, len(Assignment._fields)]), receives)
        slot = slot._replace(
            sub_batch=assignment.sub_batch,  # Unchanged if nothing is assigned.
            attempt=tf.where(assigns, assignment.attempt, slot.attempt),
            end_reason=tf.where(assigns, assignment.end_reason, slot.end_reason),
        )
        return state._replace(
            slots=_put(state.slots, message.worker_slot, pack(slot)),
            returned=state.returned[_int(takes_returned) :],
            next_sub_batch=state.next_sub_batch + _int(verdict.assign_other & ~takes_returned),
            next_attempt=state.next_attempt + _int(assigns),
        )

    def _finish(self, state: _State) -> _State:
        """Applies the sum of the held gradients, in the order of their sub-batches."""
        num_sub_batches = len(self.lanes)
        rows_per_lane = self.source.order.batch_size // self.source.order.lanes
        examples = tf.constant([len(lanes) * rows_per_lane for lanes in self.lanes], tf.int64)
        all_slots = unpack(WorkerSlot, state.slots)
        ranked = tf.where(all_slots.is_held > 0, all_slots.sub_batch, tf.int64.max)
        places = tf.argsort(ranked)[:num_sub_batches]
        held = unpack(WorkerSlot, tf.gather(state.slots, places))
        is_complete, summed = self.buffers.total(places, held.attempt, state.step)

        def apply() -> Tensor:
            gradients = self.buffers.begun(summed, state.step + 1)
            gradients = self.buffers.change_layer_state(gradients)
            for index in {*range(self.learner.num_dense)} - {*self.buffers.present}:
                gradients[index] = None  # As a replica of `mirrored` has it.
            return tf.cast(self.strategy.run(self.learner.apply, args=(gradients,)), tf.int64)

        step = tf.cond(is_complete, apply, lambda: state.step)
        done = _int(is_complete)
        finished = tf.fill([num_sub_batches], done)
        freed = held._replace(
            sub_batch=NONE * tf.ones_like(held.sub_batch), is_held=tf.zeros_like(held.is_held)
        )
        total = tf.add_n(tf.unstack(tf.gather(state.held_totals, places)))
        returned = held.sub_batch[: num_sub_batches * (1 - done)]
        state = state._replace(
            slots=tf.tensor_scatter_nd_update(state.slots, places[:, tf.newaxis], pack(freed)),
            returned=tf.concat([state.returned, returned], axis=0),
            metric_totals=tf.where(is_complete, state.metric_totals + total, state.metric_totals),
            counters=_count(
                state.counters,
                held.worker,
                finished=finished,
                examples=finished * tf.gather(examples, held.sub_batch % num_sub_batches),
                repeated=1 - finished,
            ),
            num_left=state.num_left - done,
            step=step,
            num_held=tf.zeros_like(done),
        )
        self.stored.store(
            Rounds(step, state.next_sub_batch, state.returned, state.slots, state.counters)
        )
        return state

    def _assign_all(self, state: _State) -> _State:
        """Gives an assignment to each loop that waits, if a round follows: returned ones first."""
        slots = unpack(WorkerSlot, state.slots)
        waits = (slots.sub_batch < 0) & (slots.has_loop > 0) & (state.num_left > 0)
        rank = tf.cumsum(_int(waits), exclusive=True)
        new = state.next_sub_batch + tf.range(self._num_slots, dtype=tf.int64)
        assignments = Assignment(
            attempt=state.next_attempt + rank,
            sub_batch=tf.gather(tf.concat([state.returned, new], axis=0), rank),
            end_reason=_end_reason(state, slots.is_old),
            step=tf.fill([self._num_slots], state.step),
        )
        self._assign(pack(assignments), waits)
        assigned = slots._replace(
            sub_batch=assignments.sub_batch,
            attempt=assignments.attempt,
            end_reason=assignments.end_reason,
        )
        num_assigned = tf.reduce_sum(_int(waits))
        num_returned = tf.minimum(num_assigned, tf.size(state.returned, tf.int64))
        return state._replace(
            slots=tf.where(waits[:, tf.newaxis], pack(assigned), state.slots),
            returned=state.returned[num_returned:],
            next_sub_batch=state.next_sub_batch + num_assigned - num_returned,
            next_attempt=state.next_attempt + num_assigned,
        )

    def _assign(self, rows: Tensor, receives: Tensor) -> None:
        """Gives its row of packed assignments to each worker slot that `receives`, bool [slots]."""
        num_fields = len(Assignment._fields)
        for slot, number in enumerate(tf.unstack(tf.cast(receives, tf.int32))):
            row = tf.slice(rows, [slot, 0], tf.stack([number, num_fields]))
            self.buffers.assign(slot, row)


def _end_reason(state: _State, is_old: Tensor) -> Tensor:
    """The EndReason of an assignment that is made now.

    An old loop gives way after it, because it cannot read the sub-batches of this call.
    """
    is_final = _int(tf.equal(state.num_left, 1))
    gives_way = tf.maximum(state.loops_give_way, is_old)
    return tf.maximum(gives_way * int(EndReason.GIVES_WAY), is_final * int(EndReason.FINAL))


def _put(rows: Tensor, index: Tensor, row: Tensor) -> Tensor:
    return tf.tensor_scatter_nd_update(rows, [[index]], [row])


def _count(counters: Tensor, workers: Tensor, **more: Tensor) -> Tensor:
    """Packed `counters`, with `more` of these fields of Counters for `workers`, each int64 [n]."""
    none = tf.zeros_like(workers)
    added = Counters(*[more.get(field, none) for field in Counters._fields])
    return tf.tensor_scatter_nd_add(counters, workers[:, tf.newaxis], pack(added))


def _int(flag: Tensor) -> Tensor:
    return tf.cast(flag, tf.int64)


def _shapes(state: _State) -> tuple[tf.TensorShape, ...]:
    """The shapes of the packed `state` in a loop: any number of sub-batches may be returned."""
    shapes = [tensor.shape for tensor in state.pack()]
    shapes[_State._fields.index("returned")] = tf.TensorShape([None])
    return tuple(shapes)
