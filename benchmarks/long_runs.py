"""`python -m benchmarks.long_runs`: do memory, descriptors, threads and rate stay the same?

    python -m benchmarks.long_runs --minutes=30 --strategies=mirrored,multiworker,ps,ps-sync

Trains on the digits under all strategies at the same time, with evaluations and checkpoints: the
load is steady, and 30 minutes are enough for all. Every 10 seconds it reads the memory (RSS), the
file descriptors and the threads of each process, and for each run the steps and the CPU time of all
its processes. Everything before the end of the warm-up (the first 5 minutes, a third of the run at
most) is left out. Puts a straight line through the other samples, and prints its two ends and its
slope in Markdown; memory in MiB. Says whether the values are flat. The exit code is 1 if a process
ended meanwhile, or something is not flat.

| of | flat means |
| --- | --- |
| memory | at most 2% or 4 MiB more at the end than after the warm-up |
| descriptors, threads | less than 1 more |
| steps/s | at most 3% less |
| CPU time for a step | at most 3% more |

The rate needs a machine that nothing else uses. The CPU time for a step depends less on other
programs.
"""

import contextlib
import dataclasses
import itertools
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
from absl import app, flags

from benchmarks.table import machine, newest_report, prepare, train_reports
from data.system.flags import parse_flags

_MODES = {
    "mirrored": ("--strategy=mirrored", "--replicas=2"),
    "multiworker": ("--strategy=multiworker", "--workers=2"),
    "ps": ("--strategy=ps", "--workers=2", "--ps=1"),
    "ps-sync": ("--strategy=ps", "--sync_replicas", "--workers=2", "--ps=1"),
}
_MINUTES = flags.DEFINE_float(
    "minutes", 30.0, "From the first report of all runs.", lower_bound=5.0
)
_STRATEGIES = flags.DEFINE_list("strategies", list(_MODES), f"Of {', '.join(_MODES)}.")
flags.register_validator(
    "strategies", lambda names: set(names) <= set(_MODES), f"it knows only {', '.join(_MODES)}"
)

_SAMPLE_SECS = 10.0
_WARMUP_SECS = 300.0
_RATE_SECS = 60.0
_START_SECS = 600.0
_END_SECS = 120.0
_MIB = 2**20
_MOST_CHANGE = 0.03


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one process uses at one time."""

    memory: float  # Bytes.
    descriptors: float
    threads: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is at one time, by its newest report."""

    seconds: float  # Since the first sample.
    steps: int
    reported_secs: float  # The time of the report, since the run started.
    cpu_secs: float  # Of all its processes, since they started.


@dataclasses.dataclass(frozen=True)
class Trend:
    """How values change after the warm-up: the first, the last, and the change in an hour."""

    first: float
    last: float
    per_hour: float

    @property
    def growth(self) -> float:
        """From the first to the last."""
        return self.last - self.first


def trend(times: Sequence[float], values: Sequence[float], warmup_secs: float) -> Trend:
    """The least-squares line through `values` whose `times`, in seconds, are after the warm-up.

    Raises:
        ValueError: fewer than two values are.
    """
    after = np.asarray(times) >= warmup_secs
    if after.sum() < 2:
        raise ValueError(f"only {after.sum()} of {len(times)} samples came after the warm-up")
    begin, end = np.asarray(times)[after][[0, -1]]
    slope, level = np.polyfit(np.asarray(times)[after], np.asarray(values)[after], 1)
    return Trend(float(level + slope * begin), float(level + slope * end), float(slope * 3600))


def is_flat(name: str, found: Trend) -> bool:
    """Returns True if the values called `name` stay the same, as the table above says."""
    if name == "memory":
        return found.growth <= max(0.02 * found.first, 4 * _MIB)
    if name == "steps/s":
        return found.growth >= -_MOST_CHANGE * found.first
    if name == "CPU ms a step":
        return found.growth <= _MOST_CHANGE * found.first
    return found.growth < 1


