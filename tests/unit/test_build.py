"""The learner that is built follows the config."""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.layers import Dense

from tests.unit.replicas import update_of
from trainer.build import build_learner, check_for_strategy
from trainer.config import Config, ConfigError, Recipe, flatten
from trainer.embeddings import ShardedEmbedding
from trainer.learner import Learner
from trainer.models import build_model
from trainer.step.options import LossScaleConfig, ScheduleConfig, WeightDecayConfig


def layers_of(config: Config) -> keras.Model:
    dense, norm = keras.layers.Dense, keras.layers.BatchNormalization(name="norm")
    body = keras.Sequential([keras.Input((4,)), dense(5, name="first")], name="body")
    return keras.Sequential([keras.Input((4,)), body, norm, dense(3, name="head")])


def recipe(config: Config, **functions: Any) -> Recipe:
    return Recipe("here.py", config, layers_of, **functions)


def step(learner: Learner) -> list[float]:
    """The largest change of each variable of the model in a step."""
    before = [np.array(v.value.numpy()) for v in learner.model.variables]
    batch = tf.random.stateless_normal([6, 4], [1, 2]), tf.zeros([6], tf.int64)
    strategy = tf.distribute.get_strategy()
    strategy.run(update_of(learner), args=(batch,))
    after = [np.array(v.value.numpy()) for v in learner.model.variables]
    return [float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True)]


def test_frozen_layers_and_their_statistics_do_not_change() -> None:
    plain = build_learner(recipe(Config(batch_size=6)))
    assert min(step(plain)) > 0
    learner = build_learner(recipe(Config(batch_size=6, freeze="first|norm")))
    moved = {v.path: m for v, m in zip(learner.model.variables, step(learner), strict=True)}
    assert len(moved) == 8
    for path, distance in moved.items():
        assert (distance > 0) is ("head" in path), path
    assert len(learner.variables) == 2


@pytest.mark.parametrize(
    ("pattern", "number"), [("", 3), ("ids", 2), ("head", 1), ("ids|head", None)]
)
def test_tables_of_dynamic_ids_are_frozen_and_trained_as_other_layers(
    pattern: str, number: int | None
) -> None:
    """Keras lists no weights of them."""

    def with_table(config: Config) -> keras.Model:
        ids = keras.Input((), dtype="int64")
        rows = ShardedEmbedding(None, 3, name="ids")(ids)
        return keras.Model(ids, Dense(3, name="head")(rows))

    made = Recipe("here.py", Config(freeze=pattern), with_table)
    if number is None:
        with pytest.raises(ConfigError, match="nothing would be trained"):
            build_learner(made)
    else:
        assert len(build_learner(made).variables) == number


def test_a_model_of_nothing_but_a_table_of_dynamic_ids_is_trained() -> None:
    model = keras.Sequential([keras.Input((), dtype="int64"), ShardedEmbedding(None, 3)])
    assert len(build_learner(Recipe("here.py", Config(), lambda _: model)).variables) == 1


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_precision_applies_to_layers_without_a_policy(precision: str) -> None:
    def own(config: Config) -> keras.Model:
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input((4,)), dense(5), dense(3, dtype="float32")])

    made = Recipe("here.py", Config(precision=precision), own)
    first, last = build_model(made).layers
    assert first.compute_dtype == precision.removeprefix("mixed_")
    assert first.variable_dtype == last.compute_dtype == "float32"
    assert keras.config.dtype_policy().name == "float32"
    assert (build_learner(made).loss_scale is not None) is (precision == "mixed_float16")


def test_policy_that_a_config_file_sets_is_kept() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        assert build_model(recipe(Config())).layers[-1].compute_dtype == "bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")


def own_loss(labels: Any, outputs: Any) -> Any:
    return outputs[:, 0]


def with_schedule(config: Config) -> keras.Optimizer:
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100))


WITHOUT_BIASES = WeightDecayConfig(exclude="bias")


def test_options_that_fit_the_recipe_are_used() -> None:
    build_learner(recipe(Config(), loss=own_loss))
    build_learner(recipe(Config(optimizer="adamw", weight_decay=WITHOUT_BIASES)))
    learner = build_learner(recipe(Config(), build_optimizer=with_schedule))
    assert learner.learning_rate == pytest.approx(0.1)


def check(config: Config, strategy: str, **functions: Any) -> list[str]:
    """The notes of the learner after the checks."""
    made = recipe(config, **functions)
    learner = build_learner(made)
    check_for_strategy(learner, made, strategy=strategy, num_workers=2, read_dtype="float32")
    return learner.notes


