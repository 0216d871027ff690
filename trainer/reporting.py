"""The reports of a task on its run: by hooks, on the console, in config.json and in result.json.

files.write_config(config_document(parts))
hooks, console = hooks_of(parts, recorder, saved)
with failure_recorded(parts, started), uploading(parts):
...     # Train.
exit_code = record_end(parts, hooks, console, step, started)
"""

import contextlib
import dataclasses
import json
import logging
import platform
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from data.system.errors import TrainerError
from data.system.files import absolute as absolute_path
from data.system.files import shown
from strategies.lost_peers import loss_of
from strategies.step_errors import DataFaultError
from trainer.batch_checks import length_notes
from trainer.checkpoints.marks import Saved
from trainer.config import changed_fields, data_dir, overridden_fields, to_json
from trainer.config_file import absolute
from trainer.exit_codes import EXIT_BUG, EXIT_DONE, EXIT_RESTART, first_line
from trainer.guards.fingerprint import process_settings
from trainer.hooks.base import CatchUp, Hook
from trainer.hooks.building import Parts, chief_hooks, shared_hooks
from trainer.hooks.console import Console
from trainer.hooks.export import export_notes
from trainer.hooks.stops import StopIfReplaced
from trainer.inputs import data_errors_explained
from trainer.run_files import Document, RunFiles, metric_words
from trainer.run_record.recorder import Recorder
from trainer.run_record.report_upload import uploading_reports

log = logging.getLogger(__name__)


def config_document(parts: Parts) -> Document:
    """The contents of config.json, but for the settings of the all-reduce."""
    spec, inputs, config = parts.spec, parts.inputs, parts.spec.recipe.config
    return {
        "strategy": spec.strategy,
        "recipe": absolute(spec.recipe.path),
        "data_dir": absolute_path(data_dir(config)),
        "config": json.loads(to_json(config)),
        "changed": overridden_fields(spec.recipe),
        "best_is_lowest": parts.learner.objective.is_lower_better(config.best_metric),
        **vars(spec.transfer),
        "flags": list(spec.flags),
        "cluster": None if spec.cluster is None else json.loads(spec.cluster.tf_config()),
        "train_examples": inputs.train.split.num_examples,
        "eval_examples": inputs.evaluation.split.num_examples,
        "records_skipped": inputs.records_skipped,
        "host": platform.node(),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
        "process_settings": process_settings(),
    }


def hooks_of(
    parts: Parts, recorder: Recorder, saved: Saved | None
) -> tuple[list[Hook], Console | None]:
    """The hooks of a task that trains, and the console of the chief, which says what is trained."""
    spec, console = parts.spec, None
    if spec.is_chief:
        steps = spec.recipe.config.train_steps
        console = Console(steps, parts.executor.pace, is_quiet=spec.is_quiet)
        _say_beginning(parts, console, saved)
        hooks = chief_hooks(parts, console, config_document(parts))
    else:
        hooks = shared_hooks(parts)
    hooks = [recorder, *hooks]
    if spec.is_chief and spec.generation is not None:
        hooks.insert(0, StopIfReplaced(spec.model_dir, spec.generation))
    if saved:  # The former process may have ended at that step before it called them.
        hooks.append(CatchUp(tuple(hooks)))
    return hooks, console


def _say_beginning(parts: Parts, console: Console, saved: Saved | None) -> None:
    spec, inputs, config = parts.spec, parts.inputs, parts.spec.recipe.config
    num_epochs = config.train_steps * config.batch_size / inputs.train.split.num_examples
    if spec.is_verbose:
        console.say(f"config {spec.recipe.path}: {to_json(config)}")
    console.say(
        f"{spec.strategy}: {parts.executor.num_replicas} replica(s), batch {config.batch_size:,}, "
        f"{config.train_steps:,} steps ({num_epochs:,.1f} epochs)"
    )
    console.say(
        f"{data_dir(config)}: {inputs.train.split.num_examples:,} training and "
        f"{inputs.evaluation.split.num_examples:,} evaluation examples"
    )
    console.say(
        f"{spec.recipe.path}: {parts.learner.model.count_params():,} parameters, "
        f"{type(parts.learner.optimizer).__name__}; the whole config is in "
        f"{shown(RunFiles(spec.model_dir).config)}"
    )
    if inputs.note:
        console.say(inputs.note)
    if spec.has_evaluator:
        console.say("the evaluator task evaluates; this one does not")
    if spec.is_verbose and parts.executor.placement:
        console.say(parts.executor.placement)
    if all_reduce := RunFiles(spec.model_dir).recorded("all_reduce"):
        items = ", ".join(f"{name} {value:g}" for name, value in all_reduce.items())
        console.say(f"all-reduce: {items}")
    if saved and saved.step:
        console.say(f"resuming from step {saved.step:,}")
        if changed := changed_fields(saved.config, config):
            console.say(f"changed since that step: {changed}")
    elif parts.learner.origin:
        console.say(parts.learner.origin)
    notes = export_notes(parts.learner.model, spec.recipe.path) if config.export else []
    notes += length_notes(inputs, spec.recipe.path)
    for note in [*parts.learner.notes, *notes]:
        console.say(f"note: {note}")


