"""Where the time of a run went: every second of every task in one of ten causes.

    for task in goodput("runs/a"):
        print(task.name, f"{task.goodput:.0%}", task.seconds["dead"])

Reads what recorder.py wrote, and restarts.jsonl; the run may still be running. The seconds of a
task add up to the time from its first start to its last end: the time between two of its processes
is "dead", or "stalled" if the former one was found stopped. Steps that a later process did again
are "lost steps". A server does what the chief asks for, so its time is divided as the chief's was
at that time.
"""

import datetime
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from data.system.files import exists, is_dir, join, names_in, open_file
from data.system.stopwatch import CAUSES, SERVING
from trainer.run_files import RESTARTS, RunFiles, directory_of_logs, json_objects
from trainer.run_record.recorder import LINE_BYTES, SUFFIX

# The task that steers a run, by its name: the first that is there.
CHIEFS = ("chief-0", "worker-0")
# The time of steps: what is lost if the steps have to be repeated.
_OF_STEPS = ("input wait", "compute", "sum wait")
# A process that wrote nothing for this time before its end did not run.
_SILENT_SECS = 5.0
_LOG_LINE_BYTES = 200


class Piece(NamedTuple):
    """A part of the time of a task: `seconds` adds up to end - begin.

    The step counter was `first_step` at its begin and `last_step` at its end; None before training.
    """

    begin: float
    end: float
    seconds: dict[str, float]
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True)
class TaskTime:
    """The time of one task, such as `worker-0`, with all its processes.

    `seconds` has all causes. `pieces` are the same time in parts, in order; `starts` are the times
    at which its processes began, in seconds since 1970.
    """

    name: str
    seconds: Mapping[str, float]
    pieces: Sequence[Piece]
    starts: Sequence[float]

    @property
    def total_secs(self) -> float:
        """The time from the first start to the last end."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The part of the time in which steps were computed that the run has kept."""
        return self.seconds["compute"] / max(self.total_secs, 1e-9)


class _Process(NamedTuple):
    """A process of a task: its lines in the order of their times."""

    pid: int
    began: float
    lines: list[dict[str, Any]]  # Any: JSON values.

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1]


def goodput(model_dir: str) -> list[TaskTime]:
    """The time of each task of the run in `model_dir`, in the order of their names.

    Empty if the run has no such files: an earlier version did not write them.
    """
    directory = _directory(model_dir)
    tasks = {}
    for name in sorted(names_in(directory) if is_dir(directory) else ()):
        if name.endswith(SUFFIX) and (recorded := _processes(join(directory, name))):
            tasks[name.removesuffix(SUFFIX)] = recorded
    if not tasks:
        return []
    deaths = _deaths(join(directory, RESTARTS), tasks)
    end = max(process.last["time"] for found in tasks.values() for process in found)
    pieces = {}
    for name, processes in tasks.items():
        unrecorded = _killed_at_start(join(directory, f"{name}.log"), processes)
        pieces[name] = [*unrecorded, *_pieces(processes, deaths[name], end)]
    chief = next((name for name in CHIEFS if name in pieces), None)
    chief_pieces = pieces[chief] if chief else []
    return [
        _task_time(name, _served(pieces[name], chief_pieces), tasks[name]) for name in sorted(tasks)
    ]


def first_steps(model_dir: str) -> list[int]:
    """The step at which each process of the chief began to train; empty if it was not recorded."""
    paths = [join(_directory(model_dir), f"{name}{SUFFIX}") for name in CHIEFS]
    processes = _processes(path) if (path := next(filter(exists, paths), "")) else []
    # Of the first lines: a process that goes back after a NaN has another step in its last lines.
    steps = [[line["first_step"] for line in process.lines] for process in processes]
    return [found[0] for of_process in steps if (found := [s for s in of_process if s is not None])]


def total(tasks: Sequence[TaskTime]) -> dict[str, float]:
    """Returns the sums over all tasks, by cause."""
    return {cause: sum(task.seconds[cause] for task in tasks) for cause in CAUSES}


def _directory(model_dir: str) -> str:
    """The directory with the files of the tasks."""
    directory = str(directory_of_logs(model_dir))
    return directory if is_dir(directory) else RunFiles(model_dir).tasks


def _task_time(name: str, pieces: Sequence[Piece], processes: Sequence[_Process]) -> TaskTime:
    seconds = dict.fromkeys(CAUSES, 0.0)
    for piece in pieces:
        for cause, value in piece.seconds.items():
            seconds[cause] += value
    return TaskTime(name, seconds, pieces, [process.began for process in processes])


def _processes(path: str) -> list[_Process]:
    with open_file(path) as file:
        content = file.read()
    by_process: dict[tuple[float, int], list[dict[str, Any]]] = defaultdict(list)
    for offset in range(0, len(content), LINE_BYTES):
        try:
            line = json.loads(content[offset : offset + LINE_BYTES])
            key = float(line["began"]), int(line["process"])
            if isinstance(line["seconds"], dict) and line["time"] >= line["began"]:
                by_process[key].append(line)
        except (ValueError, KeyError, TypeError):  # Damaged, for example by a full disk.
            continue
    return [
        _Process(pid, began, sorted(lines, key=lambda line: float(line["time"])))
        for (began, pid), lines in sorted(by_process.items())
    ]


