"""One disturbed training run: its faults, their observed outcomes, and checks of its result.

story = disturb(LocalRun(Topology("ps-2+1"), model_dir, flags), faults)
check_complete(story, num_steps)
print(table(story))

on_hosts.py has runs whose tasks are on hosts with their own addresses.
"""

import abc
import contextlib
import dataclasses
import math
import shutil
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from typing_extensions import override

from tests.chaos.faults import LAUNCHER, Fault
from tests.chaos.journal import journal_of, pause_of
from tests.cluster.runs import Run, Topology, assert_same_bits, lines_so_far, read_metrics, start
from trainer.exit_codes import EXIT_RESTART

# The longest wait for the effect of a signal.
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


@dataclasses.dataclass
class Story:
    """A disturbed run that is over.

    `reports` has the time at which each report was seen, and the steps of each worker.
    """

    topology: Topology
    run: Run
    events: list[Event]
    reports: list[tuple[float, Mapping[str, int]]]
    num_endings: int  # Processes that have come and gone, launchers and tasks.
    seconds: float

    @property
    def num_kills(self) -> int:
        return sum(event.fault.kind == "kill" for event in self.events)

    def started_again(self) -> dict[int, int]:
        """How many tasks were started again, by the process whose end was the reason."""
        records = lines_so_far(self.run.model_dir / "tasks" / "restarts.jsonl")
        return {record["process"]: len(record["started_again"]) for record in records}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a fault; numbers are None where another fault came before the recovery."""

    role: str
    kind: str
    seen: str
    steps_lost: int | None
    recovery_secs: float | None


def lives_of(model_dir: Path) -> list[tuple[tuple[float, int], ...]]:
    """Times and steps of each process of the chief, the first where it began to train."""
    found: list[list[tuple[float, int]]] = []
    for line in lines_so_far(journal_of(model_dir)):
        if line["begins"]:
            found.append([])
        found[-1].append((line["time"], line["step"]))
    return list(map(tuple, found))


def tasks_of(topology: Topology) -> list[str]:
    return [name.replace("-", " ") for name in topology.tasks or ("worker-0",)]


def disturb(run: "Disturbed", faults: Sequence[Fault]) -> Story:
    """Trains to the end, and causes `faults` meanwhile.

    Faults that would come after the end of the run are left out.
    """
    run.model_dir.mkdir(parents=True, exist_ok=True)
    pause = pause_of(run.model_dir)
    pause.write_text(str(run.pause_secs))
    began = time.monotonic()
    with run, _Reports(run.model_dir) as reports:
        events = []
        for fault in faults:
            event = run.inflict(fault)
            if event is None:
                break
            events.append(event)
        pause.unlink()
        finished = run.finish()
    seconds = time.monotonic() - began
    return Story(run.topology, finished, events, reports.seen, run.num_endings(), seconds)


class Disturbed(abc.ABC):
    """A run that can be disturbed, and is started again where that is necessary.

    Attributes:
        pause_secs: Lost after each call of the chief's executor, until the last fault is over.
        patience_secs: The longest wait for one recovery, on a busy machine.
    """

    pause_secs = 0.05
    patience_secs = 100.0

    def __init__(self, topology: Topology, model_dir: Path, flags: Sequence[str]) -> None:
        self.topology = topology
        self.model_dir = model_dir
        self._flags = tuple(flags)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # With the error: otherwise processes that are left would be reported in its place.
        self._stack.__exit__(kind, error, trace)

    @abc.abstractmethod
    def _start(self) -> None:
        """Starts the run; `_stack` ends it."""

    @abc.abstractmethod
    def _is_over(self) -> bool:
        """Returns True if the run has ended, and will not be started again."""

    @abc.abstractmethod
    def _output(self) -> str:
        """What the run has printed, for messages."""

    @abc.abstractmethod
    def _process_of(self, task: str) -> psutil.Process:
        """The process of a task. Any error means that there is none at the moment."""

    @abc.abstractmethod
    def finish(self) -> Run:
        """Waits for the end of the run, and checks that nothing is left of it."""

    @abc.abstractmethod
    def num_endings(self) -> int:
        """Processes that have come and gone, after `finish`."""

    def _num_starts(self, tasks: str) -> int:
        """How many processes the logs of `tasks`, a pattern, name."""
        logs = (self.model_dir / "tasks").glob(f"{tasks}.log")
        lines = (line for log in logs for line in log.read_text(errors="replace").splitlines())
        return sum(line.startswith("=== ") for line in lines)

    def inflict(self, fault: Fault) -> Event | None:
        """Causes the fault, and proves that it happened; None if the run ends before."""
        if not self._wait_for(lambda: self._is_due(fault)):
            return None
        time.sleep(fault.delay_secs)
        while True:
            target = self._find(fault.task)
            if target is None:
                return None
            began = time.time()
            with contextlib.suppress(psutil.NoSuchProcess):  # It has ended: there will be another.
                self._cause(fault, target)
                break
        ended = time.time()
        return Event(fault, target.pid, began, ended) if self._handle_end(fault) else None

    def _cause(self, fault: Fault, target: psutil.Process) -> None:
        if fault.kind == "disk":
            _fill_disk(self.model_dir, fault.secs)
        else:
            _INFLICT[fault.kind](target, fault)

    def _handle_end(self, fault: Fault) -> bool:
        """Starts again what `fault` has ended for certain; returns False if the run is over."""
        return True

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Waits for `condition`; returns False if the run ends before."""
        deadline = time.monotonic() + self.patience_secs
        while not condition():
            if self._is_over():
                return False
            assert time.monotonic() < deadline, f"is unresponsive:\n{self._output()}"
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
                if is_alive(process := self._process_of(task)):
                    found.append(process)
            return bool(found)

        return found[0] if self._wait_for(look) else None

    def _is_due(self, fault: Fault) -> bool:
        return self._step() >= fault.after_step

    def _step(self) -> int:
        """The highest step in the journal."""
        lines = lines_so_far(journal_of(self.model_dir))
        return max((line["step"] for line in lines), default=0)