@contextlib.contextmanager
def uploading(parts: Parts) -> Iterator[None]:
    """Uploads reports while the run writes them, if --model_dir is at s3://."""
    if not parts.spec.is_chief:
        yield
        return
    lines = "metrics.jsonl"
    with uploading_reports(parts.spec.model_dir, [lines, "tensorboard"], resumes=lines) as sync:
        parts.checkpointer.before_mark = sync
        yield


@contextlib.contextmanager
def failure_recorded(parts: Parts, started: float) -> Iterator[None]:
    """Writes an error to result.json, with the file and offset if the data caused it.

    On leaving, also finishes a checkpoint that is being written.
    """
    try:
        try:
            yield
        except DataFaultError as error:
            with data_errors_explained(parts.inputs):
                raise error
    except BaseException as error:
        is_lost = loss_of(error) is not None
        exit_code = error.exit_code if isinstance(error, TrainerError) else EXIT_BUG
        failed = {
            "step": None if is_lost else int(parts.learner.step.numpy()),
            "seconds": round(time.monotonic() - started, 3),
            "exit_code": EXIT_RESTART if is_lost else exit_code,
            "why": first_line(error),
        }
        # If the write fails, the run ends as before. A worker that fails also writes the reason:
        # the chief knows only that the worker is lost.
        files = RunFiles(parts.spec.model_dir)
        if not is_lost or (parts.spec.is_chief and files.read_result() is None):
            files.write_result(failed)
        raise
    finally:
        parts.checkpointer.wait()


def record_end(
    parts: Parts, hooks: Sequence[Hook], console: Console | None, step: int, started: float
) -> int:
    """Writes result.json; returns the exit code, the same in all tasks that run the loop."""
    spec, config, executor = parts.spec, parts.spec.recipe.config, parts.executor
    stopped_early = next((hook.done for hook in hooks if hook.done), "")
    is_complete = step >= config.train_steps or bool(stopped_early)
    failures = [hook.failure for hook in hooks if hook.failure]
    exit_code = max((hook.failure_exit_code for hook in hooks if hook.failure), default=EXIT_DONE)
    if not is_complete:
        exit_code = EXIT_RESTART
    if spec.is_chief and not parts.checkpointer.has_saved(step):
        failures.insert(0, f"Step {step:,} could not be saved")
        exit_code = EXIT_RESTART
    reason = (stopped_early or "done") if is_complete else "asked to stop"
    result: dict[str, Any] = {"eval": {}}  # JSON values.
    for hook in hooks:
        result |= hook.result()
    result |= {
        "step": step,
        "examples": executor.position.num_examples(parts.inputs.train.order),
        "seconds": round(time.monotonic() - started, 3),
        "exit_code": exit_code,
        "why": "; ".join(failures) or reason,
    }
    if stopped_early:
        result["stopped_early_by"] = dataclasses.asdict(config.early_stopping)
    if parts.inputs.records_skipped is not None:
        result["records_skipped"] = parts.inputs.records_skipped
    if skips := executor.position.skipped:
        result |= {"nan_recoveries": len(skips), "examples_skipped": sum(skips)}
    result |= {name: dict(by_worker) for name, by_worker in executor.worker_stats().items()}
    if spec.is_chief and (failure := RunFiles(spec.model_dir).write_result(result)):
        failures.append(failure)
        exit_code = EXIT_RESTART
    if console:
        measured = metric_words(result["eval"])
        words = [f"{result['why']}: step {step:,}", *measured, f"{result['seconds']:.1f} s"]
        console.say("  ".join(words), important=True)
        console.say(shown(RunFiles(spec.model_dir).result))
    for failure in failures:
        log.error("%s. Restart when the cause is removed, to resume from what was saved.", failure)
    # Only the chief writes, so only the chief can fail to; the other tasks end like the chief.
    return executor.gathered(exit_code)[0]
