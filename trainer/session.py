"""From a config and its data to a learner: to train, to evaluate, or to check.

session = build_session(recipe, open_inputs(recipe), executor.build)
check_batches(session.inputs, session.learner, recipe)
"""

from collections.abc import Callable
from typing import NamedTuple

from strategies.base import Batch
from trainer.build import build_learner
from trainer.config import Recipe
from trainer.inputs import Inputs, build_metrics, fitted_to_model, input_specs
from trainer.learner import Learner


class Session(NamedTuple):
    """A learner, and the data as its model takes them."""

    inputs: Inputs
    specs: Batch  # Of the model's inputs.
    learner: Learner


def build_session(
    recipe: Recipe, inputs: Inputs, build: Callable[[Callable[[], Learner]], Learner]
) -> Session:
    """Builds the model, its optimizer, its loss and its metrics for `inputs`.

    `build` calls a function that makes variables, as Executor.build.

    Raises ConfigError if the functions of `recipe` do not fit each other or the data.
    """
    specs = input_specs(inputs, recipe)
    learner = build(lambda: build_learner(recipe, specs))
    inputs = fitted_to_model(inputs, recipe, learner.model)
    build_metrics(inputs, learner, recipe)
    return Session(inputs, specs, learner)