class LocalRun(Disturbed):
    """A run on this machine, that is started again when its launcher is killed."""

    def __init__(self, topology: Topology, model_dir: Path, flags: Sequence[str]) -> None:
        super().__init__(topology, model_dir, flags)
        self._num_launches = 0

    @override
    def _start(self) -> None:
        process = start(self.topology, self.model_dir, *self._flags)
        self._process = self._stack.enter_context(process)
        self._num_launches += 1

    @override
    def _is_over(self) -> bool:
        return self._process.popen.poll() is not None

    @override
    def _output(self) -> str:
        return self._process.output()

    @override
    def _process_of(self, task: str) -> psutil.Process:
        if task == LAUNCHER:
            return psutil.Process(self._process.popen.pid)
        return self._process.task(task)

    @override
    def _handle_end(self, fault: Fault) -> bool:
        if fault.task == LAUNCHER:
            code = self._process.wait_alone().exit_code
            if code == 0:  # It was done just before.
                return False
            expected = EXIT_RESTART if fault.kind == "interrupt" else -signal.SIGKILL
            assert code == expected, f"{fault}: {code}\n{self._output()}"
            self._process.wait_for_family_to_end()
            self._start()
        return True

    @override
    def finish(self) -> Run:
        return self._process.wait()

    @override
    def num_endings(self) -> int:
        return self._num_launches + self._num_starts("*")


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(process: psutil.Process, fault: Fault) -> None:
    process.kill()
    _wait_until(lambda: not is_alive(process))


def _stop(process: psutil.Process, fault: Fault) -> None:
    process.suspend()
    _wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    time.sleep(fault.secs)
    with contextlib.suppress(psutil.NoSuchProcess):  # Others may have given it up.
        process.resume()


def _stall(process: psutil.Process, fault: Fault) -> None:
    process.suspend()
    _wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def _term(process: psutil.Process, fault: Fault) -> None:
    process.terminate()


def _interrupt(process: psutil.Process, fault: Fault) -> None:
    process.send_signal(signal.SIGINT)


def _fill_disk(directory: Path, secs: float) -> None:
    assert directory.is_mount(), f"{directory} is no file system of its own"
    fill = directory / "fill"
    with contextlib.suppress(OSError), fill.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    assert not shutil.disk_usage(directory).free
    time.sleep(secs)
    fill.unlink()


