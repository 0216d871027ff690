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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from absl import app, flags

from data.system.flags import parse_flags

MNIST_SOURCE = flags.DEFINE_string(
    "mnist_source", None, "Directory with the IDX files of MNIST; by default MNIST is left out."
)

ROOT = Path(__file__).resolve().parents[1]
_TAIL_BYTES = 1 << 16
_POLL_SECS = 0.05
_SHOWN_LINES = 15
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


def write_random_mnist(directory: Path, num_train: int, num_test: int) -> None:
    """Writes random images in files like MNIST's: a model takes the same time for them."""
    directory.mkdir()
    random = np.random.default_rng(0)
    for prefix, number in (("train", num_train), ("t10k", num_test)):
        for name, shape, most in (
            ("images-idx3", (number, 28, 28), 256),
            ("labels-idx1", (number,), 10),
        ):
            header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
            content = header + random.integers(0, most, shape, np.uint8).tobytes()
            (directory / f"{prefix}-{name}-ubyte").write_bytes(content)


def prepare(name: str, out: Path, *words: str) -> None:
    """Writes the data set `name` to `out`, as users do.

    Raises:
        ProgramError: preparation failed.
    """
    watched([sys.executable, "-m", "data.prepare", name, *words, f"--data_dir={out}"])


class ProgramError(RuntimeError):
    """A measured program failed."""


def watched(
    command: Sequence[str],
    look: Callable[[int], None] = lambda pid: None,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    timeout_secs: float = 3600.0,
    exit_codes: Sequence[int] = (0,),
) -> str:
    """Runs `command` in a new session, and calls `look` with its process id often.

    Returns its output. An interruption, or an error of `look`, kills the session.

    Raises:
        ProgramError: it failed, or took too long; with the end of its standard error.
    """
    deadline = time.monotonic() + timeout_secs
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **env}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        output = None
        try:
            while output is None and time.monotonic() < deadline:
                look(process.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=_POLL_SECS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if output is not None and process.returncode in exit_codes:
            return output
        stderr.seek(0)
        tail = "\n".join(stderr.read().splitlines()[-_SHOWN_LINES:])
    late = f"not done after {timeout_secs:g} s"
    why = late if output is None else f"exit code {process.returncode}"
    raise ProgramError(f"{' '.join(command)}: {why}\n{tail}")


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
        ProgramError: the run failed.
    """
    watched([sys.executable, "-m", "trainer", *argv, f"--model_dir={model_dir}"])
    result = json.loads((model_dir / "result.json").read_text())
    return result, train_reports(model_dir)[-1]


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
