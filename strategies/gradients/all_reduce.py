"""The sum of gradients over all replicas.

gradients = all_reduced(gradients, Compression("bfloat16", num_senders=2))  # in replica context

Each bucket of gradients (buckets.py) is summed on its own, when its last gradient is computed. No
bucket waits for another one, so sums overlap with the backward pass. Overlap is lost in a graph
that XLA compiles as one op.
"""

import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from data.autograph import no_autograph
from strategies.base import Tensor
from strategies.gradients.buckets import bucket_layout
from strategies.gradients.coalescing import num_bytes
from strategies.gradients.compression import Compression

# Two workers exchange vectors below this size. In training runs this makes 1.15 times as many
# steps/s as the ring with 0.3 MB of gradients; with 10 MB the ring is faster (1.2 times).
EXCHANGE_BYTES = 1 << 20
# TensorFlow numbers its own groups from 1.
_GROUP_KEY = 1 << 20
# All workers trace the same graphs once, so they give the same number to the same bucket.
_instance_keys = itertools.count(1)


@no_autograph
def all_reduced(
    gradients: Sequence[Tensor], compression: Compression, bucket_bytes: float = math.inf
) -> list[Tensor]:
    """The sum of each of `gradients` over all replicas. Called in replica context.

    The sum is computed in the type in which gradients are sent. The result has the given types; a
    gradient of None stays None. Each element is summed in an order that the sizes of the gradients
    and `bucket_bytes` determine, so equal calls have equal bits.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    summed = list(gradients)
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            summed[index] = context.all_reduce("sum", gradient)
    for indices in bucket_layout(gradients, bucket_bytes):
        bucket = [gradients[index] for index in indices]
        vectors = [tf.reshape(gradient, [-1]) for gradient in bucket]
        vector = vectors[0] if len(vectors) == 1 else tf.concat(vectors, axis=0)
        sent = compression.compress(vector, key=indices[0])
        total = tf.cast(_all_reduced_vector(sent), vector.dtype)
        parts = tf.split(total, [tf.size(gradient) for gradient in bucket], num=len(bucket))
        for index, part in zip(indices, parts, strict=True):
            summed[index] = tf.reshape(part, tf.shape(gradients[index]))
    return summed


def _all_reduced_vector(vector: Tensor) -> Tensor:
    """The sum of `vector`, [n], over all replicas."""
    context = tf.distribute.get_replica_context()
    device = cpu_of_worker(context.strategy)
    if not device:
        # The strategy orders its sums. NCCL needs this: the same order on all GPUs.
        return context.all_reduce("sum", vector)
    # The inputs of a loop have no device, and a collective op needs one.
    with tf.device(device):
        is_small = vector.shape.is_fully_defined() and num_bytes(vector) < EXCHANGE_BYTES
        if is_small and context.num_replicas_in_sync == 2:
            return _exchanged(vector)
        return _ring_reduced(vector, context.num_replicas_in_sync)


def cpu_of_worker(strategy: tf.distribute.Strategy) -> str:
    """The device of this worker if each worker has one replica, on its CPU; otherwise ""."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return ""
    device, *others = strategy.extended.worker_devices
    is_cpu = tf.DeviceSpec.from_string(device).device_type == "CPU"
    return str(device) if is_cpu and not others else ""


def _ring_reduced(vector: Tensor, num_workers: int) -> Tensor:
    """The sum of `vector`, [n], over a ring. The strategy's rings would wait for each other."""
    instance_key = next(_instance_keys)
    total = tf.raw_ops.CollectiveReduceV2(
        input=vector,
        group_size=num_workers,
        group_key=_GROUP_KEY,
        instance_key=instance_key,
        ordering_token=[_token(instance_key)],
        merge_op="Add",
        final_op="Id",
        communication_hint="ring",
        max_subdivs_per_device=-1,
    )
    return tf.ensure_shape(total, vector.shape)


def _exchanged(vector: Tensor) -> Tensor:
    """The sum of `vector`, [n], over two workers: each sends its vector to the other worker.

    A ring sends the same bytes in two messages, one after the other. The sum has the same bits.
    """
    # CollectiveGatherV2 does not support bfloat16, but it does not use the values either.
    sent = tf.bitcast(vector, tf.float16) if vector.dtype == tf.bfloat16 else vector
    instance_key = next(_instance_keys)
    both = tf.raw_ops.CollectiveGatherV2(
        input=sent,
        group_size=2,
        group_key=_GROUP_KEY,
        instance_key=instance_key,
        ordering_token=[_token(instance_key)],
        communication_hint="ring",
    )
    first, second = tf.split(tf.bitcast(both, vector.dtype), 2)
    return tf.ensure_shape(first + second, vector.shape)


def _token(instance_key: int) -> Tensor:
    """A resource that only one sum uses.

    A tf.function runs stateful ops one after the other if they use the same resource, or none.
    """
    return tf.raw_ops.VarHandleOp(
        dtype=tf.float32, shape=[], shared_name=f"all-reduce-{instance_key}"
    )
