"""What rounding takes from a gradient is sent with a later one."""

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from strategies.gradients.compression import Compression
from strategies.ps.worker_step import send_to_servers

DTYPES = ("float16", "bfloat16")
# The largest relative error of rounding to the nearest value.
RELATIVE_ERROR = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 0.0}


def arrived_on_servers(variables: Any, gradients: Any, compression: Compression) -> list[Any]:
    return send_to_servers(variables, gradients, compression.compress_all(gradients))


def arrivals(compression: Compression, gradients: Any) -> Any:
    """Sends `gradients`, [steps, ...], one after another to one variable; returns what arrives."""
    variable = tf.Variable(tf.zeros_like(gradients[0]))

    @tf.function
    def send_all() -> Any:
        arrived = tf.TensorArray(tf.float32, len(gradients))
        for i in tf.range(len(gradients)):
            (gradient,) = arrived_on_servers([variable], [tf.constant(gradients)[i]], compression)
            arrived = arrived.write(i, gradient)
        return arrived.stack()

    return send_all().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_what_arrives_has_the_error_of_one_rounding(dtype: str) -> None:
    random = np.random.default_rng(0)
    magnitudes = 10.0 ** random.uniform(-9, 4, size=(50, 1000))
    gradients = (magnitudes * random.choice([-1, 1], size=(50, 1000))).astype(np.float32)
    arrived = np.cumsum(arrivals(Compression(dtype), gradients), axis=0, dtype=np.float64)
    errors = np.abs(arrived - np.cumsum(gradients, axis=0, dtype=np.float64))
    # A residual is at most the rounding error of the last sum of a gradient and its residual. That
    # sum is computed in float32, which rounds too.
    largest = np.maximum.accumulate(np.abs(gradients), axis=0)
    bound = 1.01 * RELATIVE_ERROR[dtype] * largest + SMALLEST[dtype] + 50 * 2.0**-24 * largest
    assert np.all(errors <= bound)
    # Without residuals the error would be larger.
    cast = tf.cast(tf.cast(gradients, dtype), tf.float32).numpy()
    without_residuals = np.abs(np.cumsum(cast - gradients.astype(np.float64), axis=0))
    assert errors[-1].mean() < without_residuals[-1].mean() / 2


@pytest.mark.parametrize("num_senders", [1, 2, 3, 5, 9, 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_too_large_for_the_type_is_clipped_so_that_sums_are_finite_and_arrives_once(
    dtype: str, num_senders: int
) -> None:
    largest = np.finfo(np.float32).max
    first, second = arrivals(
        Compression(dtype, num_senders), np.array([[largest], [1.0]], np.float32)
    )
    total = sum(tf.cast(first, dtype) for _ in range(num_senders))
    assert np.all(np.isfinite(tf.cast(total, tf.float32)))
    assert total[0] > 0.9 * float(tf.as_dtype(dtype).max)
    assert second == 1.0


def test_steps_of_an_unrolled_graph_pass_their_residuals_on() -> None:
    compression = Compression("float16")
    # The gradient does not depend on the variable, so that nothing else orders the steps.
    variable = tf.Variable([0.0])

    @tf.function
    def sixteen() -> Any:
        done: list[Any] = []
        for _ in range(16):
            with tf.control_dependencies(done[-1:]):
                (arrived,) = arrived_on_servers([variable], [tf.constant([2.0**-27])], compression)
                done.append(variable.assign_add(arrived))
        return done[-1]

    for num_calls in range(1, 9):
        sent = num_calls * 16 * 2.0**-27
        assert abs(float(sixteen()[0]) - sent) <= 2.0**-24


def test_residuals_reach_neither_new_graphs_that_drop_them_nor_another_compression() -> None:
    compression = Compression("bfloat16")
    third = np.array([[1 / 3]], np.float32)
    first = arrivals(compression, third)
    assert arrivals(compression, third) != first
    assert arrivals(Compression("bfloat16"), third) == first
    compression.forget_residuals()
    assert arrivals(compression, third) == first


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_a_skipped_assignment_leaves_residuals_unchanged(dtype: str) -> None:
    third, other = tf.constant(1 / 3), tf.constant(1 / 7)
    found = []
    for between in (False, True):
        compression = Compression(dtype)
        sent = [compression.compress_all([third])[0]]
        if between:
            compression.compress_all([other], is_assigned=tf.constant(False))
        sent += compression.compress_all([third], is_assigned=tf.constant(True))
        found.append([float(tf.cast(one, tf.float32)) for one in sent])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "there was no residual"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_arrive_and_leave_no_residual(dtype: str, bad: float) -> None:
    first, second = arrivals(Compression(dtype), np.array([[bad, 1.0], [1.0, 1.0]], np.float32))
    np.testing.assert_array_equal(first, [bad, 1.0])
    np.testing.assert_array_equal(second, [1.0, 1.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, np.nan, np.finfo(np.float32).max])
def test_value_out_of_range_leaves_other_residuals_unchanged(dtype: str, bad: float) -> None:
    third = np.float32(1 / 3)
    gradients = np.array([[bad, third]] + [[0.0, third]] * 9, np.float32)
    total = arrivals(Compression(dtype), gradients)[:, 1].sum(dtype=np.float64)
    assert abs(total - 10 * third) <= RELATIVE_ERROR[dtype]
    without_residuals = 10 * float(tf.cast(third, dtype))
    assert abs(without_residuals - 10 * third) > 2 * abs(total - 10 * third)


def test_rows_are_rounded_without_a_residual_and_16_bit_gradients_are_not() -> None:
    third = tf.constant([1 / 3])
    gradients = [
        tf.IndexedSlices(third[tf.newaxis], tf.constant([1]), tf.constant([2, 1])),
        tf.cast(third, tf.float16),
        None,
        third,
    ]
    variables = [tf.Variable(tf.zeros(1)) for _ in gradients]
    for dtype in DTYPES:
        compression = Compression(dtype)
        for _ in range(2):
            arrived = arrived_on_servers(variables, gradients, compression)
            assert isinstance(arrived[0], tf.IndexedSlices)
            assert arrived[0].values.dtype == tf.float32
            # The range of float16 is too small without a residual.
            rounded = tf.cast(tf.cast(third, tf.bfloat16), tf.float32)
            np.testing.assert_array_equal(arrived[0].values[0], rounded)
    arrived = arrived_on_servers(variables, gradients, Compression("bfloat16"))
    assert arrived[1].dtype == tf.float16
    assert arrived[1].numpy() == gradients[1].numpy()
    assert arrived[2] is None
    assert arrived[3].numpy() != third.numpy()
    assert arrived_on_servers(variables, gradients, Compression())[3].numpy() == third.numpy()


def test_sparse_gradients_arrive_on_the_device_of_their_table() -> None:
    device = "/job:ps/replica:0/task:1/device:CPU:0"
    with tf.Graph().as_default():
        rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1]), tf.constant([2, 1]))
        variable = types.SimpleNamespace(device=device)
        (arrived,) = arrived_on_servers([variable], [rows], Compression())
    assert arrived.values.device == arrived.indices.device == device
