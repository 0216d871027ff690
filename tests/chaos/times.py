"""Do the causes of time of each task add up to its time, in runs that are disturbed?

    python -m tests.chaos.times --runs=20

Disturbs runs of all strategies: kills workers, the chief, parameter servers and the launcher, stops
tasks for some seconds, and interrupts runs by Ctrl-C, which the same command resumes. Meanwhile it
looks 50 times a second which processes of the run there are, at the kernel and not at what the run
records. Prints how far the sum of the causes of each task is from the time between the start of its
first process and the end of its last one. Ends with 0 if all are within 1%.
"""

import argparse
import dataclasses
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from data.prepare.preparing import prepare
from tests.chaos.__main__ import ASYNC, BACKUP, SYNC, flags_for
from tests.chaos.chaos import LocalRun, check_complete, disturb, tasks_of
from tests.chaos.faults import LAUNCHER, Fault
from tests.cluster.runs import Topology
from trainer.run_record.goodput import TaskTime, goodput

MOST_DIFFERENT = 0.01  # Of the time of a task.
_MODES = (Topology("mirrored-2"), Topology("multiworker-2"), SYNC, ASYNC, BACKUP)
_LOOK_SECS = 0.02
_STOP_SECS = 8.0
_NUM_CALLS = 30  # Of the executor, to a fault and after the last one.


class Clock:
    """The time of each task of a run as the kernel sees it: in seconds since this machine started.

    Setting the system's clock does not change it.
    """

    def __init__(self, model_dir: Path) -> None:
        self._logs = model_dir / "tasks"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._present: dict[int, str] = {}  # The task of each process that runs.
        self._known: set[int] = set()
        self._looked_at = _now()
        self._offset = time.time() - _now()
        self.began: dict[str, float] = {}
        # The last process of each task ended between two looks: the times of both.
        self.ended: dict[str, tuple[float, float]] = {}
        self.dead: dict[str, float] = {}  # The time between two processes of a task.
        self.step_secs = 0.0  # By how much the system's clock was set meanwhile.

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def secs(self, task: str) -> tuple[float, float]:
        """From the start of the first process of a task to the end of its last one.

        The least and the greatest value: where looks are far apart, the end is not known better.
        """
        least, most = self.ended[task]
        return least - self.began[task], most - self.began[task]

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_SECS) or self._present:
            self._look()

    def _look(self) -> None:
        now = _now()
        self.step_secs = time.time() - _now() - self._offset
        for pid in [pid for pid in self._present if _started_at(pid) is None]:
            self.ended[self._present.pop(pid)] = self._looked_at, _now()
        self._looked_at = now
        for log in self._logs.glob("*.log"):
            text = log.read_text(errors="replace")
            for pid in map(int, re.findall(r"^=== .*, process (\d+), ", text, re.MULTILINE)):
                started = _started_at(pid)
                if pid in self._known or started is None:
                    continue
                self._known.add(pid)
                self._present[pid] = log.stem
                self.began.setdefault(log.stem, started)
                _, ended = self.ended.get(log.stem, (started, started))
                gap = max(0.0, started - ended)
                self.dead[log.stem] = self.dead.get(log.stem, 0.0) + gap


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _started_at(pid: int) -> float | None:
    """When a process was made; None if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if words[0] in "ZX":
        return None
    return int(words[19]) / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Difference:
    """A task: the sum of its causes, and its time by the clock, in seconds."""

    task: str
    causes: float
    least_clock: float
    clock: float
    dead: float  # Recorded, as "dead" or "stalled".
    clock_dead: float

    @property
    def part(self) -> float:
        """The difference, as a part of the time; negative if the causes are less.

        0 if the causes end between two looks at the clock.
        """
        return self.causes / min(max(self.causes, self.least_clock), self.clock) - 1


def differences(tasks: Sequence[TaskTime], clock: Clock) -> list[Difference]:
    """Compares each task. Raises AssertionError if one of them is missing, or a cause negative."""
    assert {task.name for task in tasks} == set(clock.began), "a task has no record"
    for task in tasks:
        assert all(value > -0.01 for value in task.seconds.values()), task.seconds
    return [
        Difference(
            task.name,
            task.total_secs,
            *clock.secs(task.name),
            task.seconds["dead"] + task.seconds["stalled"],
            clock.dead[task.name],
        )
        for task in tasks
    ]


def faults_of(topology: Topology, number: int) -> tuple[list[Fault], int]:
    """The faults of a run, and its steps. Four numbers have every task and every kind of fault."""
    tasks = tasks_of(topology)
    plans = (
        [("kill", tasks[-1]), ("stop", tasks[0])],
        [("kill", tasks[0]), ("stop", tasks[-1])],
        [("interrupt", LAUNCHER), ("kill", tasks[len(tasks) // 2])],
        [("kill", LAUNCHER), ("stop", tasks[len(tasks) // 2]), ("interrupt", LAUNCHER)],
    )
    # An asynchronous run continues while one of its workers starts again.
    every_steps = _NUM_CALLS * (20 if topology == ASYNC else 5)
    faults = [
        Fault(kind, task, every_steps * i, delay_secs=0.3, secs=_STOP_SECS)
        for i, (kind, task) in enumerate(plans[number % len(plans)], 1)
    ]
    return faults, every_steps * (len(faults) + 1)


def disturbed(topology: Topology, number: int, data_dir: Path, model_dir: Path) -> list[Difference]:
    """Disturbs a run; returns the differences of its tasks."""
    faults, num_steps = faults_of(topology, number)
    flags = (*flags_for(topology, data_dir, num_steps), "--max_restarts=9")
    with Clock(model_dir) as clock:
        story = disturb(LocalRun(topology, model_dir, flags), faults)
    assert len(story.events) == len(faults), "the run was over before its faults"
    check_complete(story, num_steps)
    if abs(clock.step_secs) > 0.1:
        # The run measures the time between two processes with the system's clock.
        print(f"The system's clock was set by {clock.step_secs:.1f} s.", file=sys.stderr)
    return differences(goodput(str(model_dir)), clock)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.times")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    arguments = parser.parse_args()
    largest = 0.0
    print(
        "| strategy | faults | seconds | causes of its tasks | the end is known to | "
        "dead: recorded, by the clock |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        data_dir = Path(name) / "digits"
        prepare("digits", str(data_dir))
        for index in range(arguments.first, arguments.first + arguments.runs):
            topology, number = _MODES[index % len(_MODES)], index // len(_MODES)
            found = disturbed(topology, number, data_dir, Path(name) / f"run-{index}")
            planned, _ = faults_of(topology, number)
            faults = ", ".join(f"{fault.kind} {fault.task}" for fault in planned)
            parts = ", ".join(f"{100 * (1 + one.part):.2f}%" for one in found)
            dead = ", ".join(f"{one.dead:.1f} {one.clock_dead:.1f}" for one in found)
            seconds = max(one.clock for one in found)
            known = max(one.clock - one.least_clock for one in found)
            print(
                f"| {topology} | {faults} | {seconds:.1f} | {parts} | {known:.2f} s | {dead} |",
                flush=True,
            )
            largest = max(largest, *(abs(one.part) for one in found))
    print(f"\nThe largest difference is {100 * largest:.2f}%.")
    sys.exit(0 if largest <= MOST_DIFFERENT else 1)


if __name__ == "__main__":
    # So that contexts are left, and the run with them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
