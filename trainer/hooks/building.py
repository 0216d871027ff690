"""Decides which hooks a task has, and in which order they are called.

    hooks = shared_hooks(parts)                         # of a task that writes no files
    hooks = chief_hooks(parts, console, config_document)

Every task that runs the loop has a learner and a checkpointer, and restores. Only the chief saves,
writes and exports.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.system.files import is_s3
from strategies.base import Batch, Executor
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.config import Config, ConfigError, Recipe, flatten
from trainer.hooks.base import Hook, built_by_user
from trainer.hooks.callbacks import Callbacks, build_callbacks
from trainer.hooks.console import Console, NotebookBar, is_kernel
from trainer.hooks.digest import DigestLines
from trainer.hooks.evaluate import Evaluate
from trainer.hooks.export import Export
from trainer.hooks.inspect import Histograms, Profile
from trainer.hooks.progress import progress_writers
from trainer.hooks.report import Report
from trainer.hooks.save import CopyToStandby, KeepConfig, SaveCheckpoint
from trainer.hooks.stops import StopOnNonFinite
from trainer.hooks.tracking import build_trackers
from trainer.hooks.writers import JsonLines, TensorBoard, Values, Writer
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


def shared_hooks(
    parts: Parts,
    *,
    checkpointer: Checkpointer | None = None,
    writing: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
    history: Callable[[], Sequence[Values]] = list,
    before_save: Sequence[Hook] = (),
) -> list[Hook]:
    """The hooks that every task has, in the order of their calls.

    The other arguments are the chief's: its checkpointer; its hooks that write reports, and their
    writers; a function that returns the reports so far; and its hooks that precede a save.
    """
    config, order = parts.spec.recipe.config, parts.inputs.train.order
    steps_per_epoch = -(-order.num_examples // order.batch_size)
    save = SaveCheckpoint(
        parts.executor,
        parts.learner,
        checkpointer,
        every_steps=config.checkpoint_every_steps,
        last_step=config.train_steps,
    )
    hooks: list[Hook] = [StopOnNonFinite(parts.learner.loss_scale)]
    # Before reports, evaluations and checkpoints, which must not see the ids that Evict removes.
    hooks += parts.learner.tables.hooks(parts.executor) if parts.learner.tables else []
    hooks += writing
    evaluate = None
    if not parts.spec.has_evaluator:
        every_steps = config.eval_every_steps
        if not every_steps and parts.spec.recipe.build_callbacks:
            every_steps = steps_per_epoch  # As `fit` does with validation data.
        evaluate = Evaluate(
            parts.executor,
            parts.learner,
            writers,
            every_steps=every_steps,
            last_step=config.train_steps,
            best_metric=config.best_metric,
            checkpointer=checkpointer,
            history=history,
            save=save,
            early_stopping=config.early_stopping,
        )
        hooks.append(evaluate)
    if callbacks := build_callbacks(parts.spec.recipe):
        hook = Callbacks(
            parts.executor,
            parts.learner,
            callbacks,
            path=parts.spec.recipe.path,
            steps_per_epoch=steps_per_epoch,
            last_step=config.train_steps,
            evaluate=evaluate,
            checkpointer=parts.checkpointer,
        )
        hooks.append(hook)
    return [*hooks, *before_save, save]


def chief_hooks(parts: Parts, console: Console, config_document: Document) -> list[Hook]:
    """The hooks of the chief, in the order of their calls. config.json has `config_document`."""
    spec, recipe, config = parts.spec, parts.spec.recipe, parts.spec.recipe.config
    appended = RunFiles(local_dir(spec.model_dir))
    json_lines = build_json_lines(appended.metrics, parts.inputs, parts.learner)
    tensorboard = TensorBoard(
        appended.tensorboard,
        hparams={**_hparams(config), "strategy": config_document["strategy"]},
        metrics=parts.learner.objective.metric_names,
    )
    hooks: list[Hook] = []

    def is_complete() -> bool:
        step = int(parts.learner.step.numpy())
        return step >= config.train_steps or any(hook.done for hook in hooks)

    trackers = build_trackers(recipe, spec.model_dir, config_document, is_complete=is_complete)
    progress = progress_writers(spec.metrics_listener, spec.model_dir, config.train_steps)
    writers: list[Writer] = [console, json_lines, tensorboard, *progress, *trackers]
    writing: list[Hook] = []
    if not is_s3(spec.model_dir):
        keep_config = KeepConfig(
            RunFiles(spec.model_dir),
            config_document,
            every_steps=config.checkpoint_every_steps,
            last_step=config.train_steps,
        )
        writing.append(keep_config)
    writing += [json_lines, tensorboard, console]
    if is_kernel():
        writing.append(NotebookBar(config.train_steps, parts.executor.pace))
    report = Report(
        parts.executor,
        parts.learner,
        writers,
        every_steps=config.log_every_steps,
        last_step=config.train_steps,
        order=parts.inputs.train.order,
    )
    before_save: list[Hook] = []
    if config.histogram_every_steps:
        histograms = Histograms(
            parts.learner,
            lambda: batch_at(parts.inputs.train, parts.executor.position.next_batch),
            lambda step: tensorboard.writing("train", step),
            every_steps=config.histogram_every_steps,
        )
        before_save.append(histograms)
    if config.profile_first_step:
        profile = Profile(
            f"{appended.tensorboard}/train",
            first_step=config.profile_first_step,
            num_steps=config.profile_num_steps,
        )
        before_save.append(profile)
    if recipe.build_hooks:
        before_save += _hooks_of_user(recipe, spec.model_dir)
    hooks += shared_hooks(
        parts,
        checkpointer=parts.checkpointer,
        writing=[*writing, report],
        writers=writers,
        history=json_lines.read,
        before_save=before_save,
    )
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
    return [*hooks, *progress, *trackers]  # Last: their end comes after the last reports.


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
    hooks = built_by_user(what, recipe.build_hooks, recipe.config, model_dir)
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise ConfigError(
                f"{what} must return a list of trainer.hooks.base.Hook. Received: {hook!r}. "
                "Return a callback of Keras from `def build_callbacks(config)`; see docs/keras.md."
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