@pytest.mark.parametrize(
    ("config", "functions", "said"),
    [
        (Config(freeze="no-such"), {}, "'no-such' is found in none of: .*first"),
        (Config(freeze="."), {}, "nothing would be trained"),
        (Config(label_smoothing=0.1), {"loss": own_loss}, "label_smoothing=0.1 .* here.py defines"),
        (
            Config(schedule=ScheduleConfig(warmup_steps=5)),
            {"build_optimizer": with_schedule},
            "has a schedule, and config.schedule is another",
        ),
        (
            Config(optimizer="adam", weight_decay=WITHOUT_BIASES),
            {},
            "weight_decay.exclude='bias' means nothing",
        ),
        (Config(loss_scale=LossScaleConfig(8.0)), {}, r"initial=8\.0.*precision=mixed_float16"),
    ],
)
def test_option_that_the_recipe_has_no_use_for_is_refused(
    config: Config, functions: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(config, "mirrored", **functions)


def of_config(config: Config) -> keras.Optimizer:
    return keras.optimizers.SGD(config.learning_rate)


@pytest.mark.parametrize(
    ("fields", "build_optimizer", "said"),
    [
        ({"optimizer": "Adam"}, of_config, "config.optimizer=Adam: .* of here.py chooses SGD. It"),
        ({"optimizer": "adam_w"}, lambda config: "sgd", "config.optimizer=adam_w: .* chooses SGD"),
        ({"optimizer": "SGD"}, lambda config: config.optimizer, ""),
        (
            {"learning_rate": 0.5},
            lambda config: keras.optimizers.SGD(0.1),
            "learning_rate=0.5: .* chooses the learning rate 0.1.",
        ),
        (
            {"learning_rate": 0.5},
            lambda c: keras.optimizers.LossScaleOptimizer(of_config(c)),
            "",
        ),
        ({"learning_rate": 0.3}, of_config, ""),
        ({"learning_rate": 0.3}, lambda config: "sgd", ""),
        ({"learning_rate": 0.3}, with_schedule, ""),
        ({"learning_rate": 0.3, "optimizer": "sgd"}, None, ""),
        ({}, lambda config: keras.optimizers.SGD(0.1), ""),
    ],
)
def test_option_of_the_command_line_that_build_optimizer_does_not_use_is_said(
    fields: dict[str, Any], build_optimizer: Any, said: str
) -> None:
    functions = {"build_optimizer": build_optimizer}
    made = recipe(Config(**fields), defaults=flatten(Config()), **functions)
    notes = [note for note in build_learner(made).notes if "chooses" in note]
    assert len(notes) == bool(said)
    assert re.search(said, "".join(notes))


def test_model_is_not_traced_for_metrics_that_need_no_names_of_outputs() -> None:
    calls = []

    class Counted(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = Dense(3)

        def call(self, inputs: Any) -> Any:
            calls.append(inputs)
            return self.head(inputs)

    def num_calls(metrics: Any) -> int:
        calls.clear()
        made = Recipe("here.py", Config(), lambda _: Counted(), loss="mse", metrics=metrics)
        build_learner(made, tf.TensorSpec([None, 4]))
        return len(calls)

    assert 0 < num_calls(["mae"]) < num_calls({"mae": "mae"})


def test_loss_scale_of_a_model_in_float16_is_accepted() -> None:
    config = Config(loss_scale=LossScaleConfig(8.0), precision="mixed_float16")
    assert check(config, "mirrored") == []


# A model and a loss that do not fit each other are noted, and a correct pair is not.

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy
GENERALIZED = keras.losses.CategoricalGeneralizedCrossEntropy


def notes(loss: Any, last: keras.Layer, *, is_compiled: bool = False) -> list[str]:
    def build_model(config: Config) -> keras.Model:
        model = keras.Sequential([keras.Input((3,)), Dense(4, name="first"), last])
        if is_compiled:
            model.compile("adam", "mse")
        return model

    given = {} if loss is None else {"loss": loss}
    return build_learner(Recipe("mine.py", Config(), build_model, **given)).notes


@pytest.mark.parametrize(
    ("loss", "last", "said"),
    [
        (None, Dense(4, "softmax"), "ends with softmax, but the default loss applies softmax too"),
        (None, keras.layers.Softmax(), "softmax"),
        (None, keras.Sequential([Dense(4, "softmax")]), "softmax"),
        (CROSS_ENTROPY(from_logits=True), Dense(4, "softmax"), "from_logits=True) applies it too"),
        ("sparse_categorical_crossentropy", Dense(4), "expects probabilities, but the last layer"),
        (GENERALIZED(), Dense(4), "expects probabilities"),
    ],
)
def test_last_layer_that_does_not_fit_the_loss_is_noted(
    loss: Any, last: keras.Layer, said: str
) -> None:
    (note,) = notes(loss, last)
    assert said in note


def test_compile_in_build_model_is_noted() -> None:
    (note,) = notes(None, Dense(4), is_compiled=True)
    assert "model.compile(...) in build_model has no effect" in note


@pytest.mark.parametrize("has_loss", [False, True])
def test_method_of_the_model_that_is_never_called_is_noted(has_loss: bool) -> None:
    class Own(keras.Model):
        metrics = ()

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return {"own": 1.0}

        def predict_step(self, data: Any) -> Any:
            return self(data) + 1

    class WithLoss(Own):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, **_: Any) -> Any:
            return keras.ops.mean(y_pred)

    def build_model(config: Config) -> keras.Model:
        inputs = keras.Input((3,))
        return (WithLoss if has_loss else Own)(inputs, Dense(4)(inputs))

    of_metrics, of_predictions = build_learner(Recipe("mine.py", Config(), build_model)).notes
    kind = "WithLoss" if has_loss else "Own"
    assert of_metrics.startswith(f"compute_metrics, metrics of {kind}: not used. Define `metrics`")
    assert of_predictions.startswith(f"predict_step() of {kind} is not called")


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (None, Dense(4)),
        ("sparse_categorical_crossentropy", Dense(4, "softmax")),
        (CROSS_ENTROPY(from_logits=True), Dense(4)),
        ("mse", Dense(4)),
    ],
)
def test_last_layer_that_fits_the_loss_is_not_noted(loss: Any, last: keras.Layer) -> None:
    assert notes(loss, last) == []
