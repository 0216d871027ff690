"""From a recipe to the parts of a run: learner, checkpointer, hooks.

    learner = executor.build(lambda: build_learner(recipe))
    checkpointer = build_checkpointer(recipe, "runs/a", inputs, learner)
    hooks = shared_hooks(parts, evaluates=True)

Every task that runs the loop has all three, and restores. Only the chief saves, writes and exports.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import keras

from strategies.base import Batch, Executor
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.config import Config, ConfigError, Recipe, flatten
from trainer.config_file import errors_explained
from trainer.hooks.base import Hook
from trainer.hooks.callbacks import Callbacks, build_callbacks
from trainer.hooks.evaluate import EarlyStop, Evaluate
from trainer.hooks.export import Export
from trainer.hooks.finite import StopOnNonFinite
from trainer.hooks.inspect import Histograms, Profile
from trainer.hooks.report import Report
from trainer.hooks.save import KeepConfig, SaveCheckpoint
from trainer.hooks.writers import Console, JsonLines, Lossy, TensorBoard, Values, Writer
from trainer.inputs import Inputs, batch_at
from trainer.learner import Learner
from trainer.models import build_from_specs, check_model, is_built
from trainer.run_files import Document, RunFiles
from trainer.step.losses import PerExample, accuracy, smoothed_crossentropy
from trainer.step.optimizers import optimizer_named, supported_optimizers
from trainer.step.options import Options, ScheduleConfig, matching
from trainer.step.schedules import rate_factor
from trainer.step.warm_start import warm_start

# Options that only Learner.gradients implements.
_IN_GRADIENTS = ("micro_batches", "penalty.l1", "penalty.l2", "jit_compile")


def build_learner(recipe: Recipe, input_specs: Batch = None) -> Learner:
    """The learner of `recipe`, with the same initial weights in every process.

    A model that is not built yet is built from `input_specs`, the tensor specs of its inputs.
    """
    config = recipe.config
    keras.utils.set_random_seed(config.seed)
    model = build_model(recipe, input_specs)
    # Before averages and optimizer states that are initialised from the weights.
    origin = warm_start(model, config.warm_start) if config.warm_start.path else ""
    if config.freeze:
        _freeze(model, config.freeze)
    optimizer, decay_rate = _optimizer(recipe)
    if config.weight_decay.exclude and not decay_rate:
        raise ConfigError(
            f"config.weight_decay.exclude={config.weight_decay.exclude!r} means nothing where "
            "nothing decays. Type --config.weight_decay.rate=0.01, for example, or leave it out."
        )
    metrics = {"accuracy": accuracy} if recipe.metrics is None else recipe.metrics
    if config.best_metric not in ("loss", *metrics):
        raise ConfigError(
            f"config.best_metric={config.best_metric!r} is none of the metrics: "
            f"{', '.join(('loss', *metrics))}."
        )
    options = Options(
        clip=config.clip,
        penalty=config.penalty,
        weight_decay=dataclasses.replace(config.weight_decay, rate=decay_rate),
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
    make = partial(recipe.build_learner, config) if recipe.build_learner else Learner
    loss = _loss(recipe)
    with errors_explained(f"build_learner(config, **parts) of {recipe.path}"):
        learner = make(
            model=model,
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            batch_size=config.batch_size,
            rate_factor=factor,
            options=options,
            origin=origin,
        )
    _check_learner(learner, recipe)
    return learner


def _check_learner(learner: object, recipe: Recipe) -> None:
    if not isinstance(learner, Learner):
        raise ConfigError(
            f"build_learner() of {recipe.path} must return a trainer.learner.Learner, but returned "
            f"{type(learner).__name__}. Derive a class from it; see configs/custom_step.py."
        )
    if type(learner).gradients is Learner.gradients:
        return
    values, defaults = flatten(recipe.config), flatten(Config())
    for name in _IN_GRADIENTS:
        if values[name] != defaults[name]:
            raise ConfigError(
                f"config.{name}={values[name]} is for Learner.gradients, in whose place "
                f"{recipe.path} defines another method. Do it there, or leave {name} out."
            )
    if learner.loss_scale:
        raise ConfigError(
            f"The model of {recipe.path} computes in float16, where Learner.gradients scales the "
            "loss, but the file defines another `gradients`. Type "
            "--config.precision=mixed_bfloat16, which needs no scale."
        )


def build_model(recipe: Recipe, input_specs: Batch = None) -> keras.Model:
    """The model of `recipe`, built, in the precision that its config names.

    float32 leaves Keras' policy as it is: a file may set one.
    """
    what, config = f"build_model(config) of {recipe.path}", recipe.config
    policy = keras.config.dtype_policy()
    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    try:
        with errors_explained(what):
            model = recipe.build_model(config)
        check_model(model, what)
        if not is_built(model):
            if input_specs is None:
                raise ConfigError(f"{what} must return a built model. Give it a keras.Input.")
            build_from_specs(model, input_specs, recipe.path)
    finally:
        if config.precision != "float32":
            keras.config.set_dtype_policy(policy)
    if not model.trainable_variables:
        raise ConfigError(
            f"{what} must return a keras.Model with weights to train, but {type(model).__name__} "
            "has none. Add a layer such as keras.layers.Dense."
        )
    return model


def build_checkpointer(
    recipe: Recipe, model_dir: str, inputs: Inputs, learner: Learner, io_device: str | None = None
) -> Checkpointer:
    """The checkpointer of `model_dir`. The chief saves with it; an evaluator, only the best."""
    order = inputs.train.order
    identity = {  # Determines the example at each position. Only the same run can be resumed.
        "train data": inputs.train.split.fingerprint,
        "batch_size": order.batch_size,
        "seed": order.seed,
        "data.shuffle": order.shuffle,
        "data.lanes": order.lanes,
        "data.window_batches": order.window_batches,
    }
    return Checkpointer(
        RunFiles(model_dir).checkpoints,
        learner,
        identity,
        keep=recipe.config.keep_checkpoints,
        io_device=io_device,
    )


def build_json_lines(path: str, inputs: Inputs) -> JsonLines:
    """Reports at `path`. Each line has the number of skipped records, if records may be skipped."""
    skipped = (inputs.records_skipped or {}).items()
    return JsonLines(path, {split: {"records_skipped": count} for split, count in skipped})


@dataclass(frozen=True)
class Parts:
    """What a task trains with."""

    recipe: Recipe
    model_dir: str
    inputs: Inputs
    input_specs: Batch
    executor: Executor
    learner: Learner
    checkpointer: Checkpointer


def shared_hooks(parts: Parts, *, evaluates: bool) -> list[Hook]:
    """The hooks of a task that writes no files, in the order of their calls.

    With `evaluates` False, the cluster has an evaluator task.
    """
    evaluation = _evaluation_hooks(parts, [], None, history=list) if evaluates else []
    return [
        StopOnNonFinite(parts.learner.loss_scale),
        *evaluation,
        *_callback_hooks(parts, evaluation),
        _save_hook(parts, None),
    ]


def chief_hooks(
    parts: Parts, console: Console, config_document: Document, *, evaluates: bool
) -> list[Hook]:
    """The hooks of the chief: the shared hooks, and the hooks that write, in their order.

    `config_document` is what config.json holds.
    """
    recipe, config, files = parts.recipe, parts.recipe.config, RunFiles(parts.model_dir)
    lines = build_json_lines(files.metrics, parts.inputs)
    json_lines = Lossy(lines, files.metrics)
    tensorboard = TensorBoard(files.tensorboard)
    lossy_tensorboard = Lossy(tensorboard, files.tensorboard)
    writers: list[Writer] = [console, json_lines, lossy_tensorboard]
    hooks: list[Hook] = [
        StopOnNonFinite(parts.learner.loss_scale),
        KeepConfig(
            files,
            config_document,
            every_steps=config.checkpoint_every_steps,
            last_step=config.train_steps,
        ),
        json_lines,
        lossy_tensorboard,
        console,
        Report(
            parts.executor,
            parts.learner,
            writers,
            every_steps=config.log_every_steps,
            last_step=config.train_steps,
            order=parts.inputs.train.order,
        ),
    ]
    evaluation: list[Hook] = []
    if evaluates:
        evaluation = _evaluation_hooks(parts, writers, parts.checkpointer, history=lines.read)
    hooks += [*evaluation, *_callback_hooks(parts, evaluation)]
    if config.histogram_every_steps:
        histograms = Histograms(
            parts.learner,
            lambda: batch_at(parts.inputs.train, parts.executor.position.next_batch),
            lambda step: tensorboard.writing("train", step),
            every_steps=config.histogram_every_steps,
        )
        hooks.append(histograms)
    if config.profile_first_step:
        profile = Profile(
            f"{files.tensorboard}/train",
            first_step=config.profile_first_step,
            num_steps=config.profile_num_steps,
        )
        hooks.append(profile)
    if recipe.build_hooks:
        hooks += _hooks_of_user(recipe, parts.model_dir)
    hooks.append(_save_hook(parts, parts.checkpointer))
    if config.export:
        specs = parts.input_specs
        export = Export(
            parts.learner,
            lambda: build_model(recipe, specs),
            files.export,
            last_step=config.train_steps,
        )
        for hook in hooks:
            if isinstance(hook, (EarlyStop, Callbacks)):
                hook.to_end.append(export)
        hooks.append(export)
    return hooks


def _hooks_of_user(recipe: Recipe, model_dir: str) -> list[Hook]:
    assert recipe.build_hooks is not None
    what = f"build_hooks(config, model_dir) of {recipe.path}"
    with errors_explained(what):
        returned = recipe.build_hooks(recipe.config, model_dir)
        hooks = list(returned) if isinstance(returned, Iterable) else [returned]
    for hook in hooks:
        if isinstance(hook, keras.callbacks.Callback):
            raise ConfigError(
                f"{what} returned {type(hook).__name__}, which is a callback of Keras. Return it "
                "from `def build_callbacks(config)` instead; see docs/keras.md."
            )
        if not isinstance(hook, Hook):
            raise ConfigError(
                f"{what} must return a list of trainer.hooks.base.Hook. Received: {hook!r}."
            )
    return hooks


def _evaluation_hooks(
    parts: Parts,
    writers: Sequence[Writer],
    checkpointer: Checkpointer | None,
    *,
    history: Callable[[], Sequence[Values]],
) -> list[Hook]:
    config = parts.recipe.config
    every_steps = config.eval_every_steps
    if not every_steps and parts.recipe.build_callbacks:
        every_steps = _steps_per_epoch(parts)  # As `fit` does with validation data.
    evaluate = Evaluate(
        parts.executor,
        parts.learner,
        writers,
        every_steps=every_steps,
        last_step=config.train_steps,
        best_metric=config.best_metric,
        checkpointer=checkpointer,
        position=lambda: parts.executor.position,
    )
    if not config.early_stopping.patience:
        return [evaluate]
    early_stop = EarlyStop(
        parts.executor, evaluate, config.early_stopping, config.best_metric, history=history
    )
    return [evaluate, early_stop]


def _callback_hooks(parts: Parts, evaluation: Sequence[Hook]) -> list[Callbacks]:
    callbacks = build_callbacks(parts.recipe)
    if not callbacks:
        return []
    hook = Callbacks(
        parts.executor,
        parts.learner,
        callbacks,
        path=parts.recipe.path,
        steps_per_epoch=_steps_per_epoch(parts),
        last_step=parts.recipe.config.train_steps,
        evaluate=next((hook for hook in evaluation if isinstance(hook, Evaluate)), None),
    )
    return [hook]


def _steps_per_epoch(parts: Parts) -> int:
    order = parts.inputs.train.order
    return -(-order.num_examples // order.batch_size)


def _save_hook(parts: Parts, checkpointer: Checkpointer | None) -> SaveCheckpoint:
    return SaveCheckpoint(
        parts.executor,
        parts.learner,
        checkpointer,
        every_steps=parts.recipe.config.checkpoint_every_steps,
        last_step=parts.recipe.config.train_steps,
    )


def _freeze(model: keras.Model, pattern: str) -> None:
    # Not `model.layers`, which does not contain the layers inside a layer.
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.weights]
    found = matching("freeze", pattern, [layer.path for layer in layers])
    for layer in itertools.compress(layers, found):
        layer.trainable = False
    if not model.trainable_variables:
        raise ConfigError(
            f"config.freeze={pattern!r} is found in every layer, so that nothing would be trained. "
            "Give a pattern that leaves one."
        )


def _loss(recipe: Recipe) -> PerExample:
    smoothing = recipe.config.label_smoothing
    if recipe.loss is None:
        return smoothed_crossentropy(smoothing)
    if smoothing:
        raise ConfigError(
            f"config.label_smoothing={smoothing} is for the default loss, but {recipe.path} "
            "defines another. Smooth the labels in it, or leave label_smoothing out."
        )
    return recipe.loss


def _optimizer(recipe: Recipe) -> tuple[keras.Optimizer, float]:
    config, rate = recipe.config, recipe.config.weight_decay.rate
    if recipe.build_optimizer is not None:
        with errors_explained(f"build_optimizer(config) of {recipe.path}"):
            optimizer = recipe.build_optimizer(config)
        schedules = keras.optimizers.schedules.LearningRateSchedule
        own_schedule = isinstance(getattr(optimizer, "_learning_rate", None), schedules)
        if own_schedule and config.schedule != ScheduleConfig():
            raise ConfigError(
                f"build_optimizer() of {recipe.path} gives its optimizer a schedule, and "
                f"config.schedule is another: {config.schedule}. Give the optimizer "
                "config.learning_rate, or leave config.schedule out."
            )
        return optimizer, rate
    supported = supported_optimizers()
    if config.optimizer.lower() not in supported:
        raise ConfigError(
            f"config.optimizer={config.optimizer!r} is none of the optimizers that a name alone "
            f"can choose: {', '.join(sorted(supported))}. Use one of them, or define "
            "build_optimizer(config) in the config file."
        )
    return optimizer_named(config.optimizer.lower(), config.learning_rate, rate)
