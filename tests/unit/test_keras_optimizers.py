"""Optimizers as Keras users write them: the settings that Keras applies wrongly are taken over.

And the one op that changes a variable as Keras' dozen ops do.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.comparing import assert_close
from tests.unit.replicas import replicas, updater
from trainer.build import build_learner
from trainer.config import Config, ConfigError, Recipe
from trainer.learner import Learner
from trainer.step.fused_updates import fused_update
from trainer.step.optimizers import OptimizerError, adopt, made_optimizer
from trainer.step.options import ClipConfig, EmaConfig

BATCH, STEPS = 12, 5
OPTIMIZERS: dict[str, Callable[[], keras.Optimizer]] = {
    "weight_decay": lambda: keras.optimizers.Adam(0.05, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
    "use_ema": lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.7),
    "loss_scale_factor": lambda: keras.optimizers.SGD(0.5, loss_scale_factor=8.0),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
    "exclude": lambda: _excluding(keras.optimizers.AdamW(0.05, weight_decay=0.2)),
    "exclude, Nadam": lambda: _excluding(keras.optimizers.Nadam(0.05, weight_decay=0.2)),
    "exclude, Adafactor": lambda: _excluding(keras.optimizers.Adafactor(0.05, weight_decay=0.2)),
}


def _excluding(optimizer: keras.Optimizer) -> keras.Optimizer:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def layers_of(config: Config) -> keras.Model:
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(5)]
    )


def recipe(config: Config, **functions: Any) -> Recipe:
    return Recipe("here.py", config, layers_of, **functions)


def examples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, 3)).astype(np.float32), random.integers(0, 5, BATCH)


def trained(learner: Learner, num_replicas: int) -> list[Any]:
    for _ in range(STEPS):
        updater(learner, num_replicas)(examples())
    return learner.weights()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_setting_has_the_effect_of_keras_on_one_device_and_the_run_says_so(name: str) -> None:
    config = Config(batch_size=BATCH)
    keras.utils.set_random_seed(config.seed)
    model = layers_of(config)
    optimizer = OPTIMIZERS[name]()
    inputs, labels = examples()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(labels, model(inputs)))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
    optimizer.finalize_variable_values(model.trainable_variables)  # As `fit` does at its end.
    for num in (1, 2):
        made = recipe(config, build_optimizer=lambda config: OPTIMIZERS[name]())
        with replicas(num).scope():
            learner = build_learner(made)
        setting = "weight_decay" if name.startswith("exclude") else name
        assert any(setting in note for note in learner.notes)
        # The fused Adam rounds 1 - beta in another place.
        assert_close(trained(learner, num), model.get_weights(), rtol=1e-5, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nadam", "adafactor", "schedulefreeadamw"])
def test_corrected_optimizer_is_compiled_by_xla(name: str) -> None:
    found = []
    for is_compiled in (False, True):
        strategy = replicas(1)
        with strategy.scope():
            learner = build_learner(recipe(Config(batch_size=BATCH, optimizer=name)))
        if is_compiled:
            learner.compile_with_xla()
        gradients = [tf.zeros(v.shape) for v in learner.dense_variables]
        apply = tf.function(lambda given, s=strategy, m=learner: s.run(m.apply, args=(given,)))
        graph = apply.get_concrete_function(gradients).graph.as_graph_def()
        assert ("_XlaMustCompile" in str(graph)) is is_compiled
        found.append(trained(learner, 1))
    assert_close(*found, atol=2e-6)


@pytest.mark.parametrize(
    "setting", [{"gradient_accumulation_steps": 2}, {"use_ema": True, "ema_overwrite_frequency": 3}]
)
def test_setting_of_another_formula_is_refused(setting: dict[str, Any]) -> None:
    made = recipe(Config(), build_optimizer=lambda config: keras.optimizers.SGD(0.1, **setting))
    with pytest.raises(OptimizerError, match=f"SGD.{next(iter(setting))}="):
        build_learner(made)


def test_setting_of_optimizer_and_config_that_differ_are_refused() -> None:
    def own(config: Config) -> keras.Optimizer:
        return keras.optimizers.SGD(0.1, clipnorm=1.0)

    build_learner(recipe(Config(clip=ClipConfig(norm=1.0)), build_optimizer=own))
    for clip in (ClipConfig(norm=2.0), ClipConfig(value=1.0)):
        with pytest.raises(ConfigError, match=r"config.clip"):
            build_learner(recipe(Config(clip=clip), build_optimizer=own))


def test_optimizer_may_be_a_name_an_object_or_a_config_dict() -> None:
    cosine = keras.optimizers.schedules.CosineDecay(0.3, 10)
    as_dict = keras.optimizers.serialize(keras.optimizers.SGD(cosine, momentum=0.9))
    for returned, rate in (
        ("adam", 0.002),
        (keras.optimizers.Adam(0.1), 0.1),
        ({"class_name": "SGD", "config": {"learning_rate": 0.4}}, 0.4),
        (as_dict, 0.3),
    ):
        made = recipe(
            Config(learning_rate=0.002), build_optimizer=lambda config, value=returned: value
        )
        assert build_learner(made).learning_rate == pytest.approx(rate)
    with replicas(1).scope():
        made = recipe(Config(batch_size=BATCH), build_optimizer=lambda config: as_dict)
        learner = build_learner(made)
    trained(learner, 1)
    assert learner.learning_rate == pytest.approx(float(cosine(STEPS)))
    for wrong in (None, "adm", {"class_name": "Adm", "config": {}}):
        with pytest.raises(OptimizerError, match="build_optimizer"):
            made_optimizer(wrong, "build_optimizer(config) of here.py", 0.1)


class Own(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule as users write it, that Keras can neither describe nor make again."""

    def __call__(self, step: Any) -> Any:
        return 0.25


