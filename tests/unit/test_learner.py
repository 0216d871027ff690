"""The maths of a step: the same on any number of replicas, and no setting silently ignored."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.comparing import assert_close, assert_same
from tests.unit.replicas import replicas, shares, update_of, updater
from trainer.learner import Learner
from trainer.step.losses import accuracy, require_per_example, sparse_categorical_crossentropy
from trainer.step.optimizers import (
    OptimizerError,
    check_optimizer,
    optimizer_named,
    supported_optimizers,
)
from trainer.step.options import Options, WeightDecayConfig

BATCH = 12
PENALTY = 0.3

Batch: TypeAlias = tuple[np.ndarray, np.ndarray]


def sgd() -> keras.Optimizer:
    return keras.optimizers.SGD(0.5, momentum=0.9)


def learner_of(
    model: keras.Model,
    optimizer: keras.Optimizer | None = None,
    options: Options | None = None,
    *,
    loss: Any = sparse_categorical_crossentropy,
    metrics: Any = None,
) -> Learner:
    made = optimizer or sgd()
    return Learner(model, made, loss, metrics or {}, batch_size=BATCH, options=options)


def make_learner(
    num_replicas: int,
    optimizer: Callable[[], keras.Optimizer] = sgd,
    *,
    regularised: bool = False,
    options: Options | None = None,
) -> Learner:
    with replicas(num_replicas).scope():
        keras.utils.set_random_seed(1)
        regulariser = keras.regularizers.L2(PENALTY) if regularised else None
        hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer=regulariser)
        model = keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(5)])
        return learner_of(model, optimizer(), options, metrics={"accuracy": accuracy})


@pytest.fixture
def batch() -> Batch:
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, 3)).astype(np.float32), random.integers(0, 5, BATCH)


def gradients_of(model: keras.Model, batch: Any) -> list[Any]:
    """The gradients of the mean loss, by plain TensorFlow."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(sparse_categorical_crossentropy(batch[1], model(batch[0])))
    gradients: list[Any] = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return gradients


def summed_gradients(
    learner: Learner, num_replicas: int, batch: Any, first: int = 5
) -> list[np.ndarray]:
    strategy = replicas(num_replicas)
    parts = shares(strategy, batch, first)
    gradients, _ = tf.function(lambda b: strategy.run(learner.gradients, args=(b,)))(parts)
    return [np.sum(strategy.experimental_local_results(g), axis=0) for g in gradients]


def test_gradient_is_of_the_mean_loss_plus_penalty_once_and_changes_nothing(batch: Batch) -> None:
    for num_replicas in (1, 2):
        learner = make_learner(num_replicas, regularised=True)
        before = [weight.copy() for weight in learner.model.get_weights()]
        expected = gradients_of(learner.model, batch)
        expected[0] += 2 * PENALTY * before[0]
        assert_close(expected, summed_gradients(learner, num_replicas, batch))
        # Synchronous ps computes shares one by one, each as the only replica.
        parts = [[part[at] for part in batch] for at in (slice(0, 5), slice(5, None))]
        of_parts = zip(*(learner.gradients(tuple(part))[0] for part in parts), strict=True)
        assert_close(expected, map(sum, of_parts))
        assert_same(before, learner.model.get_weights())
        assert int(learner.step.numpy()) == 0


KERAS_OPTIMIZERS = {
    name.lower(): kind
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type) and issubclass(kind, keras.Optimizer)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(supported_optimizers().keys() - {"schedulefreeadamw"}))
def test_optimizer_apply_of_keras_ends_in_the_same_weights(batch: Batch, name: str) -> None:
    """`update_step`, and the decay that the name stands for, are all that Keras' `apply` does."""
    strategy = replicas(1)
    _, decay = optimizer_named(name, 0.01, 0.0)
    options = Options(weight_decay=WeightDecayConfig(rate=decay))
    learner = make_learner(1, lambda: optimizer_named(name, 0.01, 0.0)[0], options=options)
    reference = keras.models.clone_model(learner.model)
    reference.set_weights(learner.model.get_weights())
    before = [w.copy() for w in learner.model.get_weights()]
    optimizer = KERAS_OPTIMIZERS[name](learning_rate=0.01)
    for _ in range(4):
        strategy.run(update_of(learner), args=(shares(strategy, batch),))
        optimizer.apply(gradients_of(reference, batch), reference.trainable_variables)
    assert np.abs(before[0] - learner.model.get_weights()[0]).max() > 1e-5
    assert_close(learner.model.get_weights(), reference.get_weights())


