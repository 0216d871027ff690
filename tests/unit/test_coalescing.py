"""Tensors sent together arrive unchanged; variables are read in the right order."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies.gradients.coalescing import is_small, read_together, sent_together
from strategies.ps.worker_step import compute_gradients, compute_metrics
from tests.unit.comparing import assert_same
from tests.unit.replicas import ancestors, replicas
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import EmaConfig, Options

LARGE = [600, 600]


def test_tensors_that_are_sent_together_arrive_unchanged() -> None:
    random = np.random.default_rng(0)
    tensors = [
        tf.constant(3.5),
        tf.zeros([0, 3]),
        *(tf.cast(random.normal(size=(3, 5)), dtype) for dtype in ("float16", "bfloat16")),
        tf.constant(random.integers(-(2**40), 2**40, size=7), tf.int64),
        tf.constant([[1, 255]], tf.uint8),
        tf.constant([True, False]),
        tf.constant("text"),
        tf.constant(random.normal(size=LARGE), tf.float32),
        tf.constant(random.normal(size=4), tf.float64),
    ]
    assert [is_small(t) for t in tensors] == [True] * 6 + [False] * 3 + [True]
    for arrived in (sent_together(tensors), tf.function(lambda: sent_together(tensors))()):
        for received, sent in zip(arrived, tensors, strict=True):
            assert received.dtype == sent.dtype
            assert received.shape == sent.shape
            np.testing.assert_array_equal(received.numpy(), sent.numpy())


def test_variables_are_rounded_on_their_way_but_not_tables_or_statistics() -> None:
    values = np.array([1.0 + 2.0**-12, 3.0], np.float32)
    kernel = tf.Variable(values, name="kernel")
    large = tf.Variable(tf.fill(LARGE, 1.0 + 2.0**-12), name="kernel")
    mean = tf.Variable(values, trainable=False, name="moving_mean")
    table = keras.layers.Embedding(2, 1)
    table.build()
    table.set_weights([np.reshape(values, (2, 1))])
    count = tf.Variable(2**30 + 1, name="kernel")
    variables = [kernel, large, mean, table.embeddings.value, count]

    @tf.function
    def read(dtype: str) -> list[tf.Tensor]:
        return read_together(variables, [tf.constant(1)], kernel.device, dtype)[1]

    for dtype, first in (("float32", 1.0 + 2.0**-12), ("bfloat16", 1.0)):
        of_kernel, of_large, of_mean, of_table, of_count = read(dtype)
        np.testing.assert_array_equal(of_kernel, [first, 3.0])
        np.testing.assert_array_equal(of_large, np.full(LARGE, first, np.float32))
        np.testing.assert_array_equal(of_mean, values)
        np.testing.assert_array_equal(of_table, values[:, np.newaxis])
        assert of_count == 2**30 + 1
        assert of_kernel.dtype == of_large.dtype == tf.float32


def learner_of(model: keras.Model, batch_size: int, **options: Any) -> Learner:
    loss, sgd = sparse_categorical_crossentropy, keras.optimizers.SGD(0.1)
    return Learner(model, sgd, loss, {}, batch_size=batch_size, options=Options(**options))


def make_learner(**options: Any) -> Learner:
    norm, dense = keras.layers.BatchNormalization(), keras.layers.Dense
    model = keras.Sequential([keras.Input(LARGE[:1]), dense(LARGE[1]), norm, dense(3)])
    return learner_of(model, 8, **options)


def batch() -> tuple[tf.Tensor, tf.Tensor]:
    random = np.random.default_rng(0)
    inputs = random.normal(size=(8, LARGE[0])).astype(np.float32)
    return tf.constant(inputs), tf.constant(random.integers(0, 3, size=8))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_at_values_equal_those_at_the_variables(micro_batches: int) -> None:
    found = []
    for is_given in (False, True):
        keras.utils.set_random_seed(0)
        learner = make_learner(micro_batches=micro_batches)
        if is_given:
            device = learner.step.device
            (_,), values = read_together(learner.gradient_inputs, [tf.constant(1)], device)
            gradients, totals = learner.gradients_at(batch(), values)
        else:
            gradients, totals = learner.gradients(batch())
        found.append([*gradients, totals, *learner.model.get_weights()])
    assert_same(*found)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_evaluation_at_values_reads_no_variable(decay: float) -> None:
    learner = make_learner(ema=EmaConfig(decay=decay))
    for variable in learner.evaluation_inputs:
        if variable.dtype.is_floating:
            variable.assign(np.random.default_rng(1).uniform(0.1, 1, variable.shape))
    weighted = (*batch(), tf.constant([1.0] * 7 + [0.0]))
    _, values = read_together(learner.evaluation_inputs, [], learner.step.device)

    evaluate = tf.function(learner.evaluate_at).get_concrete_function(weighted, values)

    assert "ReadVariableOp" not in {op.type for op in evaluate.graph.get_operations()}
    expected = learner.evaluate(weighted)
    np.testing.assert_array_equal(learner.evaluate_at(weighted, values), expected)
    learner.evaluation_inputs[1].assign_add(tf.ones(LARGE[1]))
    np.testing.assert_array_equal(learner.evaluate_at(weighted, values), expected)
    assert np.any(learner.evaluate(weighted) != expected)


class Branching(Learner):
    """A learner as a config file may define it, with Python's `if` on tensors."""

    __module__ = "somewhere.else"

    def gradients(self, batch: Any, *, training: bool = True) -> Any:
        gradients, totals = super().gradients(batch, training=training)
        if tf.reduce_sum(totals) < 0:
            totals = tf.zeros_like(totals)
        return gradients, totals

    def evaluate(self, batch: Any) -> Any:
        totals = super().evaluate(batch)
        if tf.reduce_sum(totals) < 0:
            totals = tf.zeros_like(totals)
        return totals


