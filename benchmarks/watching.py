"""`python -m benchmarks.watching`: what the live view and the records of time cost.

    python -m benchmarks.watching --strategies=mirrored,multiworker,ps,ps-sync --rounds=40

Trains on the digits with the live view on a pseudo-terminal, all processes on the same core, so the
steps lack what the view takes. The view and the records are switched off and on in turns of some
seconds, within one run: two runs of the same command differ by more than the result. When they are
off, the process which draws is stopped, and no time is recorded. Prints Markdown: steps/s; CPU time
per step of all processes, which other programs disturb less; and the share of the core that the
process takes which draws, which they disturb least. Steps of the digits take about a millisecond,
so they have many reports: larger models lose less.
"""

import contextlib
import fcntl
import math
import os
import pty
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from absl import app, flags

from benchmarks.table import machine, newest_report, prepare
from data.system.flags import parse_flags
from trainer.run_files import RESTARTS

_MODES = {
    "mirrored": ("--strategy=mirrored",),
    "multiworker": ("--strategy=multiworker", "--workers=2"),
    "ps": ("--strategy=ps", "--workers=2", "--ps=1"),
    "ps-sync": ("--strategy=ps", "--sync_replicas", "--workers=2", "--ps=1"),
}
_STRATEGIES = flags.DEFINE_list("strategies", list(_MODES), f"Of {', '.join(_MODES)}.")
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Rounds to measure.", lower_bound=1)
_SECS = flags.DEFINE_float(
    "secs",
    3.0,
    "The least duration of a turn; a round has two.",
    lower_bound=0.5,
)
flags.register_validator(
    "strategies", lambda names: set(names) <= set(_MODES), f"it knows only {', '.join(_MODES)}"
)

_START_SECS = 300.0
_NUM_WARM_UP_REPORTS = 20
_POLL_SECS = 0.005
_SETTLING_SECS = 1.5  # The first frame has to catch up with the reports.
_ROWS, _COLUMNS = 40, 120
_SWITCH = "TRAINER_BENCHMARK_SWITCH"  # An environment variable: a file with one byte, 0 or 1.
# Python imports it in each process of the run.
_SWITCHED_RECORDS = f"""
import contextlib, mmap, os
from data.system.stopwatch import Stopwatch
from trainer.run_record.recorder import Recorder

switch = mmap.mmap(os.open(os.environ["{_SWITCH}"], os.O_RDONLY), 1, prot=mmap.PROT_READ)

def switched(cls, name, when_off):
    real = getattr(cls, name)
    def method(self, *args):
        return real(self, *args) if switch[0] else when_off(self)
    setattr(cls, name, method)

for name in ("begin", "reach", "switch", "relabel", "carve"):
    switched(Stopwatch, name, lambda self: self._cause)
switched(Stopwatch, "spend", lambda self: contextlib.nullcontext())
for name in ("__call__", "_write"):
    switched(Recorder, name, lambda self: None)
"""


class Turn(NamedTuple):
    """What the run did in one turn, or in several."""

    secs: float
    steps: int
    cpu_secs: float  # Of all processes.
    view_secs: float  # CPU time of the process that draws.

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.secs

    @property
    def cpu_per_step(self) -> float:
        """In seconds."""
        return self.cpu_secs / max(self.steps, 1)


def total(turns: Sequence[Turn]) -> Turn:
    """The sum of turns."""
    return Turn(*map(sum, zip(*turns, strict=True)))


