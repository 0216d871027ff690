"""One disturbed training run: its faults, their observed outcomes, and checks of its result.

story = disturb(TOPOLOGIES["ps-2+1"], model_dir, flags, faults)
check_complete(story, num_steps)
print(table([story]))
"""

import contextlib
import dataclasses
import json
import math
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from tests.chaos.faults import LAUNCHER, Fault
from tests.cluster.runs import Run, Topology, read_metrics, start

# The longest wait for one restart, on a busy machine, with other faults in between.
_PATIENCE_SECS = 100.0
_POLL_SECS = 0.02
# More steps than a worker may do between the last report and its death: 10 between two reports, and
# 5 to a call of the executor.
_REPORTED_LATE = 16


@dataclasses.dataclass
class Event:
    """A fault as it happened: to which process, when it began and was over."""

    fault: Fault
    pid: int
    began: float
    ended: float


@dataclasses.dataclass(frozen=True)
class Life:
    """What one process of the chief did: times and steps, the first where it began to train."""

    steps: tuple[tuple[float, int], ...]


@dataclasses.dataclass
class Story:
    """A disturbed run that is over.

    `reports` has the time at which each report was seen, and the steps of each worker.
    """

    topology: Topology
    run: Run
    events: list[Event]
    reports: list[tuple[float, Mapping[str, int]]]
    num_launches: int
    seconds: float

    @property
    def num_kills(self) -> int:
        return sum(event.fault.kind == "kill" for event in self.events)

    @property
    def num_endings(self) -> int:
        """Processes that have come and gone, launchers and tasks."""
        logs = (self.run.model_dir / "tasks").glob("*.log")
        lines = (line for log in logs for line in log.read_text(errors="replace").splitlines())
        return self.num_launches + sum(line.startswith("=== ") for line in lines)

    def lives(self) -> list[Life]:
        lives: list[list[tuple[float, int]]] = []
        for line in _json_lines(self.run.model_dir / "journal.jsonl"):
            if line["begins"]:
                lives.append([])
            lives[-1].append((line["time"], line["step"]))
        return [Life(tuple(steps)) for steps in lives]

    def started_again(self) -> dict[int, int]:
        """How many tasks were started again, by the process whose end was the reason."""
        records = _json_lines(self.run.model_dir / "tasks" / "restarts.jsonl")
        return {record["process"]: len(record["started_again"]) for record in records}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a fault; numbers are None where another fault came before the recovery."""

    role: str
    kind: str
    seen: str
    steps_lost: int | None
    recovery_secs: float | None


def tasks_of(topology: Topology) -> list[str]:
    return [name.replace("-", " ") for name in topology.tasks or ("worker-0",)]


def disturb(
    topology: Topology, model_dir: Path, flags: Sequence[str], faults: Sequence[Fault]
) -> Story:
    """Trains to the end, and causes `faults` meanwhile.

    Faults that would come after the end of the run are left out.
    """
    model_dir.mkdir(parents=True)
    chaos = model_dir / "chaos"
    chaos.touch()
    began = time.monotonic()
    with _Disturbed(topology, model_dir, flags) as disturbed, _Reports(model_dir) as reports:
        events = []
        for fault in faults:
            event = disturbed.inflict(fault)
            if event is None:
                break
            events.append(event)
        chaos.unlink()
        run = disturbed.process.wait()
        assert run.exit_code == 0, disturbed.process.output()
    seconds = time.monotonic() - began
    return Story(topology, run, events, reports.seen, disturbed.num_launches, seconds)


class _Disturbed:
    """A run that is started again when its launcher is killed."""

    def __init__(self, topology: Topology, model_dir: Path, flags: Sequence[str]) -> None:
        self._topology = topology
        self._model_dir = model_dir
        self._flags = flags
        self._stack = contextlib.ExitStack()
        self.num_launches = 0

    def __enter__(self) -> Self:
        self._launch()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def inflict(self, fault: Fault) -> Event | None:
        """Causes the fault, and proves that it happened; None if the run ends before."""
        if not self._wait_for(lambda: self._step() >= fault.after_step):
            return None
        time.sleep(fault.delay_secs)
        while True:
            target = self._find(fault.task)
            if target is None:
                return None
            began = time.time()
            with contextlib.suppress(psutil.NoSuchProcess):  # It has ended: there will be another.
                _INFLICT[fault.kind](target, fault)
                break
        ended = time.time()
        if fault.task == LAUNCHER:
            code = self.process.wait_alone().exit_code
            if code == 0:  # It was done just before.
                return None
            assert code == -signal.SIGKILL, f"{fault}: {code}\n{self.process.output()}"
            self.process.wait_for_family_to_end()
            self._launch()
        return Event(fault, target.pid, began, ended)

    def _launch(self) -> None:
        process = start(self._topology, self._model_dir, *self._flags)
        self.process = self._stack.enter_context(process)
        self.num_launches += 1

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Waits for `condition`; returns False if the run ends before."""
        deadline = time.monotonic() + _PATIENCE_SECS
        while not condition():
            if self.process.popen.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"is unresponsive:\n{self.process.output()}"
            time.sleep(_POLL_SECS)
        return True

    def _find(self, task: str) -> psutil.Process | None:
        """Waits for the process of `task`, and returns it; None if the run ends before."""
        found: list[psutil.Process] = []

        def look() -> bool:
            # Its log is made when it is started, and says its process once there is one.
            with contextlib.suppress(
                FileNotFoundError, IndexError, ValueError, psutil.NoSuchProcess
            ):
                if task == LAUNCHER:
                    found.append(psutil.Process(self.process.popen.pid))
                else:
                    found.append(self.process.task(task))
            return bool(found)

        return found[0] if self._wait_for(look) else None

    def _step(self) -> int:
        """The step of the last line of the journal."""
        path = self._model_dir / "journal.jsonl"
        lines = list(_json_lines(path)) if path.exists() else []
        return max((line["step"] for line in lines), default=0)


