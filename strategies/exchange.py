"""Small sums over two processes: each sends the other all that it has, and both add up.

    exchange = Exchange("/job:worker/task:0/CPU:0")
    total = exchange.summed(vector)     # in a replica: over both

A ring of two sends one half, adds, and sends the other: as many bytes, but one transfer has to wait
for the other. For what is larger that wait is nothing beside the copies, and the ring works in
place. Both processes see the same bits, those of a ring of two: a sum of two has but one order.
"""

import itertools

import tensorflow as tf

from data.graphs import plain
from strategies.base import Tensor
from strategies.packing import num_bytes

_NUM_PROCESSES = 2
# TensorFlow counts the groups of its own from 1 on.
_GROUP_KEY = 1 << 20
# Measured between two processes of one machine: 0.3 MB take 0.75 of a ring's time, 10 MB 1.2.
LARGE_BYTES = 1 << 20
# By these the two find each other's sums: each has made as many as the other. They are fixed when a
# graph is traced, and graphs of steps are, once, by all workers (`input_signature`).
_instances = itertools.count(1)


class Exchange:
    """All-reduce over two processes with one replica on a CPU each.

    Both must make the same calls in the same order, as they do who trace the same graphs.
    """

    def __init__(self, device: str) -> None:
        """`device`: that of this process's replica. The processes meet at the first sum."""
        self._device = device

    def suits(self, vector: Tensor) -> bool:
        """Whether `vector` is small enough, and known to be."""
        is_known = vector.shape.is_fully_defined()
        return bool(is_known and num_bytes(vector) < LARGE_BYTES)

    @plain
    def summed(self, vector: Tensor) -> Tensor:
        """Over both processes, of a tensor of one dimension. In a replica."""
        # What a loop carries is on no device, and a collective asks for one.
        with tf.device(self._device):
            first, second = tf.split(self._gathered(vector), _NUM_PROCESSES)
            return tf.ensure_shape(first + second, vector.shape)

    def _gathered(self, vector: Tensor) -> Tensor:
        """`vector` of both processes, one after the other."""
        # A gather takes no bfloat16, but does not look at the bits.
        sent = tf.bitcast(vector, tf.float16) if vector.dtype == tf.bfloat16 else vector
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=sent,
            group_size=_NUM_PROCESSES,
            group_key=_GROUP_KEY,
            instance_key=next(_instances),
            ordering_token=[],
            communication_hint="ring",
        )
        return tf.bitcast(gathered, vector.dtype)
