"""Losses that layers add, and losses of a model: the gradient is that of Keras on any replicas."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.unit.comparing import assert_close
from tests.unit.replicas import shares
from trainer.learner import Learner
from trainer.step.keras_losses import KerasLoss, ModelLoss, output_names
from trainer.step.losses import sparse_categorical_crossentropy

BATCH = 12


@functools.cache
def replicas(num: int) -> tf.distribute.Strategy:
    """Sums as MirroredExecutor does on logical devices: without an order of its collectives."""
    sums = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)], cross_device_ops=sums)


class Adding(layers.Layer):
    """Adds `penalty(inputs)` to the loss."""

    def __init__(self, penalty: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        self._penalty = penalty

    def call(self, inputs: Any) -> Any:
        self.add_loss(self._penalty(inputs))
        return inputs


def mean(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(values**2)


def of_each(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(values**2, axis=1)


def synchronized() -> layers.Layer:
    return layers.BatchNormalization(synchronized=True)


class Counting(layers.Layer):
    """Has a state that is the mean over replicas, which they exchange in the forward pass."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="mean"
        )

    def call(self, inputs: Any) -> Any:
        self.seen.assign(self.seen + 1.0)
        return inputs


MODELS: Mapping[str, Callable[[], list[layers.Layer]]] = {
    "one value per example": lambda: [
        Adding(of_each),
        layers.Dense(4, kernel_regularizer="l2"),
        Adding(mean),
    ],
    "one element": lambda: [Adding(lambda values: tf.reshape(mean(values), [1, 1]))],
    "synchronized": lambda: [Adding(mean), synchronized(), layers.Dense(4), Adding(mean)],
    "activity": lambda: [layers.Dense(4, activity_regularizer="l2"), synchronized()],
    "aggregation": lambda: [Adding(mean), Counting(), layers.Dense(4), Adding(mean)],
    "spectral": lambda: [
        Adding(mean),
        layers.SpectralNormalization(layers.Dense(4)),
        Adding(mean),
    ],
}


@pytest.fixture
def batch() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, 3)).astype(np.float32), random.integers(0, 4, BATCH)


def sums_of(learner: Learner, num_replicas: int, batch: Any) -> list[Any]:
    """The gradients and the metric totals, summed over replicas."""
    strategy = replicas(num_replicas)
    parts = shares(strategy, batch, BATCH // 2)
    found = tf.function(lambda b: strategy.run(learner.gradients, args=(b,)))(parts)
    return [np.sum(strategy.experimental_local_results(g), axis=0) for g in tf.nest.flatten(found)]


def learner_on(num_replicas: int, build: Callable[[], keras.Model], loss: Any = None) -> Learner:
    with replicas(num_replicas).scope():
        keras.utils.set_random_seed(1)
        model, optimizer = build(), keras.optimizers.SGD(0.1)
        used = loss(model) if loss else sparse_categorical_crossentropy
        return Learner(model, optimizer, used, {}, batch_size=BATCH)


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_layers_have_the_gradient_of_keras_on_any_replicas(
    name: str, batch: tuple[Any, Any]
) -> None:
    def build() -> keras.Model:
        hidden = [layers.Dense(4), *MODELS[name]()]
        return keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(4)])

    model = learner_on(1, build).model
    with tf.GradientTape() as tape:
        outputs = model(batch[0], training=True)
        loss = tf.reduce_mean(sparse_categorical_crossentropy(batch[1], outputs))
        loss += sum(map(tf.reduce_sum, model.losses))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    expected = [*gradients, [BATCH * loss.numpy(), BATCH]]
    assert_close(expected, sums_of(learner_on(1, build), 1, batch))
    assert_close(expected, sums_of(learner_on(2, build), 2, batch))


def test_penalty_that_is_neither_a_scalar_nor_of_each_example_is_refused(
    batch: tuple[Any, Any],
) -> None:
    def build() -> keras.Model:
        of_columns = Adding(lambda values: tf.reduce_sum(values**2, axis=0))
        return keras.Sequential([keras.Input((3,)), of_columns, layers.Dense(4)])

    with pytest.raises(ValueError, match=r"add_loss.*Received: shape \(3,\) of \(12,\)"):
        learner_on(1, build).training_losses(tuple(map(tf.constant, batch)))


class TwoPasses(keras.Model):
    """Its loss calls the model again, as consistency losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop = layers.Dense(4), layers.Dropout(0.5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.dense(self.drop(inputs, training=training))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        return tf.reduce_mean((self(x, training=True) - y_pred) ** 2)


def test_random_layers_draw_for_each_example_also_in_a_loss_that_calls_the_model(
    batch: tuple[Any, Any],
) -> None:
    def build() -> keras.Model:
        model = TwoPasses()
        model(tf.zeros((1, 3)))
        return model

    seeds = np.arange(2 * BATCH, dtype=np.int32).reshape(BATCH, 2)
    found = [sums_of(learner_on(num, build, ModelLoss), num, (*batch, seeds)) for num in (1, 2)]
    assert np.abs(found[0][0]).max() > 1e-3
    assert_close(*found)


def test_gradients_of_a_config_file_may_call_a_synchronized_model(batch: tuple[Any, Any]) -> None:
    with replicas(1).scope():
        hidden = [layers.Dense(4), synchronized()]
        model = keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.1)
        learner = Learner(model, optimizer, sparse_categorical_crossentropy, {}, batch_size=BATCH)

    def outputs(inputs: Any) -> Any:
        return learner.forward(inputs, training=True)

    assert replicas(1).run(tf.function(outputs), args=(tf.constant(batch[0]),)).shape == (BATCH, 4)


def test_each_call_of_a_shared_layer_is_an_output_that_counts_in_the_loss() -> None:
    inputs = keras.Input((3,))
    head = layers.Dense(4, name="head")
    model = keras.Model(inputs, [head(inputs), head(2 * inputs)])
    outputs = model(tf.ones((BATCH, 3)))
    assert output_names(model, outputs) == ["head", "head_1"]
    labels = [tf.zeros((BATCH, 4))] * 2
    found = KerasLoss("mse")(labels, outputs, output_names(model, outputs))
    model.compile(loss=["mse", "mse"])
    expected = model.evaluate(tf.ones((BATCH, 3)), labels, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(tf.reduce_mean(found), expected, rtol=1e-6)