def _kill(process: psutil.Process, fault: Fault) -> None:
    process.kill()
    _wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def _stop(process: psutil.Process, fault: Fault) -> None:
    process.suspend()
    _wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    time.sleep(fault.stop_secs)
    with contextlib.suppress(psutil.NoSuchProcess):  # Others may have given it up.
        process.resume()


def _stall(process: psutil.Process, fault: Fault) -> None:
    process.suspend()
    _wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def _term(process: psutil.Process, fault: Fault) -> None:
    process.terminate()


_INFLICT = {"kill": _kill, "stop": _stop, "stall": _stall, "term": _term}


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECS
    while not condition():
        assert time.monotonic() < deadline, "the fault does not happen"
        time.sleep(_POLL_SECS)


class _Reports:
    """What metrics.jsonl says of the workers of ps, and when it came."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen: list[tuple[float, Mapping[str, int]]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_SECS):
            reports = [line for line in read_metrics(self._model_dir) if "worker_steps" in line]
            steps = reports[-1]["worker_steps"] if reports else {}
            if not self.seen or self.seen[-1][1] != steps:
                self.seen.append((time.time(), steps))


def outcomes(story: Story) -> list[Outcome]:
    """The outcome of each fault, in the order of the faults."""
    lives, again = story.lives(), story.started_again()
    found = []
    blamed: set[Life] = set()
    nexts = [*(event.began for event in story.events[1:]), math.inf]
    for event, next_began in zip(story.events, nexts, strict=True):
        fault = event.fault
        after = next((life for life in lives if life.steps[0][0] > event.began), None)
        before = [life for life in lives if life.steps[0][0] <= event.began]
        lost: int | None = 0
        trained = math.inf
        if again.get(event.pid) == 1 < len(tasks_of(story.topology)):
            seen = "it is started again alone"
            trained = _works_again(story.reports, fault.task, event.began)
        elif fault.kind in ("stop", "stall") and (after is None or after.steps[0][0] > next_began):
            seen = "the others wait" if fault.kind == "stop" else "the others continue without it"
            times = [at for life in before for at, _ in life.steps[1:] if event.ended < at]
            if fault.kind == "stop":
                trained = min(times, default=math.inf)
            else:
                trained = _end_of_longest_gap(event.ended, [at for at in times if at < next_began])
        elif after is None:
            seen = "the run is done"
        else:
            seen = "all are started again"
            if fault.task == LAUNCHER:
                seen = "all end by themselves; resumed by the same command"
            if fault.kind == "term":
                seen = "all save; " + seen
            trained = after.steps[1][0] if len(after.steps) > 1 else math.inf
            if after in blamed:
                lost = None
            elif before:
                lost = before[-1].steps[-1][1] - after.steps[0][1]
            blamed.add(after)
        secs = trained - (event.ended if fault.kind == "stop" else event.began)
        role = _role(story.topology, fault.task)
        found.append(Outcome(role, fault.kind, seen, lost, secs if trained < next_began else None))
    return found


def _end_of_longest_gap(began: float, times: Sequence[float]) -> float:
    gaps = zip([began, *times], times, strict=False)
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=(began, math.inf))[1]


def _works_again(
    reports: Sequence[tuple[float, Mapping[str, int]]], task: str, died: float
) -> float:
    """The time at which a worker had done more steps than are possible before it `died`."""
    before = [steps.get(task, 0) for at, steps in reports if at <= died]
    enough = (before[-1] if before else 0) + _REPORTED_LATE
    later = (at for at, steps in reports if at > died and steps.get(task, 0) >= enough)
    return min(later, default=math.inf)


def _role(topology: Topology, task: str) -> str:
    if topology.strategy == "mirrored":
        return task if task == LAUNCHER else "the process"
    if topology.strategy == "multiworker" and task == "worker 0":
        return "worker 0, the chief"
    return task if task == LAUNCHER else task.partition(" ")[0]


def check_complete(story: Story, num_steps: int) -> None:
    """Checks that the run is done and its files are complete. (Process.wait finds orphans.)"""
    run = story.run
    assert run.result["why"] == "done"
    assert run.result["step"] >= num_steps
    steps = [report["step"] for report in run.metrics("train")]
    assert steps == sorted(set(steps))
    assert steps[-1] == run.result["step"]
    for path in run.model_dir.rglob("*.tmp"):
        raise AssertionError(f"{path} is left")
    for name in run.checkpoints():
        assert (run.model_dir / "checkpoints" / name / "checkpoint.json").exists(), (
            f"{name} is damaged"
        )
        assert run.variables(name)


def check_same(story: Story, undisturbed: Run) -> None:
    """Checks that all values of the checkpoint equal those of a run without faults, bit for bit."""
    ours, theirs = story.run.variables(), undisturbed.variables()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if ours[key].tobytes() != theirs[key].tobytes()] == []
    assert story.run.result["eval"] == undisturbed.result["eval"]


def check_counts(story: Story) -> None:
    """Checks that every applied update is counted, and every batch was trained at least once."""
    result = story.run.result
    (weight,) = story.run.weights().values()
    assert weight == result["step"], "the weight gains 1 by each update that is applied"
    batches = result["batches"]
    assert batches["handed_out"] == batches["finished"]
    assert batches["finished"] + batches["repeated"] == result["step"]
    assert result["examples"] == batches["handed_out"] * story.run.config["config"]["batch_size"]
    # A worker that dies between a step and its count leaves a step that no worker counts.
    num_uncounted = result["step"] - sum(result["worker_steps"].values())
    assert 0 <= num_uncounted <= len(story.events)


def table(stories: Sequence[Story]) -> str:
    """Markdown: medians for each strategy, role and kind of fault."""
    lines = [
        "| strategy | fault | times | what is seen | steps lost | seconds until it trains again |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for story in stories:
        rows: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
        for outcome in outcomes(story):
            rows[outcome.kind, outcome.role, outcome.seen].append(outcome)
        for (kind, role, seen), several in sorted(rows.items()):
            lost = [o.steps_lost for o in several if o.steps_lost is not None]
            secs = [o.recovery_secs for o in several if o.recovery_secs is not None]
            lines.append(
                f"| {story.topology} | {_SIGNALS[kind]} to {role} | {len(several)} | {seen} | "
                f"{_median(lost, '.0f')} | {_median(secs, '.1f')} |"
            )
    return "\n".join(lines)


_SIGNALS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, SIGCONT",
    "stall": "SIGSTOP without SIGCONT",
    "term": "SIGTERM",
}


def _median(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} (at most {max(values):{form}})"


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines."""
    if path.exists():
        for line in path.read_text().split("\n")[:-1]:
            yield json.loads(line)
