"""What each option of a step does, against its formula; tests/cluster: on every strategy."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies.position import Position
from strategies.ps.placement import dry_run
from tests.unit import comparing
from tests.unit.replicas import ancestors, replicas, updater
from tests.unit.test_learner import BATCH, Batch, dtype_policy, gradients_of, learner_of
from tests.unit.test_learner import batch as batch
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.finite import NonFiniteLossError, require_finite
from trainer.learner import Learner
from trainer.step.losses import accuracy, smoothed_crossentropy, sparse_categorical_crossentropy
from trainer.step.optimizers import OptimizerError
from trainer.step.options import (
    ClipConfig,
    ConfigError,
    EmaConfig,
    LossScaleConfig,
    Options,
    PenaltyConfig,
    WeightDecayConfig,
)

RATE = 0.5
assert_close = functools.partial(comparing.assert_close, atol=2e-6)


def build_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, activation="tanh", name="first"), layers.Dense(5)]
    )


def make_learner(options: Options, num_replicas: int = 1, *, momentum: float = 0.0) -> Learner:
    with replicas(num_replicas).scope():
        return make_here(options, momentum)


def make_here(options: Options, momentum: float = 0.0) -> Learner:
    optimizer = keras.optimizers.SGD(RATE, momentum=momentum)
    return learner_of(build_model(), optimizer, options, metrics={"accuracy": accuracy})


def weights(learner: Learner) -> list[np.ndarray]:
    return [w.copy() for w in learner.model.get_weights()]


def gradients_at(values: Sequence[np.ndarray], batch: Any) -> list[np.ndarray]:
    model = build_model()
    model.set_weights(values)
    return [g.numpy() for g in gradients_of(model, batch)]


def norm(gradients: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(g**2) for g in gradients)))


def half_precision(scale: LossScaleConfig) -> Learner:
    options = Options(loss_scale=scale, ema=EmaConfig(decay=0.9))
    with dtype_policy("mixed_float16"), replicas(1).scope():
        return learner_of(build_model(), keras.optimizers.Adam(0.05), options)


CLIPS: dict[str, tuple[ClipConfig, Callable[[list[np.ndarray]], list[np.ndarray]]]] = {
    "value": (ClipConfig(value=0.01), lambda gs: [np.clip(g, -0.01, 0.01) for g in gs]),
    "norm": (ClipConfig(norm=0.05), lambda gs: [g * min(1, 0.05 / norm([g])) for g in gs]),
    "global": (ClipConfig(global_norm=0.1), lambda gs: [g * min(1, 0.1 / norm(gs)) for g in gs]),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", CLIPS)
def test_gradient_of_the_whole_batch_is_clipped(batch: Batch, kind: str, num_replicas: int) -> None:
    clip, formula = CLIPS[kind]
    learner = make_learner(Options(clip=clip), num_replicas)
    before = weights(learner)
    plain = gradients_at(before, batch)
    clipped = formula(plain)
    assert max(np.abs(p - c).max() for p, c in zip(plain, clipped, strict=True)) > 1e-3
    updater(learner, num_replicas)(batch)
    assert_close(weights(learner), [w - RATE * g for w, g in zip(before, clipped, strict=True)])


def test_gradient_of_an_embedding_is_clipped_as_the_dense_one_is() -> None:
    tokens = np.array([[1, 1, 2]] * BATCH)
    with replicas(1).scope():
        layers = [keras.layers.Embedding(4, 2), keras.layers.Flatten(), keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
        options = Options(clip=ClipConfig(norm=0.05))
        learner = learner_of(model, keras.optimizers.SGD(1.0), options)
    before = weights(learner)
    updater(learner)((tokens, np.zeros(BATCH, np.int64)))
    assert norm([before[0] - weights(learner)[0]]) == pytest.approx(0.05, rel=1e-4)


def test_weight_decay_shrinks_variables_except_the_excluded(batch: Batch) -> None:
    options = Options(weight_decay=WeightDecayConfig(rate=0.1, exclude="bias|first/kernel"))
    learner = make_learner(options)
    before = weights(learner)
    before[1] += 1
    learner.model.set_weights(before)
    gradients = gradients_at(before, batch)
    updater(learner)(batch)
    factors = [1, 1, 1 - RATE * 0.1, 1]
    expected = [k * w - RATE * g for k, w, g in zip(factors, before, gradients, strict=True)]
    assert_close(weights(learner), expected)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_penalty_counts_once_for_variables_of_the_pattern(batch: Batch, num_replicas: int) -> None:
    strategy = replicas(num_replicas)
    options = Options(penalty=PenaltyConfig(l1=0.02, l2=0.03, variables="first/kernel"))
    learner = make_learner(options, num_replicas)
    before = weights(learner)
    gradients = gradients_at(before, batch)
    gradients[0] += 0.02 * np.sign(before[0]) + 2 * 0.03 * before[0]
    sums = strategy.experimental_local_results(updater(learner, num_replicas)(batch))
    assert_close(weights(learner), [w - RATE * g for w, g in zip(before, gradients, strict=True)])

    plain = make_learner(Options())
    loss = updater(plain)(batch).numpy()[0] / BATCH
    penalty = 0.02 * np.abs(before[0]).sum() + 0.03 * (before[0] ** 2).sum()
    assert sum(s.numpy()[0] for s in sums) / BATCH == pytest.approx(loss + penalty, rel=1e-5)


def test_micro_batches_are_computed_one_after_another() -> None:
    """Else their activations would be in memory at the same time."""
    learner = make_learner(Options(micro_batches=2))
    specs = tf.TensorSpec([BATCH, 3]), tf.TensorSpec([BATCH], tf.int64)
    graph = tf.function(lambda *b: learner.gradients(b)[0]).get_concrete_function(*specs).graph
    products = [op for op in graph.get_operations() if op.type == "MatMul"]
    first, second = products[: len(products) // 2], products[len(products) // 2 :]
    assert len(first) == len(second) >= 4
    assert all(before in ancestors(second[0]) for before in first)


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_average_of_weights_is_evaluated(batch: Batch, num_replicas: int, warmup: bool) -> None:
    strategy = replicas(num_replicas)
    learner = make_learner(Options(ema=EmaConfig(decay=0.8, warmup=warmup)), num_replicas)
    update = updater(learner, num_replicas)
    expected = weights(learner)
    for step in range(4):
        update(batch)
        decay = min(0.8, (1 + step) / (10 + step)) if warmup else 0.8
        expected = [
            decay * e + (1 - decay) * w for e, w in zip(expected, weights(learner), strict=True)
        ]
    raw = weights(learner)
    assert max(np.abs(e - w).max() for e, w in zip(expected, raw, strict=True)) > 0.01
    assert_close(learner.weights(), expected)

    complete = (*batch, np.ones(BATCH, np.float32))
    evaluate = tf.function(lambda b: strategy.run(learner.evaluate, args=(b,)))
    found = strategy.experimental_local_results(evaluate(complete))
    averaged = build_model()
    averaged.set_weights(expected)
    loss = sparse_categorical_crossentropy(batch[1], averaged(batch[0])).numpy().sum()
    for sums in found:
        assert sums.numpy()[0] == pytest.approx(loss, rel=1e-5)

    assert_close(weights(learner), raw)


def test_averages_and_the_scale_are_saved_with_the_weights(batch: Batch, tmp_path: Path) -> None:
    scale = LossScaleConfig(initial=8.0, growth_steps=3)
    learner, again = half_precision(scale), half_precision(scale)
    overflowing = np.full_like(batch[0], 1e6), batch[1]
    for examples in (overflowing, batch, batch):
        updater(learner)(examples)
    checkpointer = Checkpointer(str(tmp_path), learner, {}, keep=1)
    checkpointer.save(3, Position(3), {})
    checkpointer.wait()
    assert Checkpointer(str(tmp_path), again, {}, keep=1).restore() is not None
    assert_close(again.weights(), learner.weights())
    assert_close(weights(again), weights(learner))
    updater(again)(batch)
    assert again.loss_scale is not None
    assert again.loss_scale.report() == {"loss_scale": 8.0, "skipped_steps": 1}
    with pytest.raises(ValueError, match=r"averages: .* there, null here"):
        Checkpointer(str(tmp_path), make_learner(Options()), {}, keep=1).restore()


def test_average_is_on_the_device_of_its_variable() -> None:
    _, groups = dry_run(lambda: make_here(Options(ema=EmaConfig(decay=0.8)), 0.9))
    kernel = next(group for group in groups if group.shape == (3, 4))
    assert kernel.num_variables == 3
    assert kernel.num_bytes == 3 * 3 * 4 * 4


@pytest.mark.parametrize(
    "options",
    [
        Options(penalty=PenaltyConfig(l2=0.1, variables="no-such")),
        Options(weight_decay=WeightDecayConfig(rate=0.1, exclude="no-such")),
    ],
    ids=["penalty", "decay"],
)
def test_pattern_without_a_match_is_refused_with_all_paths(options: Options) -> None:
    with pytest.raises(ConfigError, match=r"'no-such' is found in none of: .*first/kernel"):
        make_learner(options)


def test_label_smoothing_is_equal_for_all_classes() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    labels = np.array([0, 2, 4, 1])
    smooth = 0.9 * np.eye(5, dtype=np.float32)[labels] + 0.1 / 5
    expected = tf.nn.softmax_cross_entropy_with_logits(smooth, logits)
    np.testing.assert_allclose(smoothed_crossentropy(0.1)(labels, logits), expected, rtol=1e-5)


def build_with_state() -> keras.Model:
    """Rows that occur twice, statistics that move, and penalties of every kind."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            layers.Embedding(6, 4),
            layers.Flatten(),
            layers.BatchNormalization(momentum=0.5),
            layers.Dense(5, kernel_regularizer="l2", activity_regularizer="l2"),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_compiled_gradient_and_batch_statistics_are_equal_to_uncompiled(num_replicas: int) -> None:
    strategy = replicas(num_replicas)
    tokens = np.array([[1, 1, 2]] * 5 + [[2, 3, 3]] * 4 + [[1, 2, 2]] * 3)
    batch = tokens, np.arange(BATCH) % 5
    found = []
    for is_compiled in (False, True):
        with strategy.scope():
            optimizer, options = keras.optimizers.Adam(0.05), Options(jit_compile=is_compiled)
            learner = learner_of(build_with_state(), optimizer, options)
        before = weights(learner)
        update = updater(learner, num_replicas)
        for _ in range(3):
            update(batch)
        found.append(weights(learner))
        assert all(np.abs(b - a).max() > 1e-3 for b, a in zip(before, found[-1], strict=True))
        graph = tf.function(lambda b, m=learner: m.gradients(b)[0]).get_concrete_function(batch)
        calls = [op for op in graph.graph.get_operations() if "Call" in op.type]
        assert any(op.get_attr("_XlaMustCompile") for op in calls) is is_compiled
    assert_close(*found)