class Run:
    """A run of the trainer whose view and records can be switched off."""

    def __init__(self, argv: Sequence[str], directory: Path, core: int) -> None:
        """Starts it on one core, switched on; `directory` gets its files."""
        self._model_dir = directory / "run"
        self._metrics = self._model_dir / "metrics.jsonl"
        self._switch = directory / "switch"
        self._switch.write_bytes(b"\1")
        (directory / "sitecustomize.py").write_text(_SWITCHED_RECORDS)
        env = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR")}
        env |= {"TERM": "xterm-256color", "PYTHONPATH": str(directory), _SWITCH: str(self._switch)}
        ours, theirs = pty.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        self._popen = psutil.Popen(
            [sys.executable, "-m", "trainer", *argv, f"--model_dir={self._model_dir}"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        self._popen.cpu_affinity([core])  # Before it has started another process.
        os.close(theirs)
        self._printed = b""
        threading.Thread(target=self._drain, args=[ours], daemon=True).start()
        self._processes: list[psutil.Process] = [self._popen]
        self._view: psutil.Process | None = None
        self._cpu: dict[psutil.Process, float] = {}
        self._step = 0

    def _drain(self, output: int) -> None:
        with contextlib.suppress(OSError):  # A pseudo-terminal whose programs have ended.
            while content := os.read(output, 65_536):
                self._printed = (self._printed + content)[-100_000:]
        os.close(output)

    def warm_up(self) -> None:
        """Waits for the first reports. Raises RuntimeError if they do not come."""
        self._wait_for_report(100 * _NUM_WARM_UP_REPORTS)
        time.sleep(1.0)  # Processes that start the others end.
        self._processes = [self._popen, *self._popen.children(recursive=True)]
        (self._view,) = [p for p in self._processes if "trainer.live.draw" in p.cmdline()]
        self._wait_for_report(self._step + 1)

    def turn(self, secs: float, *, is_watched: bool) -> Turn:
        """Trains from one report to the first one after `secs`."""
        assert self._view is not None
        self._switch_to(is_watched)
        time.sleep(_SETTLING_SECS)
        self._wait_for_report(self._step + 1)
        began, step = time.monotonic(), self._step
        cpu, view = self._cpu_secs(), self._cpu[self._view]
        time.sleep(secs)
        self._wait_for_report(self._step + 1)
        took, steps = time.monotonic() - began, self._step - step
        return Turn(took, steps, self._cpu_secs() - cpu, self._cpu[self._view] - view)

    def end(self) -> None:
        """Kills what is left of it."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()

    def _switch_to(self, is_watched: bool) -> None:
        assert self._view is not None
        with self._switch.open("r+b") as file:  # In place: the processes have mapped it.
            file.write(b"\1" if is_watched else b"\0")
        self._view.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)

    def _wait_for_report(self, step: int) -> None:
        """Returns just after a report of `step` or later."""
        size = self._size()
        deadline = time.monotonic() + _START_SECS
        while True:
            time.sleep(_POLL_SECS)
            now = self._size()
            if now != size:
                size = now
                with contextlib.suppress(ValueError):  # No report yet.
                    self._step = newest_report(self._metrics)["step"]
                if self._step >= step:
                    break
            if self._popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no reports:\n{self._printed.decode(errors='replace')}")
        restarts = self._model_dir / "tasks" / RESTARTS
        if restarts.exists():
            raise RuntimeError(f"a task was started again: {restarts.read_text()}")

    def _size(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else 0

    def _cpu_secs(self) -> float:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # One that has started the others.
                self._cpu[process] = sum(process.cpu_times()[:2])
        return sum(self._cpu.values())


def increase(turns: Sequence[Turn], others: Sequence[Turn], of: Callable[[Turn], float]) -> str:
    """By how many percent `of` is greater in `turns` than in `others`, with its standard error.

    It is computed from the sums of all turns; the error from what the result would be without one
    turn or another (jackknife).
    """

    def percent(left_out: int | None = None) -> float:
        kept = [i for i in range(len(turns)) if i != left_out]
        sums = (total([run[i] for i in kept]) for run in (turns, others))
        value, other = map(of, sums)
        return 100 * (value / other - 1)

    if len(turns) < 2:
        return f"{percent():+.2f}%"
    parts = [percent(left_out) for left_out in range(len(turns))]
    error = math.sqrt((len(parts) - 1) * statistics.pvariance(parts))
    return f"{percent():+.2f}% (+-{error:.2f})"


def row(mode: str, watched: Sequence[Turn], plain: Sequence[Turn]) -> str:
    """A row of the table."""
    with_view, without = total(watched), total(plain)
    return (
        f"| {mode} | {without.rate:,.0f} | {with_view.rate:,.0f} "
        f"| {increase(watched, plain, lambda turn: turn.rate)} "
        f"| {1e3 * without.cpu_per_step:.3f} | {1e3 * with_view.cpu_per_step:.3f} "
        f"| {increase(watched, plain, lambda turn: turn.cpu_per_step)} "
        f"| {with_view.view_secs / with_view.secs:.2%} |"
    )


def _measured(argv: Sequence[str], directory: Path, core: int) -> str:
    """The cells of one mode: trains in turns."""
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    run = Run(argv, directory, core)
    try:
        run.warm_up()
        for number in range(_ROUNDS.value):
            for is_watched in (number % 2 == 0, number % 2 == 1):
                turns[is_watched].append(run.turn(_SECS.value, is_watched=is_watched))
    finally:
        run.end()
    return row(directory.name, turns[True], turns[False])


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    # This process reads files and must not take time from the run, which is on another core.
    run_core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {run_core} or {run_core})
    print(f"{machine()}, one of them; {_ROUNDS.value} turns of {_SECS.value:g} s:\n")
    titles = "mode | steps/s | watched | more | CPU ms a step | watched | more | view, of the core"
    print(f"| {titles} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        prepare("digits", Path(name) / "digits")
        for mode in _STRATEGIES.value:
            words = [*_MODES[mode], f"--data_dir={name}/digits", "--train_steps=1000000000"]
            words += [f"--config.{kind}_every_steps=1000000000" for kind in ("eval", "checkpoint")]
            directory = Path(name) / mode
            directory.mkdir()
            print(_measured([*words, "--num_threads=1"], directory, run_core), flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.watching"))
