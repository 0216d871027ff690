"""Trains models as Keras users write them in each mode, and compares weights and exports.

    python -m tests.models
    python -m tests.models --models=unet,triplet --modes=mirrored-1,multiworker-2

Each run is 30 steps of SGD in one thread per process. Prints a row for each model: the loss of the
evaluation in the first mode, and for each other mode the largest difference between weights. The
export of each run is loaded in another process, without this project, and evaluated there: the last
column is the largest relative difference from the loss that the run reported. Ends with 0 if all
runs did, weights of models without batch statistics differ by at most 1e-5 in synchronous modes,
and exports by at most 1e-6.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.cluster.runs import Run, largest_difference, start
from tests.models.examples import TEST, write_examples
from trainer.batch_checks import input_specs
from trainer.build import build_learner
from trainer.config import load_recipe
from trainer.inputs import build_metrics, open_inputs

MODES = ("mirrored-1", "mirrored-2", "multiworker-2", "ps-sync-2+1", "ps-2+1")
WITH_BATCH_STATISTICS = ("mobilenetv2", "efficientnetv2b0", "resnet50", "normed")
# What a model without batch statistics may have that makes rounding visible.
WITH_JUMPS = ("triplet_hinge",)
_IMAGES = (*WITH_BATCH_STATISTICS, "subclassed", "pooled")
MODELS = {
    **{name: f"tests/models/images.py:{name}" for name in _IMAGES},
    **{name: f"tests/models/sequences.py:{name}" for name in ("transformer", "bilstm")},
    **{
        name: f"tests/models/{name}.py"
        for name in (
            *("language_model", "vae_add_loss", "vae_compute_loss"),
            *("triplet", "triplet_hinge", "wide_deep", "unet", "two_outputs"),
        )
    },
}
MAX_DIFFERENCE = 1e-5
MAX_EXPORT_ERROR = 1e-6
_TIMEOUT_SECS = 900.0

# Without this project: it is not in the path, and the current directory is another.
_EVALUATE = """
import sys, numpy as np, tensorflow as tf
given = np.load(sys.argv[1])
inputs = {name: tf.constant(given[name]) for name in given.files}
for number, path in enumerate(sys.argv[3:]):
    model = tf.saved_model.load(path)
    outputs = model.serve(inputs if "" not in inputs else inputs[""])
    named = outputs if isinstance(outputs, dict) else {"": outputs}
    np.savez(f"{sys.argv[2]}/{number}.npz", **{k: v.numpy() for k, v in named.items()})
"""


def train(model: str, mode: str, data: Path, model_dir: Path) -> Run:
    """A run of `model`; the exit code may be any."""
    flags = (f"--config={MODELS[model]}", f"--data_dir={data}")
    with start(mode, model_dir, *flags) as process:
        run = process.wait_alone(_TIMEOUT_SECS)
        process.wait_for_family_to_end()
        if run.exit_code:
            print(process.output(), file=sys.stderr)
        return run


def export_errors(model: str, runs: Sequence[Run], data: Path, scratch: Path) -> list[float]:
    """The relative error of the loss of each run's export, on all test examples at once."""
    recipe = load_recipe(MODELS[model])
    recipe.config.data_dir, recipe.config.eval_batch_size = str(data), TEST
    inputs = open_inputs(recipe)
    paths = sorted(map(str, data.glob("*-test.tfrecord-*")))
    assert recipe.parse is not None
    examples, labels, *_ = recipe.parse(tf.stack(list(tf.data.TFRecordDataset(paths))))
    named = examples if isinstance(examples, Mapping) else {"": examples}
    arrays = {name: np.asarray(value) for name, value in named.items()}
    arrays = {k: v.astype("S") if v.dtype == object else v for k, v in arrays.items()}
    np.savez(scratch / "inputs.npz", **arrays)  # type: ignore[arg-type]
    exports = [str(run.model_dir / "export/saved_model") for run in runs]
    subprocess.run(
        [sys.executable, "-c", _EVALUATE, str(scratch / "inputs.npz"), str(scratch), *exports],
        cwd=scratch,
        check=True,
        env={"PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    specs = input_specs(inputs, recipe)
    learner = build_learner(recipe, specs)
    build_metrics(inputs, learner, recipe)
    errors = []
    for number, run in enumerate(runs):
        found = np.load(scratch / f"{number}.npz")
        outputs = {name: tf.constant(found[name]) for name in found.files}
        values = learner.objective.losses(labels, outputs.get("", outputs), inputs=examples)
        reported = run.result["eval"]["loss"]
        errors.append(abs(float(np.mean(values)) / reported - 1))
    return errors


def compare(model: str, modes: Sequence[str], data: Path, scratch: Path) -> tuple[list[str], bool]:
    """The cells of a row of the table, and whether all is as it should be."""
    runs = [train(model, mode, data, scratch / f"{model}-{mode}") for mode in modes]
    cells, is_right = [], not any(run.exit_code for run in runs)
    first = runs[0]
    if first.exit_code:
        return ["failed"], False
    cells.append(f"{first.result['eval']['loss']:.6f}")
    for mode, run in list(zip(modes, runs, strict=True))[1:]:
        if run.exit_code:
            cells.append(f"exit code {run.exit_code}")
        elif mode == "ps-2+1":
            cells.append(f"loss {run.result['eval']['loss']:.4f}")
        else:
            difference = largest_difference(first.weights(), run.weights())
            cells.append(f"{difference:.1e}")
            is_compared = model not in (*WITH_BATCH_STATISTICS, *WITH_JUMPS)
            is_right &= not is_compared or difference <= MAX_DIFFERENCE
    worst = max(export_errors(model, [run for run in runs if not run.exit_code], data, scratch))
    return [*cells, f"{worst:.1e}"], is_right and worst <= MAX_EXPORT_ERROR


def main() -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(MODELS), help=", ".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES), help=", ".join(MODES))
    given = parser.parse_args()
    modes = given.modes.split(",")
    are_right = []
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        data = scratch / "data"
        write_examples(data)
        print("| model |", " | ".join(modes), "| export |", flush=True)
        print("| --- " * (len(modes) + 2) + "|", flush=True)
        for model in given.models.split(","):
            cells, is_right = compare(model, modes, data, scratch)
            are_right.append(is_right)
            print(f"| {model} |", " | ".join(cells), "|", flush=True)
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main())
