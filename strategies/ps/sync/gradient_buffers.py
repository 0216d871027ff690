"""Where worker loops and aggregator meet: queues and gradient buffers on the parameter servers.

    buffers = GradientBuffers(learner, strategy, num_slots=3)

    buffers.assign(slot, rows)                          # aggregator
    row = buffers.take(queue)                           # worker loop
    buffers.write(bucket, lock, sparse)                 # worker loop, on each ps
    buffers.send(message, totals)                       # worker loop
    messages, totals = buffers.receive(n)               # aggregator
    is_complete, summed = buffers.total(slots, attempts, step)
    summed = buffers.begun(summed, step + 1)            # aggregator; then it applies them

Each dense variable has a buffer [worker slots, ...] on its server, and each part of a table has a
pair (ids, rows) for each worker slot. Each worker slot has a tag (attempt, step) on each server. If
a worker dies between two of its buffers, it leaves no message, and no tag on the servers with an
incomplete gradient, so nothing of it is ever summed. A worker that was given up may still write. It
must hold the lock of its worker slot on that server, as all writers must, and it changes the tag
first, so a reader notices it afterwards.
"""

import collections
import functools
import itertools
import math
import uuid
from collections.abc import Mapping, Sequence

import tensorflow as tf

from strategies import locks
from strategies.base import Learner, Tensor, read_now, value_of
from strategies.gradients.coalescing import Bucket, is_small
from strategies.gradients.parts import in_pairs
from strategies.ps.former_rounds import kept_values
from strategies.ps.protocol import END_ASSIGNMENT, Assignment, Kind, Message, unpack

# Of the values that a server keeps before each step.
_MOST_KEPT_BYTES = 1 << 20
_ASSIGNMENT_SHAPE = [len(Assignment._fields)]
_MESSAGE_SHAPE = [len(Message._fields)]