def test_every_keras_optimizer_is_supported_except_wrappers() -> None:
    wrappers = {"lossscaleoptimizer", "multioptimizer", "optimizer"}
    assert wrappers < KERAS_OPTIMIZERS.keys()
    assert set(supported_optimizers()) == KERAS_OPTIMIZERS.keys() - wrappers


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda: keras.optimizers.Nadam(), r"Nadam .* _backend_.*type --config.optimizer=nadam"),
        (lambda: keras.optimizers.MultiOptimizer(_everything_by_sgd()), "MultiOptimizer .* apply"),
        (lambda: OwnApply(0.1), r"OwnApply .* apply.* Use one of .*adagrad, adam"),
        (lambda: keras.optimizers.LossScaleOptimizer(sgd()), "LossScaleOptimizer .*precision"),
    ],
    ids=["nadam", "multi", "own", "loss scale"],
)
def test_optimizer_that_does_more_than_update_step_is_refused(
    optimizer: Callable[[], keras.Optimizer], said: str
) -> None:
    with pytest.raises(OptimizerError, match=said):
        check_optimizer(optimizer())


def _everything_by_sgd() -> Any:
    return keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))


class OwnApply(keras.optimizers.SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([2 * g for g in grads], trainable_variables)


class OwnUpdateStep(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(self.signs(gradient), variable, learning_rate)

    def signs(self, gradient: Any) -> Any:
        return tf.sign(gradient)


def test_optimizer_of_a_user_that_overrides_update_step_is_accepted() -> None:
    check_optimizer(OwnUpdateStep(0.1))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_constraint_holds_after_every_update(batch: Batch, num_replicas: int) -> None:
    strategy = replicas(num_replicas)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        constraint = keras.constraints.MaxNorm(0.5, axis=0)
        layer = keras.layers.Dense(5, kernel_constraint=constraint, bias_constraint="non_neg")
        model = keras.Sequential([keras.Input((3,)), layer])
        learner = learner_of(model)
    reference = keras.models.clone_model(model)
    reference.set_weights(model.get_weights())
    optimizer = sgd()
    for _ in range(3):
        updater(learner, num_replicas)(batch)
        optimizer.apply(gradients_of(reference, batch), reference.trainable_variables)
    kernel, bias = reference.get_weights()
    assert np.linalg.norm(kernel, axis=0).max() == pytest.approx(0.5, rel=1e-5)
    assert bias.min() == 0
    for variable, expected in zip(model.trainable_variables, (kernel, bias), strict=True):
        for component in strategy.experimental_local_results(variable.value):
            np.testing.assert_allclose(component.numpy(), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    "optimizer",
    [sgd, *(partial(KERAS_OPTIMIZERS[name], 0.05) for name in ("adam", "adagrad", "rmsprop"))],
)
def test_embedding_learns_as_from_its_dense_gradient(
    optimizer: Callable[[], keras.Optimizer], num_replicas: int
) -> None:
    tokens = np.array([[1, 1, 2]] * 5 + [[2, 3, 3]] * 4 + [[1, 2, 2]] * 3)
    batch = tokens, np.arange(BATCH) % 5
    strategy = replicas(num_replicas)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(6, 4), keras.layers.Flatten(), keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
        learner = learner_of(model, optimizer())
    reference = keras.models.clone_model(model)
    reference.set_weights(model.get_weights())
    of_reference = optimizer()
    for _ in range(4):
        updater(learner, num_replicas)(batch)
        gradients = gradients_of(reference, batch)
        assert isinstance(gradients[0], tf.IndexedSlices)
        assert len(np.unique(gradients[0].indices)) < len(gradients[0].indices)
        dense = [tf.convert_to_tensor(g) for g in gradients]
        of_reference.apply(dense, reference.trainable_variables)
    assert_close(model.get_weights(), reference.get_weights(), atol=1e-5)


def test_activity_regulariser_is_exact_on_uneven_parts(batch: Batch) -> None:
    found = []
    for num in (1, 2):
        with replicas(num).scope():
            keras.utils.set_random_seed(1)
            layer = keras.layers.Dense(5, activity_regularizer=keras.regularizers.L2(PENALTY))
            model = keras.Sequential([keras.Input((3,)), layer])
            learner = learner_of(model)
        found.append(summed_gradients(learner, num, batch, 3))
    model(batch[0])
    assert float(model.losses[0]) > 0.01
    assert_close(*found)


@contextlib.contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def test_loss_is_scaled_if_any_nested_layer_is_float16() -> None:
    for policy in ("mixed_float16", "mixed_bfloat16"):
        with dtype_policy(policy):
            assert bool(make_learner(1).loss_scale) is (policy == "mixed_float16")
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, dtype="mixed_float16")])
    model = keras.Sequential([keras.Input((3,)), inner])
    assert learner_of(model).loss_scale is not None


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16], ids=["bfloat16", "float16"])
def test_losses_and_penalties_in_16_bits_are_added_in_float32(batch: Batch, dtype: Any) -> None:
    strategy = replicas(1)
    model = make_learner(1, regularised=True).model

    def loss(labels: Any, outputs: Any) -> Any:
        return tf.cast(1024 + 0 * outputs[:, 0], dtype)

    with strategy.scope():
        learner = learner_of(model, loss=loss)
    penalty = float(model.losses[0])
    assert 0.1 < penalty < 2
    assert float(tf.cast(1024 + penalty, tf.bfloat16)) == 1024
    _, sums = learner.gradients(batch)
    assert sums.numpy()[0] / BATCH == pytest.approx(1024 + penalty, abs=1e-3)


