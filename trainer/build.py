"""From a recipe to the parts of a run: learner, checkpointer, hooks.

| built | where | by whom |
| --- | --- | --- |
| learner | in the executor's scope | every task that runs the loop |
| checkpointer | anywhere | every such task; the chief alone saves |
| hooks | anywhere | by role: writers, checkpoints and export are the chief's |
"""

from collections.abc import Mapping
from typing import Any

import keras

from strategies.base import Executor
from trainer import hooks as hooks_lib
from trainer import learner as learner_lib
from trainer.checkpoint import Checkpointer
from trainer.config import Config, ConfigError, Recipe
from trainer.inputs import Inputs, batch_at, records_skipped
from trainer.learner import Learner
from trainer.writers import Console, JsonLines, TensorBoard


def build_learner(recipe: Recipe) -> Learner:
    """The model and optimizer of `recipe`, with the same initial weights wherever it is called."""
    config = recipe.config
    keras.utils.set_random_seed(config.seed)
    model = recipe.build_model(config)
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigError(
            f"build_model() of {recipe.path} must return a built keras.Model, but returned "
            f"{type(model).__name__}. Give it a keras.Input."
        )
    if recipe.build_optimizer is not None:
        optimizer = recipe.build_optimizer(config)
    else:
        optimizer = _optimizer(config)
    loss = recipe.loss or learner_lib.sparse_categorical_crossentropy
    metrics = {"accuracy": learner_lib.accuracy} if recipe.metrics is None else recipe.metrics
    if config.best_metric not in ("loss", *metrics):
        raise ConfigError(
            f"config.best_metric={config.best_metric!r} is none of the metrics: "
            f"{', '.join(('loss', *metrics))}."
        )
    return Learner(model, optimizer, loss, metrics, batch_size=config.batch_size)


def build_checkpointer(
    recipe: Recipe,
    model_dir: str,
    inputs: Inputs,
    learner: Learner,
    io_device: str | None = None,
) -> Checkpointer:
    """The checkpoints of `model_dir`; see Checkpointer."""
    return Checkpointer(
        f"{model_dir}/checkpoints",
        learner,
        _identity(inputs, recipe.config),
        keep=recipe.config.keep_checkpoints,
        io_device=io_device,
    )


def _identity(inputs: Inputs, config: Config) -> Mapping[str, Any]:
    """What decides which example comes at which position; a run goes on only if it is the same."""
    order = inputs.train.order
    return {
        "train data": inputs.train.split.fingerprint,
        "batch_size": order.batch_size,
        "seed": order.seed,
        "data.shuffle": order.shuffle,
        "data.lanes": order.lanes,
        "data.window_batches": order.window_batches,
    }


def build_json_lines(path: str, recipe: Recipe, inputs: Inputs) -> JsonLines:
    """Reports at `path`, with the records that were skipped in every line where that may be."""
    skipped = records_skipped(inputs, recipe) or {}
    always = {split: {"records_skipped": count} for split, count in skipped.items()}
    return JsonLines(path, always)


def build_hooks(
    recipe: Recipe,
    model_dir: str,
    inputs: Inputs,
    executor: Executor,
    learner: Learner,
    checkpointer: Checkpointer,
    console: Console | None,
    *,
    evaluates: bool,
) -> tuple[list[hooks_lib.Hook], hooks_lib.Evaluate | None]:
    """The hooks of a task, in the order in which they are called; with `console`, the chief's.

    Where it `evaluates`, the hook that does is returned too.
    """
    config = recipe.config
    last = config.train_steps
    writers: list[hooks_lib.Writer] = []
    hooks: list[hooks_lib.Hook] = [hooks_lib.StopOnNonFinite()]
    if console:
        json_lines = build_json_lines(f"{model_dir}/metrics.jsonl", recipe, inputs)
        tensorboard = TensorBoard(f"{model_dir}/tensorboard")
        writers = [console, json_lines, tensorboard]
        hooks += [
            json_lines,
            console,
            hooks_lib.Report(
                executor,
                learner,
                writers,
                every_steps=config.log_every_steps,
                last_step=last,
                order=inputs.train.order,
            ),
        ]
    evaluate = None
    if evaluates:
        evaluate = hooks_lib.Evaluate(
            executor,
            learner,
            writers,
            every_steps=config.eval_every_steps,
            last_step=last,
            best_metric=config.best_metric,
            checkpointer=checkpointer if console else None,
            position=lambda: executor.position,
        )
        hooks.append(evaluate)
    if console:
        if config.histogram_every_steps:
            hooks.append(
                hooks_lib.Histograms(
                    learner,
                    lambda: batch_at(inputs.train, executor.position.next_batch),
                    tensorboard.writer("train"),
                    every_steps=config.histogram_every_steps,
                )
            )
        if config.profile_first_step:
            hooks.append(
                hooks_lib.Profile(
                    f"{model_dir}/tensorboard/train",
                    first_step=config.profile_first_step,
                    num_steps=config.profile_num_steps,
                )
            )
        if recipe.build_hooks is not None:
            hooks += recipe.build_hooks(config, model_dir)
        hooks.append(
            hooks_lib.SaveCheckpoint(
                executor,
                learner,
                checkpointer,
                every_steps=config.checkpoint_every_steps,
                last_step=last,
            )
        )
        if config.export:
            hooks.append(
                hooks_lib.Export(
                    learner,
                    lambda: recipe.build_model(config),
                    f"{model_dir}/export",
                    last_step=last,
                )
            )
    return hooks, evaluate


def _optimizer(config: Config) -> keras.Optimizer:
    supported = learner_lib.supported_optimizers()
    if config.optimizer.lower() not in supported:
        raise ConfigError(
            f"config.optimizer={config.optimizer!r} is none of the optimizers that a name alone "
            f"can choose: {', '.join(sorted(supported))}. Use one of them, or define "
            "build_optimizer(config) in the config file."
        )
    return supported[config.optimizer.lower()](learning_rate=config.learning_rate)
