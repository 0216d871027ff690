"""From a config and its data to a learner: to train, to evaluate, or to check.

session = build_session(recipe, open_inputs(recipe), executor.build)
check_batches(session.inputs, session.learner, recipe)

restored = restore("runs/a", "best")      # the same, with the variables of a checkpoint
"""

from collections.abc import Callable
from typing import NamedTuple

from data.reader import Reader
from strategies.base import Batch
from strategies.mirrored import MirroredExecutor, replica_devices, use_gpus
from trainer.build import build_checkpointer, build_learner
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.config import ConfigError, Recipe, recipe_of_run
from trainer.inputs import Inputs, build_metrics, fitted_to_model, input_specs, open_evaluation
from trainer.learner import Learner
from trainer.run_files import RunFiles, step_in


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


class Restored(NamedTuple):
    """A checkpoint of a run, restored."""

    name: str
    step: int
    recipe: Recipe
    reader: Reader  # Of the evaluation split.
    executor: MirroredExecutor
    learner: Learner
    specs: Batch  # Of the model's inputs.


def restore(
    model_dir: str, checkpoint: str, split: str | None = None, data_dir: str | None = None
) -> Restored:
    """Restores `checkpoint` (newest, best, a step or its name) on a device of this machine.

    Raises:
        ConfigError, DataError, ModelDirError: the run has no such checkpoint, the data is missing,
            or the config file now defines another model.
    """
    recipe = recipe_of_run(RunFiles(model_dir).read_config())
    recipe.config.data_dir = data_dir or recipe.config.data_dir
    recipe.config.data.eval_split = split or recipe.config.data.eval_split
    recipe.config.warm_start.path = ""  # The weights come from the checkpoint.
    reader = open_evaluation(recipe)
    executor = MirroredExecutor.on(replica_devices(1, min(1, use_gpus(None))))
    inputs, specs, learner = build_session(recipe, Inputs(reader, reader), executor.build)
    checkpointer = build_checkpointer(recipe, model_dir, inputs, learner)
    name = _chosen(checkpoint, checkpointer, model_dir)
    saved = checkpointer.restore_model(name)
    return Restored(name, saved.step, recipe, inputs.evaluation, executor, learner, specs)


def _chosen(wanted: str, checkpointer: Checkpointer, model_dir: str) -> str:
    """The name of the checkpoint that `wanted` means."""
    names = checkpointer.names()
    newest = checkpointer.newest()
    if wanted == "newest" and newest is not None:
        fitting = [name for name in names if name == f"step-{newest.step:08d}"]
    elif wanted == "best":
        fitting = [name for name in names if name.startswith("best-")]
    else:
        steps = {name: step_in(name) for name in names}
        fitting = [name for name, step in steps.items() if wanted in (str(step), name)]
    if not fitting:
        raise ConfigError(
            f"--checkpoint={wanted}: {model_dir} has no such checkpoint. It has "
            f"{', '.join(names) or 'none'}. Type newest, best, or a step."
        )
    return fitting[-1]
