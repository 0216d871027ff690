"""Finds mistakes before anything starts: for `--check`, and before a launcher starts tasks.

    print(preflight(recipe, model_dir).describe(num_ps=1, num_gradient_buffers=0))

No GPU is used, except by a process that will train: their memory is for the processes that train.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from strategies.gpus import use_gpus
from strategies.ps.placement import Group, dry_run, place
from strategies.tables import part_rows
from trainer.batch_checks import check_batches, length_notes
from trainer.build import build_checkpointer
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.marks import Saved
from trainer.config import Recipe, changed_fields, data_dir
from trainer.guards.fingerprint import log_keras_settings
from trainer.hooks.callbacks import build_callbacks, check_monitors
from trainer.hooks.export import check_export, export_notes
from trainer.inputs import Inputs, open_inputs
from trainer.learner import Learner
from trainer.session import build_session


@dataclass(frozen=True)
class Findings:
    """The data, a learner without rows of tables, its variables, and the newest checkpoint."""

    recipe: Recipe
    inputs: Inputs
    learner: Learner
    checkpointer: Checkpointer
    groups: Sequence[Group]
    saved: Saved | None

    def describe(self, num_ps: int, num_gradient_buffers: int) -> str:
        """Lines to print, with the placement on `num_ps` parameter servers if there are any.

        Synchronous steps keep `num_gradient_buffers` gradients of each variable there.
        """
        config = self.recipe.config
        num_bytes = sum(group.num_bytes for group in self.groups)
        lines = [
            f"{self.recipe.path}: batch {config.batch_size:,}, learning rate "
            f"{config.learning_rate:g} (--verbose prints the whole config)",
            f"{self.inputs.train.split.num_examples:,} training and "
            f"{self.inputs.evaluation.split.num_examples:,} evaluation examples in "
            f"{data_dir(config)}",
            *filter(None, [self.inputs.note]),
            f"{num_bytes:,} bytes of variables, {slots_included(self.groups)}",
        ]
        lines += [_described(group, num_ps) for group in self.groups if group.is_table]
        if num_ps:
            placement = place(self.groups, num_ps, num_gradient_buffers=num_gradient_buffers)
            lines.append(placement.table())
        notes = export_notes(self.learner.model, self.recipe.path) if config.export else []
        notes += length_notes(self.inputs, self.recipe.path)
        lines += [f"note: {note}" for note in notes]
        step = self.saved.step if self.saved else 0
        lines.append(f"steps {step + 1:,} to {config.train_steps:,} would be trained")
        if changed := changed_fields(self.saved.config if self.saved else {}, config):
            lines.append(f"changed since step {step:,} was saved: {changed}")
        return "\n".join(lines)


def slots_included(groups: Sequence[Group]) -> str:
    """Says if the bytes of `groups` are also those of optimizer slots: plain SGD has none."""
    has_slots = any(group.num_variables > 1 for group in groups)
    return "optimizer slots included" if has_slots else "the optimizer has no slots"


def _described(table: Group, num_ps: int) -> str:
    """The size of a table, complete and on each of `num_ps` parameter servers."""
    name = table.name.partition(":")[0]
    num_rows, width = table.shape
    if not num_rows:
        return f"table {name}: rows of {width} are made for ids during training"
    line = f"table {name}: {num_rows:,} rows of {width}, {table.num_bytes:,} bytes{table.others}"
    if num_ps:
        rows = part_rows(num_rows, 0, num_ps)
        num_bytes = table.num_bytes // num_rows * rows
        line += f"; on each parameter server {rows:,} rows, {num_bytes:,} bytes"
    return line


def preflight(recipe: Recipe, model_dir: str, *, hides_gpus: bool = True) -> Findings:
    """Finds what would fail later. Trains nothing, and changes no file of a run.

    Parses the first batch of each split, runs the model on it, and compares the newest checkpoint
    in `model_dir` with the config.

    Raises DataError, ConfigError, ModelDirError or OptimizerError for a user's mistake.
    """
    if hides_gpus:
        use_gpus(0)
    log_keras_settings()
    callbacks = build_callbacks(recipe)
    groups: list[Group] = []

    def build(make: Callable[[], Learner]) -> Learner:
        learner, groups[:] = dry_run(make)
        return learner

    inputs, specs, learner = build_session(recipe, open_inputs(recipe), build)
    check_monitors(callbacks, learner, recipe.path, evaluates=True)
    check_batches(inputs, learner, recipe)
    check_export(recipe, learner.model, specs)
    checkpointer = build_checkpointer(recipe, model_dir, inputs, learner)
    saved = checkpointer.check()
    if learner.tables and not saved:
        learner.tables.check_rows()
    return Findings(recipe, inputs, learner, checkpointer, groups, saved)


def num_replicas_here(num_gpus: int | None) -> int:
    """The replicas of a task of this host: one for each of `num_gpus` (None: all), or one CPU."""
    if num_gpus is None:
        num_gpus = len(tf.config.list_physical_devices("GPU"))
    return max(1, num_gpus)
