"""`python -m benchmarks.rounding FILE.json`: how rounding grows with the number of steps.

    python -m benchmarks.rounding docs/images/rounding.json         # about 3 min

Sums over other numbers of replicas are rounded in another order. Trains the digits in several
modes, one thread for each process, and writes the largest absolute difference of a weight from
mirrored with one replica. A curve has a name and rows [step, difference]. docs/images/draw.py draws
them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.weights import largest_difference, weights
from data.prepare.preparing import prepare
from data.system.flags import parse_flags
from trainer.tf_setup import set_environment

_STEPS = flags.DEFINE_integer("steps_per_run", 4000, "Steps of a run.", lower_bound=100)
_POINTS = 40  # Of a curve.
_ALONE = ("--strategy=mirrored",)
_MODES = {
    "mirrored 2": ("--strategy=mirrored", "--replicas=2"),
    "multiworker 2": ("--strategy=multiworker", "--workers=2"),
    "ps sync 2": ("--strategy=ps", "--sync_replicas", "--workers=2", "--ps=1"),
}
_RATES = (0.002, 0.0002)  # The first is that of configs/digits.py.


def _train(argv: Sequence[str], rate: float, data_dir: Path, model_dir: Path) -> None:
    every = _STEPS.value // _POINTS
    command = [sys.executable, "-m", "trainer", *argv, "--config=digits", "--num_threads=1"]
    command += [f"--data_dir={data_dir}", f"--model_dir={model_dir}", "--quiet"]
    command += [f"--train_steps={_STEPS.value}", f"--config.learning_rate={rate}"]
    command += [f"--config.checkpoint_every_steps={every}", "--config.eval_every_steps=0"]
    command += [f"--config.keep_checkpoints={_POINTS}", "--config.export=False"]
    subprocess.run(command, check=True)


def _differences(ours: Path, theirs: Path) -> list[tuple[int, float]]:
    """The largest difference of a weight in the checkpoints of each step."""
    found = []
    for path in sorted((ours / "checkpoints").glob("step-*")):
        of_model = ("model/", "optimizer/_trainable_variables/")
        left, right = (
            weights(run / "checkpoints" / path.name, *of_model) for run in (ours, theirs)
        )
        found.append((int(path.name.removeprefix("step-")), largest_difference(left, right)))
    return found


def main(argv: Sequence[str]) -> None:
    """Writes the file."""
    if len(argv) != 2:
        sys.exit("benchmarks.rounding: give the file to write, such as docs/images/rounding.json")
    set_environment()
    curves: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare("digits", str(directory / "digits"))
        for rate in _RATES:
            alone = directory / f"alone-{rate}"
            _train(_ALONE, rate, directory / "digits", alone)
            for mode, flags_of_mode in _MODES.items():
                run = directory / f"{mode}-{rate}"
                _train(flags_of_mode, rate, directory / "digits", run)
                points = _differences(alone, run)
                curves.append({"mode": mode, "rate": rate, "points": points})
                print(f"{mode}, rate {rate:g}: {points[0]} ... {points[-1]}", flush=True)
    lines = ",\n".join(json.dumps(curve) for curve in curves)
    Path(argv[1]).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.rounding"))
