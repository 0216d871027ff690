"""`python -m benchmarks.large_models`: large models in every mode: memory, rate, times, weights.

    python -m benchmarks.large_models --megabytes=1,100,400           # about 30 min

Each row is a run of the real program, which trains a perceptron (benchmarks/large.py) with momentum
on the digits. The same run is then made in two parts, which must end in the same weights bit for
bit, except under asynchronous parameter servers. Prints Markdown:

* start: seconds from the command to the report of the first steps, with tracing;
* steps/s: after that report;
* checkpoint: seconds from the first file of the checkpoint until it is complete;
* memory: the largest resident set of any task of each kind, in 10^6 bytes; the rows of 1 MB show
  what Python and TensorFlow take;
* difference: the largest absolute difference of a weight to the same model under mirrored.
"""

import dataclasses
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
from absl import app, flags

from benchmarks.table import machine, prepare, train_reports, watched
from benchmarks.weights import largest_difference, weights
from trainer.tf_setup import set_environment

_MEGABYTES = flags.DEFINE_list("megabytes", ["1", "100", "400"], "Sizes of the weights, in 10^6 B.")
_STEPS = flags.DEFINE_integer("steps_per_run", 24, "Steps of a run.", lower_bound=12)
_MODES = {
    "mirrored": ("--strategy=mirrored",),
    "mirrored, 2 replicas": ("--strategy=mirrored", "--replicas=2"),
    "multiworker, 2 workers": ("--strategy=multiworker", "--workers=2"),
    "ps, 2 workers, 1 ps": ("--strategy=ps", "--workers=2", "--ps=1"),
    "ps, 4 workers, 3 ps": ("--strategy=ps", "--workers=4", "--ps=3"),
    "ps sync, 2 workers, 1 ps": ("--strategy=ps", "--sync_replicas", "--workers=2", "--ps=1"),
    "ps sync, 3 workers, 2 ps": ("--strategy=ps", "--sync_replicas", "--workers=3", "--ps=2"),
    "ps sync, 4 workers, 3 ps": ("--strategy=ps", "--sync_replicas", "--workers=4", "--ps=3"),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run: times in seconds, and the largest resident set of each kind of task in bytes."""

    start_secs: float
    steps_per_sec: float
    checkpoint_secs: float
    memory: Counter[str]


def train(argv: Sequence[str], model_dir: Path) -> Measured:
    """Trains, and watches files and processes from outside.

    Raises:
        ProgramError: the run failed.
    """
    memory: Counter[str] = Counter()
    first_report = first_file = complete = 0.0

    def look(pid: int) -> None:
        nonlocal first_report, first_file, complete
        now = time.monotonic()
        _add_memory(memory, pid)
        if not first_report and train_reports(model_dir):
            first_report = now
        files = [path.name for path in (model_dir / "checkpoints").rglob("*")]
        first_file = first_file or (now if files else 0.0)
        complete = complete or (now if "checkpoint.json" in files else 0.0)

    began = time.monotonic()
    watched([sys.executable, "-m", "trainer", *argv, f"--model_dir={model_dir}"], look)
    ended = time.monotonic()  # The checkpoint may have been complete before the next look.
    checkpoint_secs = (complete or ended) - (first_file or ended)
    reports = train_reports(model_dir)
    steps = reports[-1]["step"] - reports[0]["step"]
    rate = steps / (reports[-1]["seconds"] - reports[0]["seconds"])
    return Measured(first_report - began, rate, checkpoint_secs, memory)


def _add_memory(memory: Counter[str], pid: int) -> None:
    """Raises the largest resident sets by what the tasks of the run `pid` have now."""
    try:
        family = psutil.Process(pid).children(recursive=True)
        tasks = {p: p.name().rpartition("-")[0] for p in family}
        tasks = {p: kind for p, kind in tasks.items() if kind in ("chief", "worker", "ps")}
        if not family:
            tasks = {psutil.Process(pid): "process"}
        for process, kind in tasks.items():
            memory[kind] = max(memory[kind], process.memory_info().rss)
    except psutil.NoSuchProcess:
        return  # It has just ended.


def newest_weights(model_dir: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The variables of the model and the optimizer in the newest checkpoint."""
    newest = max((model_dir / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return weights(newest, "model/", "optimizer")


def print_rows(megabytes: str, directory: Path, data: Path) -> None:
    """Prints a row for each mode.

    Raises:
        ProgramError: a run failed.
    """
    alone: dict[str, npt.NDArray[np.float32]] = {}
    for number, (mode, argv) in enumerate(_MODES.items()):
        flags_ = (
            *argv,
            "--num_threads=1",
            "--config=benchmarks/large.py",
            f"--config.megabytes={megabytes}",
            f"--data_dir={data}",
        )
        whole, parts = (
            directory / f"{megabytes}-{number}",
            directory / f"{megabytes}-{number}-parts",
        )
        measured = train((*flags_, f"--train_steps={_STEPS.value}"), whole)
        ended = newest_weights(whole)
        alone = alone or ended
        is_exact = "--sync_replicas" in argv or "--strategy=ps" not in argv
        resumed = "depends on timing"
        difference = "depends on timing"
        if is_exact:
            for steps in (_STEPS.value // 2, _STEPS.value):
                train((*flags_, f"--train_steps={steps}"), parts)
            resumed = (
                "same bits" if largest_difference(newest_weights(parts), ended) == 0 else "DIFFERS"
            )
            difference = f"{largest_difference(ended, alone):.1e}"
        memory = ", ".join(f"{kind} {size / 1e6:,.0f}" for kind, size in measured.memory.items())
        print(
            f"| {megabytes} | {mode} | {measured.start_secs:.1f} | {measured.steps_per_sec:.2f} | "
            f"{measured.checkpoint_secs:.1f} | {memory} | {difference} | {resumed} |",
            flush=True,
        )
        for model_dir in (whole, parts):  # Checkpoints are large.
            shutil.rmtree(model_dir, ignore_errors=True)


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    set_environment()
    print(f"{machine()}:\n")
    print("| MB | mode | start | steps/s | checkpoint | memory | difference | resumed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare("digits", directory / "digits")
        for megabytes in _MEGABYTES.value:
            print_rows(megabytes, directory, directory / "digits")


if __name__ == "__main__":
    app.run(main)
