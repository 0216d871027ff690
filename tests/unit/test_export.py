"""Exports: which files they have, their signature, and what is found before training."""

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.system import files
from strategies.metrics import Metrics
from strategies.ps.placement import dry_run
from tests.s3 import link, needs_s3, url
from tests.unit.comparing import assert_same
from trainer.build import build_learner
from trainer.config import Config, ConfigError, Recipe
from trainer.exit_codes import EXIT_USAGE
from trainer.hooks.export import Export, check_export, export_notes
from trainer.models import build_model
from trainer.predict.models import open_model
from trainer.step.options import EmaConfig

__all__ = ["link", "url"]  # Fixtures.
# Keras warns of a layer whose own layers are made in `call`.
# Or of inputs in a dict that have no name.
pytestmark = pytest.mark.filterwarnings("ignore:.*unbuilt state", "ignore:.*Change the tensor name")

L = keras.layers
FLOATS = tf.TensorSpec([None, 4], tf.float32)
WORDS = {"words": tf.TensorSpec([None], tf.string), "weights": tf.TensorSpec([None, 2])}
NUMBERS = itertools.count()


class Head(keras.Layer):
    """Its own layer is used in training only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head = L.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(keras.ops.mean(self.head(x) ** 2))
        return x


class Subclassed(keras.Model):
    """`aux` is used in training only, and is listed before `last`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.aux, self.last = Head(), L.Dense(3), L.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.first(x)
        return self.last(x) + self.aux(x) if training else self.last(x)