def rates(progress: Sequence[Progress]) -> tuple[list[float], dict[str, list[float]]]:
    """The times when parts of _RATE_SECS begin, and for each part the rate and the CPU time.

    Raises:
        ValueError: a run made no step in a part.
    """
    stride = round(_RATE_SECS / _SAMPLE_SECS)
    times: list[float] = []
    values: dict[str, list[float]] = {"steps/s": [], "CPU ms a step": []}
    for first, last in itertools.pairwise(progress[::stride]):
        steps = last.steps - first.steps
        if not steps:
            raise ValueError(f"no step in the {_RATE_SECS:g} seconds before {last.seconds:.0f} s")
        times.append(first.seconds)
        values["steps/s"].append(steps / (last.reported_secs - first.reported_secs))
        values["CPU ms a step"].append(1000 * (last.cpu_secs - first.cpu_secs) / steps)
    return times, values


def table(
    mode: str,
    times: Sequence[float],
    samples: Mapping[str, Sequence[Sample]],
    progress: Sequence[Progress],
    warmup_secs: float,
) -> tuple[list[str], list[str]]:
    """The rows of a mode, and what is not flat. `samples` has those of each process at `times`.

    Raises:
        ValueError: the run is too short, or made no step for a minute.
    """
    trends = [
        (process, field.name, trend(times, [getattr(v, field.name) for v in values], warmup_secs))
        for process, values in samples.items()
        for field in dataclasses.fields(Sample)
    ]
    begins, values_of_run = rates(progress)
    trends += [
        ("the run", name, trend(begins, values, warmup_secs))
        for name, values in values_of_run.items()
    ]
    rows, not_flat = [], []
    for subject, name, found in trends:
        flat = is_flat(name, found)
        unit = _MIB if name == "memory" else 1
        numbers = (found.first, found.last, found.per_hour)
        columns = " | ".join(f"{number / unit:z,.{2 if unit == 1 else 1}f}" for number in numbers)
        rows.append(f"| {mode} | {subject} | {name} | {columns} | {'yes' if flat else 'no'} |")
        if not flat:
            not_flat.append(f"{name} of {subject}")
    return rows, not_flat


class _Run:
    """One run of the trainer, and its samples."""

    def __init__(self, mode: str, data_dir: Path, directory: Path) -> None:
        """Starts it, with its files in `directory`; `close` ends it."""
        self.mode = mode
        self._model_dir, self._log = directory / mode, directory / f"{mode}.log"
        command = [sys.executable, "-m", "trainer", *_MODES[mode], "--num_threads=1"]
        command += [f"--data_dir={data_dir}", f"--model_dir={self._model_dir}"]
        command.append("--train_steps=1000000000")
        with self._log.open("wb") as out:
            self._launcher = psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self._processes: dict[str, psutil.Process] = {}
        self.samples: dict[str, list[Sample]] = {}
        self.progress: list[Progress] = []
        self.error = ""

    def wait_for_report(self, deadline: float) -> None:
        """Returns after the first report of the run, or sets `error` when it is too late."""
        while not train_reports(self._model_dir):
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                self.error = f"{self.mode} did not start:\n{self._output()}"
                return
            time.sleep(1)
        self._processes = _processes(self._launcher, self._model_dir)
        self.samples = {name: [] for name in self._processes}

    def sample(self, began: float) -> None:
        """Adds a sample of each process, or sets `error` if one has ended."""
        found: dict[str, Sample] = {}
        cpu_secs = 0.0
        for name, process in self._processes.items():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    found[name] = Sample(
                        process.memory_info().rss, process.num_fds(), process.num_threads()
                    )
                if process.status() == psutil.STATUS_ZOMBIE:
                    raise psutil.NoSuchProcess(process.pid)
            except psutil.Error:  # A zombie denies access.
                self.error = f"{self.mode}: {name} has ended:\n{self._output()}"
                return
            cpu_secs += times.user + times.system
        for name, sample in found.items():
            self.samples[name].append(sample)
        report = newest_report(self._model_dir / "metrics.jsonl")
        self.progress.append(
            Progress(time.monotonic() - began, report["step"], report["seconds"], cpu_secs)
        )

    def _output(self) -> str:
        return self._log.read_text("utf-8", "replace")[-4000:]

    def ask_to_end(self) -> None:
        if self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)

    def close(self) -> None:
        self.ask_to_end()
        try:
            self._launcher.wait(_END_SECS)
        except psutil.TimeoutExpired:
            self._launcher.kill()


