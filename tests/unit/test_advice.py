"""A model and a loss that do not fit each other are noted, and a correct pair is not."""

from typing import Any

import keras
import pytest

from trainer.build import build_learner
from trainer.config import Config, Recipe

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy


def notes(loss: Any, *last: keras.Layer, is_compiled: bool = False) -> list[str]:
    def build_model(config: Config) -> keras.Model:
        model = keras.Sequential([keras.Input((3,)), *last])
        if is_compiled:
            model.compile("adam", "mse")
        return model

    given = {} if loss is None else {"loss": loss}
    return build_learner(Recipe("mine.py", Config(), build_model, **given)).notes


@pytest.mark.parametrize(
    ("loss", "activation", "said"),
    [
        (None, "softmax", "ends with softmax, but the default loss applies softmax too"),
        (CROSS_ENTROPY(from_logits=True), "softmax", "from_logits=True) applies it too"),
        ("sparse_categorical_crossentropy", None, "expects probabilities, but the last layer"),
        (keras.losses.CategoricalGeneralizedCrossEntropy(), None, "expects probabilities"),
    ],
)
def test_activation_that_does_not_fit_the_loss_is_noted(
    loss: Any, activation: str | None, said: str
) -> None:
    (note,) = notes(loss, keras.layers.Dense(4, activation=activation))
    assert said in note


def test_softmax_in_a_layer_or_a_model_is_noted() -> None:
    for last in (keras.layers.Softmax(), keras.Sequential([keras.layers.Dense(4, "softmax")])):
        (note,) = notes(None, keras.layers.Dense(4), last)
        assert "softmax" in note


def test_compile_in_build_model_is_noted() -> None:
    (note,) = notes(None, keras.layers.Dense(4), is_compiled=True)
    assert "model.compile(...) in build_model has no effect" in note


@pytest.mark.parametrize(
    ("loss", "activation"),
    [
        (None, None),
        ("sparse_categorical_crossentropy", "softmax"),
        (CROSS_ENTROPY(from_logits=True), None),
        ("mse", None),
    ],
)
def test_loss_that_fits_is_not_noted(loss: Any, activation: str | None) -> None:
    assert notes(loss, keras.layers.Dense(4, activation=activation)) == []