def _deaths(path: str, tasks: Mapping[str, Sequence[_Process]]) -> defaultdict[str, list[float]]:
    """The times at which processes of each task were ended, as restarts.jsonl says."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    began = {process.pid: process.began for of_task in tasks.values() for process in of_task}
    for restart in json_objects(path):
        try:
            death = began[restart["process"]] + restart["seconds"]
            for task in restart["started_again"]:
                found[task.replace(" ", "-")].append(death)
        except (KeyError, TypeError, AttributeError):
            continue
    return found


def _killed_at_start(log: str, processes: Sequence[_Process]) -> list[Piece]:
    """The time before the first recorded process, if an earlier one ended before it recorded."""
    if not exists(log):
        return []
    with open_file(log) as file:
        line = file.read(_LOG_LINE_BYTES).partition(b"\n")[0].decode(errors="replace")
    found = re.search(r"start 1, process (\d+), (\S+)$", line)
    if not found or int(found[1]) in (process.pid for process in processes):
        return []
    begin, end = datetime.datetime.fromisoformat(found[2]).timestamp(), processes[0].began
    return [Piece(begin, end, {"dead": end - begin})] if begin < end else []


def _pieces(processes: Sequence[_Process], deaths: Sequence[float], end: float) -> list[Piece]:
    """The time of a task, from its first start to its end, or to `end` if it did not end itself."""
    pieces: list[Piece] = []
    starts = [*(process.began for process in processes[1:]), end]
    for process, next_start in zip(processes, starts, strict=True):
        begin, seconds, step, begins = process.began, dict[str, float](), None, 0
        if pieces:  # Two processes of a task may overlap, or clocks may differ.
            begin = max(begin, pieces[-1].end)
        for line in process.lines:
            more = {
                cause: value - seconds.get(cause, 0.0) for cause, value in line["seconds"].items()
            }
            length = sum(more.values())
            if length > 0:
                if line["begins"] > begins and line["first_step"] is not None:
                    step = line["first_step"]  # Training began: of the process, or after a NaN.
                    _lose(pieces, step)
                pieces.append(Piece(begin, begin + length, more, step, line["step"]))
                begin += length
                step, seconds, begins = line["step"], line["seconds"], line["begins"]
        pieces += _gap(process, begin, next_start, deaths, is_last=next_start == end)
    return pieces


def _gap(
    process: _Process, begin: float, end: float, deaths: Sequence[float], *, is_last: bool
) -> list[Piece]:
    """The time from the last line of `process` to `end`, mostly the start of the next process."""
    if end <= begin or (is_last and (process.last["ended"] or end - begin < _SILENT_SECS)):
        return []
    death = min((time for time in deaths if begin - _SILENT_SECS < time < end), default=begin)
    found = []
    if death > begin and not process.last["ended"]:
        is_silent = death - begin > _SILENT_SECS
        cause = "stalled" if is_silent else process.last["cause"]
        step = process.last["step"]
        found.append(Piece(begin, death, {cause: death - begin}, step, step))
        begin = death
    return [*found, Piece(begin, end, {"dead": end - begin})]


def _lose(pieces: list[Piece], kept_step: int) -> None:
    """Moves the time of steps after `kept_step`, which were repeated, to "lost steps".

    It is at the end of `pieces`. The time of an unfinished step is moved, too.
    """
    index = len(pieces) - 1
    while index >= 0:
        piece = pieces[index]
        if piece.first_step is not None and piece.last_step is not None:
            if piece.first_step < kept_step:
                break
            pieces[index] = piece._replace(seconds=_lost(piece.seconds))
        index -= 1
    if index < 0 or (last := pieces[index].last_step) is None or last <= kept_step:
        return
    # The counter passed `kept_step` within this piece: it is cut in two.
    piece = pieces[index]
    assert piece.first_step is not None
    kept = (kept_step - piece.first_step) / (last - piece.first_step)
    middle = piece.begin + kept * (piece.end - piece.begin)
    before = {cause: kept * value for cause, value in piece.seconds.items()}
    after = {cause: (1 - kept) * value for cause, value in piece.seconds.items()}
    pieces[index : index + 1] = [
        piece._replace(end=middle, seconds=before, last_step=kept_step),
        Piece(middle, piece.end, _lost(after), kept_step, last),
    ]


def _lost(seconds: Mapping[str, float]) -> dict[str, float]:
    lost = {cause: value for cause, value in seconds.items() if cause not in _OF_STEPS}
    repeated = sum(value for cause, value in seconds.items() if cause in _OF_STEPS)
    return {**lost, "lost steps": lost.get("lost steps", 0.0) + repeated}


def _served(pieces: Sequence[Piece], chief: Sequence[Piece]) -> list[Piece]:
    """Divides the time of serving as the chief's time was divided meanwhile."""
    served, at = [], 0
    for piece in pieces:
        secs = piece.seconds.get(SERVING, 0.0)
        if not secs:
            served.append(piece)
            continue
        while at < len(chief) and chief[at].end <= piece.begin:
            at += 1
        shares: dict[str, float] = defaultdict(float)
        uncovered = piece.end - piece.begin
        for other in itertools.islice(chief, at, None):
            overlap = min(piece.end, other.end) - max(piece.begin, other.begin)
            if overlap <= 0:
                break
            uncovered -= overlap
            for cause, value in other.seconds.items():
                shares[cause] += value * overlap / (other.end - other.begin)
        is_before = at == 0 and (not chief or piece.begin < chief[0].begin)
        # Without a chief: it has not started yet, or it has ended.
        shares["start" if is_before else "dead"] += max(0.0, uncovered)
        whole = sum(shares.values())
        seconds = {cause: value for cause, value in piece.seconds.items() if cause != SERVING}
        for cause, value in shares.items():
            seconds[cause] = seconds.get(cause, 0.0) + secs * value / whole
        served.append(piece._replace(seconds=seconds))
    return served
