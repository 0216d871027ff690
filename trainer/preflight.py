"""What can be known before anything starts: `--check`, and what a launcher looks at first.

hide_gpus()
print(preflight(recipe, model_dir).describe(num_ps=1, num_staged=0))
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from strategies.mirrored import use_gpus
from strategies.placement import Group, place, record
from trainer import config as config_lib
from trainer.build import build_checkpointer, build_learner
from trainer.checkpoint import ModelDirError, Saved
from trainer.config import Recipe
from trainer.exits import EXIT_DONE, first_line
from trainer.inputs import Inputs, check_batches, open_inputs

# An empty file fits on a full disk.
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class Findings:
    """What was found: the data, the variables in groups, and where the newest checkpoint stands."""

    recipe: Recipe
    inputs: Inputs
    groups: Sequence[Group]
    saved: Saved | None

    def describe(self, num_ps: int, num_staged: int) -> str:
        """Lines for people, with the placement on `num_ps` parameter servers if there are any.

        `num_staged`: gradients of each variable that are kept there, as synchronous steps do.
        """
        config = self.recipe.config
        num_bytes = sum(group.num_bytes for group in self.groups)
        lines = [
            f"config {self.recipe.path}: {config_lib.to_json(config)}",
            f"{self.inputs.train.split.num_examples:,} training and "
            f"{self.inputs.evaluation.split.num_examples:,} evaluation examples in "
            f"{config_lib.data_dir(config)}",
            f"{num_bytes:,} bytes of variables, optimizer slots included",
        ]
        if num_ps:
            lines.append(place(self.groups, num_ps, num_staged=num_staged).table())
        step = self.saved.step if self.saved else 0
        lines.append(f"steps {step + 1:,} to {config.train_steps:,} would be trained")
        return "\n".join(lines)


def hide_gpus() -> None:
    """For a process that only checks: the GPUs' memory is for those that train."""
    use_gpus(0)


def preflight(recipe: Recipe, model_dir: str) -> Findings:
    """Trains and changes nothing, but finds what would fail later.

    Parses the first batch of each split and puts it through the model, and compares what the newest
    checkpoint in `model_dir` is of.

    Raises:
        DataError, ConfigError, ModelDirError, OptimizerError: as one message.
    """
    inputs = open_inputs(recipe)
    learner, groups = record(lambda: build_learner(recipe))
    check_batches(inputs, learner, recipe)
    saved = build_checkpointer(recipe, model_dir, inputs, learner).check()
    return Findings(recipe, inputs, groups, saved)


def finished_result(model_dir: str, config: config_lib.Config) -> dict[str, Any] | None:
    """The result of a complete run in `model_dir`, if there is one.

    Of at least `train_steps`, or stopped early by the same rule.
    """
    path = f"{model_dir}/result.json"
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path) as file:
        result: dict[str, Any] = json.loads(file.read())
    if result["exit_code"] != EXIT_DONE:
        return None  # It may not even know its step.
    rule = dataclasses.asdict(config.early_stopping)
    complete = result["step"] >= config.train_steps or result.get("stopped_early_by") == rule
    return result if complete else None


def check_model_dir(model_dir: str) -> None:
    """Makes `model_dir`, and returns if a file can be written to it.

    Raises:
        ModelDirError: it cannot.
    """
    probe = f"{model_dir}/.writable-{os.getpid()}"
    try:
        tf.io.gfile.makedirs(model_dir)
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("." * _PROBE_BYTES)
        tf.io.gfile.remove(probe)
    except (tf.errors.OpError, OSError) as error:
        raise ModelDirError(
            f"--model_dir={model_dir} cannot be written: {first_line(error)}. "
            "Give a directory that this user may write to, on a disk with room."
        ) from error
