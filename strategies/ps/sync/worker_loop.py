"""What a worker of synchronous parameter servers runs: a loop that takes assignments.

    loop = WorkerLoop(learner, source, strategy, compression, buffers, lanes, num_unrolled=4)
    loop.closure.schedule(coordinator, loop.inputs(slot, starts, end, tickets))

A `tf.while_loop` that spans two processes costs three control messages an iteration, besides the
two messages that carry variables and gradients. So the loop can be unrolled: one iteration then
handles several assignments. Assignments after the last one are *skipped* then: both processes know
that without a message; nothing is computed, written or sent to the aggregator. But small variables
and zeros in place of gradients travel all the same, so unrolling pays in long loops of short steps.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from data.tickets import PackedTickets, TicketSource
from strategies.base import Batch, Learner, Tensor
from strategies.gradients.coalescing import Bucket, buckets, read_together
from strategies.gradients.compression import Compression
from strategies.gradients.parts import Share
from strategies.ps.closures import Closure
from strategies.ps.protocol import (
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
from strategies.ps.sync.gradient_buffers import GradientBuffers
from strategies.ps.worker_step import compute_gradients, rows_sent

# Metric totals, dense gradients, and the gradient (ids, rows) of each part of a table.
_BranchResult: TypeAlias = tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]


class _Inputs(NamedTuple):
    """The argument of a worker loop's graph."""

    queue: Tensor  # Of assignments, a resource.
    locks: list[Tensor]  # On each device of the buffers: resources.
    slot: Tensor  # int64, as all that follow but `tickets`.
    starts: Tensor  # The first batch of each window, [windows].
    end: Tensor  # The batch after all windows.
    tickets: Tensor  # string [windows, sub-batches, parts].


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

    @functools.cached_property
    def _specs(self) -> list[dict[str, tf.TensorSpec]]:
        return [self.source.ticket_spec(lanes=lanes) for lanes in self.lanes]

    def inputs(self, slot: int, starts: Tensor, end: Tensor, tickets: Tensor) -> _Inputs:
        """The argument of `graph` for a worker slot."""
        queue, locks = self.buffers.queues[slot], self.buffers.locks[slot]
        return _Inputs(queue, locks, tf.constant(slot, tf.int64), starts, end, tickets)

    @functools.cached_property
    def closure(self) -> Closure:
        """A function of `inputs`; says, once it is traced, which `buffers` have gradients.

        It returns the EndReason of its last assignment: FINAL or GIVES_WAY.
        """
        signature = _Inputs(
            queue=tf.TensorSpec([], tf.resource),
            locks=[tf.TensorSpec([], tf.resource) for _ in self.buffers.devices],
            slot=tf.TensorSpec([], tf.int64),
            starts=tf.TensorSpec([None], tf.int64),
            end=tf.TensorSpec([], tf.int64),
            tickets=tf.TensorSpec([None, len(self.lanes), len(self._specs[0])], tf.string),
        )

        @tf.function(input_signature=[signature], autograph=False)
        def loop(inputs: _Inputs) -> Tensor:
            # Called outside of the loop, because inner graphs do not know the worker's index.
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            worker = tf.cast(worker, tf.int64)
            with tf.control_dependencies([self.source.prepare()]):
                slot = tf.identity(inputs.slot)
            with tf.device(self.buffers.step_device), tf.control_dependencies([slot]):
                num_queued = tf.cast(tf.raw_ops.QueueSizeV2(handle=inputs.queue), tf.int64)
                message = Message(Kind.BEGUN, slot, num_queued, worker, 0)
                begun = self.buffers.send(pack(message))
                end = tf.identity(inputs.end)  # In the loop, each iteration would send it.
            inputs = inputs._replace(slot=slot, end=end)
            with tf.control_dependencies([begun]):
                none = tf.constant(Assignment(SKIPPED, NONE, EndReason.CONTINUES, 0), tf.int64)

            def iterate(_: Tensor) -> tuple[Tensor]:
                row, at_queue = self._do_assignment(inputs, worker, None)
                for _ in range(1, self.num_unrolled):
                    row, at_queue = self._do_assignment(inputs, worker, at_queue)
                return (row,)

            (row,) = tf.while_loop(_continues, iterate, (none,), parallel_iterations=1)

            def send_end() -> Tensor:
                message = Message(Kind.DONE, slot, END, worker, NONE)
                with tf.control_dependencies([self.buffers.send(pack(message))]):
                    return tf.constant(True)

            with tf.device(self.buffers.step_device):
                sent = tf.cond(tf.equal(row[_ATTEMPT], END), send_end, lambda: tf.constant(True))
            with tf.control_dependencies([sent]):
                return tf.identity(row[_END_REASON])

        return Closure(loop)

    def _do_assignment(
        self, inputs: _Inputs, worker: Tensor, former: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Waits for an assignment, and writes the gradients of its sub-batch.

        `former` is the assignment before, packed, on the device of the queue; None if that was not
        the last one. Returns this assignment, packed, on the worker and on the device of the queue;
        the latter comes after all writes.
        """
        learner, buffers = self.learner, self.buffers

        def take() -> Tensor:
            return self._readable(buffers.take(inputs.queue), inputs.end)

        with tf.device(buffers.step_device):
            if former is None:
                at_queue = take()
            else:
                at_queue = tf.cond(_continues(former), take, lambda: _skipped(former))
        inputs_of_step, device = learner.gradient_inputs, learner.step.device
        (row,), values = read_together(inputs_of_step, [at_queue], device, self.read_dtype)
        assignment = unpack(Assignment, row)
        is_computed = (assignment.attempt >= 0) & tf.not_equal(assignment.step, NONE)
        variables, num_dense = buffers.sent, buffers.num_dense
        parts = variables[num_dense:]
        present = buffers.present

        def compute() -> _BranchResult:
            batch = self._batch(assignment.sub_batch, inputs.starts, inputs.tickets)
            gradients, totals = compute_gradients(
                values,
                row,
                learner,
                self.strategy,
                batch,
                self.read_dtype,
                self._share(assignment),
            )
            present[:] = [i for i in range(num_dense) if gradients[i] is not None]
            dense = [tf.ensure_shape(gradients[i], variables[i].shape) for i in present]
            rows = [
                _no_rows(part) if gradient is None else (gradient.indices, gradient.values)
                for gradient, part in zip(gradients[num_dense:], parts, strict=True)
            ]
            return totals, dense, rows

        def skip() -> _BranchResult:
            zeros = [tf.zeros(variables[i].shape, variables[i].dtype) for i in present]
            return tf.zeros([buffers.num_totals], tf.float64), zeros, list(map(_no_rows, parts))

        totals, dense, rows = tf.cond(is_computed, compute, skip)
        gradients = dict(zip(present, dense, strict=True))
        sparse = [
            rows_sent(
                self.compression.compress_rows(tf.IndexedSlices(values, ids)),
                part.device,
                part.dtype,
            )
            for part, (ids, values) in zip(parts, rows, strict=True)
        ]
        # Outside of the branch: outputs of a branch wait for all of its side effects.
        sent = self.compression.compress_all(
            [gradients.get(index) for index in range(len(variables))], is_computed
        )
        attempt, step = assignment.attempt, assignment.step
        message = pack(Message(Kind.DONE, inputs.slot, attempt, worker, step))
        found = buckets(variables, sent, [message, totals], buffers.devices)
        (with_message,) = (bucket for bucket in found if bucket.device == buffers.step_device)

        locks = dict(zip(buffers.devices, inputs.locks, strict=True))

        def write(bucket: Bucket) -> Tensor:
            here = {i: rows for i, rows in enumerate(sparse) if parts[i].device == bucket.device}
            return buffers.write(bucket, locks[bucket.device], here)

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
                return row, tf.identity(at_queue)

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

    def _share(self, assignment: Assignment) -> Share | None:
        """The parts of the sub-batch of `assignment`, with virtual replicas."""
        num_sub_batches = len(self.lanes)
        num_parts = self.learner.virtual_replicas // num_sub_batches
        if not num_parts:
            return None
        number = assignment.sub_batch % num_sub_batches
        ends_report = self.learner.ends_report(assignment.step)
        return Share(number, num_sub_batches, num_parts, ends_report)

    def _batch(self, number: Tensor, starts: Tensor, tickets: Tensor) -> Batch:
        batch, index = number // len(self.lanes), number % len(self.lanes)
        packed = PackedTickets(self._specs, starts, tickets)
        return self.source.sub_batch(batch, index, packed, self.buffers.name)


# Fields of packed rows. With `unpack` instead of slices in these places, TensorFlow 2.21 crashes.
_ATTEMPT, _END_REASON = Assignment._fields.index("attempt"), Assignment._fields.index("end_reason")
_MESSAGE_SLOT = Message._fields.index("worker_slot")
_MESSAGE_ATTEMPT = Message._fields.index("attempt")


def _no_rows(part: tf.Variable) -> tuple[Tensor, Tensor]:
    """The gradient, (ids, rows), of a part of a table of which no row was used."""
    return tf.zeros([0], tf.int64), tf.zeros([0, part.shape[1]], part.dtype)


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