def _processes(launcher: psutil.Popen, model_dir: Path) -> dict[str, psutil.Process]:
    """The launcher, or the only process, and the tasks; by name."""
    named = {"launcher": psutil.Process(launcher.pid)}
    for path in sorted((model_dir / "tasks").glob("*.log")):
        starts = re.findall(r"^=== .*, process (\d+), ", path.read_text("utf-8", "replace"), re.M)
        named[path.stem.replace("-", " ")] = psutil.Process(int(starts[-1]))
    known = {process.pid for process in named.values()}
    others = (p for p in named["launcher"].children(recursive=True) if p.pid not in known)
    named |= {f"helper {number}": process for number, process in enumerate(others, 1)}
    return {"the process": named["launcher"]} if len(named) == 1 else named


def _started(
    modes: Sequence[str], data_dir: Path, directory: Path, stack: contextlib.ExitStack
) -> list[_Run]:
    """A run of each mode, after its first report; the end of `stack` closes them."""
    runs = []
    for mode in modes:
        runs.append(_Run(mode, data_dir, directory))
        stack.callback(runs[-1].close)
    deadline = time.monotonic() + _START_SECS
    for run in runs:
        run.wait_for_report(deadline)
    return runs


def _sample(runs: Sequence[_Run], secs: float) -> None:
    """Samples the runs for `secs` seconds."""
    began = due = time.monotonic()
    while time.monotonic() - began < secs and not all(run.error for run in runs):
        for run in runs:
            if not run.error:
                run.sample(began)
        due += _SAMPLE_SECS
        time.sleep(max(0.0, due - time.monotonic()))


def measure(
    modes: Sequence[str], data_dir: Path, directory: Path, minutes: float
) -> Iterator[tuple[list[str], str, bool]]:
    """Runs all modes at the same time; yields for each its rows, its summary, and if all is flat.

    The summary of a mode that did not start, or of which a process ended, is the reason.
    """
    with contextlib.ExitStack() as stack:
        runs = _started(modes, data_dir, directory, stack)
        _sample(runs, 60 * minutes)
        for run in runs:  # All of them first: each takes seconds to end.
            run.ask_to_end()
    warmup_secs = min(_WARMUP_SECS, 60 * minutes / 3)
    for run in runs:
        if run.error:
            yield [], run.error, False
            continue
        times = [at.seconds for at in run.progress]
        try:
            rows, not_flat = table(run.mode, times, run.samples, run.progress, warmup_secs)
        except ValueError as error:
            yield [], f"{run.mode}: {error}", False
            continue
        said = "not flat: " + ", ".join(not_flat) if not_flat else "all values are flat"
        yield rows, f"{run.mode}: {said}.", not not_flat


def main(argv: Sequence[str]) -> None:
    """Prints the table, and a sentence for each mode."""
    print(f"{machine()}, {_MINUTES.value:g} minutes, all at the same time:\n")
    print("| mode | process | of | after the warm-up | at the end | per hour | flat |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    sentences, are_flat = [], True
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare("digits", directory / "digits")
        for rows, sentence, flat in measure(
            _STRATEGIES.value, directory / "digits", directory, _MINUTES.value
        ):
            if rows:
                print("\n".join(rows), flush=True)
            sentences.append(sentence)
            are_flat = are_flat and flat
    print()
    for sentence in sentences:
        print(sentence)
    sys.exit(0 if are_flat else 1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.long_runs"))
