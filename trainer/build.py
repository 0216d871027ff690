"""From a recipe to the parts of a run: learner, checkpointer, hooks.

| built | where | by whom |
| --- | --- | --- |
| learner | in the executor's scope | every task that runs the loop |
| checkpointer | anywhere | every such task; the chief alone saves |
| hooks | anywhere | by role: writers, checkpoints and export are the chief's |
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from strategies.base import Executor
from trainer import config as config_lib
from trainer import hooks as hooks_lib
from trainer import learner as learner_lib
from trainer.checkpoint import Checkpointer
from trainer.config import Config, ConfigError, Recipe
from trainer.inputs import Inputs, batch_at, records_skipped
from trainer.learner import Learner, PerExample
from trainer.optimizers import optimizer_named, supported_optimizers
from trainer.options import Options, ScheduleConfig, matching
from trainer.schedules import rate_factor
from trainer.warm_start import warm_start
from trainer.writers import Console, JsonLines, Lossy, TensorBoard

# Options that only Learner's own gradients heed.
_IN_GRADIENTS = ("micro_batches", "penalty.l1", "penalty.l2", "jit_compile")


def build_learner(recipe: Recipe) -> Learner:
    """The model and optimizer of `recipe`, with the same initial weights wherever it is called."""
    config = recipe.config
    keras.utils.set_random_seed(config.seed)
    model = build_model(recipe)
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigError(
            f"build_model() of {recipe.path} must return a built keras.Model, but returned "
            f"{type(model).__name__}. Give it a keras.Input."
        )
    # Before what begins as the weights do: averages, and the state of some optimizers.
    origin = warm_start(model, config.warm_start) if config.warm_start.path else ""
    if config.freeze:
        _freeze(model, config.freeze)
    optimizer, weight_decay = _optimizer(recipe)
    loss = _loss(recipe)
    metrics = {"accuracy": learner_lib.accuracy} if recipe.metrics is None else recipe.metrics
    if config.best_metric not in ("loss", *metrics):
        raise ConfigError(
            f"config.best_metric={config.best_metric!r} is none of the metrics: "
            f"{', '.join(('loss', *metrics))}."
        )
    options = Options(
        clip=config.clip,
        penalty=config.penalty,
        weight_decay=dataclasses.replace(config.weight_decay, rate=weight_decay),
        ema=config.ema,
        loss_scale=config.loss_scale,
        micro_batches=config.micro_batches,
        jit_compile=config.jit_compile,
    )
    factor = None
    if config.schedule != ScheduleConfig():
        factor = rate_factor(
            config.schedule, train_steps=config.train_steps, batch_size=config.batch_size
        )
    parts = {
        "model": model,
        "optimizer": optimizer,
        "loss": loss,
        "metrics": metrics,
        "batch_size": config.batch_size,
        "rate_factor": factor,
        "options": options,
        "origin": origin,
    }
    if recipe.build_learner is None:
        return Learner(**parts)
    return _checked(recipe.build_learner(config, **parts), recipe)


def _checked(learner: object, recipe: Recipe) -> Learner:
    """`learner` if it heeds what the config says."""
    if not isinstance(learner, Learner):
        raise ConfigError(
            f"build_learner() of {recipe.path} must return a trainer.learner.Learner, but returned "
            f"{type(learner).__name__}. Derive a class from it; see configs/custom_step.py."
        )
    values, defaults = config_lib.flatten(recipe.config), config_lib.flatten(Config())
    ignored = [name for name in _IN_GRADIENTS if values[name] != defaults[name]]
    if ignored and type(learner).gradients is not Learner.gradients:
        name = ignored[0]
        raise ConfigError(
            f"config.{name}={values[name]} is for Learner.gradients, in whose place {recipe.path} "
            f"has one of its own. Do it there, or leave {name} out."
        )
    if learner.loss_scale and type(learner).gradients is not Learner.gradients:
        raise ConfigError(
            f"The model of {recipe.path} computes in float16, where Learner.gradients scales the "
            "loss, but the file has a `gradients` of its own. Type "
            "--config.precision=mixed_bfloat16, which needs no scale."
        )
    return learner


def build_model(recipe: Recipe) -> Any:
    """The model of `recipe`, in the precision that its config names.

    float32 leaves Keras' policy as it is: a file may set one.
    """
    if recipe.config.precision == "float32":
        return recipe.build_model(recipe.config)
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(recipe.config.precision)
    try:
        return recipe.build_model(recipe.config)
    finally:
        keras.config.set_dtype_policy(policy)


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
    hooks: list[hooks_lib.Hook] = [hooks_lib.StopOnNonFinite(learner.loss_scale)]
    if console:
        path = f"{model_dir}/metrics.jsonl"
        lines = build_json_lines(path, recipe, inputs)
        json_lines = Lossy(lines, path)
        tensorboard = TensorBoard(f"{model_dir}/tensorboard")
        lossy_tensorboard = Lossy(tensorboard, f"{model_dir}/tensorboard")
        writers = [console, json_lines, lossy_tensorboard]
        hooks += [
            json_lines,
            lossy_tensorboard,
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
    early_stop = None
    if evaluate and config.early_stopping.patience:
        early_stop = hooks_lib.EarlyStop(
            executor,
            evaluate,
            config.early_stopping,
            config.best_metric,
            history=lines.read if console else lambda: [],
        )
        hooks.append(early_stop)
    if console:
        if config.histogram_every_steps:
            hooks.append(
                hooks_lib.Histograms(
                    learner,
                    lambda: batch_at(inputs.train, executor.position.next_batch),
                    lambda step: tensorboard.writing("train", step),
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
            checkpointer if console else None,
            every_steps=config.checkpoint_every_steps,
            last_step=last,
        )
    )
    if console and config.export:
        export = hooks_lib.Export(
            learner,
            lambda: build_model(recipe),
            f"{model_dir}/export",
            last_step=last,
        )
        hooks.append(export)
        if early_stop:
            early_stop.on_stop(export.end_at)
    return hooks, evaluate


def _freeze(model: keras.Model, pattern: str) -> None:
    """Layers in whose path `pattern` is found are not trained."""
    # Not `model.layers`: those are not the layers of its layers. Of these, those with weights.
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.weights]
    found = matching("freeze", pattern, [layer.path for layer in layers])
    for layer, is_frozen in zip(layers, found, strict=True):
        if is_frozen:
            layer.trainable = False
    if not model.trainable_variables:
        raise ConfigError(
            f"config.freeze={pattern!r} is found in every layer, so that nothing would be trained. "
            "Give a pattern that leaves one."
        )


def _loss(recipe: Recipe) -> PerExample:
    smoothing = recipe.config.label_smoothing
    if recipe.loss is None:
        return learner_lib.smoothed_crossentropy(smoothing)
    if smoothing:
        raise ConfigError(
            f"config.label_smoothing={smoothing} is for the default loss, but {recipe.path} has "
            "one of its own. Smooth the labels in it, or leave label_smoothing out."
        )
    return recipe.loss


def _optimizer(recipe: Recipe) -> tuple[keras.Optimizer, float]:
    """The optimizer, and the rate of the weight decay that goes with it."""
    config = recipe.config
    rate = config.weight_decay.rate
    if recipe.build_optimizer is not None:
        optimizer = recipe.build_optimizer(config)
        schedules = keras.optimizers.schedules.LearningRateSchedule
        own_schedule = isinstance(getattr(optimizer, "_learning_rate", None), schedules)
        if own_schedule and config.schedule != ScheduleConfig():
            raise ConfigError(
                f"build_optimizer() of {recipe.path} gives its optimizer a schedule of its own, "
                f"and config.schedule is another: {config.schedule}. Give the optimizer "
                "config.learning_rate, or leave config.schedule out."
            )
        _check_exclusions(config, rate)
        return optimizer, rate
    supported = supported_optimizers()
    if config.optimizer.lower() not in supported:
        raise ConfigError(
            f"config.optimizer={config.optimizer!r} is none of the optimizers that a name alone "
            f"can choose: {', '.join(sorted(supported))}. Use one of them, or define "
            "build_optimizer(config) in the config file."
        )
    optimizer, rate = optimizer_named(config.optimizer.lower(), config.learning_rate, rate)
    _check_exclusions(config, rate)
    return optimizer, rate


def _check_exclusions(config: Config, rate: float) -> None:
    if config.weight_decay.exclude and not rate:
        raise ConfigError(
            f"config.weight_decay.exclude={config.weight_decay.exclude!r} means nothing where "
            "nothing decays. Type --config.weight_decay.rate=0.01, for example, or leave it out."
        )
