"""The maths of a step: the same on any number of replicas, and no setting silently ignored."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.learner import (
    Learner,
    OptimizerError,
    accuracy,
    check_optimizer,
    sparse_categorical_crossentropy,
)

BATCH = 12
PENALTY = 0.3


def make_learner(
    strategy: Any, optimizer: Callable[[], keras.Optimizer], *, regularised: bool = False
) -> Learner:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        regulariser = keras.regularizers.L2(PENALTY) if regularised else None
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activation="tanh", kernel_regularizer=regulariser),
                keras.layers.Dense(5),
            ]
        )
        metrics = {"accuracy": accuracy}
        return Learner(
            model, optimizer(), sparse_categorical_crossentropy, metrics, batch_size=BATCH
        )


@functools.cache
def one_replica() -> Any:
    return tf.distribute.MirroredStrategy(["CPU:0"])


@functools.cache
def two_replicas() -> Any:
    """One for all tests: TensorFlow takes two strategies' collectives for each other's."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def sgd() -> keras.Optimizer:
    return keras.optimizers.SGD(0.5, momentum=0.9)


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, 3)).astype(np.float32), random.integers(0, 5, BATCH)


def shares(strategy: Any, batch: tuple[np.ndarray, np.ndarray], cut: int) -> Any:
    """The batch whole, or cut into two uneven shares."""
    bounds = [0, BATCH] if strategy.num_replicas_in_sync == 1 else [0, cut, BATCH]

    def of(context: Any) -> Any:
        i = context.replica_id_in_sync_group
        return tuple(tf.constant(part[bounds[i] : bounds[i + 1]]) for part in batch)

    return strategy.experimental_distribute_values_from_function(of)


def summed_gradients(learner: Learner, strategy: Any, batch: Any) -> list[np.ndarray]:
    gradients, _ = tf.function(lambda b: strategy.run(learner.gradients, args=(b,)))(batch)
    return [np.sum(strategy.experimental_local_results(g), axis=0) for g in gradients]


