"""From a recipe to the parts of a run: learner, checkpointer, hooks.

    learner = executor.build(lambda: build_learner(recipe))
    checkpointer = build_checkpointer(recipe, "runs/a", inputs, learner)
    hooks = shared_hooks(parts, evaluates=True)

Every task that runs the loop has all three, and restores. Only the chief saves, writes and exports.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import keras

from data.system.files import is_s3
from strategies.base import Batch, Executor
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.warm_start import warm_start
from trainer.config import Config, ConfigError, Recipe, config_document, flatten
from trainer.config_file import errors_explained
from trainer.hooks.base import Hook
from trainer.hooks.callbacks import Callbacks, build_callbacks
from trainer.hooks.console import Console
from trainer.hooks.evaluate import EarlyStop, Evaluate
from trainer.hooks.evict import evict_hooks
from trainer.hooks.export import Export
from trainer.hooks.finite import StopOnNonFinite
from trainer.hooks.hparams import hparams_of
from trainer.hooks.inspect import Histograms, Profile
from trainer.hooks.notebook import notebook_bars
from trainer.hooks.report import Report
from trainer.hooks.save import CopyToStandby, KeepConfig, SaveCheckpoint
from trainer.hooks.trackers.building import build_trackers
from trainer.hooks.writers import JsonLines, Lossy, TensorBoard, Values, Writer
from trainer.inputs import Inputs, batch_at
from trainer.learner import Learner
from trainer.models import (
    build_from_specs,
    check_model,
    declared_inputs,
    has_own_code,
    is_built,
    names_from_zero,
)
from trainer.run_files import Document, RunFiles, local_dir
from trainer.step.advice import advice
from trainer.step.keras_losses import KerasLoss, is_keras
from trainer.step.keras_metrics import KerasMetrics, split_metrics
from trainer.step.layer_options import Use, check_layers
from trainer.step.losses import PerExample, accuracy, smoothed_crossentropy
from trainer.step.model_loss import ModelLoss, overrides
from trainer.step.optimizers import (
    Adopted,
    adopt,
    has_schedule,
    made_optimizer,
    optimizer_named,
    supported_optimizers,
)
from trainer.step.options import (
    ClipConfig,
    EmaConfig,
    LossScaleConfig,
    Options,
    ScheduleConfig,
    WeightDecayConfig,
    matching,
)
from trainer.step.schedules import rate_factor

# Settings that an optimizer of Keras may have, too.
Group = TypeVar("Group", ClipConfig, WeightDecayConfig, EmaConfig, LossScaleConfig)

# Options that only Learner.gradients implements.
_IN_GRADIENTS = ("micro_batches", "penalty.l1", "penalty.l2", "jit_compile", "class_weight")


def check_for_strategy(
    learner: Learner,
    recipe: Recipe,
    *,
    strategy: str,
    num_workers: int,
    read_dtype: str,
) -> None:
    """Raises ConfigError if `learner`, of `recipe`, cannot train as the flags say."""
    config = recipe.config
    check_layers(learner.model, recipe.path, Use(strategy, num_workers, config))
    if config.loss_scale != LossScaleConfig() and not learner.loss_scale:
        raise ConfigError(
            f"config.loss_scale={config.loss_scale} means nothing to the model of {recipe.path}, "
            "which does not compute in float16. Type --config.precision=mixed_float16, or leave it "
            "out."
        )
    if config.complete_checkpoint_every > 1 and not learner.tables:
        raise ConfigError(
            f"config.complete_checkpoint_every={config.complete_checkpoint_every}: the model of "
            f"{recipe.path} has no ShardedEmbedding, so that all checkpoints are complete. Leave "
            "it out."
        )
    if strategy == "ps" and config.data.prefetch_batches:
        learner.notes.append(
            f"config.data.prefetch_batches={config.data.prefetch_batches} has no effect under "
            "--strategy=ps: a worker reads the batches of its ticket, and none ahead."
        )
    if read_dtype != "float32" and learner.overrides_gradients:
        raise ConfigError(
            f"--read_dtype={read_dtype}: the Learner of {recipe.path} overrides `gradients`, and "
            "reads its variables itself. Leave the flag out."
        )


def check_standby(checkpointer: Checkpointer, path: str, every_steps: int) -> None:
    """Raises ConfigError if --ps_standby=`every_steps` cannot copy the state of `path`'s model.

    The servers copy variables: a table of dynamic ids, or a lookup table that changes, is none.
    """
    if every_steps and not checkpointer.variables:
        raise ConfigError(
            f"--ps_standby={every_steps}: the model of {path} has state that parameter servers "
            "cannot copy to each other: a ShardedEmbedding with dynamic ids (rows=None), or a "
            "lookup table that changes. Leave the flag out, and save more often: "
            f"--config.checkpoint_every_steps={every_steps}."
        )


@names_from_zero()
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
    adopted = _optimizer(recipe, model)
    options = _options(config, adopted)
    if config.weight_decay.exclude and not options.weight_decay.rate:
        raise ConfigError(
            f"config.weight_decay.exclude={config.weight_decay.exclude!r} means nothing where "
            "nothing decays. Type --config.weight_decay.rate=0.01, for example, or leave it out."
        )
    loss = _loss(recipe, model)
    functions, keras_metrics = _metrics(recipe, model)
    factor = None
    if config.schedule != ScheduleConfig():
        factor = rate_factor(
            config.schedule, train_steps=config.train_steps, batch_size=config.batch_size
        )
    make = partial(recipe.build_learner, config) if recipe.build_learner else Learner
    with errors_explained(f"build_learner(config, **parts) of {recipe.path}"):
        learner = make(
            model=model,
            optimizer=adopted.optimizer,
            loss=loss,
            metrics=functions,
            keras_metrics=keras_metrics,
            batch_size=config.batch_size,
            rate_factor=factor,
            options=options,
            origin=origin,
        )
    _check_learner(learner, recipe)
    learner.notes += [*adopted.notes, *advice(model, recipe.loss, loss, recipe.path)]
    return learner


def _options(config: Config, adopted: Adopted) -> Options:
    """The options of `config`, with the settings that the user gave to the optimizer instead."""
    clip = _merged("clip", config.clip, adopted.clip)
    clip.check()
    return Options(
        clip=clip,
        penalty=config.penalty,
        weight_decay=_merged("weight_decay", config.weight_decay, adopted.weight_decay),
        ema=_merged("ema", config.ema, adopted.ema),
        loss_scale=_merged("loss_scale", config.loss_scale, adopted.loss_scale),
        micro_batches=config.micro_batches,
        jit_compile=config.jit_compile is True,
        class_weight=config.class_weight,
        marks_changed_rows=config.complete_checkpoint_every > 1,
    )


def _merged(name: str, ours: Group, of_optimizer: Group) -> Group:
    default, changes = vars(type(ours)()), {}
    for key, value in vars(of_optimizer).items():
        if value in (default[key], vars(ours)[key]):
            continue
        if vars(ours)[key] != default[key]:
            raise ConfigError(
                f"The optimizer has a setting for config.{name}.{key}, {value}, and the config has "
                f"another: {vars(ours)[key]}. Leave one of them out."
            )
        changes[key] = value
    return dataclasses.replace(ours, **changes)


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
        if values[name] and values[name] != defaults[name]:
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


def build_model(
    recipe: Recipe, input_specs: Batch = None, *, is_trained: bool = True
) -> keras.Model:
    """The model of `recipe`, built, in the precision that its config names.

    Its names are the same at each call, in each process. If `is_trained`, layers that `call` uses
    only with training=True have weights, too; otherwise it is the model as it predicts.

    float32 leaves Keras' policy as it is: a file may set one.
    """
    what, config = f"build_model(config) of {recipe.path}", recipe.config
    policy = keras.config.dtype_policy()
    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    try:
        with names_from_zero():
            with errors_explained(what):
                model = recipe.build_model(config)
            check_model(model, what)
            declared = declared_inputs(model)
            if declared is None and not is_built(model):
                if input_specs is None:
                    raise ConfigError(f"{what} must return a built model. Give it a keras.Input.")
                build_from_specs(model, input_specs, recipe.path)
            # Layers of Keras use all their weights in both modes.
            if is_trained and has_own_code(model) and not is_built(model):
                specs = input_specs if declared is None else declared
                build_from_specs(model, specs, recipe.path, training=True)
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
    recipe: Recipe,
    model_dir: str,
    inputs: Inputs,
    learner: Learner,
    io_device: str | None = None,
    *,
    is_shared: bool = False,
    is_evaluator: bool = False,
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
        config=config_document(recipe.config),
        io_device=io_device,
        is_shared=is_shared,
        complete_every=recipe.config.complete_checkpoint_every,
        is_evaluator=is_evaluator,
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
    save = _save_hook(parts, None)
    evaluation = _evaluation_hooks(parts, [], save, history=list) if evaluates else []
    return [
        StopOnNonFinite(parts.learner.loss_scale),
        *evict_hooks(parts.learner.model, parts.executor),
        *evaluation,
        *_callback_hooks(parts, evaluation),
        save,
    ]


def chief_hooks(
    parts: Parts,
    console: Console,
    config_document: Document,
    progress: Sequence[Writer] = (),
    *,
    evaluates: bool,
    standby_every_steps: int = 0,
) -> list[Hook]:
    """The hooks of the chief: the shared hooks, and the hooks that write, in their order.

    `config_document` is what config.json holds. `progress` gets all reports, too. Parameter servers
    copy their state to each other every `standby_every_steps`; 0 is never.
    """
    recipe, config, files = parts.recipe, parts.recipe.config, RunFiles(parts.model_dir)
    appended = RunFiles(local_dir(parts.model_dir))
    lines = build_json_lines(appended.metrics, parts.inputs)
    json_lines = Lossy(lines, appended.metrics)
    tensorboard = TensorBoard(
        appended.tensorboard,
        hparams={**hparams_of(config), "strategy": config_document["strategy"]},
        metrics=parts.learner.objective.metric_names,
    )
    lossy_tensorboard = Lossy(tensorboard, appended.tensorboard)
    hooks: list[Hook] = []
    step = parts.learner.step
    trackers = build_trackers(
        recipe,
        parts.model_dir,
        config_document,
        is_complete=lambda: (
            int(step.numpy()) >= config.train_steps or any(hook.done for hook in hooks)
        ),
    )
    writers: list[Writer] = [console, json_lines, lossy_tensorboard, *progress, *trackers]
    hooks += [
        StopOnNonFinite(parts.learner.loss_scale),
        *evict_hooks(parts.learner.model, parts.executor),
        *([] if is_s3(parts.model_dir) else [_keep_config_hook(parts, config_document)]),
        json_lines,
        lossy_tensorboard,
        console,
        *notebook_bars(config.train_steps, parts.executor.pace),
        *progress,
        Report(
            parts.executor,
            parts.learner,
            writers,
            every_steps=config.log_every_steps,
            last_step=config.train_steps,
            order=parts.inputs.train.order,
        ),
    ]
    save = _save_hook(parts, parts.checkpointer)
    evaluation: list[Hook] = []
    if evaluates:
        evaluation = _evaluation_hooks(parts, writers, save, history=lines.read)
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
            f"{appended.tensorboard}/train",
            first_step=config.profile_first_step,
            num_steps=config.profile_num_steps,
        )
        hooks.append(profile)
    if recipe.build_hooks:
        hooks += _hooks_of_user(recipe, parts.model_dir)
    hooks.append(save)
    if standby_every_steps:
        hooks.append(
            CopyToStandby(
                every_steps=standby_every_steps, executor=parts.executor, learner=parts.learner
            )
        )
    if config.export:
        specs = parts.input_specs
        export = Export(
            parts.learner,
            lambda: build_model(recipe, specs, is_trained=False),
            files.export,
            path=recipe.path,
            input_specs=specs,
            last_step=config.train_steps,
            stopwatch=parts.executor.stopwatch,
        )
        for hook in hooks:
            if isinstance(hook, (EarlyStop, Callbacks)):
                hook.to_end.append(export)
        hooks.append(export)
    return [*hooks, *trackers]  # Last: their end comes after the last reports.


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
    save: SaveCheckpoint,
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
        checkpointer=save.checkpointer,
        position=lambda: parts.executor.position,
        history=history,
        save=save,
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


def _keep_config_hook(parts: Parts, document: Document) -> KeepConfig:
    return KeepConfig(
        RunFiles(parts.model_dir),
        document,
        every_steps=parts.recipe.config.checkpoint_every_steps,
        last_step=parts.recipe.config.train_steps,
    )


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


def _loss(recipe: Recipe, model: keras.Model) -> PerExample | KerasLoss | ModelLoss:
    smoothing = recipe.config.label_smoothing
    if overrides(model, "compute_loss"):
        return _loss_of_model(recipe, model)
    if recipe.loss is None:
        _refuse_loss_weights(recipe, "the default loss")
        return smoothed_crossentropy(smoothing)
    if smoothing:
        raise ConfigError(
            f"config.label_smoothing={smoothing} is for the default loss, but {recipe.path} "
            "defines another. Smooth the labels in it, or leave label_smoothing out."
        )
    if is_keras(recipe.loss):
        return KerasLoss(recipe.loss, recipe.loss_weights)
    if not callable(recipe.loss):
        raise ConfigError(
            f"loss of {recipe.path} is {recipe.loss!r}, but must be a name of keras.losses, an "
            "object of it, a function of (labels, outputs), or a list or dict of these by output."
        )
    _refuse_loss_weights(recipe, "a function")
    return recipe.loss


def _loss_of_model(recipe: Recipe, model: keras.Model) -> ModelLoss:
    given = {
        "loss": recipe.loss is not None,
        "loss_weights": recipe.loss_weights is not None,
        "config.label_smoothing": bool(recipe.config.label_smoothing),
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{type(model).__name__} of {recipe.path} overrides compute_loss(), which is the loss, "
            f"and {', '.join(names)} would be ignored. Leave one of them out."
        )
    return ModelLoss(model)


def _refuse_loss_weights(recipe: Recipe, loss: str) -> None:
    if recipe.loss_weights is not None:
        raise ConfigError(
            f"loss_weights of {recipe.path} are for several losses, a list or dict, but the loss "
            f"is {loss}. Leave loss_weights out."
        )


def _metrics(
    recipe: Recipe, model: keras.Model
) -> tuple[Mapping[str, PerExample], KerasMetrics | None]:
    """The metrics that are functions of each example, by name, and the metrics of Keras."""
    metrics = _default_metrics(recipe.loss) if recipe.metrics is None else recipe.metrics
    names = getattr(model, "output_names", None) or ()
    functions, others = split_metrics("metrics", metrics, names)
    unweighted, weighted = split_metrics("weighted_metrics", recipe.weighted_metrics or [], names)
    if unweighted:
        raise ConfigError(
            f"weighted_metrics of {recipe.path} has functions by name, {', '.join(unweighted)}, "
            "which get no weights. Give a list: weighted_metrics = [function, ...]."
        )
    return functions, KerasMetrics(others, weighted) if others or weighted else None


def _default_metrics(loss: object) -> object:
    """Accuracy for classes, nothing for numbers."""
    if not is_keras(loss):
        return {"accuracy": accuracy}
    name = getattr(loss, "__name__", loss if isinstance(loss, str) else type(loss).__name__)
    is_of_classes = "crossentropy" in name.lower() or name == "ce"
    return ["accuracy"] if is_of_classes else []


def _optimizer(recipe: Recipe, model: keras.Model) -> Adopted:
    config = recipe.config
    if recipe.build_optimizer is None:
        supported = supported_optimizers()
        if config.optimizer.lower() not in supported:
            raise ConfigError(
                f"config.optimizer={config.optimizer!r} is none of the optimizers that a name "
                f"alone can choose: {', '.join(sorted(supported))}. Use one of them, or define "
                "build_optimizer(config) in the config file."
            )
        rate = config.weight_decay.rate
        optimizer, rate = optimizer_named(config.optimizer.lower(), config.learning_rate, rate)
        return Adopted(optimizer, weight_decay=WeightDecayConfig(rate=rate))
    name = f"build_optimizer(config) of {recipe.path}"
    with errors_explained(name):
        made = recipe.build_optimizer(config)
    optimizer = made_optimizer(made, name, config.learning_rate)
    if has_schedule(optimizer) and config.schedule != ScheduleConfig():
        raise ConfigError(
            f"{name} has a schedule, and config.schedule is another: {config.schedule}. Give the "
            "optimizer config.learning_rate, or leave config.schedule out."
        )
    return adopt(optimizer, model.trainable_variables)
