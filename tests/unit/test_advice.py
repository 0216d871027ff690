"""A model and a loss that do not fit each other are noted, and a correct pair is not."""

from typing import Any

import keras
import pytest
from keras.layers import Dense

from trainer.build import build_learner
from trainer.config import Config, Recipe

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy
GENERALIZED = keras.losses.CategoricalGeneralizedCrossEntropy


def notes(loss: Any, last: keras.Layer, *, is_compiled: bool = False) -> str:
    def build_model(config: Config) -> keras.Model:
        model = keras.Sequential([keras.Input((3,)), Dense(4, name="first"), last])
        if is_compiled:
            model.compile("adam", "mse")
        return model

    given = {} if loss is None else {"loss": loss}
    return "\n".join(build_learner(Recipe("mine.py", Config(), build_model, **given)).notes)


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
    assert said in notes(loss, last)


def test_compile_in_build_model_is_noted() -> None:
    said = notes(None, Dense(4), is_compiled=True)
    assert "model.compile(...) in build_model has no effect" in said


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
    assert notes(loss, last) == ""