def test_moving_statistics_are_the_mean_over_replicas_in_each_copy(batch: Batch) -> None:
    class Counting(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.third = self.add_weight(shape=(), initializer="ones", trainable=False)
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.total = self.add_weight(
                shape=(), initializer="zeros", trainable=False, aggregation="sum"
            )
            self.third.assign(1 / 3)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.count.assign_add(1.0)
            return x

    strategy = replicas(2)
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(momentum=0.5), Counting(), keras.layers.Dense(5)]
        learner = learner_of(keras.Sequential([keras.Input((3,)), *layers]))
    norm, counting = learner.model.layers[:2]
    inputs, _ = batch
    for _ in range(2):
        updater(learner, 2)(batch)
    means = inputs[:5].mean(axis=0), inputs[5:].mean(axis=0)
    variances = inputs[:5].var(axis=0), inputs[5:].var(axis=0)
    for variable, exact in (
        (norm.moving_mean, 0.75 * np.mean(means, axis=0)),
        (norm.moving_variance, 0.25 + 0.75 * np.mean(variances, axis=0)),
        (counting.count, 2.0),
    ):
        first, second = (v.numpy() for v in strategy.experimental_local_results(variable.value))
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, exact, rtol=1e-5, atol=1e-6)
    # It did not change, so it was not rounded.
    assert counting.third.numpy() == np.float32(1 / 3)
    states = {id(variable) for variable in learner.layer_state}
    assert id(norm.moving_mean.value) in states
    assert id(counting.total.value) not in states
    norm.trainable = counting.trainable = False
    assert id(counting.count.value) in {id(variable) for variable in learner.layer_state}
    assert id(norm.moving_mean.value) not in {id(variable) for variable in learner.layer_state}