@pytest.mark.parametrize("rate", [Own(), lambda: 0.25], ids=["schedule", "function"])
@pytest.mark.parametrize("kind", ["Adam", "Nadam", "Adafactor"])
def test_rate_may_be_a_schedule_or_a_function_of_the_config_file(kind: str, rate: Any) -> None:
    made = recipe(
        Config(batch_size=BATCH),
        build_optimizer=lambda config: _excluding(
            getattr(keras.optimizers, kind)(rate, weight_decay=0.1)
        ),
    )
    with replicas(1).scope():
        learner = build_learner(made)
    before = learner.weights()
    updater(learner, 1)(examples())
    assert learner.learning_rate == 0.25
    assert all((old != new).any() for old, new in zip(before, learner.weights(), strict=True))
    (note,) = [note for note in learner.notes if "weight_decay" in note]
    assert "without" in note
    assert note.count("/bias") == 2


def test_adafactor_stays_finite_where_neither_row_nor_column_has_a_gradient() -> None:
    gradient = np.ones((3, 3), np.float32)
    gradient[0] = gradient[:, 0] = 0  # A dark pixel, and a unit that never fires.

    def update(optimizer: keras.Optimizer) -> np.ndarray:
        variable = keras.Variable(np.ones((3, 3), np.float32))
        optimizer.build([variable])
        optimizer.update_step(tf.constant(gradient), variable, tf.constant(0.01))
        return np.array(variable.value)

    # If this fails, Keras has corrected its Adafactor, and this program's may go.
    assert np.isnan(update(keras.optimizers.Adafactor(0.01))).all()
    found = update(adopt(keras.optimizers.Adafactor(0.01)).optimizer)
    assert np.isfinite(found).all()
    assert found[0, 0] == 1
    assert found[1, 1] < 1


