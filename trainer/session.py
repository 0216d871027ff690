"""From a config and its data to a learner: to train, to check, or with the weights of a checkpoint.

inputs, specs, learner = build_session(recipe, open_inputs(recipe), executor.build)
check_batches(inputs, learner, recipe, executor.strategy)
parts = build_parts(spec, inputs, executor)     # the same for a task that trains

restored = restore("runs/a", "best")            # with the variables of a checkpoint
metrics = evaluate("runs/a", "best")
model = model_of_run("runs/a")
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from data.reader import Reader
from data.system import object_store
from data.system.files import DataError, exists, is_s3
from data.system.scratch import scratch_dir
from strategies.base import Batch, Executor
from strategies.gpus import replica_devices, use_gpus
from strategies.metrics import means
from strategies.mirrored import MirroredExecutor
from strategies.step_errors import memory_explained
from trainer import build
from trainer.batch_checks import check_batches, input_specs
from trainer.build import build_checkpointer, build_learner
from trainer.checkpoints.checkpointer import Checkpointer, ModelDirError
from trainer.checkpoints.marks import DamagedError
from trainer.compilation import choose_compilation
from trainer.config import ConfigError, Recipe, recipe_of_run
from trainer.config_checks import check_replicas
from trainer.exit_codes import first_line
from trainer.guards import fingerprint
from trainer.hooks.building import Parts
from trainer.hooks.export import check_export
from trainer.inputs import (
    Inputs,
    build_metrics,
    data_errors_explained,
    fitted_to_model,
    open_evaluation,
    parse_of,
)
from trainer.learner import Learner
from trainer.learner.variables import set_values
from trainer.models import build_model
from trainer.run_files import Document, RunFiles, finished_checkpoints, step_in
from trainer.task_spec import TaskSpec

_log = logging.getLogger(__name__)

# The names of the checkpoints that --checkpoint may mean.
_KINDS = {"newest": "step-", "newest_complete": "step-", "best": "best-"}


def build_session(
    recipe: Recipe, inputs: Inputs, build: Callable[[Callable[[], Learner]], Learner]
) -> tuple[Inputs, Batch, Learner]:
    """Builds the model, its optimizer, its loss and its metrics for `inputs`.

    `build` calls a function that makes variables, as Executor.build. Returns the data as the model
    takes them, the specs of its inputs, and the learner.

    Raises ConfigError if the functions of `recipe` do not fit each other or the data.
    """
    specs = input_specs(inputs, recipe)
    learner = build(lambda: build_learner(recipe, specs))
    inputs = fitted_to_model(inputs, recipe, learner.model)
    build_metrics(inputs, learner, recipe)
    return inputs, specs, learner


def build_parts(spec: TaskSpec, inputs: Inputs, executor: Executor) -> Parts:
    """Builds the parts of a task that trains, and checks that they fit it. All tasks call it.

    Raises a UsageError for a user's mistake.
    """
    if spec.is_chief and not spec.is_checked:
        fingerprint.log_keras_settings()
    check_replicas(spec.recipe.config, executor.replicas_per_step)
    inputs, specs, learner = build_session(spec.recipe, inputs, executor.build)
    build.check_for_strategy(
        learner, spec.recipe, spec.strategy, executor.num_replicas, spec.transfer.read_dtype
    )
    choose_compilation(learner, spec.recipe, inputs.train, is_cluster=spec.cluster is not None)
    if not spec.is_checked:
        # ParameterServerStrategy warns of a step that is traced outside of its coordinator.
        strategy = None if spec.strategy == "ps" else executor.strategy
        with memory_explained("Lower --batch_size: the first batch is checked as a whole"):
            check_batches(inputs, learner, spec.recipe, strategy)
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
    build.check_standby(checkpointer, spec.recipe.path, spec.ps_standby)
    checkpointer.on_progress = executor.on_progress
    return Parts(spec, inputs, specs, executor, learner, checkpointer)


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
    """Restores `checkpoint` on a device of this machine.

    It is newest, newest_complete, best, a step or a name. A damaged checkpoint is an error, but
    newest_complete takes the one before it.

    Raises:
        ConfigError, DataError, ModelDirError: the run has no such checkpoint, it is damaged, the
            data is missing, or the config file now defines another model.
    """
    recipe = recipe_of_run(RunFiles(model_dir).read_config())
    recipe.config.data_dir = data_dir or recipe.config.data_dir
    recipe.config.data.eval_split = split or recipe.config.data.eval_split
    recipe.config.warm_start.path = ""  # The weights come from the checkpoint.
    reader = open_evaluation(recipe, recipe.config.data.eval_split)
    executor = MirroredExecutor.on(replica_devices(1, min(1, use_gpus(None))))
    inputs, specs, learner = build_session(recipe, Inputs(reader, reader), executor.build)
    checkpointer = build_checkpointer(recipe, model_dir, inputs, learner)
    fitting = _fitting(checkpoint, checkpointer, model_dir)
    for name in reversed(fitting):
        try:
            step = checkpointer.restore_model(name).step
        except ModelDirError as error:
            if not isinstance(error.__cause__, DamagedError):
                raise
            if checkpoint != "newest_complete" or name == fitting[0]:
                has_others = len(_fitting("newest_complete", checkpointer, model_dir)) > 1
                is_advised = checkpoint == "newest" and has_others
                hint = " Type --checkpoint=newest_complete." if is_advised else ""
                raise ModelDirError(f"{error}{hint}") from error
            _log.warning("%s Using the one before it.", error)
        else:
            break
    return Restored(name, step, recipe, inputs.evaluation, executor, learner, specs)


def _fitting(wanted: str, checkpointer: Checkpointer, model_dir: str) -> list[str]:
    """The names of the checkpoints that `wanted` may mean, the oldest first; at least one."""
    names = finished_checkpoints(checkpointer.directory)
    if wanted in _KINDS:
        fitting = [name for name in names if name.startswith(_KINDS[wanted])]
    else:
        fitting = [name for name in names if wanted in (name, str(step_in(name)))]
    if not fitting:
        raise ConfigError(
            f"--checkpoint={wanted}: {model_dir} has no such checkpoint. It has "
            f"{', '.join(names) or 'none'}. Type newest, newest_complete, best, or a step."
        )
    return fitting if wanted == "newest_complete" else fitting[-1:]


def evaluate(
    model_dir: str, checkpoint: str, split: str | None = None, data_dir: str | None = None
) -> Document:
    """Returns the checkpoint's name and step, the split, its examples, and the metrics.

    Arguments and errors are as of `restore`.
    """
    restored = restore(model_dir, checkpoint, split, data_dir)
    reader, learner, executor = restored.reader, restored.learner, restored.executor
    inputs = Inputs(reader, reader)
    check_batches(inputs, learner, restored.recipe, executor.strategy)
    with data_errors_explained(inputs):
        executor.start_evaluation(learner, reader)
        metrics = executor.evaluate()
    return {
        "checkpoint": restored.name,
        "step": restored.step,
        "split": reader.split.name,
        "examples": int(metrics["loss"][1]),
        **means(metrics),
    }


def model_of_run(model_dir: str, checkpoint: str | None = None) -> keras.Model:
    """The model that the config file of a run builds, with its weights.

    They are those of the export; or those of a checkpoint, if `checkpoint` names one or nothing was
    exported. Not `keras.models.load_model`, which does not know the classes of a config file.
    """
    files = RunFiles(model_dir)
    document = files.read_config()
    recipe = recipe_of_run(document)
    recipe.config.warm_start.path = ""
    if checkpoint is None and exists(files.model):
        fingerprint.check_keras_settings(document.get("process_settings", {}), model_dir)
        specs = _input_specs(recipe, document["data_dir"])
        model = build_model(recipe, specs, is_trained=False)
        _load_weights(model, recipe, model_dir)
        return model
    restored = restore(model_dir, checkpoint or "newest")
    model = build_model(recipe, restored.specs)
    set_values(model, restored.learner)
    return model


def _input_specs(recipe: Recipe, data_dir: str) -> Batch:
    """What `parse` gives to the model; None if that is not known here, for lack of the data."""
    try:
        parse = parse_of(recipe, data_dir)
    except DataError:
        return None
    spec = tf.TensorSpec([None], tf.string)
    return tf.function(parse).get_concrete_function(spec).structured_outputs[0]


def _load_weights(model: keras.Model, recipe: Recipe, model_dir: str) -> None:
    path = RunFiles(model_dir).model
    try:
        with contextlib.ExitStack() as stack:
            local = path
            if is_s3(path):
                local = f"{stack.enter_context(scratch_dir())}/model.keras"
                object_store.download(path, local)
            model.load_weights(local)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"The weights in {path} do not fit the model that {recipe.path} builds: "
            f"{first_line(error)} Put the config file back as it was in the run."
        ) from error
    except Exception as error:  # A damaged file may raise any error.
        raise ConfigError(
            f"{path} cannot be loaded: {type(error).__name__}: {first_line(error)}. If the file is "
            f"damaged, remove {RunFiles(model_dir).result}, and start the training command of this "
            "run again with the same --model_dir: it exports anew."
        ) from error