class GradientBuffers:
    """The gradient buffers of `num_slots` workers, their assignment queues, a message queue.

    Attributes:
        step_device: The device of the step counter, which has the queues.
        devices: The devices of all variables: a gradient is complete when each has its bucket.
        queues: The assignment queue of each worker slot, resources.
        locks: The locks of each worker slot, one on each of `devices`, resources.
        sent: The variables whose gradients, or changes, workers send: `num_dense` dense ones, then
            the parts of tables.
        present: The indices of the dense ones that have gradients: all, until a loop is traced.
        num_totals: The size of the metric totals of a gradient and, with virtual replicas, of the
            digests of all parts: float64.
        name: Unique; for resources with names on workers.
    """

    def __init__(
        self, learner: Learner, strategy: tf.distribute.Strategy, *, num_slots: int
    ) -> None:
        """`strategy` has placed the variables of `learner`."""
        self.step_device: str = learner.step.device
        self.name = uuid.uuid4().hex
        self.num_totals = learner.num_totals + learner.virtual_replicas
        # With virtual replicas, the changes of the layers' state are sent as gradients are.
        self._virtual_replicas = learner.virtual_replicas
        self._state = learner.layer_state if learner.virtual_replicas else ()
        place = learner.num_dense
        self.sent = [*learner.variables[:place], *self._state, *learner.variables[place:]]
        self.num_dense = place + len(self._state)
        self.present = list(range(self.num_dense))
        self._gradients: list[tf.Variable] = []
        self._tags: dict[str, tf.Variable] = {}
        self._begun: dict[str, tf.Variable] = {}
        self._kept: Sequence[tf.Variable] = ()
        self._parts = self.sent[self.num_dense :]
        with strategy.scope():
            for index, variable in enumerate((*self.sent, learner.step)):
                with strategy.extended.colocate_vars_with(variable):
                    if variable.device not in self._tags:
                        none = -tf.ones([num_slots, 2], tf.int64)
                        self._tags[variable.device] = tf.Variable(none, trainable=False)
                        mark = tf.Variable(learner.step.read_value(), trainable=False)
                        self._begun[variable.device] = mark
                    if index < self.num_dense:
                        # Made on the server: the chief would have to store and send them.
                        with tf.device(variable.device):
                            zeros = tf.zeros([num_slots, *variable.shape], variable.dtype)
                        self._gradients.append(tf.Variable(zeros, trainable=False))
        with tf.device(self.step_device):
            self.queues = [
                tf.raw_ops.FIFOQueueV2(
                    component_types=[tf.int64],
                    shapes=[_ASSIGNMENT_SHAPE],
                    shared_name=f"assignments-{self.name}-{slot}",
                )
                for slot in range(num_slots)
            ]
            self._messages = tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int64, tf.float64],
                shapes=[_MESSAGE_SHAPE, [self.num_totals]],
                shared_name=f"messages-{self.name}",
            )
        self.devices = list(self._tags)
        self.locks: list[list[Tensor]] = [[] for _ in range(num_slots)]
        for device in self.devices:
            with tf.device(device):
                for slot, of_slot in enumerate(self.locks):
                    of_slot.append(tf.raw_ops.MutexV2(shared_name=f"slot-{self.name}-{slot}"))

        self._row_buffers = [self._row_buffer(i, num_slots) for i in range(len(self._parts))]

    @property
    def marks(self) -> list[tf.Variable]:
        """On each of `devices`, the number of the step begun last, as the step counter counts."""
        return list(self._begun.values())

    @property
    def variables(self) -> list[tf.Variable]:
        """The gradient buffers and the tags."""
        return [*self._gradients, *self._tags.values()]

    def assign(self, slot: int, rows: Tensor) -> None:
        """Puts packed assignments, int64 [n, 4] with any n, into the queue of a worker slot."""
        tf.raw_ops.QueueEnqueueManyV2(handle=self.queues[slot], components=[rows])

    def num_queued(self, slot: int) -> Tensor:
        """How many assignments are in the queue of a worker slot, int32."""
        return tf.raw_ops.QueueSizeV2(handle=self.queues[slot])

    def take(self, queue: Tensor) -> Tensor:
        """Waits for the next packed assignment of `queue`, int64 [4]."""
        (row,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
        return tf.ensure_shape(row, _ASSIGNMENT_SHAPE)

    def end_loop(self, slot: int) -> None:
        """Ends the loop of a worker slot that waits for an assignment.

        Does nothing if its queue has an assignment: the loop is not waiting.
        """
        with tf.device(self.step_device):
            if not int(value_of(self.num_queued(slot))):
                self.assign(slot, tf.constant([END_ASSIGNMENT], tf.int64))

    def clear_queue(self, slot: int) -> None:
        """Takes all assignments out of the queue of a worker slot that has no loop."""
        with tf.device(self.step_device):
            for _ in range(int(value_of(self.num_queued(slot)))):
                self.take(self.queues[slot])

    def send(self, message: Tensor, metric_totals: Tensor | None = None) -> Tensor:
        """Puts a packed message into the aggregator's queue; returns the op."""
        if metric_totals is None:
            metric_totals = tf.zeros([self.num_totals], tf.float64)
        return tf.raw_ops.QueueEnqueueV2(handle=self._messages, components=[message, metric_totals])

    def tell(self, kind: Kind, number: int) -> None:
        """Sends a message from the chief, filled up to `number` messages with NOTHING.

        The aggregator waits for `number` messages at most, so it handles this one immediately.
        """
        with tf.device(self.step_device):
            kinds = [kind] + [Kind.NOTHING] * (number - 1)
            messages = tf.constant([Message(kind, 0, 0, 0, 0) for kind in kinds], tf.int64)
            totals = tf.zeros([number, self.num_totals], tf.float64)
            tf.raw_ops.QueueEnqueueManyV2(handle=self._messages, components=[messages, totals])

    def receive(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Waits for `number` messages: int64 [n, 5], and metric totals [n, num_totals]."""
        messages, totals = tf.raw_ops.QueueDequeueManyV2(
            handle=self._messages,
            n=tf.cast(number, tf.int32),
            component_types=[tf.int64, tf.float64],
        )
        return tf.ensure_shape(messages, [None, *_MESSAGE_SHAPE]), totals

    def write(self, bucket: Bucket, lock: Tensor, sparse: Mapping[int, tf.IndexedSlices]) -> Tensor:
        """Writes the gradients of `bucket`; the tag is unset until they are complete.

        `bucket.metadata[0]` is the worker's message; `lock` is the lock of its worker slot on this
        device. `sparse` are the gradients of the parts of tables on this device, by the number of
        the part. Returns the worker slot, after the write.

        One gap is left: TensorFlow frees a lock when an op that waits for it is cancelled, so a
        third writer could come between.
        """
        tags = self._tags[bucket.device]
        message = unpack(Message, bucket.metadata[0])
        slot = message.worker_slot
        rows = [[gradient.indices, gradient.values] for gradient in sparse.values()]
        held = locks.take([lock], [*itertools.chain(bucket.gradients.values(), *rows)])
        with tf.control_dependencies(held):
            untagged = _write_row(tags, slot, tf.constant([-1, -1], tf.int64))
        written = []
        for index, gradient in bucket.gradients.items():
            buffer = self._gradients[index]
            with tf.control_dependencies([untagged]):
                written.append(_write_row(buffer, slot, tf.cast(gradient, buffer.dtype)))
        for part, pair in zip(sparse, rows, strict=True):
            with tf.control_dependencies([untagged]):
                update = tf.raw_ops.ResourceScatterUpdate(
                    resource=self._row_buffers[part],
                    indices=slot,
                    updates=tf.raw_ops.OptionalFromValue(components=pair),
                )
            written.append(update)
        with tf.control_dependencies([untagged, *written]):
            tagged = _write_row(tags, slot, tf.stack([message.attempt, message.step]))
        with tf.control_dependencies([locks.free(held, tagged)]):
            return tf.identity(slot)

    def total(self, slots: Tensor, attempts: Tensor, step: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The sum of the gradients of n worker slots, in the order of `slots`, int64 [n].

        The first result is True if these are the gradients of `attempts` at `step`, and none of
        them was overwritten meanwhile.
        """
        expected = tf.stack([attempts, tf.fill(tf.shape(attempts), step)], axis=1)
        summed = []
        read: dict[str, list[Tensor]] = {device: [] for device in self._tags}
        by_tree = self._virtual_replicas > 0
        for variable, buffer in zip(self.sent[: self.num_dense], self._gradients, strict=True):
            with tf.device(buffer.device):
                small = is_small(variable)
                summed.append(_sum_of_rows(buffer, slots, is_small=small, by_tree=by_tree))
                read[buffer.device].append(summed[-1])
        for index, part in enumerate(self._parts):
            with tf.device(part.device):
                gradient = self._joined_rows(index, slots)
                summed.append(gradient)
                read[part.device] += [gradient.indices, gradient.values]
        are_expected = []
        for device, tags in self._tags.items():
            # Tags are read after the rows: a writer to one of the rows has changed its tag before.
            with tf.device(device), tf.control_dependencies(read[device]):
                are_expected.append(tf.reduce_all(tf.equal(tags.sparse_read(slots), expected)))
        return tf.reduce_all(tf.stack(are_expected)), summed

    def keep(self, variables: Sequence[tf.Variable]) -> None:
        """From now on `begun` keeps the values of `variables` before a step, except in three cases.

        A single server needs no such values. Of a table a step changes only a few rows. If a server
        had much to keep, it would take time: a step changes copies of the kept values. (With 75 MB
        on each of two servers a step took 1.15 times as long.)
        """
        sizes = collections.Counter[str]()
        for variable in variables:
            sizes[variable.device] += math.prod(variable.shape) * variable.dtype.size
        pays = max(sizes.values(), default=0) <= _MOST_KEPT_BYTES
        for device in self.devices:
            kept_values(device).clear()
        self._kept = variables if len(self.devices) > 1 and not self._parts and pays else ()

    def begun(self, summed: list[Tensor], step: Tensor) -> list[Tensor]:
        """The sums, once all of them are there and `step`, which they make, is marked as begun.

        Before that each server keeps the values that `keep` has named (former_rounds.py). They
        share memory with the variables, which are copied when the step changes them.
        """
        owners = [*self._gradients, *self._parts]
        marks: dict[str, tf.Operation] = {}
        for device, mark in self._begun.items():
            here = [summed[i] for i, owner in enumerate(owners) if owner.device == device]
            with tf.device(device):
                with tf.control_dependencies(tf.nest.flatten(here, expand_composites=True)):
                    number = tf.cast(step, tf.int64)
                kept: list[tf.Operation | None] = []
                if self._kept:
                    with tf.control_dependencies([number]):
                        values = [read_now(v) for v in self._kept if v.device == device]
                    kept = [kept_values(device).store([number - 1, *values])]
                with tf.control_dependencies(kept):
                    marks[device] = mark.assign(tf.cast(number, mark.dtype)).op
        # A server without gradients may have variables that change, such as the step counter.
        others = [op for device, op in marks.items() if device not in {o.device for o in owners}]
        marked = []
        for owner, gradient in zip(owners, summed, strict=True):
            with tf.device(owner.device), tf.control_dependencies([marks[owner.device], *others]):
                marked.append(tf.nest.map_structure(tf.identity, gradient, expand_composites=True))
        return marked

    def change_layer_state(self, summed: list[Tensor]) -> list[Tensor]:
        """Changes the layers' state by the mean of its changes, which are among the sums.

        Returns the other sums, which come after that.
        """
        if not self._state:
            return summed
        first, last = self.num_dense - len(self._state), self.num_dense
        changed = []
        for variable, total in zip(self._state, summed[first:last], strict=True):
            with tf.device(variable.device):
                changed.append(variable.assign_add(total / self._virtual_replicas))
        with tf.control_dependencies(changed):
            gradients = [*summed[:first], *summed[last:]]
            ordered = tf.nest.map_structure(tf.identity, gradients, expand_composites=True)
        return list(ordered)

    def _row_buffer(self, part: int, num_slots: int) -> Tensor:
        """A variable, [worker slots], of pairs (ids, rows), which have any number of rows."""
        variable = self._parts[part]
        with tf.device(variable.device):
            buffer = tf.raw_ops.VarHandleOp(
                dtype=tf.variant, shape=[num_slots], shared_name=f"rows-{self.name}-{part}"
            )
            none = [tf.zeros([0], tf.int64), tf.zeros([0, *variable.shape[1:]], variable.dtype)]
            pairs = [tf.raw_ops.OptionalFromValue(components=none) for _ in range(num_slots)]
            tf.raw_ops.AssignVariableOp(resource=buffer, value=tf.stack(pairs))
        return buffer

    def _joined_rows(self, part: int, slots: Tensor) -> tf.IndexedSlices:
        """The gradients of worker slots for a part of a table, in the order of `slots`."""
        variable = self._parts[part]
        pairs = [
            tf.raw_ops.OptionalGetValue(
                optional=tf.raw_ops.ResourceGather(
                    resource=self._row_buffers[part], indices=slot, dtype=tf.variant
                ),
                output_types=[tf.int64, variable.dtype],
                output_shapes=[[None], [None, *variable.shape[1:]]],
            )
            for slot in tf.unstack(slots)
        ]
        ids, rows = zip(*pairs, strict=True)
        return tf.IndexedSlices(tf.concat(rows, axis=0), tf.concat(ids, axis=0))


def _sum_of_rows(buffer: tf.Variable, slots: Tensor, *, is_small: bool, by_tree: bool) -> Tensor:
    """The sum of the rows of worker slots, in the order of `slots` or along a tree.

    Large rows are read one at a time: together they take much memory.
    """
    # Not tf.reduce_sum: from 8 rows on it adds them in another order.
    rows = tf.unstack(buffer.sparse_read(slots)) if is_small else []
    number = slots.shape[0]
    former: list[Tensor] = []

    def row(index: int) -> Tensor:
        with tf.control_dependencies(former):
            return rows[index] if is_small else buffer.sparse_read(slots[index])

    def add(left: Tensor, right: Tensor) -> Tensor:
        total = left + right
        former[:] = [] if is_small else [total]
        return total

    return in_pairs(row, number, add) if by_tree else functools.reduce(add, map(row, range(number)))


def _write_row(variable: tf.Variable, slot: Tensor, row: Tensor) -> Tensor:
    return tf.raw_ops.ResourceScatterNdUpdate(ref=variable.handle, indices=[[slot]], updates=[row])