def test_overflow_changes_the_scale_alone_which_finite_steps_double(batch: Batch) -> None:
    learner = half_precision(LossScaleConfig(initial=4.0, growth_steps=3))
    slots = [slot.value for slot in learner.optimizer.variables if len(slot.shape)]
    state = [*learner.variables, *learner.state["averages"], *slots]
    update = updater(learner)
    overflowing = np.full_like(batch[0], 1e6), batch[1]
    assert learner.loss_scale is not None
    scales = []
    for kind in "ggbgggggbbbbbb":
        before = [np.array(variable.numpy()) for variable in state]  # A copy.
        update(batch if kind == "g" else overflowing)
        pairs = zip(before, state, strict=True)
        is_same = all(np.array_equal(was, variable.numpy()) for was, variable in pairs)
        assert is_same is (kind == "b")
        scales.append(learner.loss_scale.report()["loss_scale"])
    assert scales == [4, 4, 2, 2, 2, 4, 4, 4, 2, 1, 1, 1, 1, 1]
    assert learner.loss_scale.num_skipped == 7
    assert learner.loss_scale.is_at_minimum


@pytest.mark.parametrize(("num_replicas", "compiles"), [(1, False), (1, True), (2, False)])
def test_moving_statistics_of_an_overflow_are_left_out(
    num_replicas: int, compiles: bool, batch: Batch
) -> None:
    """Of a replica whose part of the batch is finite they count."""
    with dtype_policy("mixed_float16"), replicas(num_replicas).scope():
        norm = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(5)])
        learner = learner_of(model, options=Options(jit_compile=compiles))
    overflowing = batch[0].copy()
    overflowing[-1] = 1e6
    updater(learner, num_replicas)((overflowing, batch[1]))
    assert learner.loss_scale is not None
    assert learner.loss_scale.num_skipped == 1
    of_finite = batch[0][:5].mean(axis=0) / 2 / num_replicas
    expected = np.zeros(3) if num_replicas == 1 else of_finite
    np.testing.assert_allclose(norm.moving_mean.numpy(), expected, rtol=1e-2, atol=1e-4)
    updater(learner, num_replicas)(batch)
    assert np.isfinite(norm.moving_variance.numpy()).all()
    assert not np.allclose(norm.moving_mean.numpy(), expected)


