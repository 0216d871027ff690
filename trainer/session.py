"""From a config and its data to a learner: to train, to evaluate, or to check.

session = build_session(recipe, open_inputs(recipe), executor.build)
check_batches(session.inputs, session.learner, recipe)
parts = build_parts(spec, inputs, executor)         # the same for a task that trains
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from strategies.base import Batch, Executor
from trainer.build import (
    Parts,
    build_checkpointer,
    build_learner,
    check_for_strategy,
    check_standby,
)
from trainer.compilation import choose_compilation
from trainer.config import Recipe
from trainer.config_checks import check_replicas
from trainer.guards.agreement import check_agreement
from trainer.guards.fingerprint import log_keras_settings
from trainer.hooks.export import check_export
from trainer.inputs import Inputs, build_metrics, check_batches, fitted_to_model, input_specs
from trainer.learner import Learner
from trainer.task_spec import TaskSpec


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


def build_parts(spec: TaskSpec, inputs: Inputs, executor: Executor) -> Parts:
    """Builds what a task trains with, and checks that it fits the task. All tasks call it together.

    Raises a UsageError for a user's mistake.
    """
    # Before the model is built: with other settings of Keras on this host, building may fail.
    check_agreement(spec, executor)
    if spec.is_chief and not spec.is_checked:
        log_keras_settings()
    check_replicas(spec.recipe.config, executor.replicas_per_step)
    inputs, specs, learner = build_session(spec.recipe, inputs, executor.build)
    check_for_strategy(
        learner,
        spec.recipe,
        strategy=spec.strategy,
        num_workers=executor.num_replicas,
        read_dtype=spec.read_dtype,
    )
    choose_compilation(learner, spec.recipe, inputs.train, is_cluster=spec.cluster is not None)
    if not spec.is_checked:
        check_batches(inputs, learner, spec.recipe)
        check_export(spec.recipe, learner.model, specs)
    train = dataclasses.replace(inputs.train, gives_seeds=learner.needs_seeds)
    inputs = dataclasses.replace(inputs, train=train)
    checkpointer = build_checkpointer(
        spec.recipe,
        spec.model_dir,
        inputs,
        learner,
        executor.io_device,
        is_shared=spec.generation is not None,
    )
    check_standby(checkpointer, spec.recipe.path, spec.ps_standby)
    checkpointer.on_progress = executor.on_progress
    return Parts(spec.recipe, spec.model_dir, inputs, specs, executor, learner, checkpointer)
