"""A disturbed run whose tasks are on hosts with their own addresses, without a launcher.

    run = HostsRun(topology, model_dir, flags, timeout_secs=40)
    story = disturb(run, faults)
    print(table(story, run))

A task that ends with 75, or by SIGKILL, is started again by hand, as docs/failures.md asks: alone,
and a few seconds later. Any other end is an error. After the end of the run no task is started.
"""

import dataclasses
import itertools
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from typing_extensions import override

from benchmarks.hosts import Host, dropped, hosts, num_dropped
from strategies.cluster.tf_config import Task
from tests.chaos.chaos import (
    Disturbed,
    Event,
    Story,
    is_alive,
    median_and_most,
    role_of,
    tasks_of,
)
from tests.chaos.faults import NETWORK, Fault
from tests.chaos.journal import journal_of
from tests.cluster.hosts import cluster_on
from tests.cluster.runs import Process, Run, Topology, by_hand, json_lines, lines_so_far

_POLL_SECS = 0.2
# Between the end of a task and its restart.
_BY_HAND_SECS = 5.0
# What tasks say of another task that is silent.
_SILENCES = (
    "has not answered for",
    "does not answer",
    "no other host answers",
    "accepts no connection",
    "waiting for ",
)


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of one process, and its exit code."""

    time: float
    task: str
    exit_code: int


@dataclasses.dataclass(frozen=True)
class HostsOutcome:
    """What a fault has caused until the next one.

    Attributes:
        seen: Which tasks have ended.
        pause_secs: The longest time without a step.
        after_secs: The part of it that came after the end of the fault.
        named_secs: From the fault to the first message about silence; None if there was none.
    """

    seen: str
    pause_secs: float
    after_secs: float
    named_secs: float | None


class HostsRun(Disturbed):
    """Each task is on a host of its own."""

    pause_secs = 0.5
    patience_secs = 300.0

    def __init__(
        self, topology: Topology, model_dir: Path, flags: Sequence[str], *, timeout_secs: float
    ) -> None:
        """After the end of the chief the other tasks must end within twice `timeout_secs`."""
        super().__init__(topology, model_dir, flags)
        self._timeout_secs = timeout_secs
        self._is_supervised = threading.Event()
        self._error = ""
        self._run: Run | None = None
        self._last_secs = 0.0
        self._last_fault_ended = 0.0
        self.endings: list[Ending] = []
        self.named: list[float] = []

    @override
    def _start(self) -> None:
        names = [name.split() for name in tasks_of(self.topology)]
        self._places = self._stack.enter_context(hosts(len(names)))
        tasks = [Task(job, int(index)) for job, index in names]
        cluster, commands = cluster_on(dict(zip(tasks, self._places, strict=True)))
        sizes = ("--strategy=", "--workers=", "--ps=")
        flags = [flag for flag in self.topology.argv if not flag.startswith(sizes)]
        started = by_hand(cluster, self.model_dir, *flags, *self._flags, under=commands)
        self._tasks = self._stack.enter_context(started)
        self._tasks.start_all()
        self._chief = str(tasks[0])
        thread = threading.Thread(target=self._supervise, daemon=True)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._is_supervised.set)

    def _supervise(self) -> None:
        """Starts ended tasks again, and notes when tasks are said to be silent."""
        ended: dict[str, float] = {}
        num_named: dict[Process, int] = defaultdict(int)
        while not self._is_supervised.wait(_POLL_SECS):
            for name in tasks_of(self.topology):
                process = self._tasks[name]
                if (number := sum(map(process.warned, _SILENCES))) > num_named[process]:
                    num_named[process] = number
                    self.named.append(time.time())
                code = process.popen.poll()
                if code is not None and name not in ended:
                    ended[name] = time.monotonic()
                    self.endings.append(Ending(time.time(), name, code))
                    if code == 0 and name == self._chief:
                        self._run = process.wait_alone()
                    elif code not in (0, 75, -signal.SIGKILL):
                        self._error = f"{name} has ended with {code}:\n{process.output()}"
                is_due = code not in (None, 0) and time.monotonic() > ended[name] + _BY_HAND_SECS
                if is_due and self._run is None and not self._error:
                    job, index = name.split()
                    self._tasks.start(Task(job, int(index)))
                    del ended[name]

    @override
    def _is_over(self) -> bool:
        assert not self._error, self._error
        return self._run is not None

    @override
    def _output(self) -> str:
        return "\n".join(f"{n}:\n{self._tasks[n].output()}" for n in tasks_of(self.topology))

    @override
    def _process_of(self, task: str) -> psutil.Process:
        return psutil.Process(self._tasks[task].popen.pid)

    def _host_of(self, task: str) -> Host:
        return self._places[tasks_of(self.topology).index(task)]

    @override
    def _is_due(self, fault: Fault) -> bool:
        """Most runs make steps during a fault, so a step number alone says little."""
        if not fault.after_step:
            return True
        lines = [line for line in lines_so_far(journal_of(self.model_dir)) if not line["begins"]]
        has_trained_again = bool(lines) and lines[-1]["time"] > self._last_fault_ended
        return has_trained_again and lines[-1]["step"] >= fault.after_step

    @override
    def _cause(self, fault: Fault, target: psutil.Process) -> None:
        self._disturb(fault, target)
        self._last_fault_ended = time.time()

    def _disturb(self, fault: Fault, target: psutil.Process) -> None:
        if fault.kind not in NETWORK:
            super()._cause(fault, target)
            return
        host = self._host_of(fault.task)
        others = [self._host_of(fault.peer)] if fault.peer else list(self._places)
        directions = {
            "from": [(host, other) for other in others if other is not host],
            "to": [(other, host) for other in others if other is not host],
        }
        directions["both"] = directions["from"] + directions["to"]
        pairs = directions[fault.direction]
        with dropped(*pairs):
            if fault.kind == "lose":
                ended = _wait_until(lambda: not is_alive(target), 4 * self._timeout_secs)
                assert ended, f"{fault.task} does not end by itself:\n{self._output()}"
            else:
                time.sleep(fault.secs)
                # Tasks that have just been started may send nothing for a while.
                _wait_until(lambda: num_dropped(*pairs) > 0, self.patience_secs)

    @override
    def finish(self) -> Run:
        assert self._wait_for_end(), f"no end:\n{self._output()}"
        assert self._run is not None
        began = time.monotonic()

        def none_is_left() -> bool:
            return not any(process.family() for process in self._tasks.processes)

        assert _wait_until(none_is_left, 2 * self._timeout_secs), f"are left:\n{self._output()}"
        self._last_secs = time.monotonic() - began
        return self._run

    def _wait_for_end(self) -> bool:
        """Waits as long as there is progress."""
        while True:
            step = self._step()
            if _wait_until(self._is_over, self.patience_secs):
                return True
            if self._step() == step:
                return False

    @property
    def num_restarts(self) -> int:
        """How many tasks were started again."""
        return len(self._tasks.processes) - len(self._places)

    @property
    def last_secs(self) -> float:
        """From the end of the chief to the end of the last task."""
        return self._last_secs

    @override
    def num_endings(self) -> int:
        return len(self._tasks.processes)


def _wait_until(condition: Callable[[], bool], timeout_secs: float) -> bool:
    deadline = time.monotonic() + timeout_secs
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECS)
    return True


def outcomes(story: Story, run: HostsRun) -> list[HostsOutcome]:
    """What each fault has caused until the next one, in the order of the faults."""
    begun = [event.began for event in story.events]
    steps = [line["time"] for line in json_lines(journal_of(run.model_dir)) if not line["begins"]]
    found = []
    for event, until in zip(story.events, [*begun[1:], max(steps)], strict=True):
        ended = {e.task for e in run.endings if event.began <= e.time < until and e.exit_code}
        pause, after = _longest_pause(event, steps, until)
        named = [at - event.began for at in run.named if event.began <= at < until]
        seen = _seen(event.fault, ended, tasks_of(story.topology))
        found.append(HostsOutcome(seen, pause, after, min(named, default=None)))
    return found


def _seen(fault: Fault, ended: set[str], tasks: Sequence[str]) -> str:
    if ended == set(tasks):
        return "all end"
    if ended == {fault.task}:
        return "it ends"
    if ended and ended == {fault.peer}:
        return "the other one ends"
    return f"{len(ended)} of {len(tasks)} end" if ended else "no task ends"


def _longest_pause(event: Event, steps: Sequence[float], until: float) -> tuple[float, float]:
    """The longest time without a step that overlaps the fault, and its part after the fault.

    Zeros if no step was made before the next fault.
    """
    times = [max([at for at in steps if at <= event.began], default=event.began)]
    times += [at for at in steps if event.began < at < until]
    pauses = [pair for pair in itertools.pairwise(times) if pair[0] < event.ended]
    if not pauses:
        return 0.0, 0.0
    began, ended = max(pauses, key=lambda pair: pair[1] - pair[0])
    return ended - began, max(0.0, ended - event.ended)


def table(story: Story, run: HostsRun) -> str:
    """Markdown: medians for each kind of fault, role and outcome."""
    lines = [
        "| strategy | fault | times | its seconds | what ends | longest pause, s "
        "| of it after the fault, s | first named after s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str, str], list[tuple[Event, HostsOutcome]]] = defaultdict(list)
    for event, outcome in zip(story.events, outcomes(story, run), strict=True):
        fault = event.fault
        role = role_of(story.topology, fault.task)
        if fault.peer:
            role = " and ".join(sorted([role, role_of(story.topology, fault.peer)]))
        rows[_NAMES[fault.kind], "disk" if fault.kind == "disk" else role, outcome.seen].append(
            (event, outcome)
        )
    for (name, role, seen), several in sorted(rows.items()):
        secs = [event.ended - event.began for event, _ in several]
        named = [o.named_secs for _, o in several if o.named_secs is not None]
        columns = (
            median_and_most(secs, ".0f"),
            seen,
            median_and_most([o.pause_secs for _, o in several], ".1f"),
            median_and_most([o.after_secs for _, o in several], ".1f"),
            median_and_most(named, ".1f"),
        )
        lines.append(
            f"| {story.topology} | {name} {role} | {len(several)} | {' | '.join(columns)} |"
        )
    return "\n".join(lines)


_NAMES = {
    "kill": "SIGKILL to",
    "stop": "SIGSTOP, SIGCONT to",
    "term": "SIGTERM to",
    "drop": "packets dropped,",
    "lose": "packets dropped for good,",
    "cut": "packets dropped between",
    "disk": "full",
}
