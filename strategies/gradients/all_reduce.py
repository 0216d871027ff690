"""The sum of gradients over all replicas.

    gradients = all_reduced(gradients)                  # in replica context
    gradients = all_reduced(gradients, Compression("bfloat16", num_senders=2))
    bucket_mb = best_bucket_mb(gradient_bytes, network)
    with averaged_over_replicas(learner.layer_state):   # in replica context
        gradients, totals = learner.gradients(batch)

The backward pass computes the gradients of the last layers first. Each bucket of gradients is
summed on its own, when its last gradient is computed (Li et al., "PyTorch Distributed: Experiences
on Accelerating Data Parallel Training", 2020). No bucket waits for another one, so sums overlap
with the backward pass through the layers before. Small buckets begin early, but each sum has a
fixed cost. Large buckets leave more to be sent when nothing is left to compute. Overlap is lost in
a graph that XLA compiles as one op.
"""

import contextlib
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from data.system.compat.autograph import no_autograph
from strategies.base import Tensor, num_bytes
from strategies.gradients.parts import in_pairs

if TYPE_CHECKING:
    from strategies.gradients.compression import Compression

# Two workers exchange vectors below this size. In training runs this makes 1.15 times as many
# steps/s as the ring with 0.3 MB of gradients; with 10 MB the ring is faster (1.2 times).
EXCHANGE_BYTES = 1 << 20
# Smaller gradients are summed as one vector: there is nothing to gain.
LEAST_BYTES = 1 << 20
# TensorFlow numbers its own groups from 1. All collectives of a group are on the same devices.
_GROUP_KEY = 1 << 20
_GROUP_KEY_OF_SUMS, _MOST_KEYS = _GROUP_KEY + 1, 16  # Of `summed_with_key`.
GATHER_KEY, TOTALS_KEY = 1, 2  # Its callers.
_GROUP_KEY_OF_ROWS = _GROUP_KEY + 2  # On the first CPU of each worker.
_GROUP_KEY_OF_PAIRS, _MOST_WORKERS = _GROUP_KEY + 3, 1 << 10  # Of `_tree_sum`.
# Rows are gathered in multiples of this number; a table has this number of keys for them.
_BLOCK_ROWS = 256
_KEYS_OF_A_TABLE = 1 << 20
# All workers trace the same graphs once, so they give the same number to the same bucket.
_instance_keys = itertools.count(1)


class Network(NamedTuple):
    """Measured all-reduces over all workers."""

    latency_secs: float  # The time of a small all-reduce.
    bytes_per_sec: float  # The bytes of a large vector that are summed in a second.


@no_autograph
def all_reduced(
    gradients: Sequence[Tensor],
    compression: "Compression | None" = None,
    bucket_bytes: float = math.inf,
    *,
    by_tree: bool = False,
) -> list[Tensor]:
    """The sum of each of `gradients` over all replicas. Called in replica context.

    The sum is computed in the type to which `compression` rounds. The result has the given types; a
    gradient of None stays None. Each element is summed in an order that the sizes of the gradients
    and `bucket_bytes` determine, so equal calls have equal bits. With `by_tree` that order is a
    binary tree over the replicas, a power of two; each worker has one replica, on its CPU.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    summed = list(gradients)
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            summed[index] = _gathered_rows(gradient, compression)
    for indices in bucket_layout(gradients, bucket_bytes):
        bucket = [gradients[index] for index in indices]
        vectors = [tf.reshape(gradient, [-1]) for gradient in bucket]
        vector = vectors[0] if len(vectors) == 1 else tf.concat(vectors, axis=0)
        dtype = vector.dtype
        if dtype == tf.bfloat16 and not cpu_of_worker(context.strategy):
            vector = tf.cast(vector, tf.float32)  # NCCL does not sum bfloat16 in TensorFlow 2.21.
        sent = compression.compress(vector, key=indices[0]) if compression else vector
        sum_of = _tree_sum if by_tree else _all_reduced_vector
        total = tf.cast(sum_of(sent), dtype)
        parts = tf.split(total, [tf.size(gradient) for gradient in bucket], num=len(bucket))
        for index, part in zip(indices, parts, strict=True):
            summed[index] = tf.reshape(part, tf.shape(gradients[index]))
    return summed


@contextlib.contextmanager
def averaged_over_replicas(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Changes each of `variables` by the mean of what all replicas change it by within the block.

    They are the state of layers, such as moving statistics: each replica changes its own copy, by
    its own part of the batch. Without the average, a replica would evaluate with its own copy, but
    only the first one is saved and exported. A variable that does not change keeps its bits.
    In replica context; not to be converted by AutoGraph.
    """
    num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if num_replicas == 1 or not variables:
        yield
        return
    before = [variable.read_value() for variable in variables]
    yield
    changes = [new.read_value() - old for new, old in zip(variables, before, strict=True)]
    sums = all_reduced(changes)
    for variable, old, total in zip(variables, before, sums, strict=True):
        variable.assign(old + total / num_replicas)