def test_value_of_a_wrong_shape_is_refused_while_tracing() -> None:
    for value in (tf.zeros([]), tf.zeros([BATCH, 1])):
        with pytest.raises(ValueError, match="mine must give one value an example"):
            require_per_example("mine", value, tf.zeros([BATCH]), tf.zeros([BATCH, 5]))


@pytest.mark.parametrize("wrong", ["loss", "accuracy"])
def test_value_of_some_examples_is_refused_if_shapes_are_unknown(wrong: str, batch: Batch) -> None:
    def of_some(labels: Any, logits: Any) -> Any:
        return tf.boolean_mask(sparse_categorical_crossentropy(labels, logits), labels > 0)

    functions = {"loss": sparse_categorical_crossentropy, "accuracy": accuracy, wrong: of_some}
    loss = functions.pop("loss")
    learner = learner_of(make_learner(1).model, loss=loss, metrics=functions)
    specs = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int64))
    for signature in (specs, None):
        totals_of = tf.function(lambda *batch: learner.gradients(batch)[1], signature)
        assert (batch[1] == 0).any()
        with pytest.raises(tf.errors.InvalidArgumentError, match="one value an example"):
            totals_of(*map(tf.constant, batch))
        whole = batch[0], np.maximum(batch[1], 1)
        assert totals_of(*map(tf.constant, whole)).numpy()[1::2].tolist() == [BATCH] * 2


def test_examples_of_weight_zero_do_not_count_even_if_they_are_nan(batch: Batch) -> None:
    learner = make_learner(1)
    inputs, labels = batch
    weights = np.array([1] * 7 + [0] * 5, np.float32)
    exact = learner.evaluate((inputs[:7], labels[:7], weights[:7])).numpy()
    padded = inputs.copy()
    padded[7:] = np.nan

    found = learner.evaluate((padded, labels, weights)).numpy()

    np.testing.assert_allclose(found, exact, rtol=1e-6)
    assert learner.objective.metric_names == ("loss", "accuracy")
    assert found[1::2].tolist() == [7, 7]
    logits = learner.model(inputs[:7]).numpy()
    assert found[2] == (logits.argmax(-1) == labels[:7]).sum()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("clipnorm", 1.0), ("global_clipnorm", 1.0), ("clipvalue", 1.0), ("weight_decay", 0.1)),
        *(("use_ema", True), ("gradient_accumulation_steps", 2), ("loss_scale_factor", 2.0)),
    ],
)
def test_optimizer_setting_that_would_be_ignored_is_refused(name: str, value: Any) -> None:
    check_optimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(OptimizerError, match=f"SGD\\({name}={value}\\)"):
        check_optimizer(keras.optimizers.SGD(0.1, **{name: value}))


def test_variable_without_a_gradient_does_not_change(batch: Batch) -> None:
    for num in (1, 2):
        with replicas(num).scope():
            inputs = keras.Input((3,))
            unused = keras.layers.Dense(2)
            model = keras.Model(inputs, [keras.layers.Dense(5)(inputs), unused(inputs)])
            learner = learner_of(
                model,
                loss=lambda labels, outputs: sparse_categorical_crossentropy(labels, outputs[0]),
            )
        before = unused.get_weights()[0].copy()
        updater(learner, num)(batch)
        assert int(learner.step.numpy()) == 1
        np.testing.assert_array_equal(before, unused.get_weights()[0])
