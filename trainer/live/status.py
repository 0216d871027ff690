"""What the live view knows of a run: from its files, its printed lines and /proc.

    status = Status("runs/a", pid=123, logs=Path("runs/a/tasks"))
    status.read_line("compiling the first step")
    status.poll()
    status.step, status.metrics("train"), status.tasks

No file is read as a whole twice: runs may be long.
"""

import contextlib
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from strategies.worker_stats import mean_staleness
from trainer.hooks.terminal import COMPILING, progress_in
from trainer.run_files import NO_METRICS, RunFiles, local_dir, step_of
from trainer.run_record.goodput import goodput, total

_MAX_VALUES = 4096  # Of a curve. Of more than this, every second one is left out.
_MAX_MESSAGES = 200
# Goodput is computed anew after this time, and at most during 0.2% of the time.
_SECS_PER_GOODPUT, _GOODPUT_PAUSE = 5.0, 500
_REPORT = re.compile(r"step [\d,]+/[\d,]+  (train|eval) ")
_START = re.compile(rb"=== (?P<task>.+), start (?P<start>\d+), process (?P<pid>\d+), (?P<time>.+)")
_RESTARTING = re.compile(r" died: .*\. Restarting (?P<task>.+) (now|in [\d.e+]+ s)\.$")
_ALL = "all tasks"
_RESIZED = re.compile(r"(?P<number>\d+) worker\(s\) train from now on, not ")
STARTING, COMPILES, TRAINING, SERVING = "starting", "compiling", "training", "serving"
RESTARTING, DEAD = "restarting", "dead"


def split_of_report(line: str) -> str:
    """The split of a report that a Console has printed; "" for any other line."""
    found = _REPORT.match(line)
    return found[1] if found else ""


@dataclass
class TaskStatus:
    """A task of the run; a value is None or NaN where it is not known."""

    name: str
    pid: int | None = None  # None: on another machine.
    restarts: int = 0
    state: str = STARTING
    step: int | None = None
    share: float = math.nan
    staleness: float = math.nan
    num_bytes: float = math.nan
    cpu: float = math.nan
    steps_at_start: int | None = None  # Of a worker that was restarted alone.
    process: psutil.Process | None = field(default=None, repr=False)

    @property
    def is_ps(self) -> bool:
        """True for a parameter server."""
        return self.name.startswith("ps ")

    def measure(self) -> bool:
        """Reads memory and CPU time; returns False if the process has ended."""
        try:
            if self.process is None:
                self.process = psutil.Process(self.pid)
            with self.process.oneshot():
                if self.process.status() == psutil.STATUS_ZOMBIE:
                    raise psutil.NoSuchProcess(self.process.pid)
                self.num_bytes = self.process.memory_info().rss
                self.cpu = self.process.cpu_percent()
        except psutil.Error:
            self.num_bytes = self.cpu = math.nan
            return False
        return True


class Curve:
    """The values of a metric: each nth one, at equal distances, and the last one."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._every, self._num_added, self._last = 1, 0, math.nan
        self.step = 0  # Of the last report.

    def add(self, value: float) -> None:
        """Appends a value."""
        if self._num_added % self._every == 0:
            self._kept.append(value)
        self._num_added, self._last = self._num_added + 1, value
        if len(self._kept) > _MAX_VALUES:
            del self._kept[1::2]
            self._every *= 2

    @property
    def values(self) -> list[float]:
        """The values that are kept, and the last one."""
        is_kept = (self._num_added - 1) % self._every == 0
        return self._kept if is_kept else [*self._kept, self._last]


class Tail:
    """The lines that are appended to a file, which may be replaced."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0

    def new_lines(self) -> tuple[list[bytes], bool]:
        """Returns the complete lines since the last call, and True if the file was replaced."""
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                is_replaced = status.st_ino != self._inode or status.st_size < self._offset
                if is_replaced:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                content, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return [], False
        self._offset += len(content) + len(newline)
        return content.splitlines(), is_replaced


def is_warning(message: str) -> bool:
    """Returns True for a message that must not be hidden by others, such as a traceback."""
    return message.startswith(("WARNING", "ERROR", "error:")) or " died: " in message


