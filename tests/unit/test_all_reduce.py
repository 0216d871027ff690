"""The all-reduce: its buckets, and its sums on all replicas in all types that are sent."""

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies.gradients import all_reduce
from strategies.gradients.all_reduce import (
    LEAST_BYTES,
    Network,
    all_reduced,
    best_bucket_mb,
    bucket_layout,
)
from strategies.gradients.compression import Compression
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from strategies.worker_stats import WorkerStats
from tests.unit.comparing import assert_same
from tests.unit.replicas import ancestors, replicas
from tests.unit.test_compression import DTYPES, RELATIVE_ERROR
from tests.unit.toy import BATCH, CLASSES, make_reader, write_split
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_all_reduce_sums_what_each_replica_has_sent(dtype: str) -> None:
    strategy, compression = replicas(2), Compression(dtype, num_senders=2)
    random = np.random.default_rng(0)
    parts = random.normal(size=(20, 2, 3, 5)).astype(np.float32)

    @tf.function
    def summed(part: Any) -> Any:
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([4, 2]))
        return all_reduced([part, None, rows, part[0]], compression)[::3]

    totals = np.zeros([3, 5])
    for both in parts:
        part = strategy.experimental_distribute_values_from_function(
            lambda context, both=both: tf.constant(both[context.replica_id_in_sync_group])
        )
        dense, row = strategy.run(summed, args=(part,))
        for copies in (dense, row):
            first, second = strategy.experimental_local_results(copies)
            assert first.dtype == tf.float32
            np.testing.assert_array_equal(first, second)
        totals += strategy.experimental_local_results(dense)[0].numpy()
    exact = parts.sum(axis=(0, 1), dtype=np.float64)
    if dtype == "float32":
        np.testing.assert_allclose(totals, exact, atol=1e-5)
    else:
        # The sum is rounded once more in each step, without a residual.
        bound = 20 * RELATIVE_ERROR[dtype] * np.abs(parts).max() * 2
        assert 0 < np.abs(totals - exact).max() < bound


def test_gradients_of_a_type_that_nccl_does_not_sum_are_summed_in_float32() -> None:
    @tf.function
    def summed() -> Any:
        gradient = tf.constant([1 / 3, 1e-3], tf.bfloat16)
        return replicas(2).run(lambda: all_reduced([gradient])[0])

    first, _ = replicas(2).experimental_local_results(summed())
    np.testing.assert_array_equal(first, tf.constant([2 / 3, 2e-3], tf.bfloat16))
    operations = summed.get_concrete_function().graph.get_operations()
    sums = [op for op in operations if op.type.startswith(("AddN", "CollectiveReduce"))]
    assert {op.get_attr("T") for op in sums} == {tf.float32}


def test_replicas_sum_each_bucket_while_the_backward_pass_continues() -> None:
    """With the bits of one vector, and each bucket after those whose gradients come first."""
    executor = MirroredExecutor.on(["CPU:0", "CPU:1"])
    kernels = [tf.random.stateless_normal([1500, 1500], [i, 0], stddev=0.02) for i in range(4)]
    inputs = tf.random.stateless_normal([2, 1500], [4, 0])

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(kernels)
            values = inputs
            for kernel in kernels:
                values = tf.nn.softplus(tf.matmul(values, kernel))
        return executor._all_reduced(tape.gradient(values, kernels))

    def summed() -> tuple[list[Any], list[tf.Operation]]:
        run = tf.function(lambda: executor.strategy.run(gradients))
        found = tf.nest.flatten(run(), expand_composites=True)
        return found, run.get_concrete_function().graph.get_operations()

    in_buckets, operations = summed()
    executor._bucket_bytes = math.inf
    assert_same(in_buckets, summed()[0])
    sums = [op for op in operations if op.type == "AddN"]
    assert len(sums) == 4
    products = [sum(op.type == "MatMul" for op in ancestors(one)) for one in sums]
    assert products == sorted(set(products)), "a bucket waits for a later one"
    assert not any(op.type == "AddN" for one in sums for op in ancestors(one))


def test_rolled_back_training_starts_without_residuals(tmp_path: Path) -> None:
    executor = MirroredExecutor(replicas(2), Compression("bfloat16", 2))

    def make() -> Learner:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES)])
        loss = sparse_categorical_crossentropy
        return Learner(model, keras.optimizers.SGD(0.5), loss, {}, batch_size=BATCH)

    learner = executor.build(make)
    reader = make_reader(write_split(tmp_path))
    executor.start(learner, reader, reader, Position())
    origin = learner.model.get_weights()

    def restore() -> tuple[Position, WorkerStats]:
        learner.model.set_weights(origin)
        learner.step.assign(0)
        return Position(), {}

    ends = []
    for _ in range(2):
        executor.run(6)
        ends.append(learner.model.get_weights())
        executor.roll_back(restore)
    assert_same(*ends)


@pytest.mark.parametrize("inner", [(3,), (), (1, 3)])
@pytest.mark.parametrize("ids_dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32])
def test_rows_of_workers_keep_their_bits_and_shapes(
    dtype: Any, ids_dtype: Any, inner: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce, "_gathered", lambda tensor, *_: tensor)
    numbers = [1 / 3, -0.0, 3e38, np.nan, np.inf, 1e-38][: 2 * math.prod(inner)]
    values = tf.reshape(tf.cast(numbers, dtype), [2, *inner])
    rows = tf.IndexedSlices(values, tf.constant([7, 2**31 - 1], ids_dtype))
    arrived = all_reduce._rows_of_workers(rows, 1)
    assert arrived.values.dtype == dtype
    bits = tf.uint16 if dtype == tf.bfloat16 else tf.uint32
    np.testing.assert_array_equal(tf.bitcast(arrived.values, bits), tf.bitcast(rows.values, bits))
    np.testing.assert_array_equal(arrived.indices, rows.indices)


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
