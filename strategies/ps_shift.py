"""What a worker of synchronous parameter servers runs: a shift, which takes orders until its last.

    shift = Shift(learner, source, strategy, wire, staging, lanes, num_unrolled=4)
    coordinator.schedule(shift.graph, args=shift.arguments(slot, starts, tickets))

Each iteration of a loop over two processes sends its condition from one to the other, and waits for
what either does without the other's knowledge: three messages beside the two that carry variables
and gradient. So an iteration can have several shares. Orders after the last one are *skipped* then:
each side knows that by itself; nothing is computed, staged or told to the conductor. But small
variables and zeros for their gradients travel all the same: it pays in long shifts of short steps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from data.kept import KeptTickets
from strategies.base import Learner, Tensor
from strategies.packing import computed_with, read_together
from strategies.ps_staging import BEGUN, DONE, END, GOES_ON, NOBODYS, Staging
from strategies.wire import Parcel, Wire

# The attempt of an order that nobody has given, after the last one.
_SKIPPED = -3


class _Duty(NamedTuple):
    """What a shift has from its beginning to its end."""

    orders: Tensor  # The queue, a resource.
    locks: dict[str, Tensor]  # On each device: resources.
    slot: Tensor
    worker: Tensor
    starts: Tensor
    tickets: Tensor


class Shift:
    """The graph of a worker's closure.

    Attributes:
        graph: A tf.function of what `arguments` returns. It returns whether its last order was
            IS_FINAL or GIVES_WAY.
    """

    def __init__(
        self,
        learner: Learner,
        source: Any,
        strategy: Any,
        wire: Wire,
        staging: Staging,
        lanes: Sequence[range],
        *,
        num_unrolled: int,
    ) -> None:
        """`lanes` are those of each share of a batch of `source`.

        `num_unrolled` shares are in one iteration.
        """
        self._learner = learner
        self._source = source
        self._strategy = strategy
        self._wire = wire
        self._staging = staging
        self._home = staging.home
        self._num_shares = len(lanes)
        self._num_unrolled = num_unrolled
        self._ticket_spec = [source.ticket_spec(lanes=share) for share in lanes]
        self.graph = self._make_graph()

    def arguments(self, slot: int, starts: Tensor, tickets: Tensor) -> tuple[Any, ...]:
        """Those of `graph` for `slot`.

        `tickets`, string [windows, shares, parts], begin at the batches `starts`, int64 [windows].
        """
        staging = self._staging
        of_slot = staging.orders[slot], staging.locks(slot), tf.constant(slot, tf.int64)
        return *of_slot, starts, tickets

    def _make_graph(self) -> Any:
        num_parts = len(self._ticket_spec[0])

        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.resource),
                [tf.TensorSpec([], tf.resource) for _ in self._staging.devices],
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, self._num_shares, num_parts], tf.string),
            ],
            autograph=False,
        )
        def shift(
            orders: Tensor, locks: list[Tensor], slot: Tensor, starts: Tensor, tickets: Tensor
        ) -> Tensor:
            # Here, and not in the loop: in inner graphs it cannot be had.
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            worker = tf.cast(worker, tf.int64)
            kept = [self._source.filled()] if isinstance(self._source, KeptTickets) else []
            with tf.control_dependencies(kept):
                slot = tf.identity(slot)
            with tf.device(self._home), tf.control_dependencies([slot]):
                found = tf.cast(tf.raw_ops.QueueSizeV2(handle=orders), tf.int64)
                begun = self._staging.send(tf.stack([BEGUN, slot, found, worker, 0]))
            with tf.control_dependencies([begun]):
                none = tf.constant([_SKIPPED, NOBODYS, GOES_ON, 0], tf.int64)

            locks_of = dict(zip(self._staging.devices, locks, strict=True))
            duty = _Duty(orders, locks_of, slot, worker, starts, tickets)

            def shares(_: Tensor) -> tuple[Tensor]:
                order, there = self._do_share(duty, None)
                for _ in range(1, self._num_unrolled):
                    order, there = self._do_share(duty, there)
                return (order,)

            (last,) = tf.while_loop(
                lambda order: tf.equal(order[2], GOES_ON), shares, (none,), parallel_iterations=1
            )

            def end() -> Tensor:
                message = tf.stack([DONE, slot, END, worker, NOBODYS])
                with tf.control_dependencies([self._staging.send(message)]):
                    return tf.constant(True)

            with tf.device(self._home):
                told = tf.cond(tf.equal(last[0], END), end, lambda: tf.constant(True))
            with tf.control_dependencies([told]):
                return tf.identity(last[2])

        return shift

    def _do_share(self, duty: _Duty, former: Tensor | None) -> tuple[Tensor, Tensor]:
        """Waits for an order, and stages the gradient of its share.

        `former` is the order before, there where orders come from, if it may have been the last.
        Returns this one, here and there; that comes after what was done.
        """
        learner, staging = self._learner, self._staging
        with tf.device(self._home):
            if former is None:
                there = staging.take(duty.orders)
            else:
                there = tf.cond(
                    tf.equal(former[2], GOES_ON),
                    lambda: staging.take(duty.orders),
                    lambda: _skipped(former),
                )
        (order,), values = read_together(learner.computed_with, [there], self._home)
        attempt, number, _, step = tf.unstack(order)
        is_ordered = attempt >= 0
        present: list[int] = []  # The gradients that there are.

        def compute() -> list[Tensor]:
            batch = self._batch(number, duty.starts, duty.tickets)
            gradients, sums = computed_with(values, order, learner, self._strategy, batch)
            present[:] = [index for index, g in enumerate(gradients) if g is not None]
            shapes = [variable.shape for variable in learner.variables]
            return [sums, *(tf.ensure_shape(gradients[index], shapes[index]) for index in present)]

        def skip() -> list[Tensor]:
            of_nobody = tf.zeros(staging.sums_shape, tf.float64)
            absent = [learner.variables[index] for index in present]
            return [of_nobody, *(tf.zeros(like.shape, like.dtype) for like in absent)]

        sums, *computed = tf.cond(is_ordered, compute, skip)
        gradients = dict(zip(present, computed, strict=True))
        # Not in the branch: what leaves that waits for all of its side effects.
        sent = self._wire.rounded(
            [gradients.get(index) for index in range(len(learner.variables))], is_ordered
        )
        message = tf.stack([DONE, duty.slot, attempt, duty.worker, step])
        beside = [message, sums]
        parcels = self._wire.parcels(learner.variables, sent, beside, staging.devices)
        (home,) = (parcel for parcel in parcels if parcel.device == self._home)

        def put(parcel: Parcel) -> Tensor:
            return staging.put(parcel, duty.locks[parcel.device])

        others = []
        for parcel in parcels:
            if parcel is not home:
                with tf.device(parcel.device):
                    others.append(_if_whole(parcel, functools.partial(put, parcel)))

        def put_and_send() -> Tensor:
            with tf.control_dependencies([put(home)]):
                sent = staging.send(*home.beside)
            with tf.control_dependencies([sent]):
                return tf.identity(home.beside[0][1])

        with tf.device(self._home), tf.control_dependencies(others):
            done = _if_whole(home, put_and_send)
            with tf.control_dependencies([done]):
                return order, tf.identity(there)

    def _batch(self, number: Tensor, starts: Tensor, tickets: Tensor) -> Any:
        """The examples of share `number`, parsed."""
        batch, index = number // self._num_shares, number % self._num_shares
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
            return self._source.parse_filled(ticket)
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
            shared_name=f"records-{self._staging.name}",
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


def _skipped(former: Tensor) -> Tensor:
    """What comes after `former`, the last order; of one that only ended the shift that is known."""
    attempt = tf.where(tf.equal(former[0], END), former[0], tf.constant(_SKIPPED, tf.int64))
    return tf.concat([[attempt], former[1:]], axis=0)


def _if_whole(parcel: Parcel, stage: Callable[[], Tensor]) -> Tensor:
    """Runs `stage` if there are gradients in `parcel`; returns something that comes after."""
    message = parcel.beside[0]
    return tf.cond(message[2] >= 0, stage, lambda: tf.identity(message[1]))
