"""`python -m benchmarks.table`: accuracy, time and rate of each strategy, for docs/measured.md.

    python -m benchmarks.table --mnist_source=DIRECTORY_WITH_THE_IDX_FILES

Runs the real program, one run after the other; takes some minutes on an idle machine. Prints
Markdown. `seconds` is the time from building the model to its export. The rate is that of the last
report, after tracing.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from data.system.flags import parse_flags

MNIST_SOURCE = flags.DEFINE_string(
    "mnist_source", None, "Directory with the IDX files of MNIST; by default MNIST is left out."
)

_TAIL_BYTES = 1 << 16
_STRATEGIES = (
    ("--strategy=mirrored",),
    ("--strategy=mirrored", "--replicas=2"),
    ("--strategy=multiworker", "--workers=2"),
    ("--strategy=ps", "--sync_replicas", "--workers=2"),
    ("--strategy=ps", "--workers=2"),
)


def machine() -> str:
    """The machine and the date of a measurement."""
    return f"{os.cpu_count()} cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}"


def prepare_mnist(source: str, out: Path) -> None:
    """Writes the IDX files in `source` to `out`, as users do."""
    prepare("mnist", out, f"--source={source}")


def prepare(name: str, out: Path, *words: str) -> None:
    """Writes the data set `name` to `out`, as users do.

    Raises:
        subprocess.CalledProcessError: preparation failed; its standard error says why.
    """
    command = [sys.executable, "-m", "data.prepare", name, *words, f"--data_dir={out}"]
    subprocess.run(command, check=True, capture_output=True)


def train_reports(model_dir: Path) -> list[dict[str, Any]]:
    """The training reports in the complete lines of metrics.jsonl."""
    path = model_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [report for report in map(json.loads, lines) if report["split"] == "train"]


def newest_report(metrics: Path) -> dict[str, Any]:
    """The newest report of training. Reads only the end of the file, which grows."""
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # Cut off, at the beginning or the end.
            report: dict[str, Any] = json.loads(line)
            if report["split"] == "train":
                return report
    raise ValueError(f"{metrics} has no report of training in its last {_TAIL_BYTES:,} bytes")


def run(argv: Sequence[str], model_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains; returns the result and the last training report.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    command = [sys.executable, "-m", "trainer", *argv, f"--model_dir={model_dir}"]
    subprocess.run(command, check=True, capture_output=True)
    result = json.loads((model_dir / "result.json").read_text())
    reports = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    return result, [report for report in reports if report["split"] == "train"][-1]


def rows(data_flags: Sequence[str], directory: Path) -> Iterator[str]:
    """Yields a row of the table for each strategy."""
    for number, strategy in enumerate(_STRATEGIES):
        argv = [*strategy, *data_flags]
        result, report = run(argv, directory / f"run-{number}")
        shown = " ".join(a for a in argv if not a.startswith("--data_dir"))
        yield (
            f"| `{shown}` | {result['step']:,} | {result['eval']['accuracy']:.4f} | "
            f"{result['seconds']:.1f} | {report['steps_per_sec']:,.0f} |"
        )


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    print(f"{machine()}:\n")
    print("| `python -m trainer` | steps | test accuracy | seconds | steps/s |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for row in rows((), directory / "digits"):
            print(row, flush=True)
        if MNIST_SOURCE.value:
            data = directory / "mnist"
            prepare_mnist(MNIST_SOURCE.value, data)
            config = ("--config=configs/mnist_replica.py", f"--data_dir={data}")
            for row in rows(config, directory / "mnist-runs"):
                print(row, flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.table"))
