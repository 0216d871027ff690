"""What a worker of synchronous parameter servers runs: a loop that takes assignments.

    loop = WorkerLoop(learner, source, strategy, compression, buffers, lanes, num_unrolled=4)
    coordinator.schedule(loop.graph, args=loop.arguments(slot, starts, end, tickets))

A `tf.while_loop` that spans two processes costs three control messages an iteration, besides the
two messages that carry variables and gradients. So the loop can be unrolled: one iteration then
handles several assignments. Assignments after the last one are *skipped* then: both processes know
that without a message; nothing is computed, written or sent to the aggregator. But small variables
and zeros in place of gradients travel all the same, so unrolling pays in long loops of short steps.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from data.tickets import PackedTickets, TicketSource
from strategies.base import Batch, Learner, Tensor
from strategies.gradients.coalescing import Bucket, buckets
from strategies.gradients.compression import Compression
from strategies.lookups import EarlyLookups
from strategies.ps.sync.gradient_buffers import GradientBuffers
from strategies.ps.sync.protocol import (
    END,
    NONE,
    SKIPPED,
    Assignment,
    EndReason,
    Kind,
    Message,
    pack,
    unpack,
)
from strategies.ps.sync.read_ahead import Ahead, nothing, specs_of, tensors_of
from strategies.ps.worker_step import compute_gradients, look_up_rows, read_variables, rows_sent


class _Inputs(NamedTuple):
    """What does not change while a worker loop runs."""

    queue: Tensor  # Of assignments, a resource.
    locks: dict[str, Tensor]  # On each device: resources.
    slot: Tensor
    worker: Tensor
    starts: Tensor
    end: Tensor
    end_at_queue: Tensor  # The same on the device of the queue.
    tickets: Tensor


@dataclass(frozen=True, eq=False)
class WorkerLoop:
    """The graph of a worker's closure."""

    learner: Learner
    source: TicketSource
    strategy: tf.distribute.Strategy
    compression: Compression
    buffers: GradientBuffers
    lanes: Sequence[range]  # Of each sub-batch of a batch of `source`.
    num_unrolled: int  # The number of assignments that one iteration handles.
    read_dtype: str = "float32"  # In which the variables are sent to the worker.
    reads_ahead: bool = False  # Rows of tables are read one step before they are used.

    @functools.cached_property
    def _specs(self) -> list[dict[str, tf.TensorSpec]]:
        return [self.source.ticket_spec(lanes=lanes) for lanes in self.lanes]

    def arguments(
        self, slot: int, starts: Tensor, end: Tensor, tickets: Tensor
    ) -> tuple[object, ...]:
        """The arguments of `graph` for a worker slot.

        `tickets`, string [windows, sub-batches, parts], begin at the batches `starts`,
        int64 [windows]; `end`, int64, is the batch after all of them.
        """
        buffers = self.buffers
        of_slot = buffers.queues[slot], buffers.locks[slot], tf.constant(slot, tf.int64)
        return *of_slot, starts, end, tickets

    @functools.cached_property
    def graph(self) -> tf.types.experimental.PolymorphicFunction:
        """A tf.function of the result of `arguments`.

        It returns the EndReason of its last assignment: FINAL or GIVES_WAY.
        """
        num_parts = len(self._specs[0])

        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.resource),
                [tf.TensorSpec([], tf.resource) for _ in self.buffers.devices],
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None, len(self.lanes), num_parts], tf.string),
            ],
            autograph=False,
        )
        def loop(
            queue: Tensor,
            locks: list[Tensor],
            slot: Tensor,
            starts: Tensor,
            end: Tensor,
            tickets: Tensor,
        ) -> Tensor:
            # Called outside of the loop, because inner graphs do not know the worker's index.
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            worker = tf.cast(worker, tf.int64)
            with tf.control_dependencies([self.source.prepare()]):
                slot = tf.identity(slot)
            with tf.device(self.buffers.step_device), tf.control_dependencies([slot]):
                num_queued = tf.cast(tf.raw_ops.QueueSizeV2(handle=queue), tf.int64)
                message = Message(Kind.BEGUN, slot, num_queued, worker, 0)
                begun = self.buffers.send(pack(message))
                end_at_queue = tf.identity(end)  # In the loop, each iteration would send it.
            with tf.control_dependencies([begun]):
                none = tf.constant(Assignment(SKIPPED, NONE, EndReason.CONTINUES, 0), tf.int64)

            locks_of = dict(zip(self.buffers.devices, locks, strict=True))
            inputs = _Inputs(queue, locks_of, slot, worker, starts, end, end_at_queue, tickets)
            specs = None
            if self.reads_ahead:
                specs = specs_of(lambda: self._read_ahead(inputs, unpack(Assignment, none)))

            def iterate(row: Tensor, *tensors: Tensor) -> list[Tensor]:
                at_queue, ahead = None, specs and tf.nest.pack_sequence_as(specs, tensors)
                for _ in range(self.num_unrolled):
                    row, at_queue, ahead = self._do_assignment(inputs, at_queue, ahead)
                return [row, *tensors_of(ahead)]

            row, *_ = tf.while_loop(
                lambda row, *_: _continues(row),
                iterate,
                [none, *tensors_of(specs and nothing(specs))],
                shape_invariants=[none.shape, *(spec.shape for spec in tensors_of(specs))],
                parallel_iterations=1,
            )

            def send_end() -> Tensor:
                message = Message(Kind.DONE, slot, END, worker, NONE)
                with tf.control_dependencies([self.buffers.send(pack(message))]):
                    return tf.constant(True)

            with tf.device(self.buffers.step_device):
                sent = tf.cond(tf.equal(row[_ATTEMPT], END), send_end, lambda: tf.constant(True))
            with tf.control_dependencies([sent]):
                return tf.identity(row[_END_REASON])

        return loop

    def _do_assignment(
        self, inputs: _Inputs, former: Tensor | None, ahead: Ahead | None
    ) -> tuple[Tensor, Tensor, Ahead | None]:
        """Waits for an assignment, and writes the gradients of its sub-batch.

        `former` is the assignment before, packed, on the device of the queue; None if that was not
        the last one. Returns this assignment, packed, on the worker and on the device of the queue;
        the latter comes after all writes. `ahead` is what was read for this assignment, and the
        third result what is read for the next: None if the loop does not read ahead.
        """
        learner, buffers = self.learner, self.buffers

        def take() -> Tensor:
            return self._readable(buffers.take(inputs.queue), inputs.end_at_queue)

        with tf.device(buffers.step_device):
            if former is None:
                at_queue = take()
            else:
                at_queue = tf.cond(_continues(former), take, lambda: _skipped(former))
        row, values = read_variables(learner, at_queue, self.read_dtype)
        assignment = unpack(Assignment, row)
        is_computed = (assignment.attempt >= 0) & tf.not_equal(assignment.step, NONE)
        present: list[int] = []  # The indices of dense gradients that are not None.
        parts = learner.variables[learner.num_dense :]

        def compute() -> list[Tensor]:
            gradients, totals, next_ahead = self._compute(inputs, row, values, ahead)
            shapes = [variable.shape for variable in learner.variables]
            present[:] = [i for i in range(learner.num_dense) if gradients[i] is not None]
            dense = (tf.ensure_shape(gradients[index], shapes[index]) for index in present)
            rows = [
                gradient if gradient is not None else _no_rows(part)
                for gradient, part in zip(gradients[learner.num_dense :], parts, strict=True)
            ]
            sparse = (t for row in rows for t in (row.indices, row.values))
            return [totals, *dense, *sparse, *tensors_of(next_ahead)]

        def skip() -> list[Tensor]:
            no_totals = tf.zeros([buffers.num_totals], tf.float64)
            absent = [learner.variables[index] for index in present]
            rows = [_no_rows(part) for part in parts]
            return [
                no_totals,
                *(tf.zeros(like.shape, like.dtype) for like in absent),
                *(t for row in rows for t in (row.indices, row.values)),
                *tensors_of(ahead and nothing(ahead)),
            ]

        totals, *computed = tf.cond(is_computed, compute, skip)
        gradients = dict(zip(present, computed[: len(present)], strict=True))
        end_of_parts = len(present) + 2 * len(parts)
        of_parts = computed[len(present) : end_of_parts]
        next_ahead = ahead and tf.nest.pack_sequence_as(ahead, computed[end_of_parts:])
        sparse = [
            rows_sent(
                self.compression.compress_rows(tf.IndexedSlices(values, ids)),
                part.device,
                part.dtype,
            )
            for part, ids, values in zip(parts, of_parts[::2], of_parts[1::2], strict=True)
        ]
        # Outside of the branch: outputs of a branch wait for all of its side effects.
        sent = self.compression.compress_all(
            [gradients.get(index) for index in range(len(learner.variables))], is_computed
        )
        attempt, step = assignment.attempt, assignment.step
        message = pack(Message(Kind.DONE, inputs.slot, attempt, inputs.worker, step))
        found = buckets(learner.variables, sent, [message, totals], buffers.devices)
        (with_message,) = (bucket for bucket in found if bucket.device == buffers.step_device)

        def write(bucket: Bucket) -> Tensor:
            here = {i: rows for i, rows in enumerate(sparse) if parts[i].device == bucket.device}
            return buffers.write(bucket, inputs.locks[bucket.device], here)

        others = []
        for bucket in found:
            if bucket is not with_message:
                with tf.device(bucket.device):
                    others.append(_if_assigned(bucket, functools.partial(write, bucket)))

        def write_and_send() -> Tensor:
            with tf.control_dependencies([write(with_message)]):
                sent = buffers.send(*with_message.metadata)
            with tf.control_dependencies([sent]):
                return tf.identity(with_message.metadata[0][_MESSAGE_SLOT])

        with tf.device(buffers.step_device), tf.control_dependencies(others):
            done = _if_assigned(with_message, write_and_send)
            with tf.control_dependencies([done]):
                return row, tf.identity(at_queue), next_ahead

    def _compute(
        self, inputs: _Inputs, row: Tensor, values: Sequence[Tensor], ahead: Ahead | None
    ) -> tuple[Sequence[Tensor], Tensor, Ahead | None]:
        """The gradients and metric totals of the assignment `row`; and what is read for the next.

        `values` are those of the learner's `gradient_inputs`.
        """
        assignment = unpack(Assignment, row)
        of_step = self.learner, self.strategy

        def read() -> Batch:
            return self._batch(assignment.sub_batch, inputs)

        if ahead is None:
            computed = compute_gradients(values, row, *of_step, read(), self.read_dtype)
            return *computed, None
        is_ahead = ahead.is_for(assignment.sub_batch, assignment.step)
        batch = tf.cond(is_ahead, lambda: tf.nest.map_structure(tf.identity, ahead.batch), read)
        early = EarlyLookups(ahead.lookups, is_ahead)
        with tf.control_dependencies(tf.nest.flatten(batch)):  # `read` may cache the next one.
            next_ahead = self._read_ahead(inputs, assignment)
        # The requests for rows are sent first, so that the rows arrive during the computation.
        with tf.control_dependencies([lookup.ids for lookup in next_ahead.lookups]):
            after = tf.identity(row)
        gradients, totals = compute_gradients(
            values, after, *of_step, batch, self.read_dtype, early
        )
        # The step ends when all workers have their rows, so no row has the update of this step.
        with tf.control_dependencies([lookup.rows for lookup in next_ahead.lookups]):
            return gradients, tf.identity(totals), next_ahead

    def _read_ahead(self, inputs: _Inputs, assignment: Assignment) -> Ahead:
        """Reads the sub-batch that the loop probably gets after `assignment`, and its rows.

        If there is none, it reads that of `assignment` again: a branch would keep back the requests
        for rows until all of them are answered.
        """
        # Sub-batches of the next batch are assigned in the order of the worker slots.
        batch = assignment.sub_batch // len(self.lanes) + 1
        has_next = tf.equal(assignment.end_reason, EndReason.CONTINUES) & (batch < inputs.end)
        number = batch * len(self.lanes) + inputs.slot
        number = tf.where(has_next, number, assignment.sub_batch)
        batch = self._batch(number, inputs)
        step = tf.identity(assignment.step)
        lookups = look_up_rows(step, self.learner, self.strategy, batch, self.read_dtype)
        return Ahead(number, step, batch, lookups)

    def _readable(self, row: Tensor, end: Tensor) -> Tensor:
        """An assignment, packed, that this loop can do: of no step if it has no tickets for it.

        The network of a worker may return after its loop was given to another worker. Its own loop
        then still waits at the queue, perhaps since an earlier call. With such an assignment it
        ends, and its message is that of a late gradient: the sub-batch is assigned again.
        """
        assignment = unpack(Assignment, row)
        has_no_tickets = (assignment.attempt >= 0) & (
            assignment.sub_batch // len(self.lanes) >= end
        )
        refused = assignment._replace(end_reason=EndReason.GIVES_WAY, step=NONE)
        return tf.where(has_no_tickets, pack(refused), row)

    def _batch(self, number: Tensor, inputs: _Inputs) -> Batch:
        batch, index = number // len(self.lanes), number % len(self.lanes)
        packed = PackedTickets(self._specs, inputs.starts, inputs.tickets)
        return self.source.sub_batch(batch, index, packed, self.buffers.name)


