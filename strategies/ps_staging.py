"""Where workers and conductor of synchronous parameter servers meet: queues and gradients there.

    staging = Staging(learner, strategy, num_slots=3)

| side | does |
| --- | --- |
| conductor | `give(slot, order)` |
| shift | `take(orders)`, `put(parcel, lock)` on each ps, `send(message, metrics)` |
| conductor | `receive(n)`, `total(slots, attempts, step)` |

Gradients are kept in a variable [slots, ...] beside each trainable one; the tags of a slot, one on
each ps, are (attempt, step). A worker that dies between two of its variables leaves no message, and
no tag on the ps where they are, so nothing of it is ever summed. And one that was given up but
still writes has the lock of its slot on that ps, as everyone who writes there, and changes the tag
first, so who reads after that notices.

| int64 | columns |
| --- | --- |
| an order, [4] | attempt, share, whether it is the last of its shift, step |
| a message, [5] | kind, slot, attempt, worker, step |
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from strategies.base import Learner, Tensor
from strategies.wire import Parcel

NOBODYS = -1

# Whether an order is the last of its shift: no; to let others have the worker; with the last round.
GOES_ON, GIVES_WAY, IS_FINAL = range(3)

# The attempt of an order that is none, and only ends a shift.
END = -2
ENDING = (END, NOBODYS, GIVES_WAY, NOBODYS)

# Kinds of messages. One that has begun says in place of the attempt how many orders it has found.
DONE, BEGUN, NUDGE, STOP, NOTHING = range(5)


class Staging:
    """The staging area of `num_slots` workers, their queues of orders, and one of messages.

    Attributes:
        home: The device of the step counter, where the queues are.
        orders: The queue of each slot, resources.
        sums_shape: Of the metrics of a gradient, float64.
        name: Of this one, for what has a name on workers.
    """

    def __init__(self, learner: Learner, strategy: Any, *, num_slots: int) -> None:
        """For the gradients of `learner`, whose variables `strategy` has placed."""
        self.home: str = learner.step.device
        self.name = f"{os.getpid()}-{time.time_ns()}"
        self.sums_shape = (len(learner.metric_names), 2)
        self._gradients: list[Any] = []
        self._tags: dict[str, Any] = {}
        with strategy.scope():
            for variable in (learner.step, *learner.variables):
                with strategy.extended.colocate_vars_with(variable):
                    if variable.device not in self._tags:
                        none = -tf.ones([num_slots, 2], tf.int64)
                        self._tags[variable.device] = tf.Variable(none, trainable=False)
                    if variable is not learner.step:
                        zeros = tf.zeros([num_slots, *variable.shape], variable.dtype)
                        self._gradients.append(tf.Variable(zeros, trainable=False))
        with tf.device(self.home):
            self.orders = [
                tf.raw_ops.FIFOQueueV2(
                    component_types=[tf.int64],
                    shapes=[[4]],
                    shared_name=f"orders-{self.name}-{slot}",
                )
                for slot in range(num_slots)
            ]
            self._messages = tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int64, tf.float64],
                shapes=[[5], self.sums_shape],
                shared_name=f"messages-{self.name}",
            )
        self._locks = {device: self._make_locks(device, num_slots) for device in self._tags}

    def _make_locks(self, device: str, num_slots: int) -> list[Tensor]:
        with tf.device(device):
            names = [f"slot-{self.name}-{slot}" for slot in range(num_slots)]
            return [tf.raw_ops.MutexV2(shared_name=name) for name in names]

    @property
    def devices(self) -> Sequence[str]:
        """Those of all variables: a gradient is whole when each of them has its parcel."""
        return list(self._tags)

    def locks(self, slot: int) -> list[Tensor]:
        """Those of `slot`, resources, on each of `devices`."""
        return [locks[slot] for locks in self._locks.values()]

    def give(self, slot: int, orders: Tensor) -> None:
        """Gives `orders`, int64 [n, 4] of any n, to `slot`."""
        tf.raw_ops.QueueEnqueueManyV2(handle=self.orders[slot], components=[orders])

    def num_given(self, slot: int) -> Tensor:
        """The orders of `slot` that nobody has taken, int32."""
        return tf.raw_ops.QueueSizeV2(handle=self.orders[slot])

    def take(self, orders: Tensor) -> Tensor:
        """Waits for the next of `orders`, a queue."""
        (order,) = tf.raw_ops.QueueDequeueV2(handle=orders, component_types=[tf.int64])
        return tf.ensure_shape(order, [4])

    def forget_orders(self, slot: int) -> None:
        """Takes back what nobody has taken."""
        with tf.device(self.home):
            for _ in range(int(self.num_given(slot).numpy())):
                self.take(self.orders[slot])

    def send(self, message: Tensor, sums: Tensor | None = None) -> Tensor:
        """Puts `message`, with metrics, if any, into the conductor's queue; returns the op."""
        if sums is None:
            sums = tf.zeros(self.sums_shape, tf.float64)
        return tf.raw_ops.QueueEnqueueV2(handle=self._messages, components=[message, sums])

    def send_kinds(self, kinds: Sequence[int]) -> None:
        """Sends messages that come from no slot, all at once."""
        with tf.device(self.home):
            messages = tf.constant([[kind, 0, 0, 0, 0] for kind in kinds], tf.int64)
            sums = tf.zeros([len(kinds), *self.sums_shape], tf.float64)
            tf.raw_ops.QueueEnqueueManyV2(handle=self._messages, components=[messages, sums])

    def receive(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Waits for so many messages: they, int64 [n, 5], and their metrics."""
        messages, sums = tf.raw_ops.QueueDequeueManyV2(
            handle=self._messages,
            n=tf.cast(number, tf.int32),
            component_types=[tf.int64, tf.float64],
        )
        return tf.ensure_shape(messages, [None, 5]), sums

    def put(self, parcel: Parcel, lock: Tensor) -> Tensor:
        """Writes gradients to a slot, with no tag while they are not whole, and the tag after.

        `parcel.beside` begins with the message of who computed them; `lock` is the slot's. Returns
        the slot after that.

        One hole is left: TensorFlow frees a lock when somebody who waits for it is cancelled, so a
        third writer could come between.
        """
        tags = self._tags[parcel.device]
        _, slot, attempt, _, step = tf.unstack(parcel.beside[0])
        with tf.control_dependencies(list(parcel.gradients.values())):
            # Freed with the graph that has it, however that ends.
            held = tf.raw_ops.MutexLock(mutex=lock)
        with tf.control_dependencies([held]):
            torn = _write(tags, slot, tf.constant([-1, -1], tf.int64))
        written = []
        for index, gradient in parcel.gradients.items():
            area = self._gradients[index]
            with tf.control_dependencies([torn]):
                written.append(_write(area, slot, tf.cast(gradient, area.dtype)))
        with tf.control_dependencies([torn, *written]):
            tagged = _write(tags, slot, tf.stack([attempt, step]))
        with tf.control_dependencies([tagged]):
            released = tf.raw_ops.ConsumeMutexLock(mutex_lock=held)
        with tf.control_dependencies([released]):
            return tf.identity(slot)

    def total(
        self, slots: Tensor, attempts: Tensor, step: Tensor, number: int
    ) -> tuple[Tensor, list[Tensor]]:
        """The sum of `number` gradients: those of `slots`, in this order, int64 [number].

        With it whether these are the `attempts` at `step`, and none was written to meanwhile.
        """
        expected = tf.stack([attempts, tf.fill(tf.shape(attempts), step)], axis=1)
        summed = []
        read: dict[str, list[Tensor]] = {device: [] for device in self._tags}
        for area in self._gradients:
            with tf.device(area.device):
                total, *rows = tf.unstack(area.sparse_read(slots), num=number)
                for row in rows:
                    total += row
                summed.append(total)
                read[area.device].append(total)
        are_right = []
        for device, tags in self._tags.items():
            # After the rows were read: whoever wrote to one before has changed its tag.
            with tf.device(device), tf.control_dependencies(read[device]):
                are_right.append(tf.reduce_all(tf.equal(tags.sparse_read(slots), expected)))
        return tf.reduce_all(tf.stack(are_right)), summed


def _write(variable: Any, slot: Tensor, row: Tensor) -> Tensor:
    return tf.raw_ops.ResourceScatterNdUpdate(ref=variable.handle, indices=[[slot]], updates=[row])
