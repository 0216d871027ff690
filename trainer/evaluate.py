"""`python -m trainer.evaluate RUN`: evaluates a checkpoint of a run on the devices of this machine.

    python -m trainer.evaluate runs/latest                          # the newest checkpoint
    python -m trainer.evaluate runs/a --checkpoint=best --split=train
    best-00000900  train  loss 0.0021  accuracy 0.9993  1,437 examples

The model, the loss, the metrics and the data are those of the run: its config.json and config file
say which. The metrics are the trainer's own, up to rounding. A checkpoint of any strategy works.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from trainer.config import ConfigError, recipe_of_run
from trainer.exit_codes import EXIT_DONE
from trainer.run_files import Document, RunFiles
from trainer.run_record.tools import prepare_tensorflow, run_tool, runs_of

if TYPE_CHECKING:
    from data.reader import Reader
    from strategies.mirrored import MirroredExecutor
    from trainer.checkpoints.checkpointer import Checkpointer
    from trainer.config import Recipe
    from trainer.learner import Learner


def evaluate(
    model_dir: str,
    checkpoint: str = "newest",
    split: str | None = None,
    data_dir: str | None = None,
) -> Document:
    """Returns the checkpoint's name and step, the split, its examples, and the metrics.

    Raises:
        ConfigError, DataError, ModelDirError: the run has no such checkpoint, the data is missing,
            or the config file now defines another model.
    """
    from strategies.metrics import means
    from trainer.inputs import Inputs, check_batches

    restored = restore(model_dir, checkpoint, split, data_dir)
    reader, learner, executor = restored.reader, restored.learner, restored.executor
    check_batches(Inputs(reader, reader), learner, restored.recipe)
    executor.start_evaluation(learner, reader)
    metrics = executor.evaluate()
    return {
        "checkpoint": restored.name,
        "step": restored.step,
        "split": reader.split.name,
        "examples": int(metrics["loss"][1]),
        **means(metrics),
    }


class Restored(NamedTuple):
    """A checkpoint of a run, restored."""

    name: str
    step: int
    recipe: "Recipe"
    reader: "Reader"  # Of the evaluation split.
    executor: "MirroredExecutor"
    learner: "Learner"
    specs: Any  # Of the model's inputs: a nest of tensor specs has no type.


def restore(
    model_dir: str, checkpoint: str, split: str | None = None, data_dir: str | None = None
) -> Restored:
    """Restores `checkpoint` (newest, best, a step or its name); raises as `evaluate`."""
    from strategies.mirrored import MirroredExecutor, replica_devices, use_gpus
    from trainer.build import build_checkpointer, build_learner
    from trainer.inputs import (
        Inputs,
        build_metrics,
        fitted_to_model,
        input_specs,
        open_evaluation,
    )

    recipe = recipe_of_run(RunFiles(model_dir).read_config())
    recipe.config.data_dir = data_dir or recipe.config.data_dir
    recipe.config.data.eval_split = split or recipe.config.data.eval_split
    recipe.config.warm_start.path = ""  # The weights come from the checkpoint.
    reader = open_evaluation(recipe)
    executor = MirroredExecutor.on(replica_devices(1, min(1, use_gpus(None))))
    inputs = Inputs(reader, reader)
    specs = input_specs(inputs, recipe)
    learner = executor.build(lambda: build_learner(recipe, specs))
    reader = fitted_to_model(inputs, recipe, learner.model).evaluation
    inputs = Inputs(reader, reader)
    build_metrics(inputs, learner, recipe)
    checkpointer = build_checkpointer(recipe, model_dir, inputs, learner)
    name = _chosen(checkpoint, checkpointer, model_dir)
    saved = checkpointer.restore_model(name)
    return Restored(name, saved.step, recipe, reader, executor, learner, specs)


def _chosen(wanted: str, checkpointer: "Checkpointer", model_dir: str) -> str:
    """The name of the checkpoint that `wanted` means."""
    names = checkpointer.names()
    newest = checkpointer.newest()
    if wanted == "newest" and newest is not None:
        fitting = [name for name in names if name == f"step-{newest.step:08d}"]
    elif wanted == "best":
        fitting = [name for name in names if name.startswith("best-")]
    else:
        steps = {name: int(name.partition("-")[2]) for name in names}
        fitting = [name for name, step in steps.items() if wanted in (str(step), name)]
    if not fitting:
        raise ConfigError(
            f"--checkpoint={wanted}: {model_dir} has no such checkpoint. It has "
            f"{', '.join(names) or 'none'}. Type newest, best, or a step."
        )
    return fitting[-1]


def define_flags() -> None:
    """Declares the flags of the command."""
    flags.DEFINE_string(
        "checkpoint",
        "newest",
        "The checkpoint that is evaluated: newest, best, or a step such as 1000.",
    )
    flags.DEFINE_string("split", None, "Split to read; by default the evaluation split.")
    flags.DEFINE_string(
        "data_dir", None, "Directory with TFRecord files; by default that of the run."
    )
    flags.DEFINE_boolean("json", False, "Print JSON.")


def main(argv: Sequence[str]) -> int:
    """Prints the metrics; returns the exit code."""
    (model_dir,) = runs_of(argv, command="trainer.evaluate", number=1)
    prepare_tensorflow()
    found = evaluate(model_dir, flags.FLAGS.checkpoint, flags.FLAGS.split, flags.FLAGS.data_dir)
    if flags.FLAGS.json:
        print(json.dumps(found))
        return EXIT_DONE
    shown = [f"{name} {value:.4f}" for name, value in found.items() if isinstance(value, float)]
    words = [found["checkpoint"], found["split"], *shown, f"{found['examples']:,} examples"]
    print("  ".join(words))
    return EXIT_DONE


if __name__ == "__main__":
    run_tool(main, define_flags)
