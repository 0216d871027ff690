"""The division of gradients into buckets; each bucket is summed by one all-reduce.

    layout = bucket_layout(gradients, bucket_bytes=4 << 20)     # [[4, 5], [3], [0, 1, 2]]
    bucket_mb = best_bucket_mb(gradient_bytes, network)

The backward pass computes the gradients of the last layers first. A bucket is sent as soon as its
gradients exist, so its transfer overlaps with the backward pass through the layers before (Li et
al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020). Small buckets
begin early, but each all-reduce has a fixed cost. Large buckets leave more to be sent when nothing
is left to compute.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from strategies.base import Tensor
from strategies.gradients.coalescing import num_bytes

# Smaller gradients are summed as one vector: there is nothing to gain.
LEAST_BYTES = 1 << 20


class Network(NamedTuple):
    """Measured all-reduces over all workers."""

    latency_secs: float  # The time of a small all-reduce.
    bytes_per_sec: float  # The bytes of a large vector that are summed in a second.


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