@pytest.mark.parametrize("regularised", [False, True], ids=["plain", "regularised"])
def test_gradients_of_uneven_shares_sum_to_that_of_the_whole_batch(
    batch: tuple[np.ndarray, np.ndarray], regularised: bool
) -> None:
    one, two = one_replica(), two_replicas()
    whole = make_learner(one, sgd, regularised=regularised)
    shared = make_learner(two, sgd, regularised=regularised)

    expected = summed_gradients(whole, one, shares(one, batch, 0))
    found = summed_gradients(shared, two, shares(two, batch, 5))

    assert max(np.abs(g).max() for g in expected) > 0.01
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_gradient_is_that_of_the_mean_loss_and_one_penalty(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    two = two_replicas()
    learner = make_learner(two, sgd, regularised=True)
    kernel = learner.model.trainable_variables[0].value
    inputs, labels = batch
    with tf.GradientTape() as tape:
        losses = sparse_categorical_crossentropy(labels, learner.model(inputs))
        loss = tf.reduce_mean(losses) + PENALTY * tf.reduce_sum(kernel**2)
    expected = tape.gradient(loss, kernel)
    found = summed_gradients(learner, two, shares(two, batch, 5))[0]
    np.testing.assert_allclose(expected, found, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [sgd, lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.Adagrad(0.1)],
    ids=["sgd", "adam", "adagrad"],
)
def test_steps_of_two_replicas_end_in_the_weights_of_one(
    batch: tuple[np.ndarray, np.ndarray], optimizer: Callable[[], keras.Optimizer]
) -> None:
    weights = []
    for strategy in (one_replica(), two_replicas()):
        learner = make_learner(strategy, optimizer)
        before = [w.copy() for w in learner.model.get_weights()]
        update = tf.function(lambda b, s=strategy, m=learner: s.run(m.update, args=(b,)))
        for _ in range(5):
            update(shares(strategy, batch, 5))
        assert int(learner.step.numpy()) == 5
        assert np.abs(before[0] - learner.model.get_weights()[0]).max() > 1e-3
        weights.append(learner.model.get_weights())
    for left, right in zip(*weights, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_keras_own_optimizer_ends_in_the_same_weights(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    """`update_step` alone is all that Keras' `apply` would have done."""
    strategy = one_replica()
    learner = make_learner(strategy, lambda: keras.optimizers.Adam(0.01))
    reference = keras.models.clone_model(learner.model)
    reference.set_weights(learner.model.get_weights())
    optimizer = keras.optimizers.Adam(0.01)
    for _ in range(3):
        strategy.run(learner.update, args=(shares(strategy, batch, 0),))
        with tf.GradientTape() as tape:
            losses = sparse_categorical_crossentropy(batch[1], reference(batch[0]))
            loss = tf.reduce_mean(losses)
        variables = reference.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)
    for left, right in zip(learner.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_gradients_change_nothing(batch: tuple[np.ndarray, np.ndarray]) -> None:
    strategy = one_replica()
    learner = make_learner(strategy, sgd)
    before = [w.copy() for w in learner.model.get_weights()]
    strategy.run(learner.gradients, args=(shares(strategy, batch, 0),))
    assert int(learner.step.numpy()) == 0
    for left, right in zip(before, learner.model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)


def test_learning_rate_follows_its_schedule(batch: tuple[np.ndarray, np.ndarray]) -> None:
    strategy = one_replica()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])
    learner = make_learner(strategy, lambda: keras.optimizers.SGD(schedule))
    rates = []
    for _ in range(3):
        rates.append(learner.learning_rate)
        strategy.run(learner.update, args=(shares(strategy, batch, 0),))
    assert rates == [0.5, 0.5, 0.25]


def test_examples_of_weight_zero_do_not_count_even_where_they_are_nan(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    learner = make_learner(one_replica(), sgd)
    inputs, labels = batch
    weights = np.array([1] * 7 + [0] * 5, np.float32)
    exact = learner.evaluate((inputs[:7], labels[:7], weights[:7])).numpy()
    padded = inputs.copy()
    padded[7:] = np.nan

    found = learner.evaluate((padded, labels, weights)).numpy()

    np.testing.assert_allclose(found, exact, rtol=1e-6)
    assert learner.metric_names == ("loss", "accuracy")
    assert found[:, 1].tolist() == [7, 7]
    logits = learner.model(inputs[:7]).numpy()
    assert found[1, 0] == (logits.argmax(-1) == labels[:7]).sum()


@pytest.mark.parametrize(
    "setting",
    [
        {"clipnorm": 1.0},
        {"global_clipnorm": 1.0},
        {"clipvalue": 1.0},
        {"weight_decay": 0.1},
        {"use_ema": True},
        {"gradient_accumulation_steps": 2},
        {"loss_scale_factor": 2.0},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_optimizer_setting_that_would_be_ignored_is_refused(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    check_optimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(OptimizerError, match=f"SGD\\({name}={value}\\)"):
        check_optimizer(keras.optimizers.SGD(0.1, **setting))


def test_loss_scale_optimizer_is_refused() -> None:
    inner = keras.optimizers.SGD(0.1)
    with pytest.raises(OptimizerError, match="LossScaleOptimizer"):
        check_optimizer(keras.optimizers.LossScaleOptimizer(inner))


def test_variable_that_the_loss_does_not_depend_on_stays_as_it_is(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    for strategy in (one_replica(), two_replicas()):
        with strategy.scope():
            inputs = keras.Input((3,))
            unused = keras.layers.Dense(2)
            model = keras.Model(inputs, [keras.layers.Dense(5)(inputs), unused(inputs)])
            learner = Learner(
                model,
                keras.optimizers.SGD(0.1),
                lambda labels, outputs: sparse_categorical_crossentropy(labels, outputs[0]),
                {},
                batch_size=BATCH,
            )
        before = unused.get_weights()[0].copy()
        update = tf.function(lambda b, s=strategy, m=learner: s.run(m.update, args=(b,)))
        update(shares(strategy, batch, 5))
        assert int(learner.step.numpy()) == 1
        np.testing.assert_array_equal(before, unused.get_weights()[0])
