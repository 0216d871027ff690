"""Gradients on their way: what is rounded is not lost."""

import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies.base import Position
from strategies.counts import Counts
from strategies.mirrored import MirroredExecutor
from strategies.wire import Wire
from tests.unit.replicas import replicas
from tests.unit.toy import BATCH, CLASSES, make_reader, write_split
from trainer.learner import Learner, sparse_categorical_crossentropy

DTYPES = ("float16", "bfloat16")
# Of what is rounded to the nearest, at most.
RELATIVE_ERROR = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 0.0}


def arrivals(wire: Wire, gradients: Any) -> Any:
    """What arrives of each of `gradients`, [steps, ...], one after another, at one variable."""
    variable = tf.Variable(tf.zeros_like(gradients[0]))

    @tf.function
    def send_all() -> Any:
        arrived = tf.TensorArray(tf.float32, len(gradients))
        for i in tf.range(len(gradients)):
            (one,) = wire.sent_to([variable], [tf.constant(gradients)[i]])
            arrived = arrived.write(i, one)
        return arrived.stack()

    return send_all().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_that_is_sent_arrives_but_for_one_rounding(dtype: str) -> None:
    random = np.random.default_rng(0)
    magnitudes = 10.0 ** random.uniform(-9, 4, size=(50, 1000))
    gradients = (magnitudes * random.choice([-1, 1], size=(50, 1000))).astype(np.float32)
    arrived = np.cumsum(arrivals(Wire(dtype), gradients), axis=0, dtype=np.float64)
    errors = np.abs(arrived - np.cumsum(gradients, axis=0, dtype=np.float64))
    # A rest is at most what was rounded off the last sum, of a gradient and the rest before it; in
    # float32, which rounds too.
    largest = np.maximum.accumulate(np.abs(gradients), axis=0)
    bound = 1.01 * RELATIVE_ERROR[dtype] * largest + SMALLEST[dtype] + 50 * 2.0**-24 * largest
    assert np.all(errors <= bound)
    # And without the rests, more would be missing.
    cast = tf.cast(tf.cast(gradients, dtype), tf.float32).numpy()
    forgotten = np.abs(np.cumsum(cast - gradients.astype(np.float64), axis=0))
    assert errors[-1].mean() < forgotten[-1].mean() / 2


def test_what_is_too_small_for_the_type_comes_later() -> None:
    tiny = np.full([1000, 1], 2.0**-27, np.float32)
    assert np.float16(tiny[0, 0]) == 0.0
    arrived = arrivals(Wire("float16"), tiny)
    assert 1 <= np.count_nonzero(arrived) < 1000
    assert arrived.sum() == pytest.approx(tiny.sum(), abs=2.0**-24)