class Status:
    """The known state of a run."""

    def __init__(self, model_dir: str, pid: int, logs: Path | None) -> None:
        """Follows the run of the process `pid`.

        With `logs` it is the launcher of a cluster, whose tasks log there. Otherwise it is a single
        process, or the chief of a cluster on several machines.
        """
        self.model_dir = model_dir
        self.step = 0
        self.last_step: int | None = None
        self.config: Mapping[str, Any] = {}  # JSON values.
        self.messages: deque[str] = deque(maxlen=_MAX_MESSAGES)
        self.last_warning = ""  # The last message for which `is_warning` is true.
        self.report: Mapping[str, Any] = {}  # The last report of training.
        self.goodput: float | None = None
        self._next_goodput = 0.0
        self._files = RunFiles(model_dir)
        files = RunFiles(local_dir(model_dir))
        self._reports = [Tail(files.metrics), Tail(RunFiles(files.evaluator).metrics)]
        # Of each file, because one of them may be replaced.
        self._curves: list[dict[tuple[str, str], Curve]] = [{}, {}]
        self._phase = STARTING
        self._restarting: set[str] = set()
        self._logs = logs
        self._tails: dict[Path, Tail] = {}
        # Whole seconds, as in the logs, which may have tasks of former runs.
        self._since = psutil.Process(pid).create_time() // 1
        self._tasks: dict[str, TaskStatus] = {}
        if logs is None:
            self._tasks["this process"] = TaskStatus("this process", pid)

    @property
    def tasks(self) -> list[TaskStatus]:
        """The tasks by name: the chief, servers, workers."""

        def place(task: TaskStatus) -> tuple[str, int]:
            job, _, index = task.name.partition(" ")
            return job, int(index) if index.isdecimal() else -1

        return sorted(self._tasks.values(), key=place)

    @property
    def secs_left(self) -> float | None:
        """The time of the steps that are left, at the rate of the last report."""
        rate = self.report.get("steps_per_sec")
        if not rate or self.last_step is None:
            return None
        return float(max(0, self.last_step - self.step) / rate)

    def curve(self, split: str, name: str) -> list[float]:
        """The values of a metric in all reports; of many reports, in some at equal distances."""
        key = split, name
        found = (curves[key] for curves in self._curves if key in curves)
        # An earlier start of the run may have evaluated by itself, this one in an evaluator task.
        return max(found, key=lambda curve: curve.step, default=Curve()).values

    def metrics(self) -> list[str]:
        """Returns the names of the metrics in all reports so far, losses first."""
        found = (name for curves in self._curves for _, name in curves)
        names = dict.fromkeys(name for name in found if name not in NO_METRICS)
        return sorted(names, key=lambda name: "loss" not in name)

    def read_line(self, line: str) -> None:
        """Updates the state from a line that the process has printed."""
        step = progress_in(line)
        if step is not None:
            self.step, self._phase = step, TRAINING
        elif line.strip() == COMPILING:
            self._read_starts()  # A start before this line must not be seen after it.
            self._phase, line = COMPILES, COMPILING
        elif found := _RESTARTING.search(line.rstrip()):
            is_all = found["task"] == _ALL
            self._restarting |= set(self._tasks) if is_all else {found["task"]}
        elif found := _RESIZED.match(line):
            left = {f"worker {index}" for index in range(int(found["number"]))}
            for name in [n for n in self._tasks if n.startswith("worker ") and n not in left]:
                del self._tasks[name]
            self._restarting |= set(self._tasks)
        if self._phase == TRAINING and COMPILING in self.messages:
            self.messages.remove(COMPILING)
        if step is None and line.strip() and not split_of_report(line):
            self.messages.append(line)
            if is_warning(line):
                self.last_warning = line

    def poll(self) -> None:
        """Updates the state from the files of the run and from its processes."""
        self._read_starts()
        for tail, curves in zip(self._reports, self._curves, strict=True):
            self._read_reports(tail, curves)
        if self._phase != STARTING:  # Before, the files may be those of a former run.
            if self.last_step is None:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    document = self._files.read_config()
                    self.last_step = int(document["config"]["train_steps"])
                    self.config = document
            self._read_goodput()
        for task in self._tasks.values():
            if (task.step or 0) > (task.steps_at_start or 0):
                task.steps_at_start = None
            if task.pid is None:
                task.state = self._phase
            elif not task.measure():
                task.state = RESTARTING if task.name in self._restarting else DEAD
            elif task.is_ps:
                task.state = STARTING if self._phase == STARTING else SERVING
            else:
                task.state = self._phase if task.steps_at_start is None else STARTING

    def _read_starts(self) -> None:
        """Finds the tasks, and their restarts, in the logs that the launcher writes."""
        if self._logs is None:
            return
        for path in self._logs.glob("*.log"):
            lines, _ = self._tails.setdefault(path, Tail(path)).new_lines()
            for found in filter(None, map(_START.match, lines)):
                if datetime.fromisoformat(found["time"].decode()).timestamp() < self._since:
                    continue
                name, start = found["task"].decode(), int(found["start"])
                former = self._tasks.get(name)
                task = TaskStatus(name, int(found["pid"]), restarts=start - 1)
                self._tasks[name] = task
                self._restarting.discard(name)
                if name == ("chief 0" if "chief 0" in self._tasks else "worker 0"):
                    self._phase = STARTING
                    for other in self._tasks.values():
                        other.steps_at_start = None
                elif former is not None and self._phase == TRAINING:  # Of ps: restarted alone.
                    task.step = former.step
                    task.steps_at_start = former.step or 0

    def _read_reports(self, tail: Tail, curves: dict[tuple[str, str], Curve]) -> None:
        lines, is_replaced = tail.new_lines()
        if is_replaced:
            curves.clear()
        for line in lines:
            if math.isnan(step_of(line, math.nan)):  # A part of a line, of a run that was killed.
                continue
            report = json.loads(line)
            for name, value in report.items():
                if isinstance(value, float):
                    curve = curves.setdefault((report["split"], name), Curve())
                    curve.add(value)
                    curve.step = report["step"]
            if report["split"] == "train":
                self._read_train_report(report)

    def _read_train_report(self, report: Mapping[str, Any]) -> None:
        self.report = report
        # Progress lines come first, but a process that is not this one's child sends none.
        self.step = max(self.step, report["step"]) if self._phase == TRAINING else report["step"]
        steps = report.get("worker_steps", {})
        for name, number in steps.items():
            if self._logs is None:
                self._tasks.setdefault(name, TaskStatus(name))
            if task := self._tasks.get(name):
                task.step = number
                task.share = report.get("worker_share", {}).get(name, math.nan)
                task.staleness = mean_staleness(report.get("staleness", {}).get(name, {}))

    def _read_goodput(self) -> None:
        begin = time.monotonic()
        if begin < self._next_goodput:
            return
        with contextlib.suppress(OSError):
            if tasks := goodput(self.model_dir):
                seconds = total(tasks)
                if seconds["compute"]:  # Before the first step it would be 0%.
                    self.goodput = seconds["compute"] / sum(seconds.values())
        now = time.monotonic()
        self._next_goodput = now + max(_SECS_PER_GOODPUT, _GOODPUT_PAUSE * (now - begin))
