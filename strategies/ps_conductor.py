"""What decides the steps of synchronous parameter servers: a loop on the one that counts them.

    conductor = Conductor(learner, source, strategy, staging, lanes)
    numbers, slots, returned, sums, counts = conductor.graph(...)

It gives an order to each slot that waits; takes the first n gradients that are timely; applies
their sum, in the order of the shares; and gives the shares of those that came too late out again.
Messages are taken n at a time and judged together, and one by one where something is unusual.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import tensorflow as tf

from strategies.base import Learner, Tensor, read_now
from strategies.ps_staging import (
    BEGUN,
    DONE,
    END,
    ENDING,
    GOES_ON,
    IS_FINAL,
    NOBODYS,
    NUDGE,
    STOP,
    Staging,
)

# Columns of what the conductor knows of a slot, int64 [slots, 7].
SHARE = 0  # The number of the share it was given, or NOBODYS.
ATTEMPT = 1  # The number of that order.
LAST = 2  # Whether that order is the shift's last: GOES_ON or why.
IS_SERVED = 3  # Whether a shift takes its orders.
IS_OLD = 4  # Whether its shift began in an earlier call, and knows of no batches after that.
IS_HELD = 5  # Whether the gradient is there, and waits for the others.
WORKER = 6  # Who computed it.
NUM_COLUMNS = 7

# Columns of what is counted of each worker, int64 [workers, 4].
FINISHED, EXAMPLES, DROPPED, REPEATED = range(4)


class _State(NamedTuple):
    """What the conductor carries from message to message. Scalars are int64."""

    slots: Tensor  # What is known of each, int64 [slots, NUM_COLUMNS].
    returned: Tensor  # Shares to give out again, int64 [any].
    held: Tensor  # The metrics of gradients that are held, float64 [slots, metrics, 2].
    sums: Tensor  # Of the rounds that are done, float64 [metrics, 2].
    counts: Tensor  # int64 [workers, 4].
    num_done: Tensor  # Rounds.
    step: Tensor  # The number of the round.
    fresh: Tensor  # The next share.
    attempt: Tensor  # The number of the next order.
    ends_shifts: Tensor  # 1 if each order is the last of its shift.
    is_stopped: Tensor  # 1 if it was told to stop.
    num_held: Tensor  # Gradients of this round that are there.

    def packed(self) -> tuple[Tensor, ...]:
        """With all scalars in one tensor: what goes into a loop or a branch has a price each."""
        return *self[:_NUM_TENSORS], tf.stack(self[_NUM_TENSORS:])

    @classmethod
    def unpacked(cls, packed: Sequence[Tensor]) -> Self:
        """What `packed` returned."""
        *tensors, scalars = packed
        return cls(*tensors, *tf.unstack(scalars))


# Fields of _State that are no scalars.
_NUM_TENSORS = 5


class Conductor:
    """The loop.

    Attributes:
        graph: A tf.function, which takes and returns what is known between two calls.
    """

    def __init__(
        self,
        learner: Learner,
        source: Any,
        strategy: Any,
        staging: Staging,
        lanes: Sequence[range],
    ) -> None:
        """`lanes` are those of each share of a batch of `source`."""
        self._learner = learner
        self._source = source
        self._strategy = strategy
        self._staging = staging
        self._lanes = lanes
        self._num_slots = len(staging.orders)
        self._home = staging.home
        self.graph = self._make_graph()

    def _make_graph(self) -> Any:
        staging = self._staging

        @tf.function(
            input_signature=[
                tf.TensorSpec([4], tf.int64),
                tf.TensorSpec([self._num_slots, NUM_COLUMNS], tf.int64),
                tf.TensorSpec([None], tf.int64),
            ],
            autograph=False,
        )
        def conduct(
            numbers: Tensor, slots: Tensor, returned: Tensor
        ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            """Some rounds.

            Args:
                numbers: How many rounds; whether each order is the last of its shift; the next
                    share; the next attempt.
                slots: What is known of each.
                returned: Shares to give out again.

            Returns:
                `numbers`, `slots`, `returned` as they are then; metrics; counts of each worker.
            """
            with tf.device(self._home):
                zero = tf.constant(0, tf.int64)
                rounds, ends_shifts, fresh, attempt = tf.unstack(tf.identity(numbers))
                state = _State(
                    slots=tf.identity(slots),
                    returned=tf.identity(returned),
                    held=tf.zeros([self._num_slots, *staging.sums_shape], tf.float64),
                    sums=tf.zeros(staging.sums_shape, tf.float64),
                    counts=tf.zeros([self._num_slots, 4], tf.int64),
                    num_done=zero,
                    step=tf.cast(read_now(self._learner.step), tf.int64),
                    fresh=fresh,
                    attempt=attempt,
                    ends_shifts=ends_shifts,
                    is_stopped=zero,
                    num_held=zero,
                )
                state = _loop(
                    lambda state: tf.equal(state.is_stopped, 0) & (state.num_done < rounds),
                    lambda state: self._turn(state, rounds),
                    self._order_all(state, rounds),
                )
                numbers = tf.stack([state.num_done, state.ends_shifts, state.fresh, state.attempt])
                return numbers, state.slots, state.returned, state.sums, state.counts

        return conduct

    def _turn(self, state: _State, rounds: Tensor) -> _State:
        """Waits for messages, and ends the round if they bring what it lacks."""
        state = self._receive(state, rounds)
        is_full = tf.equal(state.num_held, len(self._lanes)) & tf.equal(state.is_stopped, 0)
        turned = tf.cond(
            is_full,
            lambda: self._order_all(self._finish(state), rounds).packed(),
            state.packed,
        )
        return _State.unpacked(turned)

    def _receive(self, state: _State, rounds: Tensor) -> _State:
        """Waits for messages, and does what they ask for."""
        # As many will come: each slot that holds none owes at least one. But a worker that stands
        # in for another one can owe one at a time.
        num_due = len(self._lanes) - state.num_held
        num_due = tf.where(state.ends_shifts > 0, tf.ones_like(num_due), num_due)
        messages, sums = self._staging.receive(num_due)
        kinds, senders, attempts, workers, steps = tf.unstack(messages, axis=1)
        rows = tf.gather(state.slots, senders)
        of_rows = tf.unstack(rows, axis=1)
        is_usual = tf.equal(kinds, DONE) & (of_rows[SHARE] >= 0)
        is_usual &= tf.equal(of_rows[ATTEMPT], attempts) & tf.equal(of_rows[IS_HELD], 0)
        is_usual &= tf.equal(steps, state.step) & tf.equal(of_rows[LAST], GOES_ON)

        def hold_all() -> tuple[Tensor, ...]:
            held = [*of_rows]
            held[IS_HELD], held[WORKER] = tf.ones_like(senders), workers
            places = senders[:, tf.newaxis]
            update = tf.tensor_scatter_nd_update
            return state._replace(
                slots=update(state.slots, places, tf.stack(held, axis=1)),
                held=update(state.held, places, sums),
                num_held=state.num_held + tf.size(senders, tf.int64),
            ).packed()

        def hear_each() -> tuple[Tensor, ...]:
            hear = self._hear
            last = tf.shape(messages)[0]
            _, *heard = tf.while_loop(
                lambda i, *_: i < last,
                lambda i, *state: (
                    i + 1,
                    *hear(_State.unpacked(state), messages[i], sums[i], rounds).packed(),
                ),
                (tf.constant(0), *state.packed()),
                shape_invariants=(tf.TensorShape([]), *_shapes(state)),
                parallel_iterations=1,
            )
            return tuple(heard)

        return _State.unpacked(tf.cond(tf.reduce_all(is_usual), hold_all, hear_each))

    def _hear(self, state: _State, message: Tensor, sums: Tensor, rounds: Tensor) -> _State:
        """Does what one message asks for."""
        kind, slot, number, worker, tag = tf.unstack(message)
        share, attempt, last, is_served, is_old, is_held, holder = tf.unstack(state.slots[slot])
        nobodys = tf.constant(NOBODYS, tf.int64)
        is_done, has_begun = tf.equal(kind, DONE), tf.equal(kind, BEGUN)
        is_nudge = tf.equal(kind, NUDGE)
        is_free = tf.equal(is_held, 0)
        is_known = is_done & (share >= 0) & tf.equal(attempt, number) & is_free
        is_timely = is_known & tf.equal(tag, state.step)
        is_late = is_known & tf.not_equal(tag, state.step)
        goes_on = tf.equal(last, GOES_ON)
        is_end = is_done & tf.equal(number, END)
        has_ended = is_end | (is_known & ~goes_on)
        ends_shifts = tf.maximum(state.ends_shifts, _int(is_nudge))
        returned = tf.concat([state.returned, tf.repeat(share, _int(is_late))], axis=0)
        # What it gets: its share again, if the order was taken by one that is no more; one that was
        # returned; or, if it has just been late and would be for ever, a new one.
        num_orders = tf.stack([self._staging.num_given(i) for i in range(self._num_slots)])
        of_slot = tf.where(is_end, tf.cast(num_orders[slot], tf.int64), number)
        gives_again = (has_begun | is_end) & is_free & (share >= 0) & tf.equal(of_slot, 0)
        begins = has_begun & is_free & (share < 0)
        # One that does not know of new shares has to end.
        is_useless = begins & (is_old > 0)
        gives_other = (begins & ~is_useless) | (is_late & goes_on)
        gives_returned = gives_other & has_begun & (tf.size(returned) > 0)
        gives = gives_again | gives_other
        # What is known of the sender now.
        is_served = tf.where(has_ended, tf.zeros_like(kind), tf.maximum(is_served, _int(has_begun)))
        is_old = tf.where(has_ended, tf.zeros_like(kind), is_old)
        other = tf.where(gives_returned, tf.concat([returned, [nobodys]], axis=0)[0], state.fresh)
        given = tf.where(gives_other, other, share)
        last_given = self._last(state, is_old, ends_shifts, rounds)
        row = [
            tf.where(gives, given, tf.where(is_late, nobodys, share)),
            tf.where(gives, state.attempt, attempt),
            tf.where(gives, last_given, last),
            is_served,
            is_old,
            tf.maximum(is_held, _int(is_timely)),
            tf.where(is_known, worker, holder),
        ]
        order = tf.stack([state.attempt, given, last_given, state.step])
        # Nudged, shifts that wait for an order end.
        is_sender = tf.equal(tf.range(self._num_slots, dtype=tf.int64), slot)
        gets = (is_sender & (gives | is_useless)) | (is_nudge & tf.equal(num_orders, 0))
        self._give(tf.where(gives, order, tf.constant(ENDING, tf.int64)), gets)
        return state._replace(
            slots=_put(state.slots, slot, tf.stack(row)),
            returned=returned[_int(gives_returned) :],
            held=tf.where(is_timely, _put(state.held, slot, sums), state.held),
            counts=_count(state.counts, [worker], {DROPPED: [_int(is_late)]}),
            fresh=state.fresh + _int(gives_other & ~gives_returned),
            attempt=state.attempt + _int(gives),
            ends_shifts=ends_shifts,
            is_stopped=tf.maximum(state.is_stopped, _int(tf.equal(kind, STOP))),
            num_held=state.num_held + _int(is_timely),
        )

    def _finish(self, state: _State) -> _State:
        """Applies what is held, in the order of the shares, whoever computed them."""
        order = self._source.order
        num_shares = len(self._lanes)
        rows_per_lane = order.batch_size // order.lanes
        examples = tf.constant([len(share) * rows_per_lane for share in self._lanes], tf.int64)
        ranked = tf.where(state.slots[:, IS_HELD] > 0, state.slots[:, SHARE], tf.int64.max)
        places = tf.argsort(ranked)[:num_shares]
        columns = tf.unstack(tf.gather(state.slots, places), axis=1)
        shares, workers = columns[SHARE], columns[WORKER]
        is_whole, summed = self._staging.total(places, columns[ATTEMPT], state.step, num_shares)

        def apply() -> Tensor:
            return tf.cast(self._strategy.run(self._learner.apply, args=(summed,)), tf.int64)

        step = tf.cond(is_whole, apply, lambda: state.step)
        done = _int(is_whole)
        finished = tf.fill([num_shares], done)
        counted = {
            FINISHED: finished,
            EXAMPLES: finished * tf.gather(examples, shares % num_shares),
            REPEATED: 1 - finished,
        }
        columns[SHARE], columns[IS_HELD] = NOBODYS * tf.ones_like(shares), tf.zeros_like(shares)
        freed = tf.stack(columns, axis=1)
        total = tf.add_n(tf.unstack(tf.gather(state.held, places)))
        return state._replace(
            slots=tf.tensor_scatter_nd_update(state.slots, places[:, tf.newaxis], freed),
            returned=tf.concat([state.returned, shares[: num_shares * (1 - done)]], axis=0),
            sums=tf.where(is_whole, state.sums + total, state.sums),
            counts=_count(state.counts, workers, counted),
            num_done=state.num_done + done,
            step=step,
            num_held=tf.zeros_like(done),
        )

    def _order_all(self, state: _State, rounds: Tensor) -> _State:
        """An order for each slot that waits, if there is another round: returned shares first."""
        columns = tf.unstack(state.slots, axis=1)
        waits = (columns[SHARE] < 0) & (columns[IS_SERVED] > 0) & (state.num_done < rounds)
        rank = tf.cumsum(_int(waits), exclusive=True)
        new = state.fresh + tf.range(self._num_slots, dtype=tf.int64)
        shares = tf.gather(tf.concat([state.returned, new], axis=0), rank)
        lasts = self._last(state, columns[IS_OLD], state.ends_shifts, rounds)
        attempts = state.attempt + rank
        steps = tf.fill([self._num_slots], state.step)
        self._give(tf.stack([attempts, shares, lasts, steps], axis=1), waits)
        columns[SHARE], columns[ATTEMPT], columns[LAST] = shares, attempts, lasts
        num_given = tf.reduce_sum(_int(waits))
        num_returned = tf.minimum(num_given, tf.size(state.returned, tf.int64))
        return state._replace(
            slots=tf.where(waits[:, tf.newaxis], tf.stack(columns, axis=1), state.slots),
            returned=state.returned[num_returned:],
            fresh=state.fresh + num_given - num_returned,
            attempt=state.attempt + num_given,
        )

    def _last(self, state: _State, is_old: Tensor, ends_shifts: Tensor, rounds: Tensor) -> Tensor:
        """Whether an order that is given now is its shift's last, and why.

        A shift that does not know what comes after an earlier call ends with it.
        """
        is_final = tf.equal(state.num_done + 1, rounds)
        return tf.maximum(tf.maximum(ends_shifts, is_old), IS_FINAL * _int(is_final))

    def _give(self, orders: Tensor, gets: Tensor) -> None:
        """Gives each slot that `gets` one, bool [slots], its row of `orders`, or all the same."""
        rows = tf.broadcast_to(orders, [self._num_slots, 4]) if orders.shape.rank == 1 else orders
        for slot, number in enumerate(tf.unstack(tf.cast(gets, tf.int32))):
            self._staging.give(slot, tf.slice(rows, [slot, 0], tf.stack([number, 4])))


def _loop(
    goes_on: Callable[[_State], Tensor], body: Callable[[_State], _State], state: _State
) -> _State:
    """`state` after `body` while it `goes_on`."""
    packed = tf.while_loop(
        lambda *state: goes_on(_State.unpacked(state)),
        lambda *state: body(_State.unpacked(state)).packed(),
        state.packed(),
        shape_invariants=_shapes(state),
        parallel_iterations=1,
    )
    return _State.unpacked(packed)


def _put(rows: Tensor, index: Tensor, row: Tensor) -> Tensor:
    return tf.tensor_scatter_nd_update(rows, [[index]], [row])


def _count(counts: Tensor, workers: Tensor, columns: Mapping[int, Tensor]) -> Tensor:
    """`counts` with more in these columns of `workers`, all [n]."""
    workers = tf.convert_to_tensor(workers)
    none = tf.zeros_like(workers)
    more = tf.stack([columns.get(column, none) for column in range(4)], axis=1)
    return tf.tensor_scatter_nd_add(counts, workers[:, tf.newaxis], more)


def _int(flag: Tensor) -> Tensor:
    return tf.cast(flag, tf.int64)


def _shapes(state: _State) -> tuple[Any, ...]:
    """Those of `state`, packed, in a loop: any number of shares may be returned."""
    shapes = [tensor.shape for tensor in state.packed()]
    shapes[_State._fields.index("returned")] = tf.TensorShape([None])
    return tuple(shapes)