def bucket_layout(gradients: Sequence[Tensor], bucket_bytes: float) -> list[list[int]]:
    """The indices of the gradients of each bucket; the bucket that is complete first is first.

    Variables are expected in the order in which the forward pass uses them. A bucket has gradients
    of one type, and is full when it has `bucket_bytes`. Gradients that are None or sparse are left
    out.
    """
    layout: list[list[int]] = []
    unfilled: dict[tf.DType, tuple[list[int], int]] = {}
    for index, gradient in reversed(list(enumerate(gradients))):
        if gradient is None or isinstance(gradient, tf.IndexedSlices):
            continue
        later, size = unfilled.pop(gradient.dtype, ([], 0))
        if gradient.shape.is_fully_defined():
            size += num_bytes(gradient)
        if size >= bucket_bytes:
            layout.append([index, *later])
        else:
            unfilled[gradient.dtype] = [index, *later], size
    return layout + [indices for indices, _ in unfilled.values()]


def best_bucket_mb(gradient_bytes: int, network: Network) -> float:
    """The bucket size, in MiB, with the least time besides the transfer itself; a power of two.

    With n buckets that time is the fixed cost of n all-reduces, and the transfer of the last
    bucket, which begins when the backward pass ends. Powers of two, because measurements of the
    same network differ.
    """
    best_bytes = math.sqrt(gradient_bytes * network.latency_secs * network.bytes_per_sec)
    return 2.0 ** round(math.log2(max(best_bytes, LEAST_BYTES) / 2**20))


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
        # Not `context.all_reduce`: its rings would wait for each other.
        instance_key = next(_instance_keys)
        tokens = [_token(instance_key)]
        return _ring_sum(vector, context.num_replicas_in_sync, _GROUP_KEY, instance_key, tokens)


def _tree_sum(vector: Tensor) -> Tensor:
    """The sum of `vector`, [n], over all replicas, along a binary tree over them.

    Between workers: in round k, each worker exchanges its sum of 2 ** k replicas with one other
    worker, so after log2(R) rounds all have the sum.
    """
    context = tf.distribute.get_replica_context()
    device = cpu_of_worker(context.strategy)
    if not device:

        def add(strategy: tf.distribute.Strategy, vectors: Tensor) -> Tensor:
            local = strategy.experimental_local_results(vectors)
            return in_pairs(local.__getitem__, len(local), operator.add)

        return context.merge_call(add, args=(vector,))
    own = int(tf.get_static_value(context.replica_id_in_sync_group))
    distance = 1
    with tf.device(device):
        while distance < context.num_replicas_in_sync:
            # Of each pair: its first worker, and the round.
            pair = _MOST_WORKERS * distance + (own & ~distance)
            vector = _exchanged(vector, _GROUP_KEY_OF_PAIRS + pair)
            distance *= 2
    return vector


