"""`python -m benchmarks.watching`: what the live view and the records of time cost.

    python -m benchmarks.watching --strategies=mirrored,multiworker,ps,ps-sync --rounds=40

Starts two equal runs on the digits: one with the live view on a pseudo-terminal, which also records
where its time goes; and one that prints lines to a pipe and records nothing. All processes are on
the same core, so what the view takes is missing from the steps. The two runs train in turns of some
seconds: the one whose turn it is not is stopped by SIGSTOP. Prints Markdown: steps/s in its own
turns, and CPU time per step of all processes of a run, which other programs disturb less; and the
share of the core that the process takes which draws, which they disturb least. Steps of the digits
take less than a millisecond, so they have many reports: larger models lose less.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from absl import app, flags

from benchmarks.table import machine, prepare, train_reports
from data.system.flags import parse_flags
from trainer.local.launch_report import RESTARTS

_MODES = {
    "mirrored": ("--strategy=mirrored",),
    "multiworker": ("--strategy=multiworker", "--workers=2"),
    "ps": ("--strategy=ps", "--workers=2", "--ps=1"),
    "ps-sync": ("--strategy=ps", "--sync_replicas", "--workers=2", "--ps=1"),
}
_STRATEGIES = flags.DEFINE_list("strategies", list(_MODES), f"Of {', '.join(_MODES)}.")
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Rounds to measure.", lower_bound=1)
_SECS = flags.DEFINE_float(
    "secs", 1.5, "The duration of a turn; a round has one of each run.", lower_bound=0.5
)
flags.register_validator(
    "strategies", lambda names: set(names) <= set(_MODES), f"it knows only {', '.join(_MODES)}"
)

_START_SECS = 300.0
_NUM_WARM_UP_REPORTS = 20
_ROWS, _COLUMNS = 40, 120
# Python imports it in each process of the run that records nothing.
_NO_RECORDS = """
import contextlib
from data.system.stopwatch import Stopwatch
from trainer.report.recorder import Recorder

def nothing(self, *args, **named):
    return args[0] if args else None

for name in ("begin", "reach", "switch", "relabel", "carve"):
    setattr(Stopwatch, name, nothing)
Stopwatch.spend = lambda self, cause: contextlib.nullcontext()
for name in ("__call__", "begin", "end", "open", "close", "close_stalled"):
    setattr(Recorder, name, nothing)
Recorder.__enter__ = lambda self: self
"""


class Turn(NamedTuple):
    """What a run did in one turn, or in several."""

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
    """A run of the trainer that makes steps in its own turns."""

    def __init__(self, argv: Sequence[str], directory: Path, *, is_watched: bool) -> None:
        """Starts it; `directory` gets its files."""
        self._model_dir = directory / "run"
        env = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR")}
        ours, theirs = pty.openpty() if is_watched else os.pipe()
        if is_watched:
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
            env["TERM"] = "xterm-256color"
        else:
            directory.mkdir()
            (directory / "sitecustomize.py").write_text(_NO_RECORDS)
            env["PYTHONPATH"] = str(directory)
        self._popen = psutil.Popen(
            [sys.executable, "-m", "trainer", *argv, f"--model_dir={self._model_dir}"],
            stdin=theirs if is_watched else None,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self.printed = b""
        threading.Thread(target=self._drain, args=[ours], daemon=True).start()
        self.processes: list[psutil.Process] = []
        self.view: psutil.Process | None = None
        self._cpu: dict[psutil.Process, float] = {}
        self.turns: list[Turn] = []

    def _drain(self, output: int) -> None:
        with contextlib.suppress(OSError):  # A pseudo-terminal whose programs have ended.
            while content := os.read(output, 65_536):
                self.printed = (self.printed + content)[-100_000:]
        os.close(output)

    def warm_up(self) -> None:
        """Waits for the first reports. Raises RuntimeError if they do not come."""
        deadline = time.monotonic() + _START_SECS
        while len(train_reports(self._model_dir)) < _NUM_WARM_UP_REPORTS:
            if self._popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no reports:\n{self.printed.decode(errors='replace')}")
            time.sleep(0.5)
        time.sleep(1.0)  # Processes that start the others end.
        self.processes = [psutil.Process(self._popen.pid), *self._popen.children(recursive=True)]
        views = [p for p in self.processes if "trainer.live.draw" in p.cmdline()]
        self.view = views[0] if views else None

    def pause(self) -> None:
        """Stops all processes."""
        self._signal(signal.SIGSTOP)

    def turn(self, secs: float) -> None:
        """Trains for `secs`."""
        step, cpu, view = self._step(), self._cpu_secs(), self._view_secs()
        began = time.monotonic()
        self._signal(signal.SIGCONT)
        time.sleep(secs)
        self.pause()
        restarts = self._model_dir / "tasks" / RESTARTS
        if restarts.exists():
            raise RuntimeError(f"a task was started again: {restarts.read_text()}")
        if self._popen.poll() is not None:
            raise RuntimeError(f"the run has ended:\n{self.printed.decode(errors='replace')}")
        took = time.monotonic() - began
        steps = self._step() - step
        self.turns.append(Turn(took, steps, self._cpu_secs() - cpu, self._view_secs() - view))

    def end(self) -> None:
        """Kills what is left of it."""
        for process in self.processes or [self._popen]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()

    def _signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _step(self) -> int:
        return int(train_reports(self._model_dir)[-1]["step"])

    def _cpu_secs(self) -> float:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # One that has started the others.
                self._cpu[process] = sum(process.cpu_times()[:2])
        return sum(self._cpu.values())

    def _view_secs(self) -> float:
        return sum(self.view.cpu_times()[:2]) if self.view else 0.0


def increase(turns: Sequence[Turn], others: Sequence[Turn], of: Callable[[Turn], float]) -> str:
    """By how many percent `of` is greater in `turns` than in `others`, with its standard error.

    It is computed from the sums of all turns, because a turn may end between two reports; the
    error from what the result would be without one turn or another (jackknife).
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


@contextlib.contextmanager
def _two_runs(argv: Sequence[str], directory: Path) -> Iterator[dict[bool, Run]]:
    runs: dict[bool, Run] = {}
    try:
        for is_watched in (True, False):
            run = Run(argv, directory / f"watched-{is_watched}", is_watched=is_watched)
            runs[is_watched] = run
        for run in runs.values():
            run.warm_up()
        # Not before: a run that is stopped for as long as another starts is taken for dead.
        for run in runs.values():
            run.pause()
        yield runs
    finally:
        for run in runs.values():
            run.end()


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
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
            with _two_runs([*words, "--num_threads=1"], directory) as runs:
                for number in range(_ROUNDS.value):
                    for is_watched in (number % 2 == 0, number % 2 == 1):
                        runs[is_watched].turn(_SECS.value)
                print(row(mode, runs[True].turns, runs[False].turns), flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.watching"))