# Fields of packed rows. With `unpack` instead of slices in these places, TensorFlow 2.21 crashes.
_ATTEMPT, _END_REASON = Assignment._fields.index("attempt"), Assignment._fields.index("end_reason")
_MESSAGE_SLOT = Message._fields.index("worker_slot")
_MESSAGE_ATTEMPT = Message._fields.index("attempt")


def _no_rows(part: tf.Variable) -> tf.IndexedSlices:
    """The gradient of a part of a table of which no row was used."""
    return tf.IndexedSlices(tf.zeros([0, part.shape[1]], part.dtype), tf.zeros([0], tf.int64))


def _continues(row: Tensor) -> Tensor:
    return tf.equal(row[_END_REASON], EndReason.CONTINUES)


def _skipped(row: Tensor) -> Tensor:
    """The assignment after the last one, `row`. After END it is END again, so the loop knows it."""
    attempt = tf.where(tf.equal(row[_ATTEMPT], END), row[_ATTEMPT], tf.constant(SKIPPED, tf.int64))
    return tf.concat([[attempt], row[1:]], axis=0)


def _if_assigned(bucket: Bucket, write: Callable[[], Tensor]) -> Tensor:
    """Calls `write` unless the assignment of `bucket` is skipped; the result comes after that."""
    message = bucket.metadata[0]
    return tf.cond(
        message[_MESSAGE_ATTEMPT] >= 0, write, lambda: tf.identity(message[_MESSAGE_SLOT])
    )
