"""Buckets: their order, their size, and the choice of the size."""

import math

import pytest
import tensorflow as tf

from strategies.gradients.all_reduce import LEAST_BYTES, Network, best_bucket_mb, bucket_layout


def test_buckets_are_filled_from_the_last_variable_on() -> None:
    sizes = (100, 1, 50, 50, 3, 200, 2)
    gradients = [tf.zeros([size // 2, 2]) if size > 3 else tf.zeros([size]) for size in sizes]
    assert bucket_layout(gradients, 4 * 100) == [[5, 6], [2, 3, 4], [0, 1]]
    assert bucket_layout(gradients, math.inf) == [[0, 1, 2, 3, 4, 5, 6]]
    assert bucket_layout(gradients, 1) == [[6], [5], [4], [3], [2], [1], [0]]


def test_buckets_have_one_type_and_leave_out_sparse_and_missing_gradients() -> None:
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([4, 2]))
    gradients = [tf.zeros([8]), None, tf.zeros([8], tf.float16), rows, tf.zeros([8])]
    assert bucket_layout(gradients, 64) == [[0, 4], [2]]
    assert bucket_layout([None, rows], 64) == []


@pytest.mark.parametrize(
    ("gradient_bytes", "latency", "rate", "best"),
    [
        (54e6, 1e-3, 250e6, 4),  # sqrt(54e6 * 1e-3 * 250e6) = 3.7e6
        (54e6, 1e-3, 62.5e6, 2),
        (54e6, 1e-6, 1e6, 1),  # Never less than 1 MiB.
        (100e6, 1, 1e9, 256),  # A single sum, because each has a high cost.
    ],
)
def test_bucket_size_weighs_the_fixed_cost_against_the_last_transfer(
    gradient_bytes: float, latency: float, rate: float, best: float
) -> None:
    assert best_bucket_mb(int(gradient_bytes), Network(latency, rate)) == best
    assert best * 2**20 >= LEAST_BYTES