Branching.gradients.__module__ = Branching.evaluate.__module__ = "somewhere.else"


def test_learner_of_a_config_file_reads_its_own_variables_and_is_converted_by_autograph() -> None:
    strategy = replicas(1)
    with strategy.scope():
        learner = make_learner()
    learner.__class__ = Branching
    assert not learner.evaluation_inputs
    assert not learner.gradient_inputs

    @tf.function
    def compute() -> Any:
        weighted = (*batch(), tf.ones([8]))
        evaluated = compute_metrics([], learner, strategy, weighted)
        parts: Any = [], tf.constant(0), learner, strategy, batch(), "float32"
        return *compute_gradients(*parts), evaluated

    _, totals, evaluated = compute()
    assert totals[1] == evaluated[1] == 8


@pytest.mark.parametrize("in_branch", [False, True])
@pytest.mark.parametrize("num_rows", [100_000, 65_536])
def test_rows_are_gathered_on_the_device_of_a_table_that_is_larger(
    num_rows: int, in_branch: bool
) -> None:
    """A kernel of any size is multiplied on the device of the batch."""
    replicas(2)
    here, there = tf.config.list_logical_devices("CPU")[:2]
    with tf.device(there.name):
        rows, flatten = keras.layers.Embedding(num_rows, 4), keras.layers.Flatten()
        model = keras.Sequential([keras.Input([32_768]), rows, flatten, keras.layers.Dense(3)])
        learner = learner_of(model, 2)
    one = tf.distribute.OneDeviceStrategy(here.name)
    labels, weights = tf.constant([0, 1]), tf.ones([2])
    inputs = tf.reshape(tf.range(65_536.0), [2, 32_768])
    graphs = []

    def compute_all(values: Any, step: Any) -> Any:
        step = tf.identity(step)
        graphs.append(step.graph)
        evaluated = compute_metrics(values, learner, one, (inputs, labels, weights))
        gradients, totals = compute_gradients(
            values, step, learner, one, (inputs, labels), "float32"
        )
        return gradients[0].indices, totals, evaluated

    def nothing() -> Any:
        return tf.zeros([65_536], tf.int32), *[tf.zeros([1, 2], tf.float64)] * 2

    @tf.function(autograph=False)
    def compute() -> Any:
        metadata = [learner.step.read_value()]
        (step,), values = read_together(learner.gradient_inputs, metadata, learner.step.device)
        if in_branch:
            return tf.cond(step >= 0, lambda: compute_all(values, step), nothing)
        return compute_all(values, step)

    indices, totals, evaluated = compute()
    for kind, is_there in (("GatherV2", num_rows > 65_536), ("MatMul", False)):
        ops = [op for op in graphs[0].get_operations() if op.type == kind]
        devices = {tf.DeviceSpec.from_string(op.device).device_index for op in ops}
        assert devices == {int(is_there)}
    np.testing.assert_array_equal(indices, np.arange(65_536))
    np.testing.assert_allclose(evaluated, totals, rtol=1e-6)


@pytest.mark.parametrize("has_own", [False, True])
def test_each_variable_is_read_after_the_metadata(has_own: bool) -> None:
    strategy = replicas(1)
    with strategy.scope():
        learner = make_learner()
        learner.__class__ = Branching if has_own else Learner
    queue = tf.queue.FIFOQueue(1, tf.int64, [[]])
    assert bool(learner.gradient_inputs) != has_own

    @tf.function
    def compute() -> Any:
        number = queue.dequeue()
        device = learner.step.device
        (number,), values = read_together(learner.gradient_inputs, [number], device)
        return compute_gradients(values, number, learner, strategy, batch(), "float32")

    graph = compute.get_concrete_function().graph
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    assert len(reads) >= len(learner.variables)
    for read in reads:
        assert "QueueDequeueV2" in {op.type for op in ancestors(read)}, read.name