class Strings(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.number, self.rows = L.StringLookup(vocabulary=["a", "b"]), L.Embedding(3, 2)

    def call(self, x: Any) -> Any:
        return self.rows(self.number(x["words"])) * x["weights"]


class Scaled(keras.Layer):
    """Its description lacks `factor`."""

    def __init__(self, factor: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def get_config(self) -> dict[str, Any]:
        return dict(super().get_config())

    def call(self, x: Any) -> Any:
        return x * self.factor


class Composed(keras.Model):
    """Keras cannot describe it: its parts are arguments."""

    def __init__(self, first: keras.Layer, last: keras.Layer) -> None:
        super().__init__()
        self.first, self.last = first, last

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


class OfOneBatch(keras.Model):
    """The size of the batch must be known."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(3)
        self(tf.zeros([2, 4]))

    def call(self, x: Any) -> Any:
        return self.dense(tf.reshape(x, [int(x.shape[0]), 4]))


def sequential(*layers: keras.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), *layers, L.Dense(3)])


def by_name() -> keras.Model:
    a, b = keras.Input((4,), dtype="int32"), keras.Input((4,), name="mine")
    return keras.Model({"x": a, "y": b}, [L.Embedding(5, 2)(a), L.Dense(3)(b)])


def recipe_of(build: Callable[[], keras.Model], **fields: Any) -> Recipe:
    return Recipe("mine.py", Config(**fields), lambda config: build())


def numbered() -> keras.Layer:
    return L.Dense(4, name=f"numbered_{next(NUMBERS)}")


def export_hook(recipe: Recipe, specs: Any, directory: Path | str) -> Export:
    """The hook of a complete run whose weights are no initial ones."""
    learner = build_learner(recipe, specs)
    for variable in learner.variables:
        variable.assign(variable + 0.5)
    L.Dense(1), keras.KerasTensor((1,))  # Objects of another program.
    return Export(
        learner,
        lambda: build_model(recipe, specs, is_trained=False),
        str(directory),
        path="mine.py",
        is_complete=lambda: True,
        input_specs=specs,
    )


def exported(recipe: Recipe, specs: Any, directory: Path | str) -> Export:
    """The hook, after the export."""
    hook = export_hook(recipe, specs, directory)
    hook.end(1)
    return hook


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "num_variables"),
    [
        (lambda: sequential(L.Dense(4), Head()), 6),
        (Subclassed, 6),
        (lambda: sequential(numbered(), numbered()), 6),
    ],
    ids=["layer", "model", "own numbers"],
)
@pytest.mark.parametrize("decay", [0.0, 0.9], ids=["weights", "averages"])
def test_export_has_the_weights_of_the_layers_that_predictions_use(
    build: Callable[[], keras.Model], num_variables: int, decay: float, tmp_path: Path
) -> None:
    recipe = recipe_of(build, ema=EmaConfig(decay=decay))
    hook = exported(recipe, FLOATS, tmp_path)
    assert hook.failure == ""
    assert len(hook.learner.dense_variables) == num_variables
    examples = tf.random.normal([5, 4])
    # Averages begin with the initial weights.
    model = build_learner(recipe, FLOATS).model if decay else hook.learner.model
    expected = model(examples, training=False)
    classes = {"Head": Head, "Subclassed": Subclassed}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=classes)
    served = tf.saved_model.load(str(tmp_path / "saved_model"))
    for found in (loaded(examples), served.serve(examples)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_that_exist_in_both_modes_are_initialised_as_without_a_head() -> None:
    recipe = recipe_of(Subclassed)
    learner = build_learner(recipe, FLOATS)
    keras.utils.set_random_seed(recipe.config.seed)
    for variable in build_model(recipe, FLOATS, is_trained=False).variables:
        (same,) = [v for v in learner.model.variables if v.path == variable.path]
        assert np.array_equal(same, variable)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "specs", "inputs", "outputs"),
    [
        (sequential, FLOATS, {"keras_tensor": "float32"}, ["output_0"]),
        (lambda: keras.Sequential([L.Dense(3)]), FLOATS, {"keras_tensor": "float32"}, ["output_0"]),
        (by_name, None, {"x": "int32", "mine": "float32"}, ["output_0", "output_1"]),
        (Subclassed, FLOATS, {"args_0": "float32"}, ["output_0"]),
        (Strings, WORDS, {"words": "string", "weights": "float32"}, ["output_0"]),
    ],
    ids=["sequential", "built late", "functional", "subclassed", "strings"],
)
def test_signature_has_the_same_names_and_types_at_each_build(
    build: Callable[[], keras.Model],
    specs: Any,
    inputs: dict[str, str],
    outputs: list[str],
    tmp_path: Path,
) -> None:
    recipe = recipe_of(build)
    for number in range(2):
        dry_run(lambda: build_learner(recipe, specs))  # As a chief of ps does.
        assert exported(recipe, specs, tmp_path / str(number)).failure == ""
        saved = tf.saved_model.load(str(tmp_path / f"{number}/saved_model"))
        serve = saved.signatures["serving_default"]
        found = {name: s.dtype.name for name, s in serve.structured_input_signature[1].items()}
        assert (found, sorted(serve.structured_outputs)) == (inputs, outputs)


def test_inputs_may_have_any_names(tmp_path: Path) -> None:
    """Columns have names that are no arguments in Python, or that are equal as names of ops."""
    names = ["class", "self", "a-b", "a_b", "a.b", "x", "X", "x_1", "hours per week", "år", "年龄"]
    names += ["龄年", "None", "1st", "_", ""]
    specs = {name: tf.TensorSpec([None, 1], tf.float32) for name in names}

    def build() -> keras.Model:
        inputs = {name: keras.Input((1,), name=name or None) for name in names}
        return keras.Model(inputs, L.Dense(1)(L.Concatenate()([*inputs.values()])))

    class OfDict(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.last = L.Dense(1)

        def call(self, x: Any) -> Any:
            return self.last(keras.ops.concatenate([x[name] for name in names]))

    values = {name: tf.constant([[float(number)]]) for number, name in enumerate(names)}
    for number, recipe in enumerate((recipe_of(build), recipe_of(OfDict))):
        hook = exported(recipe, specs, tmp_path / str(number))
        assert hook.failure == ""
        found = open_model(str(tmp_path / f"{number}/saved_model"), None).call(values)
        np.testing.assert_allclose(found, hook.learner.model(values), rtol=1e-5, atol=1e-6)
        serve = tf.saved_model.load(str(tmp_path / f"{number}/saved_model")).signatures
        served = serve["serving_default"].structured_input_signature[1]
        assert len(served) == len(names)
        assert {"a_b", "hours_per_week", "class_"} <= served.keys()


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: Composed(L.Dense(4), L.Dense(3)),
            r"only export/saved_model .* argument values in `__init__\(\)`, and therefore the "
            r"object must override `get_config\(\)` .*mine\.py, or type --config\.export=False",
        ),
        (lambda: sequential(Scaled(2)), r"load_model will not .*missing 1 required .*'factor'"),
        (lambda: sequential(L.Lambda(lambda x: 2 * x)), "load_model will not .*Lambda.*safe_mode"),
        (lambda: sequential(Head()), ""),
        (lambda: sequential(L.Dense(3, activation="relu")), ""),
    ],
    ids=["composed", "without an argument", "lambda", "unregistered", "of Keras"],
)
def test_what_a_keras_file_cannot_have_is_said_before(
    build: Callable[[], keras.Model], said: str, tmp_path: Path
) -> None:
    recipe = recipe_of(build)
    model = build_model(recipe, FLOATS)
    check_export(recipe, model, FLOATS)
    notes = export_notes(model, "mine.py")
    assert len(notes) == bool(said)
    assert re.search(said, "".join(notes))


@pytest.mark.parametrize("place", ["tmp_path", pytest.param("url", marks=needs_s3)])
def test_model_that_keras_cannot_describe_is_a_saved_model_alone(
    place: str, request: pytest.FixtureRequest
) -> None:
    directory = str(request.getfixturevalue(place))
    assert exported(recipe_of(sequential), None, directory).failure == ""
    assert sorted(files.names_in(directory)) == ["model.keras", "saved_model"]
    hook = exported(recipe_of(lambda: Composed(L.Dense(4), L.Dense(3))), FLOATS, directory)
    assert hook.failure == ""
    # Not with the weights of another model beside it.
    assert files.names_in(directory) == ["saved_model"]


def test_model_that_cannot_be_a_saved_model_is_refused_before_training() -> None:
    recipe = recipe_of(OfOneBatch)
    model = build_model(recipe, FLOATS)
    with pytest.raises(ConfigError, match=r"(?s)traced for the export.*--config\.export=False"):
        check_export(recipe, model, FLOATS)
    recipe.config.export = False
    check_export(recipe, model, FLOATS)


def test_export_that_fails_leaves_what_was_there_and_says_what_to_do(tmp_path: Path) -> None:
    exported(recipe_of(sequential), None, tmp_path)
    before = (tmp_path / "model.keras").read_bytes()
    hook = exported(recipe_of(OfOneBatch), FLOATS, tmp_path)
    assert hook.failure_exit_code == EXIT_USAGE
    assert exported(recipe_of(OfOneBatch), FLOATS, tmp_path / "new").failure == hook.failure
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.keras"]
    shutil.rmtree(tmp_path / "new")
    for said in ("The export of the model of mine.py fails: ", "--config.export=False"):
        assert said in hook.failure
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "saved_model"]
    assert (tmp_path / "model.keras").read_bytes() == before


def test_export_has_the_last_weights_whatever_other_hooks_do_at_their_end(tmp_path: Path) -> None:
    hook = export_hook(recipe_of(sequential), FLOATS, tmp_path)
    hook.is_complete = lambda: False
    hook(1, Metrics())
    assert not (tmp_path / "model.keras").exists()
    hook.is_complete = lambda: True
    hook(2, Metrics())
    trained = hook.learner.weights()
    for variable in hook.learner.variables:
        variable.assign(tf.zeros_like(variable))
    hook.end(2)
    assert hook.failure == ""
    assert_same(keras.models.load_model(tmp_path / "model.keras").get_weights(), trained)
