"""What users write may branch on tensors, wherever this program calls it."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.order import Order
from data.reader import Reader
from data.system.compat.autograph import autograph, no_autograph
from tests.unit.toy import parse as toy_parse
from tests.unit.toy import write_split
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy


def halved_if_large(value: Any) -> Any:
    if tf.reduce_max(value) > 1.0:
        value = value / 2.0
    return value


@no_autograph
def through_plain(value: Any) -> Any:
    return autograph(halved_if_large)(value)


@no_autograph
def without(value: Any) -> Any:
    return halved_if_large(value)


def test_function_of_a_user_is_rewritten_where_a_plain_one_calls_it() -> None:
    graph = tf.function(through_plain, input_signature=[tf.TensorSpec([2])])
    np.testing.assert_array_equal(graph([1.0, 4.0]), [0.5, 2.0])
    np.testing.assert_array_equal(graph([1.0, 0.0]), [1.0, 0.0])
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(without).get_concrete_function(tf.TensorSpec([2]))


def test_ours_stay_as_they_are() -> None:
    assert autograph(sparse_categorical_crossentropy) is sparse_categorical_crossentropy


def test_parse_and_augment_may_branch(tmp_path: Path) -> None:
    split = write_split(tmp_path)

    def parse(serialized: Any) -> tuple[Any, Any]:
        inputs, labels = toy_parse(serialized)
        if tf.size(labels) > 0:
            labels = labels * 0
        return inputs, labels

    def augment(inputs: Any, labels: Any, seeds: Any) -> tuple[Any, Any]:
        for _ in tf.range(tf.shape(seeds)[1]):
            inputs = inputs + 1.0
        return inputs, labels

    lengths, chunk = split.shard_lengths, split.chunk_examples
    order = Order(lengths, chunk, 8, lanes=4, window_batches=4, seed=0, shuffle=True)
    inputs, labels = next(
        iter(DiskReader(Reader(split, order, parse, augment=augment)).batches(0, range(4)))
    )
    plain_inputs, _ = next(iter(DiskReader(Reader(split, order, toy_parse)).batches(0, range(4))))
    np.testing.assert_allclose(inputs, plain_inputs + 2.0, rtol=1e-6)
    assert not np.any(labels)


class Halving(Learner):
    def change_variable(self, index: int, variable: Any, gradient: Any, rate: Any) -> None:
        if tf.reduce_max(tf.abs(variable)) > 0.5:
            variable.assign(variable * 0.0)
        super().change_variable(index, variable, gradient * 0.0, rate)


def test_loss_metric_and_change_of_a_variable_may_branch() -> None:
    def loss(labels: Any, outputs: Any) -> Any:
        if tf.reduce_sum(outputs) > -1e9:
            outputs = outputs * 0.0
        return tf.reduce_sum(outputs, axis=-1) + 3.0

    def metric(labels: Any, outputs: Any) -> Any:
        return tf.cast(labels, tf.float32) if tf.size(labels) > 0 else tf.zeros([0])

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
    learner = Halving(model, keras.optimizers.SGD(0.1), loss, {"metric": metric}, batch_size=4)
    strategy = tf.distribute.get_strategy()

    @tf.function
    def step() -> Any:
        gradients, sums = learner.gradients((tf.ones([4, 3]), tf.range(4)))
        strategy.run(learner.apply, args=(gradients,))
        return sums, learner.evaluate((tf.ones([4, 3]), tf.range(4), tf.ones([4])))

    for sums in step():
        np.testing.assert_allclose(sums, [12.0, 4.0, 6.0, 4.0])
    assert all(not np.any(weights) for weights in model.get_weights())
