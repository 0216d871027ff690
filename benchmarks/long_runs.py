"""`python -m benchmarks.long_runs`: do memory, descriptors, threads and rate stay the same?

    python -m benchmarks.long_runs --minutes=30 --strategies=mirrored,multiworker,ps,ps-sync

Trains on the digits under all strategies at the same time, with evaluations and checkpoints: the
load is steady, and 30 minutes are enough for all. Every 10 seconds it reads the memory (RSS), the
file descriptors and the threads of each process, and for each run the steps and the CPU time of all
its processes. Everything before the end of the warm-up (the first 5 minutes, a third of the run at
most) is left out. Puts a straight line through the other samples, and prints its two ends and its
slope in Markdown; memory in MiB. Then starts a second run of each mode next to the first one, and
compares their rates for 5 minutes: a machine that others use has no constant rate, but both runs
have the same machine. Says whether the values are flat. The exit code is 1 if a process ended
meanwhile, or something is not flat.

| of | flat means |
| --- | --- |
| memory | at most 2% or 4 MiB more at the end than after the warm-up |
| descriptors, threads | less than 1 more |
| steps/s | at most 3% less than the new run, or at most 3% more CPU time for a step |
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from absl import app, flags

from benchmarks.table import machine, prepare, train_reports
from data.system.flags import parse_flags

_MODES = {
    "mirrored": ("--strategy=mirrored", "--replicas=2"),
    "multiworker": ("--strategy=multiworker", "--workers=2"),
    "ps": ("--strategy=ps", "--workers=2", "--ps=1"),
    "ps-sync": ("--strategy=ps", "--sync_replicas", "--workers=2", "--ps=1"),
}
_MINUTES = flags.DEFINE_float(
    "minutes", 30.0, "From the first report of all runs to the second runs.", lower_bound=1.0
)
_STRATEGIES = flags.DEFINE_list("strategies", list(_MODES), f"Of {', '.join(_MODES)}.")
flags.register_validator(
    "strategies", lambda names: set(names) <= set(_MODES), f"it knows only {', '.join(_MODES)}"
)

_SAMPLE_SECS = 10.0
_WARMUP_SECS = 300.0
_NEW_WARMUP_SECS = 60.0
_COMPARED_SECS = 300.0
_START_SECS = 600.0
_END_SECS = 120.0
_MIB = 2**20
_END_BYTES = 1 << 16
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
    """Returns True if the values called `name`, a field of Sample, stay the same."""
    if name == "memory":
        return found.growth <= max(0.02 * found.first, 4 * _MIB)
    return found.growth < 1


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast a run is: steps a second, and the CPU time for a step of all its processes."""

    rate: float
    cpu_millisecs: float


def pace(progress: Sequence[Progress]) -> Pace:
    """The pace between the first and the last of `progress`.

    Raises:
        ValueError: no step was made between them.
    """
    first, last = progress[0], progress[-1]
    steps = last.steps - first.steps
    if not steps:
        raise ValueError(f"no step in {last.seconds - first.seconds:.0f} s")
    return Pace(
        steps / (last.reported_secs - first.reported_secs),
        1000 * (last.cpu_secs - first.cpu_secs) / steps,
    )


def is_pace_kept(old: Pace, new: Pace) -> bool:
    """Returns True if the old run is not slower than a new one at the same time."""
    has_rate = old.rate >= (1 - _MOST_CHANGE) * new.rate
    return has_rate or old.cpu_millisecs <= (1 + _MOST_CHANGE) * new.cpu_millisecs


def table(
    mode: str, times: Sequence[float], samples: Mapping[str, Sequence[Sample]], warmup_secs: float
) -> tuple[list[str], list[str]]:
    """The rows of a mode, and what is not flat. `samples` has those of each process at `times`."""
    rows, grown = [], []
    for process, values in samples.items():
        for field in dataclasses.fields(Sample):
            found = trend(times, [getattr(value, field.name) for value in values], warmup_secs)
            flat = is_flat(field.name, found)
            unit = _MIB if field.name == "memory" else 1
            ends = (found.first, found.last, found.per_hour)
            columns = " | ".join(f"{value / unit:z,.1f}" for value in ends)
            verdict = "yes" if flat else "no"
            rows.append(f"| {mode} | {process} | {field.name} | {columns} | {verdict} |")
            if not flat:
                grown.append(f"{field.name} of {process}")
    return rows, grown


def summary(mode: str, grown: Sequence[str], old: Pace, new: Pace) -> str:
    """One sentence: what is not flat, and how the run compares with a new one."""
    flat = "not flat: " + ", ".join(grown) if grown else "all values are flat"
    rate = 100 * (old.rate / new.rate - 1)
    cpu = 100 * (old.cpu_millisecs / new.cpu_millisecs - 1)
    return (
        f"{mode}: {flat}; {old.rate:,.0f} steps/s, {rate:+.1f}% to a new run at the same time; "
        f"{old.cpu_millisecs:.2f} ms of CPU time for a step, {cpu:+.1f}%."
    )


def newest_report(metrics: Path) -> dict[str, Any]:
    """The newest report of training. Reads only the end of the file, which grows."""
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # Cut off, at the beginning or the end.
            report: dict[str, Any] = json.loads(line)
            if report["split"] == "train":
                return report
    raise ValueError(f"{metrics} has no report of training in its last {_END_BYTES:,} bytes")


class _Run:
    """One run of the trainer, and its samples."""

    def __init__(self, mode: str, data_dir: Path, directory: Path) -> None:
        """Starts it, with its files in `directory`; `close` ends it."""
        self.mode = mode
        directory.mkdir(exist_ok=True)
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


def _sample(runs: Sequence[_Run], began: float, until: float) -> None:
    """Samples the runs for the seconds from now to `until`, since `began`."""
    due = time.monotonic()
    while time.monotonic() - began < until and not all(run.error for run in runs):
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
        runs = _started(modes, data_dir, directory / "old", stack)
        began = time.monotonic()
        _sample(runs, began, 60 * minutes)
        new_runs = _started(modes, data_dir, directory / "new", stack)
        time.sleep(_NEW_WARMUP_SECS)
        compared = time.monotonic() - began
        _sample([*runs, *new_runs], began, compared + _COMPARED_SECS)
        for run in [*runs, *new_runs]:  # All of them first: each takes seconds to end.
            run.ask_to_end()
    warmup_secs = min(_WARMUP_SECS, 60 * minutes / 3)
    for run, new in zip(runs, new_runs, strict=True):
        if error := run.error or new.error:
            yield [], error, False
            continue
        times = [at.seconds for at in run.progress]
        rows, grown = table(run.mode, times, run.samples, warmup_secs)
        paces = [pace([at for at in r.progress if at.seconds >= compared]) for r in (run, new)]
        if not is_pace_kept(*paces):
            grown.append("steps/s")
        yield rows, summary(run.mode, grown, *paces), not grown


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
