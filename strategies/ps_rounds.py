"""The graphs of synchronous parameter servers: what workers run, and what combines their gradients.

    rounds = Rounds(learner, source, strategy, wire, lanes=lanes, num_slots=3)
    rounds.shift                                # a closure for each worker
    numbers, slots, returned, sums, counts = rounds.conduct(...)    # meanwhile, on the ps

No Python and no chief takes part in a round. A worker's closure is a *shift*: it takes *orders*
from the queue of its *slot*, one after the other, and each is a share to compute. The *conductor*,
a loop on the parameter server that counts the steps, gives the orders:

| who | does |
| --- | --- |
| conductor | gives an order to each slot that waits |
| shift | reads the variables; writes its gradient to its slot of the staging area, then a tag |
| conductor | takes the first n that are timely; applies their sum, in the order of the shares |
| conductor | gives the shares of gradients that came too late out again |

The staging area is a variable on the ps, [slots, ...], beside each trainable one; the tags of a
slot, one on each ps, are (attempt, step). An order carries the step, and comes before the variables
are read: what is computed on variables of two steps is tagged with the older one, and dropped. A
worker that dies between two of its variables leaves no tag, so nothing of it is ever summed. And
one that was given up but still writes changes a tag first, so a round that reads after that
notices, and does that share again.

A shift ends with an order that is its *last*, so that closures of evaluation find idle workers. If
the worker dies, the coordinator gives the shift to another one or waits for it to come back; the
shift begins with a message, and the conductor gives it the share again that was lost.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.kept import KeptTickets
from strategies.base import Learner, Tensor, read_now
from strategies.packing import computed_with, read_together
from strategies.wire import Parcel, Wire

# Columns of what the conductor knows of a slot, int64 [slots, 6].
SHARE = 0  # The number of the share it was given, or NOBODYS.
ATTEMPT = 1  # The number of that order.
IS_SERVED = 2  # Whether a shift takes its orders.
LAST = 3  # Whether that order is the shift's last: GOES_ON or why.
IS_HELD = 4  # Whether the gradient is there, and waits for the others.
IS_OLD = 5  # Whether its shift began in an earlier call, and knows of no batches after that.
NUM_COLUMNS = 6

NOBODYS = -1

# Whether an order is the last of its shift: no; to let others have the worker; with the last round.
GOES_ON, GIVES_WAY, IS_FINAL = range(3)

# The attempt of an order that is none, and only ends a shift.
_END = -2
_ENDING = (_END, NOBODYS, GIVES_WAY, NOBODYS)

# Kinds of messages to the conductor, int64 [5]: (kind, slot, attempt, worker, step). One that has
# begun says in place of the attempt how many orders it has found.
_DONE = 0
_BEGUN = 1
_NUDGE = 2
_STOP = 3
_NOTHING = 4

# Columns of what is counted of each worker, int64 [workers, 4].
FINISHED, EXAMPLES, DROPPED, REPEATED = range(4)


class _State(NamedTuple):
    """What the conductor carries from message to message."""

    slots: Tensor  # What is known of each, int64 [slots, NUM_COLUMNS].
    returned: Tensor  # Shares to give out again, int64 [any].
    fresh: Tensor  # The next share.
    attempt: Tensor  # The number of the next order.
    ends_shifts: Tensor  # Whether each order is the last of its shift.
    is_stopped: Tensor  # Whether it was told to stop.
    num_held: Tensor  # Gradients of this round that are there.
    held: Tensor  # Their metrics, float64 [slots, metrics, 2].
    workers: Tensor  # Who computed them, int64 [slots].
    counts: Tensor  # int64 [workers, 4].


class Rounds:
    """The graphs, and the queues and staging area that they meet at."""

    def __init__(
        self,
        learner: Learner,
        source: Any,
        strategy: Any,
        wire: Wire,
        *,
        lanes: Sequence[range],
        num_slots: int,
    ) -> None:
        """`lanes` are those of each share of a batch of `source`; there are `num_slots` workers."""
        self._learner = learner
        self._source = source
        self._strategy = strategy
        self._wire = wire
        self._lanes = lanes
        self._num_slots = num_slots
        self._step = learner.step
        self._home = learner.step.device
        self._run_id = f"{os.getpid()}-{time.time_ns()}"
        self._sums_shape = (len(learner.metric_names), 2)
        self._ticket_spec = [source.ticket_spec(lanes=share) for share in lanes]
        self._make_staging()
        self._make_queues()
        self.shift = self._make_shift()
        self.conduct = self._make_conduct()

    def ticket(self, first_batch: int, num_batches: int) -> npt.NDArray[np.object_]:
        """The tickets of these batches, of one window, for shifts: bytes [shares, parts]."""
        return np.array(
            [
                [
                    tf.io.serialize_tensor(part).numpy()
                    for _, part in sorted(
                        self._source.ticket(first_batch, num_batches, share).items()
                    )
                ]
                for share in self._lanes
            ],
            object,
        )

    def begin(self, slot: int, starts: Tensor, tickets: Tensor) -> tuple[Any, ...]:
        """The arguments of `shift` for `slot`.

        `tickets`, string [windows, shares, parts], begin at the batches `starts`, int64 [windows].
        """
        return self._orders[slot], tf.constant(slot, tf.int64), starts, tickets

    def end(self, slot: int) -> None:
        """Ends the shift of `slot` when it has done what it was ordered before."""
        with tf.device(self._home):
            if not int(tf.raw_ops.QueueSizeV2(handle=self._orders[slot]).numpy()):
                order = tf.constant(_ENDING, tf.int64)
                tf.raw_ops.QueueEnqueueV2(handle=self._orders[slot], components=[order])

    def forget_orders(self, slot: int) -> None:
        """Takes back what no shift of `slot` has taken."""
        with tf.device(self._home):
            queue = self._orders[slot]
            for _ in range(int(tf.raw_ops.QueueSizeV2(handle=queue).numpy())):
                tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])

    def nudge(self) -> None:
        """From now on each order is the last of its shift, and shifts that wait end.

        So that a worker which is there can take the shift of one that is not.
        """
        self._tell(_NUDGE)

    def stop(self) -> None:
        """Ends `conduct`, wherever it is."""
        self._tell(_STOP)

    def _tell(self, kind: int) -> None:
        # As many as are waited for at most.
        kinds = [kind] + [_NOTHING] * (len(self._lanes) - 1)
        with tf.device(self._home):
            messages = tf.constant([[kind, 0, 0, 0, 0] for kind in kinds], tf.int64)
            sums = tf.zeros([len(kinds), *self._sums_shape], tf.float64)
            tf.raw_ops.QueueEnqueueManyV2(handle=self._messages, components=[messages, sums])

    def _make_staging(self) -> None:
        """A slot for each gradient of each variable, beside it, and the tags of each ps."""
        extended = self._strategy.extended
        self._staging = []
        self._tags: dict[str, Any] = {}
        with self._strategy.scope():
            for variable in (self._learner.step, *self._learner.variables):
                with extended.colocate_vars_with(variable):
                    if variable.device not in self._tags:
                        none = -tf.ones([self._num_slots, 2], tf.int64)
                        self._tags[variable.device] = tf.Variable(none, trainable=False)
                    if variable is not self._learner.step:
                        zeros = tf.zeros([self._num_slots, *variable.shape], variable.dtype)
                        self._staging.append(tf.Variable(zeros, trainable=False))

    def _make_queues(self) -> None:
        """A queue of orders for each slot, and one of messages."""
        with tf.device(self._home):
            self._orders = [
                tf.raw_ops.FIFOQueueV2(
                    component_types=[tf.int64],
                    shapes=[[4]],
                    shared_name=f"orders-{self._run_id}-{slot}",
                )
                for slot in range(self._num_slots)
            ]
            self._messages = tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int64, tf.float64],
                shapes=[[5], self._sums_shape],
                shared_name=f"messages-{self._run_id}",
            )

    def _make_shift(self) -> Any:
        num_parts = len(self._ticket_spec[0])

        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.resource),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, len(self._lanes), num_parts], tf.string),
            ],
            autograph=False,
        )
        def shift(orders: Tensor, slot: Tensor, starts: Tensor, tickets: Tensor) -> Tensor:
            """Until the last order; returns its last flag."""
            # Here, and not in the loop: in inner graphs it cannot be had.
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            worker = tf.cast(worker, tf.int64)
            with tf.device(self._home):
                num_orders = tf.cast(tf.raw_ops.QueueSizeV2(handle=orders), tf.int64)
                begun = tf.raw_ops.QueueEnqueueV2(
                    handle=self._messages,
                    components=[
                        tf.stack([_BEGUN, slot, num_orders, worker, 0]),
                        tf.zeros(self._sums_shape, tf.float64),
                    ],
                )
            with tf.control_dependencies([begun]):
                go_on = tf.zeros([], tf.int64)
            return tf.while_loop(
                lambda last: tf.equal(last, 0),
                lambda _: (self._do_share(orders, slot, starts, tickets, worker),),
                (go_on,),
                parallel_iterations=1,
            )[0]

        return shift

    def _do_share(
        self, orders: Tensor, slot: Tensor, starts: Tensor, tickets: Tensor, worker: Tensor
    ) -> Tensor:
        """Waits for an order, and stages the gradient of its share; returns whether it is last."""
        learner = self._learner
        with tf.device(self._home):
            (order,) = tf.raw_ops.QueueDequeueV2(handle=orders, component_types=[tf.int64])
            order = tf.ensure_shape(order, [4])
        (order,), values = read_together(learner.computed_with, [order], self._home)
        attempt, number, last, step = tf.unstack(order)
        # One that only ends the shift computes what there is, for nobody.
        number = tf.where(attempt < 0, starts[0] * len(self._lanes), number)
        batch = self._batch(number, starts, tickets)
        gradients, sums = computed_with(values, order, learner, self._strategy, batch)
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        message = tf.stack([_DONE, slot, attempt, worker, step])
        parcels = self._wire.parcels(learner.variables, dense, [message, sums], self._tags)
        staged = [self._stage(parcel) for parcel in parcels]
        (home,) = (parcel for parcel in parcels if parcel.device == self._home)
        with tf.device(self._home), tf.control_dependencies(staged):
            tf.raw_ops.QueueEnqueueV2(handle=self._messages, components=home.beside)
        return last

    def _stage(self, parcel: Parcel) -> Tensor:
        """Writes gradients to a slot, with no tag while they are not whole, and the tag after.

        Of an order that was none nothing is written. Returns something that comes after all.
        """
        tags = self._tags[parcel.device]
        message, _ = parcel.beside

        def write() -> Tensor:
            _, slot, attempt, _, step = tf.unstack(message)
            with tf.control_dependencies(list(parcel.gradients.values())):
                torn = _write(tags, slot, tf.constant([-1, -1], tf.int64))
            with tf.control_dependencies([torn]):
                written = [
                    _write(self._staging[index], slot, gradient)
                    for index, gradient in parcel.gradients.items()
                ]
            with tf.control_dependencies(written):
                tagged = _write(tags, slot, tf.stack([attempt, step]))
            with tf.control_dependencies([tagged]):
                return tf.identity(slot)

        with tf.device(parcel.device):
            return tf.cond(message[2] >= 0, write, lambda: tf.identity(message[1]))

    def _batch(self, number: Tensor, starts: Tensor, tickets: Tensor) -> Any:
        """The examples of share `number`, parsed."""
        batch, index = number // len(self._lanes), number % len(self._lanes)
        specs = dict(sorted(self._ticket_spec[0].items()))

        def row_of(*names: str) -> tuple[Tensor, list[Tensor]]:
            """Which batch of its window it is, and these parts of the window's ticket."""
            window = tf.searchsorted(starts, [batch], side="right", out_type=tf.int64)[0] - 1
            parts = dict(zip(specs, tf.unstack(tickets[window, index]), strict=True))
            decoded = [tf.io.parse_tensor(parts[name], specs[name].dtype) for name in names]
            for part, name in zip(decoded, names, strict=True):
                part.set_shape([None] * specs[name].shape.rank)
            return batch - starts[window], decoded

        def read() -> Tensor:
            row, parts = row_of(*specs)
            ticket = dict(zip(specs, parts, strict=True))
            return self._source.read_ticket({**ticket, "gather": ticket["gather"][row:]})

        if isinstance(self._source, KeptTickets):
            row, parts = row_of(*specs)
            # Shares of a batch that cannot be divided evenly differ by a lane.
            sizes = {spec["gather"].shape[1] for spec in self._ticket_spec}
            size = sizes.pop() if len(sizes) == 1 else None
            ticket = {
                name: tf.ensure_shape(part[row], [size, *specs[name].shape[2:]])
                for name, part in zip(specs, parts, strict=True)
            }
            return self._source.parse_ticket(ticket)
        records = self._kept_or_read(read, batch, index)
        extras = {}
        if "seeds" in specs:
            row, (seeds,) = row_of("seeds")
            extras["seeds"] = tf.ensure_shape(seeds[row], [records.shape[0], 2])
        return self._source.parse_records(records, extras)

    def _kept_or_read(self, read: Callable[[], Tensor], batch: Tensor, index: Tensor) -> Tensor:
        """The records of share `index`, string [n]: kept by this worker, or read now.

        Reading means the rest of the window, as its batches are spread over the same chunks. What
        is not needed now is kept for the batches to come, in a table of the worker's own: at most
        two windows for each share of a batch.
        """
        sizes = [int(spec["gather"].shape[1]) for spec in self._ticket_spec]
        most = max(sizes)
        ring = 2 * self._source.order.window_batches
        # Found again by its name: it lives as long as the worker, and one that is back has none.
        table = tf.raw_ops.MutableHashTableOfTensorsV2(
            key_dtype=tf.int64,
            value_dtype=tf.string,
            value_shape=[1 + most],
            shared_name=f"records-{self._run_id}",
        )

        def place(batches: Tensor) -> Tensor:
            return index * ring + batches % ring

        kept = tf.raw_ops.LookupTableFindV2(
            table_handle=table, keys=[place(batch)], default_value=tf.fill([1 + most], "")
        )[0]

        def keep() -> Tensor:
            records = read()
            batches = batch + tf.range(tf.shape(records, tf.int64)[0])
            columns = [tf.strings.as_string(batches)[:, tf.newaxis], records]
            padding = tf.fill([tf.size(batches), most - tf.shape(records)[1]], "")
            values = tf.ensure_shape(tf.concat([*columns, padding], axis=1), [None, 1 + most])
            tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=place(batches), values=values)
            return values[0]

        is_kept = tf.equal(kept[0], tf.strings.as_string(batch))
        records = tf.ensure_shape(tf.cond(is_kept, lambda: kept, keep), [1 + most])[1:]
        # Shares of a batch that cannot be divided evenly differ by a lane.
        return records if min(sizes) == most else records[: tf.gather(sizes, index)]

    def _make_conduct(self) -> Any:
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
                rounds, ends_shifts, fresh, attempt = tf.unstack(tf.identity(numbers))
                state = _State(
                    slots=tf.identity(slots),
                    returned=tf.identity(returned),
                    fresh=fresh,
                    attempt=attempt,
                    ends_shifts=ends_shifts,
                    is_stopped=tf.constant(False),
                    num_held=tf.constant(0, tf.int64),
                    held=tf.zeros([self._num_slots, *self._sums_shape], tf.float64),
                    workers=tf.zeros([self._num_slots], tf.int64),
                    counts=tf.zeros([self._num_slots, 4], tf.int64),
                )
                num_done, step = tf.constant(0, tf.int64), tf.cast(read_now(self._step), tf.int64)
                sums = tf.zeros(self._sums_shape, tf.float64)
                num_done, step, sums, state = tf.while_loop(
                    lambda num_done, step, sums, state: ~state.is_stopped & (num_done < rounds),
                    lambda num_done, step, sums, state: self._round(
                        num_done, step, sums, state, rounds
                    ),
                    (num_done, step, sums, state),
                    shape_invariants=_invariants((num_done, step, sums, state)),
                    parallel_iterations=1,
                )
                numbers = tf.stack([num_done, state.ends_shifts, state.fresh, state.attempt])
                return numbers, state.slots, state.returned, sums, state.counts

        return conduct

    def _round(
        self, num_done: Tensor, step: Tensor, sums: Tensor, state: "_State", rounds: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, "_State"]:
        """Gives orders, waits for n gradients, applies them; unless it is told to stop."""
        num_shares = len(self._lanes)
        final = IS_FINAL * tf.cast(tf.equal(num_done + 1, rounds), tf.int64)
        state = self._order_all(state, tf.maximum(state.ends_shifts, final), step)
        (state,) = tf.while_loop(
            lambda state: ~state.is_stopped & (state.num_held < num_shares),
            lambda state: (self._receive(state, final, step),),
            (state,),
            shape_invariants=_invariants((state,)),
            parallel_iterations=1,
        )
        stopped = (num_done, step, sums, state)
        found: tuple[Tensor, Tensor, Tensor, _State] = tf.cond(
            state.is_stopped,
            lambda: tf.nest.map_structure(tf.identity, stopped),
            lambda: self._finish(*stopped),
        )
        return found

    def _receive(self, state: "_State", final: Tensor, step: Tensor) -> "_State":
        """Waits for messages, and does what they ask for."""
        num_shares = len(self._lanes)
        # As many will come: each slot that holds none owes at least one. But a worker that stands
        # in for another one can owe one at a time.
        num_due = num_shares - state.num_held
        num_due = tf.where(state.ends_shifts > 0, tf.ones_like(num_due), num_due)
        messages, sums = tf.raw_ops.QueueDequeueManyV2(
            handle=self._messages,
            n=tf.cast(num_due, tf.int32),
            component_types=[tf.int64, tf.float64],
        )
        messages = tf.ensure_shape(messages, [None, 5])
        kinds, senders, numbers, workers, steps = tf.unstack(messages, axis=1)
        rows = tf.gather(state.slots, senders)
        is_usual = tf.equal(kinds, _DONE) & (rows[:, SHARE] >= 0)
        is_usual &= tf.equal(rows[:, ATTEMPT], numbers) & tf.equal(rows[:, IS_HELD], 0)
        is_usual &= tf.equal(steps, step) & tf.equal(rows[:, LAST], GOES_ON)

        def hold_all() -> _State:
            columns = tf.stack([senders, IS_HELD * tf.ones_like(senders)], axis=1)
            places = senders[:, tf.newaxis]
            update = tf.tensor_scatter_nd_update
            return state._replace(
                slots=update(state.slots, columns, tf.ones_like(senders)),
                held=update(state.held, places, sums),
                workers=update(state.workers, places, workers),
                num_held=state.num_held + tf.size(senders, tf.int64),
            )

        def hear_each() -> _State:
            heard: _State
            _, heard = tf.while_loop(
                lambda i, _: i < tf.shape(messages)[0],
                lambda i, state: (i + 1, self._hear(state, messages[i], sums[i], final, step)),
                (tf.constant(0), state),
                shape_invariants=_invariants((tf.constant(0), state)),
                parallel_iterations=1,
            )
            return heard

        received: Any = tf.cond(tf.reduce_all(is_usual), hold_all, hear_each)
        return _State(*received)

    def _hear(
        self, state: "_State", message: Tensor, sums: Tensor, final: Tensor, step: Tensor
    ) -> "_State":
        """Does what one message asks for."""
        kind, slot, number, worker, tag = tf.unstack(message)
        row = state.slots[slot]
        is_done, has_begun = tf.equal(kind, _DONE), tf.equal(kind, _BEGUN)
        is_nudge = tf.equal(kind, _NUDGE)
        is_free = tf.equal(row[IS_HELD], 0)
        is_known = is_done & (row[SHARE] >= 0) & tf.equal(row[ATTEMPT], number) & is_free
        is_timely, is_late = is_known & tf.equal(tag, step), is_known & tf.not_equal(tag, step)
        goes_on = tf.equal(row[LAST], GOES_ON)
        is_end = is_done & tf.equal(number, _END)
        has_ended = is_end | (is_known & ~goes_on)
        ends_shifts = tf.where(is_nudge, tf.ones_like(kind), state.ends_shifts)
        # What is known of the sender now.
        row = tf.stack(
            [
                tf.where(is_late, tf.fill([], tf.constant(NOBODYS, tf.int64)), row[SHARE]),
                row[ATTEMPT],
                tf.where(
                    has_ended, tf.zeros_like(kind), tf.maximum(row[IS_SERVED], _int(has_begun))
                ),
                row[LAST],
                tf.maximum(row[IS_HELD], _int(is_timely)),
                tf.where(has_ended, tf.zeros_like(kind), row[IS_OLD]),
            ]
        )
        former = state.slots[slot, SHARE]
        returned = tf.concat([state.returned, tf.repeat(former, _int(is_late))], axis=0)
        # What it gets: its share again, if the order was taken by one that is no more; one that was
        # returned; or, if it has just been late and would be for ever, a new one.
        num_orders = tf.cond(
            is_end, lambda: tf.cast(self._num_orders(slot), tf.int64), lambda: number
        )
        gives_again = (has_begun | is_end) & is_free & (former >= 0) & tf.equal(num_orders, 0)
        begins = has_begun & is_free & (former < 0)
        # One that does not know of new shares has to end.
        is_useless = begins & (row[IS_OLD] > 0)
        gives_other = (begins & ~is_useless) | (is_late & goes_on)
        gives_returned = gives_other & has_begun & (tf.size(returned) > 0)
        first = tf.concat([returned, [state.fresh]], axis=0)[0]
        share = tf.where(gives_returned, first, tf.where(gives_again, former, state.fresh))
        gives = gives_again | gives_other
        slots = _put(state.slots, slot, row)
        order = tf.stack([state.attempt, share, tf.maximum(ends_shifts, final), step])
        slots = tf.cond(gives, lambda: self._give(slots, slot, order), lambda: slots)
        tf.cond(is_nudge, self._end_all, lambda: tf.constant(True))
        ending = tf.constant(_ENDING, tf.int64)
        tf.cond(is_useless, lambda: self._send(slot, ending), lambda: tf.constant(True))
        return state._replace(
            slots=slots,
            returned=returned[_int(gives_returned) :],
            fresh=state.fresh + _int(gives_other & ~gives_returned),
            attempt=state.attempt + _int(gives),
            ends_shifts=ends_shifts,
            is_stopped=tf.equal(kind, _STOP) | state.is_stopped,
            num_held=state.num_held + _int(is_timely),
            held=tf.where(is_timely, _put(state.held, slot, sums), state.held),
            workers=tf.where(is_known, _put(state.workers, slot, worker), state.workers),
            counts=_count(state.counts, [worker], DROPPED, [_int(is_late)]),
        )

    def _finish(
        self, num_done: Tensor, step: Tensor, sums: Tensor, state: "_State"
    ) -> tuple[Tensor, Tensor, Tensor, "_State"]:
        """Applies what is held, in the order of the shares, whoever computed them."""
        order = self._source.order
        num_shares = len(self._lanes)
        rows_per_lane = order.batch_size // order.lanes
        examples = tf.constant([len(share) * rows_per_lane for share in self._lanes], tf.int64)
        places = tf.where(state.slots[:, IS_HELD] > 0)[:, 0]
        places = tf.ensure_shape(places, [num_shares])
        places = tf.gather(places, tf.argsort(tf.gather(state.slots[:, SHARE], places)))
        rows = tf.gather(state.slots, places)
        shares = rows[:, SHARE]
        is_whole, step = self._apply(places, rows[:, ATTEMPT], step)
        workers = tf.gather(state.workers, places)
        total = tf.add_n(tf.unstack(tf.gather(state.held, places)))
        done, repeated = _int(is_whole), _int(~is_whole)
        ones = tf.ones_like(workers)
        counts = _count(state.counts, workers, FINISHED, done * ones)
        counts = _count(counts, workers, EXAMPLES, done * tf.gather(examples, shares % num_shares))
        counts = _count(counts, workers, REPEATED, repeated * ones)
        freed = tf.stack(
            [tf.fill([num_shares], tf.constant(NOBODYS, tf.int64)), *tf.unstack(rows, axis=1)[1:]],
            axis=1,
        )
        not_held = tf.ones([NUM_COLUMNS], tf.int64) - tf.one_hot(
            IS_HELD, NUM_COLUMNS, dtype=tf.int64
        )
        state = state._replace(
            slots=tf.tensor_scatter_nd_update(state.slots, places[:, tf.newaxis], freed * not_held),
            returned=tf.concat([state.returned, shares[: num_shares * repeated]], axis=0),
            num_held=tf.zeros_like(state.num_held),
            counts=counts,
        )
        sums = tf.where(is_whole, sums + total, sums)
        return num_done + done, step, sums, state

    def _order_all(self, state: "_State", last: Tensor, step: Tensor) -> "_State":
        """An order for each slot that waits: returned shares first."""
        slots = state.slots
        waits = (slots[:, SHARE] < 0) & (slots[:, IS_SERVED] > 0)
        rank = tf.cumsum(_int(waits), exclusive=True)
        new = state.fresh + tf.range(self._num_slots, dtype=tf.int64)
        shares = tf.gather(tf.concat([state.returned, new], axis=0), rank)
        lasts = tf.maximum(last, slots[:, IS_OLD])
        attempts = state.attempt + rank
        orders = tf.stack([attempts, shares, lasts, tf.fill(tf.shape(rank), step)], axis=1)

        def give_each() -> Tensor:
            for slot in range(self._num_slots):
                tf.cond(
                    waits[slot],
                    lambda slot=slot: self._enqueue(slot, orders[slot]),
                    lambda: tf.constant(True),
                )
            return tf.constant(True)

        def give_all() -> Tensor:
            for slot, order in enumerate(tf.unstack(orders)):
                self._enqueue(slot, order)
            return tf.constant(True)

        tf.cond(tf.reduce_all(waits), give_all, give_each)
        columns = [shares, attempts, slots[:, IS_SERVED], lasts, 0 * rank, slots[:, IS_OLD]]
        num_given = tf.reduce_sum(_int(waits))
        num_returned = tf.minimum(num_given, tf.size(state.returned, tf.int64))
        return state._replace(
            slots=tf.where(waits[:, tf.newaxis], tf.stack(columns, axis=1), slots),
            returned=state.returned[num_returned:],
            fresh=state.fresh + num_given - num_returned,
            attempt=state.attempt + num_given,
        )

    def _give(self, slots: Tensor, slot: Tensor, order: Tensor) -> Tensor:
        """Gives `order` to `slot`; returns what is known of the slots then.

        A shift that does not know what comes after this call of `conduct` ends with it.
        """
        attempt, share, last, step = tf.unstack(order)
        last = tf.maximum(last, slots[slot, IS_OLD])
        order = tf.stack([attempt, share, last, step])
        self._send(slot, order)
        given = tf.stack([share, attempt, slots[slot, IS_SERVED], last, 0, slots[slot, IS_OLD]])
        return _put(slots, slot, given)

    def _enqueue(self, slot: int, order: Tensor) -> Tensor:
        given = tf.raw_ops.QueueEnqueueV2(handle=self._orders[slot], components=[order])
        with tf.control_dependencies([given]):
            return tf.constant(True)

    def _send(self, slot: Tensor, order: Tensor) -> Tensor:
        """`_enqueue`, for a slot that the graph decides."""
        branches = [
            lambda index=index: self._enqueue(index, order) for index in range(self._num_slots)
        ]
        return tf.switch_case(tf.cast(slot, tf.int32), branches)

    def _end_all(self) -> Tensor:
        """Ends the shifts that wait for an order."""
        for slot in range(self._num_slots):
            tf.cond(
                tf.equal(tf.raw_ops.QueueSizeV2(handle=self._orders[slot]), 0),
                lambda slot=slot: self._enqueue(slot, tf.constant(_ENDING, tf.int64)),
                lambda: tf.constant(True),
            )
        return tf.constant(True)

    def _num_orders(self, slot: Tensor) -> Tensor:
        branches = [
            lambda slot=index: tf.raw_ops.QueueSizeV2(handle=self._orders[slot])
            for index in range(self._num_slots)
        ]
        return tf.switch_case(tf.cast(slot, tf.int32), branches)

    def _apply(self, places: Tensor, attempts: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Applies the sum of these slots; False, and nothing, if one was written to meanwhile.

        Returns the step after that, too.
        """
        expected = tf.stack([attempts, tf.fill(tf.shape(attempts), step)], axis=1)
        summed = []
        read: dict[str, list[Tensor]] = {device: [] for device in self._tags}
        for stage in self._staging:
            with tf.device(stage.device):
                rows = tf.unstack(stage.sparse_read(places))
                total = rows[0]
                for row in rows[1:]:
                    total += row
                summed.append(total)
                read[stage.device].append(total)
        are_right = []
        for device, tags in self._tags.items():
            # After the rows were read: whoever wrote to one before has changed its tag.
            with tf.device(device), tf.control_dependencies(read[device]):
                are_right.append(tf.reduce_all(tf.equal(tags.sparse_read(places), expected)))
        whole = tf.reduce_all(tf.stack(are_right))

        def apply() -> Tensor:
            after = self._strategy.run(self._learner.apply, args=(summed,))
            return tf.cast(after, tf.int64)

        return whole, tf.cond(whole, apply, lambda: step)


def _write(variable: Any, slot: Tensor, row: Tensor) -> Tensor:
    return tf.raw_ops.ResourceScatterNdUpdate(ref=variable.handle, indices=[[slot]], updates=[row])


def _put(rows: Tensor, index: Tensor, row: Tensor) -> Tensor:
    return tf.tensor_scatter_nd_update(rows, [[index]], [row])


def _count(counts: Tensor, workers: Tensor, column: int, numbers: Tensor) -> Tensor:
    """`counts` with `numbers` more in `column` of `workers`, both [n]."""
    workers = tf.convert_to_tensor(workers)
    indices = tf.stack([workers, column * tf.ones_like(workers)], axis=1)
    return tf.tensor_scatter_nd_add(counts, indices, numbers)


def _int(flag: Tensor) -> Tensor:
    return tf.cast(flag, tf.int64)


def _invariants(variables: Any) -> Any:
    """Shapes of loop variables: any number of shares may be returned."""

    def shape_of(variable: Any) -> Any:
        if isinstance(variable, _State):
            shapes = tf.nest.map_structure(shape_of, tuple(variable))
            return _State(*shapes)._replace(returned=tf.TensorShape([None]))
        return variable.shape

    return tuple(map(shape_of, variables))