@pytest.mark.parametrize("num_senders", [1, 2, 3, 5, 9, 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_too_large_for_the_type_is_clipped_to_what_can_be_summed_and_comes_once(
    dtype: str, num_senders: int
) -> None:
    largest = np.finfo(np.float32).max
    first, second = arrivals(Wire(dtype, num_senders), np.array([[largest], [1.0]], np.float32))
    total = sum(tf.cast(first, dtype) for _ in range(num_senders))
    assert np.all(np.isfinite(tf.cast(total, tf.float32)))
    assert total[0] > 0.9 * float(tf.as_dtype(dtype).max)
    assert second == 1.0


def test_steps_of_an_unrolled_graph_hand_their_rests_on() -> None:
    wire = Wire("float16")
    # The gradient does not depend on the variable, so that nothing else orders the steps.
    variable = tf.Variable([0.0])

    @tf.function
    def sixteen() -> Any:
        done: list[Any] = []
        for _ in range(16):
            with tf.control_dependencies(done[-1:]):
                (arrived,) = wire.sent_to([variable], [tf.constant([2.0**-27])])
                done.append(variable.assign_add(arrived))
        return done[-1]

    for num_calls in range(1, 9):
        sent = num_calls * 16 * 2.0**-27
        assert abs(float(sixteen()[0]) - sent) <= 2.0**-24


def test_rests_are_forgotten_in_new_graphs() -> None:
    wire = Wire("bfloat16")
    third = np.array([[1 / 3]], np.float32)
    first = arrivals(wire, third)
    assert arrivals(wire, third) != first
    wire.forget()
    assert arrivals(wire, third) == first


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_that_does_not_count_leaves_rests_as_they_are(dtype: str) -> None:
    third, other = tf.constant(1 / 3), tf.constant(1 / 7)
    found = []
    for between in (False, True):
        wire = Wire(dtype)
        sent = [wire.rounded([third])[0]]
        if between:
            wire.rounded([other], counts=tf.constant(False))
        sent += wire.rounded([third], counts=tf.constant(True))
        found.append([float(tf.cast(one, tf.float32)) for one in sent])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "nothing was left to add"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen_and_leaves_no_rest(dtype: str, bad: float) -> None:
    first, second = arrivals(Wire(dtype), np.array([[bad, 1.0], [1.0, 1.0]], np.float32))
    np.testing.assert_array_equal(first, [bad, 1.0])
    np.testing.assert_array_equal(second, [1.0, 1.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, np.nan, np.finfo(np.float32).max])
def test_what_is_out_of_range_costs_no_other_its_rest(dtype: str, bad: float) -> None:
    third = np.float32(1 / 3)
    gradients = np.array([[bad, third]] + [[0.0, third]] * 9, np.float32)
    total = arrivals(Wire(dtype), gradients)[:, 1].sum(dtype=np.float64)
    assert abs(total - 10 * third) <= RELATIVE_ERROR[dtype]
    forgotten = 10 * float(tf.cast(third, dtype))
    assert abs(forgotten - 10 * third) > 2 * abs(total - 10 * third)


def test_rows_of_a_table_and_what_is_small_already_travel_as_they_are() -> None:
    third = tf.constant([1 / 3])
    gradients = [
        tf.IndexedSlices(third[tf.newaxis], tf.constant([1]), tf.constant([2, 1])),
        tf.cast(third, tf.float16),
        None,
        third,
    ]
    variables = [tf.Variable(tf.zeros(1)) for _ in gradients]
    arrived = Wire("bfloat16").sent_to(variables, gradients)
    assert isinstance(arrived[0], tf.IndexedSlices)
    assert arrived[0].values.dtype == tf.float32
    np.testing.assert_array_equal(
        tf.convert_to_tensor(arrived[0]), tf.convert_to_tensor(gradients[0])
    )
    assert arrived[1].dtype == tf.float16
    assert arrived[1].numpy() == gradients[1].numpy()
    assert arrived[2] is None
    assert arrived[3].numpy() != third.numpy()
    assert Wire().sent_to(variables, gradients)[3].numpy() == third.numpy()


def test_rows_arrive_where_their_table_is() -> None:
    place = "/job:ps/replica:0/task:1/device:CPU:0"
    with tf.Graph().as_default():
        rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1]), tf.constant([2, 1]))
        (arrived,) = Wire().sent_to([types.SimpleNamespace(device=place)], [rows])
    assert arrived.values.device == arrived.indices.device == place


def test_two_wires_of_a_process_have_rests_of_their_own() -> None:
    once = np.array([[1 / 3]], np.float32)
    np.testing.assert_array_equal(
        arrivals(Wire("bfloat16"), once), arrivals(Wire("bfloat16"), once)
    )


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_sums_over_replicas_are_those_of_what_each_has_sent(dtype: str) -> None:
    strategy, wire = replicas(2), Wire(dtype, num_senders=2)
    random = np.random.default_rng(0)
    parts = random.normal(size=(20, 2, 3, 5)).astype(np.float32)

    @tf.function
    def summed(part: Any) -> Any:
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([4, 2]))
        return wire.all_reduced([part, None, rows, part[0]])[::3]

    totals = np.zeros([3, 5])
    for both in parts:
        part = strategy.experimental_distribute_values_from_function(
            lambda context, both=both: tf.constant(both[context.replica_id_in_sync_group])
        )
        whole, row = strategy.run(summed, args=(part,))
        for copies in (whole, row):
            first, second = strategy.experimental_local_results(copies)
            assert first.dtype == tf.float32
            np.testing.assert_array_equal(first, second)
        totals += strategy.experimental_local_results(whole)[0].numpy()
    exact = parts.sum(axis=(0, 1), dtype=np.float64)
    if dtype == "float32":
        np.testing.assert_allclose(totals, exact, atol=1e-5)
    else:
        # A sum is rounded again, once a step, and that is not fed back.
        bound = 20 * RELATIVE_ERROR[dtype] * np.abs(parts).max() * 2
        assert 0 < np.abs(totals - exact).max() < bound


def test_training_that_goes_back_begins_without_rests(tmp_path: Path) -> None:
    executor = MirroredExecutor(replicas(2), wire_dtype="bfloat16")

    def make() -> Learner:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES)])
        loss = sparse_categorical_crossentropy
        return Learner(model, keras.optimizers.SGD(0.5), loss, {}, batch_size=BATCH)

    learner = executor.build(make)
    reader = make_reader(write_split(tmp_path))
    executor.start(learner, reader, reader, Position())
    origin = learner.model.get_weights()

    def restore() -> tuple[Position, Counts]:
        learner.model.set_weights(origin)
        learner.step.assign(0)
        return Position(), {}

    ends = []
    for _ in range(2):
        executor.run(6)
        ends.append(learner.model.get_weights())
        executor.go_back(restore)
    for first, second in zip(*ends, strict=True):
        np.testing.assert_array_equal(first, second)
