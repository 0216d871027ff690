"""Models that Keras builds late are built from the inputs' specs; hooks of users are checked."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from strategies.ps.placement import dry_run
from tests.unit.comparing import assert_same
from trainer.build import build_learner
from trainer.config import Config, ConfigError, Recipe
from trainer.hooks.base import Hook
from trainer.hooks.building import _hooks_of_user
from trainer.models import build_model, is_built

SPECS = tf.TensorSpec([None, 4], tf.float32)
NAMED = {"a": SPECS, "b": tf.TensorSpec([None, 2], tf.float32)}


class OwnBuild(keras.Model):
    """Keras calls it built after `build`, when its layers have no weights yet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(5), keras.layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))


class Named(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return {"x": self.first(inputs["a"]) + self.second(inputs["b"])}


def unbuilt(config: Config) -> keras.Model:
    return keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(3)])


def own_build(config: Config) -> keras.Model:
    model = OwnBuild()
    model.build((None, 4))
    return model


@pytest.mark.parametrize(
    ("build", "specs"), [(unbuilt, SPECS), (own_build, SPECS), (lambda config: Named(), NAMED)]
)
def test_model_is_built_from_specs(build: Callable[[Config], keras.Model], specs: Any) -> None:
    recipe = Recipe("mine.py", Config(batch_size=6), build)
    assert not is_built(build(recipe.config))
    learner, groups = dry_run(lambda: build_learner(recipe, specs))
    assert is_built(learner.model)
    assert len(learner.variables) == 4
    assert sum(group.gradient_bytes > 0 for group in groups) == 4


def test_weights_do_not_depend_on_when_the_model_is_built() -> None:
    def early(config: Config) -> keras.Model:
        model = unbuilt(config)
        model.build((None, 4))
        return model

    late = build_learner(Recipe("mine.py", Config(), unbuilt), SPECS).weights()
    assert_same(late, build_learner(Recipe("mine.py", Config(), early)).weights())


def test_error_in_call_shows_the_inputs() -> None:
    class Wrong(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs["c"]

    recipe = Recipe("mine.py", Config(), lambda config: Wrong())
    with pytest.raises(
        ConfigError, match=r"(?s)'a': 'float32\(None, 4\)'.*KeyError.*inputs\[\"c\"\]"
    ):
        build_model(recipe, NAMED)


def hooks_of_user(returned: Any) -> Any:
    """The hooks of a run if `build_hooks` of its file returns `returned`."""
    recipe = Recipe("mine.py", Config(), unbuilt, build_hooks=lambda config, model_dir: returned)
    return _hooks_of_user(recipe, "runs/a")


class WithoutMetrics(Hook):
    def __call__(self, step: int) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (WithoutMetrics(), r"too many positional.*Needed is __call__\(self, step: int, metrics"),
        ([keras.callbacks.History()], r"Received: .*History.*callback of Keras.*build_callbacks"),
        (["save"], "must return a list of trainer.hooks.base.Hook. Received: 'save'"),
        (None, "must return a list of trainer.hooks.base.Hook. Received: None"),
    ],
)
def test_wrong_hooks_are_refused(returned: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"mine.py.*{said}"):
        hooks_of_user(returned)


def test_single_hook_is_a_list_of_one() -> None:
    hook = Hook()
    assert hooks_of_user(hook) == [hook]