def test_average_starts_with_the_weights_after_the_first_step_that_is_not_skipped(
    batch: Batch,
) -> None:
    ema = EmaConfig(decay=0.9, from_first_step=True)
    with dtype_policy("mixed_float16"), replicas(1).scope():
        learner = learner_of(build_model(), options=Options(ema=ema))
    updater(learner)((np.full_like(batch[0], 1e6), batch[1]))
    updater(learner)(batch)
    averages = [average.numpy() for average in learner.state["averages"]]
    for average, weight in zip(averages, learner.variables, strict=True):
        np.testing.assert_array_equal(average, weight.numpy())
    before = averages[0].copy()
    updater(learner)(batch)
    assert_close(learner.state["averages"][0].numpy(), 0.9 * before + 0.1 * learner.variables[0])


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "float32"])
def test_global_norm_of_two_types_is_that_of_exact_values(kind: str, batch: Batch) -> None:
    with replicas(1).scope():
        layers = [keras.layers.Dense(4, dtype=kind), keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        options = Options(clip=ClipConfig(global_norm=1e-2))
        learner = learner_of(model, keras.optimizers.SGD(1.0), options)
    before = weights(learner)
    updater(learner)(batch)
    changes = [
        new.astype(np.float64) - old for old, new in zip(before, weights(learner), strict=True)
    ]
    assert norm(changes) == pytest.approx(1e-2, rel=0.2 if kind == "bfloat16" else 1e-4)


def test_variables_without_gradient_are_named_once(
    batch: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(1).scope():
        inputs = keras.Input((3,))
        hidden = keras.layers.Dense(4, name="unused")(inputs)
        learner = learner_of(
            keras.Model(inputs, keras.layers.Dense(5)(keras.ops.stop_gradient(hidden)))
        )
    for _ in range(2):
        updater(learner)(batch)
    assert len(re.findall("The loss has no gradient for unused/kernel, .*bias", caplog.text)) == 1


def test_moving_statistics_that_are_nan_are_not_saved() -> None:
    norm = keras.layers.BatchNormalization()
    learner = learner_of(keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(5)]))
    require_finite(learner, 4)
    norm.moving_mean.assign([1.0, np.inf, 1.0])  # As a layer's minimum of nothing.
    require_finite(learner, 4)
    norm.moving_variance.assign([1.0, np.nan, 1.0])
    with pytest.raises(NonFiniteLossError, match=r"At step 4 .*moving_variance.* an activation"):
        require_finite(learner, 4)


def test_loss_is_scaled_so_that_small_gradients_do_not_become_zero() -> None:
    """The gradient of an example of a large batch is below what float16 holds."""
    found = []
    for scale in (1.0, 2.0**15):
        with dtype_policy("mixed_float16"):
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((1,)), layer])
        learner = learner_of(
            model,
            options=Options(loss_scale=LossScaleConfig(initial=scale)),
            loss=lambda labels, outputs: 1e-8 * tf.cast(outputs[:, 0], tf.float32),
        )
        gradients, _ = learner.gradients((tf.ones([BATCH, 1]), tf.zeros([BATCH])))
        found.append(float(gradients[0][0, 0]))
    assert found == [0.0, pytest.approx(1e-8, rel=1e-2)]


def test_float16_variables_are_refused() -> None:
    layer = keras.layers.Dense(5, dtype="float16", name="logits")
    model = keras.Sequential([keras.Input((3,)), layer])
    with pytest.raises(OptimizerError, match=r"logits/kernel' is float16.*mixed_float16"):
        learner_of(model, keras.optimizers.SGD(0.1))