_INFLICT = {"kill": _kill, "stop": _stop, "stall": _stall, "term": _term, "interrupt": _interrupt}


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
    lives, again = lives_of(story.run.model_dir), story.started_again()
    found = []
    blamed: set[tuple[tuple[float, int], ...]] = set()
    nexts = [*(event.began for event in story.events[1:]), math.inf]
    for event, next_began in zip(story.events, nexts, strict=True):
        fault = event.fault
        after = next((life for life in lives if life[0][0] > event.began), None)
        before = [life for life in lives if life[0][0] <= event.began]
        lost: int | None = 0
        trained = math.inf
        num_again, num_tasks = again.get(event.pid), len(tasks_of(story.topology))
        is_ps_worker = story.topology.strategy == "ps" and fault.task.startswith("worker")
        if is_ps_worker and num_again == 1 < num_tasks:
            seen = "it is started again alone"
            trained = _works_again(story.reports, fault.task, event.began)
        elif fault.kind in ("stop", "stall", "disk") and (
            after is None or after[0][0] > next_began
        ):
            seen = _SEEN_WITHOUT_RESTART[fault.kind]
            times = [at for life in before for at, _ in life[1:] if event.ended < at]
            if fault.kind != "stall":
                trained = min(times, default=math.inf)
            else:
                trained = _end_of_longest_gap(event.ended, [at for at in times if at < next_began])
        elif after is None:
            seen = "the run is done"
        else:
            seen = "all are started again"
            if story.topology.strategy == "ps" and num_again is not None and num_again < num_tasks:
                these = "it is" if num_again == 1 else "it and the chief are"
                seen = f"{these} started again; the other servers stay"
            if fault.task == LAUNCHER:
                seen = "all end by themselves; resumed by the same command"
            elif fault.task.startswith(LAUNCHER):
                seen = "its task ends by itself; all are started again when it is"
            if fault.kind in ("term", "interrupt"):
                seen = "all save; " + seen
            trained = after[1][0] if len(after) > 1 else math.inf
            if after in blamed:
                lost = None
            elif before:
                # A step may be complete, and saved, without being in the journal.
                lost = max(0, before[-1][-1][1] - after[0][1])
            blamed.add(after)
        secs = trained - (event.ended if fault.kind in ("stop", "disk") else event.began)
        role = "disk" if fault.kind == "disk" else role_of(story.topology, fault.task)
        found.append(Outcome(role, fault.kind, seen, lost, secs if trained < next_began else None))
    return found


_SEEN_WITHOUT_RESTART = {
    "stop": "the others wait",
    "stall": "the others continue without it",
    "disk": "training continues",
}


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


def role_of(topology: Topology, task: str) -> str:
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
    steps = run.steps("train")
    assert steps == sorted(set(steps))
    assert steps[-1] == run.result["step"]
    for path in run.model_dir.rglob("*.tmp"):
        raise AssertionError(f"{path} is left")
    for name in run.checkpoints():
        assert run.mark(name), f"{name} is damaged"
        assert run.variables(name)


def check_same(story: Story, undisturbed: Run) -> None:
    """Checks that all values of the checkpoint equal those of a run without faults, bit for bit."""
    assert_same_bits(story.run, undisturbed)
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


def check_backups(story: Story, num_gradients: int) -> None:
    """Checks that each step of synchronous ps has its number of gradients, of all workers."""
    result = story.run.result
    assert sum(result["worker_steps"].values()) == num_gradients * result["step"]


def table(story: Story) -> str:
    """Markdown: medians for each role and kind of fault."""
    lines = [
        "| strategy | fault | times | what is seen | steps lost | seconds until it trains again |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes(story):
        rows[outcome.kind, outcome.role, outcome.seen].append(outcome)
    for (kind, role, seen), several in sorted(rows.items()):
        lost = [o.steps_lost for o in several if o.steps_lost is not None]
        secs = [o.recovery_secs for o in several if o.recovery_secs is not None]
        lines.append(
            f"| {story.topology} | {_NAMES[kind]} {role} | {len(several)} | {seen} | "
            f"{median_and_most(lost, '.0f')} | {median_and_most(secs, '.1f')} |"
        )
    return "\n".join(lines)


_NAMES = {
    "kill": "SIGKILL to",
    "stop": "SIGSTOP, SIGCONT to",
    "stall": "SIGSTOP without SIGCONT to",
    "term": "SIGTERM to",
    "interrupt": "Ctrl-C to",
    "disk": "full",
}


def median_and_most(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} (at most {max(values):{form}})"
