"""`python -m benchmarks.long_runs`: do memory, descriptors and threads of a long run stay the same?

    python -m benchmarks.long_runs --minutes=30 --strategies=mirrored,multiworker,ps,ps-sync

Trains on the digits under each strategy, one after the other, with evaluations and checkpoints.
Every 10 seconds it reads the memory (RSS), the file descriptors and the threads of each process,
and the step rate since the sample before. Puts a straight line through the samples after the
warm-up (the first 5 minutes, a third of the run at most), and prints its two ends and its slope in
Markdown; memory in MiB. Then says whether the values are flat. The exit code is 1 if a process
ended meanwhile, or something is not flat.

| of | flat means: by the line, from the warm-up to the end |
| --- | --- |
| memory | at most 2% or 4 MiB more |
| descriptors, threads | less than 1 more |
| steps/s | at most 3% less |
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

from benchmarks.table import machine, prepare, train_reports
from data.system.flags import parse_flags

_MODES = {
    "mirrored": ("--strategy=mirrored", "--replicas=2"),
    "multiworker": ("--strategy=multiworker", "--workers=2"),
    "ps": ("--strategy=ps", "--workers=2", "--ps=1"),
    "ps-sync": ("--strategy=ps", "--sync_replicas", "--workers=2", "--ps=1"),
}
_MINUTES = flags.DEFINE_float(
    "minutes", 30.0, "The duration of each run, after its first report.", lower_bound=0.5
)
_STRATEGIES = flags.DEFINE_list("strategies", list(_MODES), f"Of {', '.join(_MODES)}.")
flags.register_validator(
    "strategies", lambda names: set(names) <= set(_MODES), f"it knows only {', '.join(_MODES)}"
)

_SAMPLE_SECS = 10.0
_WARMUP_SECS = 300.0
_START_SECS = 300.0
_END_SECS = 120.0
_MIB = 2**20
_MOST_SLOWDOWN = 0.03


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one process uses at one time."""

    memory: float  # Bytes.
    descriptors: float
    threads: float


@dataclasses.dataclass(frozen=True)
class Trend:
    """A straight line through values after the warm-up: its ends, and its slope in an hour."""

    first: float
    last: float
    per_hour: float

    @property
    def growth(self) -> float:
        """From the first end to the last."""
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
    """Returns True if the values called `name`, a field of Sample or `rate`, stay the same."""
    if name == "rate":
        return -found.growth <= _MOST_SLOWDOWN * found.first
    if name == "memory":
        return found.growth <= max(0.02 * found.first, 4 * _MIB)
    return found.growth < 1


def rates(reports: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """The time and the step rate of each sample, of which `reports` has the newest report.

    A report has the seconds since the start, and a step. The rate is that since the report of the
    sample before; samples without a new report have none.
    """
    found = []
    for (early, before), (late, after) in itertools.pairwise(reports):
        if after > before:
            found.append((late, (after - before) / (late - early)))
    return found


def table(
    mode: str,
    times: Sequence[float],
    samples: Mapping[str, Sequence[Sample]],
    of_rates: Sequence[tuple[float, float]],
    warmup_secs: float,
) -> tuple[list[str], list[str]]:
    """The rows of a mode, and what is not flat. `samples` has those of each process."""
    rows, grown = [], []

    def add(process: str, name: str, found: Trend) -> None:
        unit, flat = _MIB if name == "memory" else 1, is_flat(name, found)
        ends = (found.first, found.last, found.per_hour)
        columns = " | ".join(f"{value / unit:z,.1f}" for value in ends)
        rows.append(f"| {mode} | {process} | {name} | {columns} | {'yes' if flat else 'no'} |")
        if not flat:
            grown.append(f"{name} of {process}")

    for process, values in samples.items():
        for field in dataclasses.fields(Sample):
            found = trend(times, [getattr(value, field.name) for value in values], warmup_secs)
            add(process, field.name, found)
    rate = trend([at for at, _ in of_rates], [rate for _, rate in of_rates], warmup_secs)
    add("the run", "rate", rate)
    return rows, grown


def summary(mode: str, grown: Sequence[str], rate: Trend) -> str:
    """One sentence: what is not flat, and how much the rate fell."""
    flat = "not flat: " + ", ".join(grown) if grown else "all values are flat"
    return f"{mode}: {flat}; the rate changed by {100 * rate.growth / rate.first:+.1f}%."


@contextlib.contextmanager
def _running(argv: Sequence[str], model_dir: Path, log: Path) -> Iterator[psutil.Popen]:
    command = [sys.executable, "-m", "trainer", *argv, f"--model_dir={model_dir}"]
    with log.open("wb") as out:
        process = psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_SECS)
            except psutil.TimeoutExpired:
                process.kill()


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


def _sample(process: psutil.Process) -> Sample:
    with process.oneshot():
        return Sample(process.memory_info().rss, process.num_fds(), process.num_threads())


def measure(
    mode: str, data_dir: Path, directory: Path, minutes: float
) -> tuple[list[str], str, bool]:
    """Runs one mode; returns its rows, its summary, and whether all is flat.

    Raises:
        RuntimeError: the run did not start, or a process ended.
    """
    model_dir, log = directory / mode, directory / f"{mode}.log"
    argv = [*_MODES[mode], f"--data_dir={data_dir}", "--train_steps=1000000000", "--num_threads=1"]
    with _running(argv, model_dir, log) as launcher:
        deadline = time.monotonic() + _START_SECS
        while not train_reports(model_dir):
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{mode} did not start:\n{log.read_text()}")
            time.sleep(1)
        processes = _processes(launcher, model_dir)
        began = time.monotonic()
        times: list[float] = []
        samples: dict[str, list[Sample]] = {name: [] for name in processes}
        reports: list[tuple[float, int]] = []
        while (now := time.monotonic() - began) < 60 * minutes:
            try:
                for name, process in processes.items():
                    samples[name].append(_sample(process))
            except psutil.NoSuchProcess:
                raise RuntimeError(f"{mode}: {name} has ended:\n{log.read_text()}") from None
            times.append(now)
            newest = train_reports(model_dir)[-1]
            reports.append((newest["seconds"], newest["step"]))
            time.sleep(max(0.0, began + len(times) * _SAMPLE_SECS - time.monotonic()))
    # Times of reports count from a moment before the first sample.
    of_rates = [(at - reports[0][0], rate) for at, rate in rates(reports)]
    warmup_secs = min(_WARMUP_SECS, 60 * minutes / 3)
    rows, grown = table(mode, times, samples, of_rates, warmup_secs)
    of_run = trend([at for at, _ in of_rates], [rate for _, rate in of_rates], warmup_secs)
    return rows, summary(mode, grown, of_run), not grown


def main(argv: Sequence[str]) -> None:
    """Prints the table, and a sentence for each mode."""
    print(f"{machine()}, {_MINUTES.value:g} minutes each:\n")
    print("| mode | process | of | after the warm-up | at the end | per hour | flat |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    sentences, are_flat = [], True
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare("digits", directory / "digits")
        for mode in _STRATEGIES.value:
            rows, sentence, flat = measure(mode, directory / "digits", directory, _MINUTES.value)
            print("\n".join(rows), flush=True)
            sentences.append(sentence)
            are_flat = are_flat and flat
    print()
    for sentence in sentences:
        print(sentence)
    sys.exit(0 if are_flat else 1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.long_runs"))
