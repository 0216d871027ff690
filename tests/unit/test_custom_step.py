"""A Learner of a config file's own: configs/custom_step.py, and what is refused."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.order import Order
from tests.unit.comparing import assert_close
from tests.unit.replicas import replicas, updater
from trainer.build import build_learner
from trainer.config import Config, ConfigError, Recipe, load_recipe
from trainer.learner import Learner

BATCH = 12


@pytest.fixture
def recipe() -> Recipe:
    recipe = load_recipe("configs/custom_step.py")
    recipe.config.batch_size = BATCH
    return recipe


def batch_of(step: int) -> tuple[Any, ...]:
    random = np.random.default_rng(step)
    inputs = {
        "image": random.uniform(size=(BATCH, 8, 8, 1)).astype(np.float32),
        "noise": random.normal(size=(BATCH, 16)).astype(np.float32),
    }
    order = Order((1000,), 100, BATCH, lanes=BATCH, window_batches=4, seed=0, shuffle=True)
    return inputs, np.zeros(BATCH, np.int64), order.seeds(step, 1)[0]


def trained(recipe: Recipe, num_replicas: int, steps: int) -> tuple[Learner, list[np.ndarray]]:
    """The learner, and its weights before the `steps`."""
    with replicas(num_replicas).scope():
        learner = build_learner(recipe)
    before = learner.model.get_weights()
    for step in range(steps):
        updater(learner, num_replicas)(batch_of(step))
    return learner, before


def test_each_network_follows_its_own_loss_by_its_own_optimizer(recipe: Recipe) -> None:
    learner, before = trained(recipe, 1, 4)
    reference = build_learner(recipe)
    model = reference.model
    assert all(np.array_equal(w, b) for w, b in zip(model.get_weights(), before, strict=True))
    rate = recipe.config.learning_rate
    optimizers = {
        "generator": keras.optimizers.Adam(rate, beta_1=0.5),
        "critic": keras.optimizers.Adam(2 * rate, beta_1=0.5),
    }
    crossentropy = keras.losses.BinaryCrossentropy(from_logits=True)
    for step in range(4):
        inputs, _, seeds = batch_of(step)
        found = {}
        for name in optimizers:
            variables = [v.value for v in model.get_layer(name).trainable_variables]
            with tf.GradientTape() as tape:
                outputs = reference.forward(inputs, tf.constant(seeds), training=True)
                made = tf.ones(BATCH) if name == "generator" else tf.zeros(BATCH)
                loss = crossentropy(made, outputs["made_logit"])
                if name == "critic":
                    loss += crossentropy(tf.ones(BATCH), outputs["real_logit"])
            found[name] = tape.gradient(loss, variables)
        for name, optimizer in optimizers.items():
            optimizer.apply(found[name], model.get_layer(name).trainable_variables)
    for ours, theirs, start in zip(
        learner.model.get_weights(), model.get_weights(), before, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert ours.dtype != np.float32 or np.abs(ours - start).max() > 1e-4
    assert int(learner.step.numpy()) == 4


@pytest.mark.slow
def test_uneven_replicas_end_in_the_weights_of_one(recipe: Recipe) -> None:
    alone, _ = trained(recipe, 1, 4)
    shared, _ = trained(recipe, 2, 4)
    assert_close(alone.model.get_weights(), shared.model.get_weights(), atol=1e-5)


def test_each_network_has_its_slots_and_checkpoints_have_both(recipe: Recipe) -> None:
    def size(variables: Any) -> int:
        return sum(int(np.prod(variable.shape)) for variable in variables)

    learner = build_learner(recipe)
    generator, critic = (learner.model.get_layer(name) for name in ("generator", "critic"))
    assert size(learner.optimizer.variables[2:]) == 2 * generator.count_params()
    critics_slots = size(learner.state["critic_optimizer"][2:])
    assert critics_slots == 2 * size(critic.trainable_variables)


def test_other_object_than_a_learner_is_refused(recipe: Recipe) -> None:
    wrong = dataclasses.replace(recipe, build_learner=lambda config, **parts: parts["model"])
    with pytest.raises(ConfigError, match=r"build_learner\(\) of .* returned Functional"):
        build_learner(wrong)


@pytest.mark.parametrize(("group", "name"), [("", "micro_batches"), ("penalty", "l2")])
def test_option_that_an_overridden_gradients_would_ignore_is_refused(
    recipe: Recipe, group: str, name: str
) -> None:
    holder = getattr(recipe.config, group) if group else recipe.config
    setattr(holder, name, 2)
    with pytest.raises(ConfigError, match=rf"{name}=2 is for Learner\.gradients"):
        build_learner(recipe)
    plain = dataclasses.replace(recipe, build_learner=lambda config, **parts: Learner(**parts))
    assert type(build_learner(plain)) is Learner


def test_histograms_need_gradients_without_an_effect(recipe: Recipe) -> None:
    class Own(Learner):
        def gradients(self, batch: Any) -> Any:  # type: ignore[override]
            return super().gradients(batch)

    recipe.config.histogram_every_steps = 10
    build_learner(recipe)
    own = dataclasses.replace(recipe, build_learner=lambda config, **parts: Own(**parts))
    with pytest.raises(ConfigError, match=r"def gradients\(self, batch, \*, training=True\)"):
        build_learner(own)


@pytest.mark.slow
def test_options_of_apply_hold_for_both_networks(recipe: Recipe) -> None:
    recipe.config.clip.global_norm = 1e-12
    recipe.config.ema.decay = 0.5
    assert isinstance(recipe.config, Config)
    learner, before = trained(recipe, 1, 1)
    assert learner.state.keys() == {"averages", "critic_optimizer"}
    assert_close(learner.model.get_weights(), before, atol=1e-4)
