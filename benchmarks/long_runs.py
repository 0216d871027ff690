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
| steps/s | at most 3% less than the new run, within twice the standard error |

Two runs of one command differ by 2 or 3% themselves.
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
import numpy.typing as npt
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
_SECTIONS = 10
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
    """Returns True if the values called `name`, a field of Sample, stay the same."""
    if name == "memory":
        return found.growth <= max(0.02 * found.first, 4 * _MIB)
    return found.growth < 1


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A run and a new one at the same time.

    `ratio` is the rate of the run divided by that of the new one, `error` its standard error, and
    `cpu_ratio` the same of the CPU time for a step of all processes. `rate` is in steps/s.
    """

    rate: float
    ratio: float
    error: float
    cpu_ratio: float

    @property
    def is_flat(self) -> bool:
        """The run is not slower by _MOST_CHANGE, within twice the standard error."""
        return self.ratio + 2 * self.error >= 1 - _MOST_CHANGE


def compared(old: Sequence[Progress], new: Sequence[Progress]) -> Comparison:
    """Compares two runs whose samples are of the same times.

    The error is computed from the ratio in each of _SECTIONS parts of the time, so that a disturbed
    part counts.

    Raises:
        ValueError: there are too few samples, or a run made no step in a part.
    """
    stride = (min(len(old), len(new)) - 1) // _SECTIONS
    if stride < 1:
        raise ValueError(f"only {min(len(old), len(new))} samples next to a new run")
    ratios = np.divide(_rates(old[::stride]), _rates(new[::stride]))
    total, total_of_new = _steps_and_cpu(old), _steps_and_cpu(new)
    return Comparison(
        float(np.mean(_rates(old[::stride]))),
        float(ratios.mean()),
        float(ratios.std(ddof=1) / np.sqrt(len(ratios))),
        float(total[1] / total[0] / (total_of_new[1] / total_of_new[0])),
    )


def _rates(progress: Sequence[Progress]) -> npt.NDArray[np.float64]:
    rates = [
        (later.steps - sooner.steps) / max(later.reported_secs - sooner.reported_secs, 1e-9)
        for sooner, later in itertools.pairwise(progress)
    ]
    if not all(rates):
        raise ValueError("a part of the time has no step")
    return np.array(rates)


def _steps_and_cpu(progress: Sequence[Progress]) -> tuple[int, float]:
    first, last = progress[0], progress[-1]
    return last.steps - first.steps, last.cpu_secs - first.cpu_secs


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


def summary(mode: str, grown: Sequence[str], found: Comparison) -> str:
    """One sentence: what is not flat, and how the run compares with a new one."""
    flat = "not flat: " + ", ".join(grown) if grown else "all values are flat"
    return (
        f"{mode}: {flat}; {found.rate:,.0f} steps/s, {100 * (found.ratio - 1):+.1f}% "
        f"(+-{100 * found.error:.1f}) to a new run at the same time; CPU time for a step "
        f"{100 * (found.cpu_ratio - 1):+.1f}%."
    )


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
        since = time.monotonic() - began
        _sample([*runs, *new_runs], began, since + _COMPARED_SECS)
        for run in [*runs, *new_runs]:  # All of them first: each takes seconds to end.
            run.ask_to_end()
    warmup_secs = min(_WARMUP_SECS, 60 * minutes / 3)
    for run, new in zip(runs, new_runs, strict=True):
        if run.error:
            yield [], run.error, False
            continue
        times = [at.seconds for at in run.progress]
        rows, grown = table(run.mode, times, run.samples, warmup_secs)
        both = [[at for at in r.progress if at.seconds >= since] for r in (run, new)]
        try:
            found = compared(*both)
        except ValueError as error:
            yield rows, f"{run.mode}: not compared: {new.error or error}", False
            continue
        if not found.is_flat:
            grown.append("steps/s")
        yield rows, summary(run.mode, grown, found), not grown


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