def cpu_of_worker(strategy: tf.distribute.Strategy) -> str:
    """The device of this worker if each worker has one replica, on its CPU; otherwise ""."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return ""
    device, *others = strategy.extended.worker_devices
    is_cpu = tf.DeviceSpec.from_string(device).device_type == "CPU"
    return str(device) if is_cpu and not others else ""


@no_autograph
def summed_with_key(vector: Tensor, strategy: tf.distribute.Strategy, key: int) -> Tensor:
    """The sum of `vector`, [n], over all replicas, outside of replica context.

    If each worker has one replica, on its CPU, all sums with the same `key`, below 16, must have
    the same type, and come in the same order in all workers; they may be in several graphs.
    `strategy.reduce` needs no key: it makes a new one in each call, and TensorFlow keeps some
    kilobytes for each key it has seen.
    """
    device = cpu_of_worker(strategy)
    if not device:
        return strategy.reduce("SUM", vector, axis=None)
    (size,) = vector.shape.as_list()
    # All uses of a key of TensorFlow must have the same shape.
    instance_key = _MOST_KEYS * size + key
    with tf.device(device):
        num_workers = strategy.num_replicas_in_sync
        return _ring_sum(vector, num_workers, _GROUP_KEY_OF_SUMS, instance_key, [])


def _ring_sum(
    vector: Tensor, num_workers: int, group_key: int, instance_key: int, tokens: list[Tensor]
) -> Tensor:
    """The sum of `vector`, [n], over a ring of workers. `tokens` order it with other sums."""
    total = tf.raw_ops.CollectiveReduceV2(
        input=vector,
        group_size=num_workers,
        group_key=group_key,
        instance_key=instance_key,
        ordering_token=tokens,
        merge_op="Add",
        final_op="Id",
        communication_hint="ring",
    )
    return tf.ensure_shape(total, vector.shape)


def _exchanged(vector: Tensor, group_key: int = _GROUP_KEY) -> Tensor:
    """The sum of `vector`, [n], over two workers: each sends its vector to the other worker.

    A ring sends the same bytes in two messages, one after the other. The sum has the same bits.
    """
    # CollectiveGatherV2 does not support bfloat16, but it does not use the values either.
    sent = tf.bitcast(vector, tf.float16) if vector.dtype == tf.bfloat16 else vector
    both = _gathered(sent, 2, group_key, next(_instance_keys))
    first, second = tf.split(tf.bitcast(both, vector.dtype), 2)
    return tf.ensure_shape(first + second, vector.shape)


def _gathered_rows(
    gradient: tf.IndexedSlices, compression: "Compression | None"
) -> tf.IndexedSlices:
    """The rows of all replicas, in their order. They are compressed between workers.

    Each replica may have another number of rows. TensorFlow's collectives refuse another number in
    each iteration of a loop.
    """
    context = tf.distribute.get_replica_context()
    first, *others = context.strategy.extended.worker_devices
    num_workers = context.num_replicas_in_sync // (1 + len(others))
    is_fixed = gradient.indices.shape.is_fully_defined()
    if is_fixed and not cpu_of_worker(context.strategy):
        return context.all_reduce("sum", gradient)

    def join(strategy: tf.distribute.Strategy, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        parts = [strategy.experimental_local_results(tensors) for tensors in (rows, ids)]
        return tf.concat(parts[0], axis=0), tf.concat(parts[1], axis=0)

    def join_workers(
        strategy: tf.distribute.Strategy, rows: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        # On the CPU, where tables are, also if the replicas are on GPUs.
        cpu = tf.DeviceSpec.from_string(first).replace(device_type="CPU", device_index=0)
        with tf.device(cpu.to_string()):
            joined = tf.IndexedSlices(*join(strategy, rows, ids))
            sent = compression.compress_rows(joined) if compression else joined
            arrived = _rows_of_workers(sent, num_workers)
            return tf.cast(arrived.values, gradient.dtype), arrived.indices

    merge = join if num_workers == 1 else join_workers
    joined = context.merge_call(merge, args=(gradient.values, gradient.indices))
    return tf.IndexedSlices(*joined, gradient.dense_shape)


def _rows_of_workers(gradient: tf.IndexedSlices, num_workers: int) -> tf.IndexedSlices:
    """The rows of all workers, in their order.

    First the numbers of rows are gathered. Then each worker sends as many rows as the worker with
    the most, rounded up, and this number is in the key of the collective: all uses of a key must
    have the same shape.
    """
    instance_key = next(_instance_keys)
    rows, ids = gradient.values, gradient.indices
    if ids.dtype.size < rows.dtype.size:
        ids = tf.cast(ids, tf.int64)
    numbers = _gathered(tf.shape(ids), num_workers, _GROUP_KEY_OF_ROWS, instance_key)
    blocks = (tf.reduce_max(numbers) + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    size = blocks * _BLOCK_ROWS
    missing = size - tf.size(ids)
    width = math.prod(rows.shape[1:])  # A row of a variable may have any shape.
    # Ids and rows travel as one tensor, of the type of the rows. Collectives refuse bfloat16. The
    # gather only copies bits, so float16 can carry them.
    bits = tf.float16 if rows.dtype == tf.bfloat16 else rows.dtype
    words = ids.dtype.size // bits.size
    flat = tf.reshape(tf.bitcast(rows, bits), [tf.size(ids), width])
    parts = [tf.reshape(tf.bitcast(ids, bits), [-1, words]), flat]
    numbered = tf.concat(parts, axis=1)
    sent = tf.pad(numbered, [[0, missing], [0, 0]])
    key = (instance_key + 1) * _KEYS_OF_A_TABLE + blocks
    arrived = _gathered(sent, num_workers, _GROUP_KEY_OF_ROWS, key)
    arrived = tf.reshape(arrived, [num_workers, size, words + width])
    present = tf.boolean_mask(arrived, tf.sequence_mask(numbers, size))
    found = tf.bitcast(present[:, 0] if words == 1 else present[:, :words], ids.dtype)
    values = tf.bitcast(present[:, words:], rows.dtype)
    values = tf.reshape(values, [tf.size(found), *rows.shape[1:]])
    return tf.IndexedSlices(values, found, gradient.dense_shape)


def _gathered(
    tensor: Tensor, num_workers: int, group_key: int, instance_key: Tensor | int
) -> Tensor:
    """`tensor`, [n, ...], of all workers: [workers * n, ...]."""
    return tf.raw_ops.CollectiveGatherV2(
        input=tensor,
        group_size=num_workers,
        group_key=group_key,
        instance_key=instance_key,
        ordering_token=[_token(next(_instance_keys))],
        communication_hint="ring",
    )


def _token(instance_key: int) -> Tensor:
    """A resource that only one sum uses.

    A tf.function runs stateful ops one after the other if they use the same resource, or none.
    """
    return tf.raw_ops.VarHandleOp(
        dtype=tf.float32, shape=[], shared_name=f"all-reduce-{instance_key}"
    )