def test_schedule_free_steps_are_those_of_the_paper() -> None:
    """On 50 w ** 2, whose gradients change so fast that the order of the reads is seen."""
    beta_1, beta_2, rate, warmup = 0.9, 0.99, 0.02, 5

    def trained(optimizer: keras.Optimizer) -> float:
        variable = keras.Variable(1.0)
        optimizer.build([variable])
        for _ in range(20):
            gradient = tf.constant(100.0) * variable.value
            optimizer.update_step(gradient, variable.value, tf.constant(rate))
            optimizer.iterations.assign_add(1)
        return float(variable.value)

    y, x, z, v = 1.0, 1.0, 1.0, 0.0
    for step in range(1, 21):
        gradient = 100 * y
        v = beta_2 * v + (1 - beta_2) * gradient**2
        scaled = gradient / (np.sqrt(v / (1 - beta_2**step)) + 1e-8)
        z -= rate * min(1, step / warmup) * scaled
        x += (z - x) / step
        y = (1 - beta_1) * z + beta_1 * x
    kind = keras.optimizers.ScheduleFreeAdamW
    found = trained(adopt(kind(beta_1=beta_1, beta_2=beta_2, warmup_steps=warmup)).optimizer)
    assert found == pytest.approx(y, rel=1e-5)
    # If this fails, Keras has corrected its ScheduleFreeAdamW, and this program's may go.
    theirs = trained(kind(beta_1=beta_1, beta_2=beta_2, warmup_steps=warmup))
    assert theirs != pytest.approx(y, rel=1e-2)


def test_average_starts_with_the_weights_of_the_first_step_only_if_asked() -> None:
    keras_like = adopt(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    assert keras_like.options.ema == EmaConfig(decay=0.5, from_first_step=True)
    assert not keras_like.optimizer.use_ema


FUSED: dict[str, dict[str, Any]] = {
    "sgd": {"class_name": "SGD", "config": {}},
    "momentum": {"class_name": "SGD", "config": {"momentum": 0.9}},
    "nesterov": {"class_name": "SGD", "config": {"momentum": 0.8, "nesterov": True}},
    "adam": {"class_name": "Adam", "config": {}},
    "adam, other betas": {"class_name": "Adam", "config": {"beta_1": 0.5, "epsilon": 1e-3}},
    "adamw": {"class_name": "AdamW", "config": {}},
}


def built(name: str) -> tuple[keras.Optimizer, list[keras.Variable]]:
    optimizer = keras.optimizers.deserialize(FUSED[name])
    start = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    variables = [keras.Variable(start), keras.Variable(start[0])]
    optimizer.build(variables)
    return optimizer, variables


@pytest.mark.parametrize("name", FUSED)
def test_fused_update_is_equal_to_that_of_keras(name: str) -> None:
    theirs, their_variables = built(name)
    ours, our_variables = built(name)
    random = np.random.default_rng(1)
    for step in range(6):
        update = fused_update(ours, tf.constant(step, tf.int64))
        assert update is not None
        rate = tf.constant(0.1 / (1 + step))
        for their, our in zip(their_variables, our_variables, strict=True):
            gradient = tf.constant(random.normal(size=their.shape).astype(np.float32))
            theirs.update_step(gradient, their.value, rate)
            update(our.value, gradient, rate)
        theirs.iterations.assign_add(1)
    for their, our in zip(
        (*their_variables, *theirs.variables), (*our_variables, *ours.variables), strict=True
    ):
        if "iteration" not in their.path:
            # Second moments are small.
            tolerance = 1e-8 if "velocity" in their.path else 1e-5
            np.testing.assert_allclose(our.numpy(), their.numpy(), rtol=1e-4, atol=tolerance)
    moved = np.abs(our_variables[0].numpy() - built(name)[1][0].numpy())
    assert np.median(moved) > 1e-2, "it was changed"


def test_other_formulas_have_no_fused_update() -> None:
    class Own(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            variable.assign(gradient)

    class Masked(keras.optimizers.SGD):
        def assign_sub(self, variable: Any, value: Any) -> None:
            super().assign_sub(variable, value * 0.0)

    for optimizer in (
        Own(),
        Masked(),
        keras.optimizers.Adam(amsgrad=True),
        keras.optimizers.Nadam(),
        keras.optimizers.RMSprop(),
    ):
        assert fused_update(optimizer, tf.constant(0, tf.int64)) is None
