"""Weights of another run or model as the initial ones: all that match, or none."""

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies.position import Position
from strategies.ps.placement import dry_run
from tests.unit.comparing import assert_same
from tests.unit.replicas import replicas
from trainer.build import build_learner
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.config import Config, ConfigError, Recipe
from trainer.learner import Learner
from trainer.learner.variables import set_values
from trainer.step.options import EmaConfig, WarmStartConfig


def recipe(path: str = "", exclude: str = "", *, classes: int = 3, **fields: Any) -> Recipe:
    config = Config(warm_start=WarmStartConfig(path, exclude), **fields)

    def build_model(config: Config) -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(5, name="hidden"),
                layers.BatchNormalization(name="norm"),
                layers.Dropout(0.5),
                layers.Dense(classes, name="head"),
            ]
        )

    return Recipe("here.py", config, build_model, None, None, None, None, None, None)


def weights(learner: Learner) -> list[np.ndarray]:
    return [w.copy() for w in learner.model.get_weights()]


@pytest.fixture
def source(tmp_path: Path) -> Learner:
    """A learner with other weights, saved as a checkpoint and as a model."""
    learner = build_learner(recipe(seed=7, ema=EmaConfig(decay=0.5)))
    for variable in learner.model.variables:
        if "seed" not in variable.path:
            variable.assign(np.random.default_rng(1).normal(size=variable.shape))
    checkpointer = Checkpointer(str(tmp_path / "checkpoints"), learner, {}, keep=2)
    checkpointer.save(5, Position(5), {})
    checkpointer.wait()
    learner.model.variables[0].assign_add(tf.ones([4, 5]))
    learner.step.assign(10)
    checkpointer.save(10, Position(10), {})
    checkpointer.wait()
    learner.model.save(tmp_path / "model.keras")
    return learner


@pytest.mark.parametrize("path", [".", "checkpoints/step-00000010", "model.keras"])
def test_only_weights_are_restored(path: str, source: Learner, tmp_path: Path) -> None:
    fresh = weights(build_learner(recipe()))
    learner = build_learner(recipe(str(tmp_path / path), ema=EmaConfig(decay=0.5)))
    assert np.abs(fresh[0] - weights(source)[0]).max() > 0.1
    assert_same(weights(learner), weights(source))
    assert int(learner.step.numpy()) == 0
    for average, variable in zip(learner.state["averages"], learner.variables, strict=True):
        np.testing.assert_array_equal(average.numpy(), variable.numpy())
    assert learner.origin.startswith(f"warm start from {tmp_path / path}: ")
    assert "hidden/kernel" in learner.origin
    assert "norm/moving_mean" in learner.origin


def test_older_checkpoint_is_used_if_it_is_named(
    source: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    learner = build_learner(recipe("~/checkpoints/step-00000005"))
    np.testing.assert_allclose(weights(learner)[0], weights(source)[0] - 1, atol=1e-6)


@pytest.mark.parametrize("path", [".", "model.keras"])
def test_new_head_is_left_as_initialised(path: str, source: Learner, tmp_path: Path) -> None:
    fresh = weights(build_learner(recipe(classes=8)))
    learner = build_learner(recipe(str(tmp_path / path), "head", classes=8))
    *body, kernel, bias = weights(learner)
    assert_same(body, weights(source)[:-2])
    np.testing.assert_array_equal(kernel, fresh[-2])
    np.testing.assert_array_equal(bias, fresh[-1])
    assert "as initialised: " in learner.origin
    assert learner.origin.rpartition(": ")[2].count("head/") == 2


@pytest.mark.parametrize("path", [".", "model.keras"])
def test_other_shapes_are_refused_by_name(path: str, source: Learner, tmp_path: Path) -> None:
    said = r"(?s)head/kernel: \[5, 3\] there, \[5, 8\] here.*head/bias.*warm_start.exclude='.*head"
    with pytest.raises(ConfigError, match=said):
        build_learner(recipe(str(tmp_path / path), classes=8))


@pytest.mark.parametrize("make", ["nothing", "directory", "damaged", "keras"])
def test_path_without_weights_is_refused(make: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.keras" if make == "keras" else "a")
    if make == "keras":
        path.write_text("no archive")
    elif make != "nothing":
        (path / "checkpoints").mkdir(parents=True)
    if make == "damaged":
        (path / "checkpoints" / "step-00000001").mkdir()
    with pytest.raises(ConfigError, match=f"config.warm_start.path={path}"):
        build_learner(recipe(str(path)))


def test_weights_are_placed_by_the_strategy(source: Learner, tmp_path: Path) -> None:
    strategy = replicas(2)
    for path in (tmp_path, tmp_path / "model.keras"):
        with strategy.scope():
            learner = build_learner(recipe(str(path)))
        for variable, theirs in zip(learner.variables, source.variables, strict=True):
            components = strategy.experimental_local_results(variable)
            assert len(components) == 2
            for component in components:
                np.testing.assert_array_equal(component.numpy(), theirs.numpy())


def test_reading_a_model_places_no_variable(source: Learner, tmp_path: Path) -> None:
    cold, warm = recipe(), recipe(str(tmp_path / "model.keras"))
    of_cold, of_warm = (
        [group.shape for group in dry_run(functools.partial(build_learner, made))[1]]
        for made in (cold, warm)
    )
    assert of_cold == of_warm


@pytest.mark.parametrize("way", ["checkpoint", "model", "restore", "set_values"])
def test_normalization_computes_with_the_values_that_its_variables_got(
    way: str, tmp_path: Path
) -> None:
    def build_model(config: Config) -> keras.Model:
        scale = keras.layers.Normalization(name="scale")
        return keras.Sequential([keras.Input((4,)), scale, keras.layers.Dense(3)])

    def learner_of(path: str = "") -> Learner:
        config = Config(warm_start=WarmStartConfig(path))
        return build_learner(Recipe("here.py", config, build_model))

    def checkpointer_of(learner: Learner) -> Checkpointer:
        return Checkpointer(str(tmp_path / "checkpoints"), learner, {}, keep=2)

    source = learner_of()
    source.model.get_layer("scale").adapt(np.random.default_rng(1).normal(5, 9, size=(99, 4)))
    checkpointer = checkpointer_of(source)
    checkpointer.save(1, Position(1), {})
    checkpointer.wait()
    source.model.save(tmp_path / "model.keras")
    paths = {"checkpoint": str(tmp_path), "model": str(tmp_path / "model.keras")}
    learner = learner_of(paths.get(way, ""))
    if way == "restore":
        assert checkpointer_of(learner).restore()
    if way == "set_values":
        set_values(learner.model, source)
    examples = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(learner.model(examples), source.model(examples))
