"""Decides which hooks a task has, and in which order they are called.

    hooks = shared_hooks(parts)                         # of a task that writes no files
    hooks = chief_hooks(parts, console, config_document)

Every task that runs the loop has a learner and a checkpointer, and restores. Only the chief saves,
writes and exports.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import keras

from data.system.files import is_s3
from strategies.base import Batch, Executor
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.config import Config, ConfigError, Recipe, flatten
from trainer.config_file import errors_explained
from trainer.hooks.base import Hook
from trainer.hooks.callbacks import Callbacks, build_callbacks
from trainer.hooks.console import Console
from trainer.hooks.digest import DigestLines
from trainer.hooks.evaluate import EarlyStop, Evaluate
from trainer.hooks.evict import evict_hooks
from trainer.hooks.export import Export
from trainer.hooks.inspect import Histograms, Profile
from trainer.hooks.notebook import NotebookBar, is_kernel
from trainer.hooks.progress import progress_writers
from trainer.hooks.report import Report
from trainer.hooks.save import CopyToStandby, KeepConfig, SaveCheckpoint
from trainer.hooks.stops import StopOnNonFinite
from trainer.hooks.tracking import build_trackers
from trainer.hooks.writers import JsonLines, Lossy, TensorBoard, Values, Writer
from trainer.inputs import Inputs, batch_at
from trainer.learner import Learner
from trainer.models import build_model
from trainer.run_files import Document, RunFiles, local_dir
from trainer.task_spec import TaskSpec

_HPARAMS = ("batch_size", "learning_rate", "optimizer", "precision", "seed", "train_steps")


@dataclass(frozen=True)
class Parts:
    """A task that trains, and its parts."""

    spec: TaskSpec
    inputs: Inputs
    input_specs: Batch
    executor: Executor
    learner: Learner
    checkpointer: Checkpointer


def shared_hooks(parts: Parts) -> list[Hook]:
    """The hooks of a task that writes no files, in the order of their calls."""
    save = _save_hook(parts, None)
    evaluation = _evaluation_hooks(parts, [], save)
    return [
        StopOnNonFinite(parts.learner.loss_scale),
        *evict_hooks(parts.learner.model, parts.executor),
        *evaluation,
        *_callback_hooks(parts, evaluation),
        save,
    ]


def chief_hooks(parts: Parts, console: Console, config_document: Document) -> list[Hook]:
    """The hooks of the chief: the shared hooks, and the hooks that write, in their order.

    `config_document` is what config.json holds.
    """
    spec, recipe, config = parts.spec, parts.spec.recipe, parts.spec.recipe.config
    appended = RunFiles(local_dir(spec.model_dir))
    lines = build_json_lines(appended.metrics, parts.inputs, parts.learner)
    json_lines = Lossy(lines, appended.metrics)
    tensorboard = TensorBoard(
        appended.tensorboard,
        hparams={**_hparams(config), "strategy": config_document["strategy"]},
        metrics=parts.learner.objective.metric_names,
    )
    lossy_tensorboard = Lossy(tensorboard, appended.tensorboard)
    hooks: list[Hook] = []

    def is_complete() -> bool:
        step = int(parts.learner.step.numpy())
        return step >= config.train_steps or any(hook.done for hook in hooks)

    trackers = build_trackers(recipe, spec.model_dir, config_document, is_complete=is_complete)
    progress = progress_writers(spec.metrics_listener, spec.model_dir, config.train_steps)
    writers: list[Writer] = [console, json_lines, lossy_tensorboard, *progress, *trackers]
    hooks += [
        StopOnNonFinite(parts.learner.loss_scale),
        *evict_hooks(parts.learner.model, parts.executor),
        *([] if is_s3(spec.model_dir) else [_keep_config_hook(parts, config_document)]),
        json_lines,
        lossy_tensorboard,
        console,
        *([NotebookBar(config.train_steps, parts.executor.pace)] if is_kernel() else []),
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
    evaluation = _evaluation_hooks(parts, writers, save, lines.read)
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
        hooks += _hooks_of_user(recipe, spec.model_dir)
    hooks.append(save)
    if spec.ps_standby:
        hooks.append(CopyToStandby(parts.executor, parts.learner, every_steps=spec.ps_standby))
    if config.export:
        specs = parts.input_specs
        export = Export(
            parts.learner,
            lambda: build_model(recipe, specs, is_trained=False),
            RunFiles(spec.model_dir).export,
            path=recipe.path,
            is_complete=is_complete,
            input_specs=specs,
            stopwatch=parts.executor.stopwatch,
        )
        hooks.append(export)
    return [*hooks, *trackers]  # Last: their end comes after the last reports.


def _hparams(config: Config) -> dict[str, bool | float | str]:
    """The fields by which TensorBoard's HParams page compares runs: some, and all that were set."""
    values, defaults = flatten(config), flatten(Config())
    shown = [n for n in values if n in _HPARAMS or values[n] != defaults.get(n)]
    kinds = (bool, int, float, str)
    return {n: v if isinstance(v := values[n], kinds) else str(v) for n in shown if n != "data_dir"}


def build_json_lines(path: str, inputs: Inputs, learner: Learner | None = None) -> JsonLines:
    """Reports at `path`. Each line has the number of skipped records, if records may be skipped.

    With a `learner` that has virtual replicas, lines of training have digests of its variables.
    """
    skipped = (inputs.records_skipped or {}).items()
    always = {split: {"records_skipped": count} for split, count in skipped}
    if learner and learner.virtual_replicas:
        return DigestLines(path, always, learner)
    return JsonLines(path, always)


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
        for method, arguments in (("__call__", 2), ("next_step", 1), ("begin", 1), ("end", 1)):
            try:
                inspect.signature(getattr(hook, method)).bind(*[None] * arguments)
            except TypeError as error:
                needed = inspect.signature(getattr(Hook, method))
                raise ConfigError(
                    f"{type(hook).__name__}.{method} of {recipe.path}: {error}. Needed is "
                    f"{method}{needed}."
                ) from None
    return hooks


def _evaluation_hooks(
    parts: Parts,
    writers: Sequence[Writer],
    save: SaveCheckpoint,
    history: Callable[[], Sequence[Values]] = list,
) -> list[Hook]:
    """The hooks that evaluate; an empty list if an evaluator task does it."""
    if parts.spec.has_evaluator:
        return []
    config = parts.spec.recipe.config
    every_steps = config.eval_every_steps
    if not every_steps and parts.spec.recipe.build_callbacks:
        every_steps = _steps_per_epoch(parts)  # As `fit` does with validation data.
    evaluate = Evaluate(
        parts.executor,
        parts.learner,
        writers,
        every_steps=every_steps,
        last_step=config.train_steps,
        best_metric=config.best_metric,
        checkpointer=save.checkpointer,
        history=history,
        save=save,
    )
    if not config.early_stopping.patience:
        return [evaluate]
    return [evaluate, EarlyStop(evaluate, config.early_stopping)]


def _callback_hooks(parts: Parts, evaluation: Sequence[Hook]) -> list[Callbacks]:
    recipe = parts.spec.recipe
    callbacks = build_callbacks(recipe)
    if not callbacks:
        return []
    hook = Callbacks(
        parts.executor,
        parts.learner,
        callbacks,
        path=recipe.path,
        steps_per_epoch=_steps_per_epoch(parts),
        last_step=recipe.config.train_steps,
        evaluate=next((hook for hook in evaluation if isinstance(hook, Evaluate)), None),
    )
    return [hook]


def _steps_per_epoch(parts: Parts) -> int:
    order = parts.inputs.train.order
    return -(-order.num_examples // order.batch_size)


def _keep_config_hook(parts: Parts, document: Document) -> KeepConfig:
    return KeepConfig(
        RunFiles(parts.spec.model_dir),
        document,
        every_steps=parts.spec.recipe.config.checkpoint_every_steps,
        last_step=parts.spec.recipe.config.train_steps,
    )


def _save_hook(parts: Parts, checkpointer: Checkpointer | None) -> SaveCheckpoint:
    return SaveCheckpoint(
        parts.executor,
        parts.learner,
        checkpointer,
        every_steps=parts.spec.recipe.config.checkpoint_every_steps,
        last_step=parts.spec.recipe.config.train_steps,
    )
