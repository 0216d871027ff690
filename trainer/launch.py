"""A whole cluster on this machine: one process a task, supervised, and taken down whatever happens.

    cluster = local_cluster("ps", num_workers=2, num_ps=1)
    report = LocalCluster(cluster, sys.argv[1:], model_dir, restarts=restarts).run()
    sys.exit(report.exit_code)

What is seen: the chief's lines (worker 0's where no chief is named) appear on the launcher's
standard output as they are, so that one process and a cluster look the same. The other tasks' lines
do not: they are copies of the same, or the noise of servers. All lines of every task, the chief's
too, are in `<model_dir>/tasks/<job>-<index>.log`, with a line that marks each start.

A task that dies is started again, and the run resumes from its newest checkpoint by itself:

| what died | what is started again | because |
| --- | --- | --- |
| a worker of ps | it alone | the others go on, and the chief takes it back |
| a ps | all | its variables are gone |
| the chief of ps | all | what it handed out is in flight, and must not reach the next variables |
| a worker of multiworker | all | no step is done without it |

Dead is: killed by a signal that the launcher did not send; killed by the launcher for standing
still (trainer/heartbeat.py); or ended with 75, because somebody else asked it to end or because it
lost a peer. Bad usage (2) and a bug (1) would only come again: they end the run, and so do restarts
that bring no progress (trainer/restarts.py). The launcher knows of a death at once, and does not
wait until the others notice: those that go down with it have nothing to save, and are killed.

What ends the run: the chief's good end; a failure that is not mended; a signal to the launcher.
Every process is started in a session of its own, so a terminal's Ctrl-C reaches only the launcher,
which asks the tasks to save and end.

What is left behind: nothing. Process groups are killed by their id when `run` ends, and if the
launcher itself is killed the tasks see the end of a pipe that it held (trainer/lifeline.py).
"""

import dataclasses
import heapq
import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from data.files import absolute, is_url
from strategies.cluster import Cluster, Task
from trainer.binding import core_env
from trainer.exits import EXIT_BUG, EXIT_RESTART, EXIT_USAGE
from trainer.isolation import Namespace
from trainer.lifeline import Lifeline
from trainer.process import Child, TaskProcess, now, say, show
from trainer.restarts import Restarts
from trainer.template import Template

_DEFAULT_COMMAND = (sys.executable, "-m", "trainer")
_RESTARTS = "restarts.jsonl"
_SHOWN_RESTARTS = 20
# TensorFlow's coordination service reports a dead peer to the others within 10 s.
_PEER_LOST_SECS = 15.0
# From the chief's good end to that of tasks which have nothing left to do.
_FAREWELL_SECS = 10.0
# From the end of the last task that trains, if it failed, to SIGTERM for its servers.
_SERVERS_ALONE_SECS = 2.0
# From a worker's end with 75 to that of the chief, if that is who has ended it.
_CHIEF_FOLLOWS_SECS = 1.0
# Too short for a task to have done anything.
_SHORT_LIFE_SECS = 10.0
# From the time when a task should have ended by itself to SIGKILL.
_LATE_SECS = 2.0
# At the sign of life of each process, in the time that it may stand still.
_LOOKS = 10
# From SIGTERM to SIGKILL for tasks without state to save.
_STATELESS_GRACE_SECS = 5.0


@dataclass(frozen=True)
class TaskEnd:
    """How one process of a task ended; `failure` is empty, or says why the end is one."""

    task: Task
    pid: int
    exit_code: int  # As in subprocess: -n is death by signal n.
    seconds: float
    failure: str
    was_overdue: bool = False  # It had to be ended, when it should have ended by itself.
    survived: bool = False  # The run went on: without it, or with what was started again.
    last_lines: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Restart:
    """Tasks that were started again because `cause` had ended, and when."""

    cause: TaskEnd
    tasks: tuple[Task, ...]
    when: str

    def __str__(self) -> str:
        """A line of the report at the end."""
        what = self.tasks[0] if len(self.tasks) == 1 else "all tasks"
        return f"{self.when}  {self.cause.task}: {self.cause.failure}; {what} started again"


@dataclass(frozen=True)
class LaunchReport:
    """How the cluster ended: all processes in the order of their ends.

    `exit_code` is 0 if the chief ended with 0 and so did every task that it needed; 2 if a task
    found bad usage; 75 if a signal stopped the cluster or killed a task, so that starting it again
    goes on; otherwise 1.
    `first_failure` is the task to look at: of those that ended the run, or, if none did, of those
    that were survived. Tasks that ended with 75 because a peer was gone, or because the launcher
    ended them, are blamed only where nobody else is.
    """

    exit_code: int
    tasks: tuple[TaskEnd, ...]
    first_failure: TaskEnd | None
    restarts: tuple[Restart, ...]


@dataclass(frozen=True, order=True)
class _Due:
    """What is to be done at `when`."""

    when: float
    number: int  # So that what was planned first comes first.
    act: Callable[[], None] = field(compare=False)


class LocalCluster:
    """Starts, supervises and ends the tasks of one cluster, each as `command argv --model_dir=...`.

    A process is executed, or forked from a template which has imported all that it needs
    (trainer/template.py). The task's place in the cluster is in its `TF_CONFIG`; directory and
    environment are the launcher's own. `grace_secs` is the time that tasks which train have for
    saving when they are asked to stop. A process that gives no sign of life for
    `stall_timeout_secs` is killed, which is one more way to die; 0 waits for ever.
    """

    def __init__(
        self,
        cluster: Cluster,
        argv: Sequence[str],
        model_dir: str | Path,
        *,
        restarts: Restarts | None = None,
        namespace: Namespace | None = None,
        cores: Mapping[Task, Collection[int]] | None = None,
        grace_secs: float = 30.0,
        stall_timeout_secs: float = 0.0,
        template: Template | None = None,
        command: Sequence[str] = _DEFAULT_COMMAND,
    ) -> None:
        """Checks and starts nothing. Without `restarts`, whatever dies stays dead.

        `cores`: of tasks that keep to some. With a `template`, tasks begin as copies of it where
        that is possible.
        """
        self._logs = logs_of(model_dir)
        self._template = template
        self._argv = [*argv, f"--model_dir={absolute(str(model_dir))}"]
        self._command = [*command, *self._argv]
        if namespace:
            self._command = namespace.command(self._command)
        self._fds = namespace.fds if namespace else ()
        self._cores = cores or {}
        self._limit = restarts
        self._grace_secs = grace_secs
        self._stall_timeout_secs = stall_timeout_secs
        self._next_look = time.monotonic() if stall_timeout_secs else math.inf
        self._clusters = {task: cluster.for_task(task) for task in cluster.tasks()}
        self._events: queue.SimpleQueue[TaskProcess | signal.Signals] = queue.SimpleQueue()
        self._running: dict[Task, TaskProcess] = {}
        self._to_start: set[Task] = set()  # When their time has come.
        self._due: list[_Due] = []
        self._numbers = itertools.count()
        self._num_starts: Counter[Task] = Counter()
        self._num_short_lives: Counter[Task] = Counter()  # In a row.
        self._came_back: set[Task] = set()  # Alone, to the others that went on.
        self._ends: list[TaskEnd] = []
        self._restarts: list[Restart] = []
        # Why all are being taken down, and from when on they may be started again.
        self._going_down: tuple[TaskEnd, float] | None = None
        self._is_ending = False
        self._num_stops = 0

    def run(self) -> LaunchReport:
        """Runs the cluster to its end; to be called once, in the main thread.

        When it returns, or raises, no process that it started is left.

        Raises:
            OSError: a log file or a process could not be made.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        stops = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As nohup leaves it.
            stops.append(signal.SIGHUP)
        handlers = {signum: signal.signal(signum, self._on_signal) for signum in stops}
        try:
            with Lifeline() as self._lifeline:
                self._to_start = set(self._clusters)
                self._start(self._clusters)
                while self._running or self._to_start:
                    self._handle_next_event()
        finally:
            for process in self._running.values():
                process.kill()
                process.reap()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        # A task with 75 only follows another: it is the first to look at where there is no other.
        failures = [end for end in self._ends if end.failure]
        first = min(
            failures,
            key=lambda end: (end.survived, end.exit_code == EXIT_RESTART),
            default=None,
        )
        self._say_how_it_ended(first)
        exit_code = self._exit_code(first)
        return LaunchReport(exit_code, tuple(self._ends), first, tuple(self._restarts))

    def _start(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._to_start.remove(task)
            self._num_starts[task] += 1
            cluster = self._clusters[task]
            self._running[task] = TaskProcess(
                task,
                partial(self._begin, cluster),
                self._logs / f"{task.job}-{task.index}.log",
                self._events,
                is_shown=cluster.is_chief,
                start=self._num_starts[task],
            )

    def _begin(
        self, cluster: Cluster, env: Mapping[str, str], fds: Sequence[int], output: int
    ) -> Child:
        """See process.Begin."""
        bound = core_env(self._cores.get(cluster.task, ()))
        env = {**env, **bound, "TF_CONFIG": cluster.tf_config()}
        if self._template:
            inherited = {1: output, 2: output} | {fd: fd for fd in (self._lifeline.fd, *fds)}
            name = f"{cluster.task.job}-{cluster.task.index}"
            ours = {**env, **self._lifeline.env}
            try:
                return self._template.start(name, self._argv, ours, inherited, self._fds)
            except OSError as error:
                say(f"{cluster.task} is executed, which takes longer: {error}")
        return self._lifeline.start(
            self._command,
            [*self._fds, *fds],
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def _on_signal(self, signum: int, frame: object) -> None:
        # SimpleQueue.put may interrupt a get of the same thread; Queue.put would dead-lock.
        self._events.put(signal.Signals(signum))

    def _handle_next_event(self) -> None:
        wake = min(self._due[0].when if self._due else math.inf, self._next_look)
        timeout_secs = None if wake == math.inf else max(0.0, wake - time.monotonic())
        try:
            event = self._events.get(timeout=timeout_secs)
        except queue.Empty:
            if wake == self._next_look:
                self._kill_stalled()
            else:
                heapq.heappop(self._due).act()
        else:
            if isinstance(event, TaskProcess):
                self._on_exit(event)
            else:
                self._on_stop(event)

    def _kill_stalled(self) -> None:
        """Looks at each process' sign of life, and plans the next look."""
        for process in self._running.values():
            silent_secs = process.silent_secs()
            if silent_secs > self._stall_timeout_secs and not process.stall:
                process.stall = f"stood still for {silent_secs:.0f} s (--stall_timeout_secs)"
                process.kill()
        self._next_look = time.monotonic() + self._stall_timeout_secs / _LOOKS

    def _on_stop(self, signum: signal.Signals) -> None:
        """The user, or a scheduler, ends the run: state is saved the first time it is asked."""
        self._num_stops += 1
        self._start_nothing_more()
        if self._num_stops > 1:
            self._end(self._running, 0, signal.SIGKILL)
            return
        say(
            f"{signum.name}: the tasks save their state and end, within {self._grace_secs:g} s. "
            "Once more to end them at once."
        )
        overdue = f"had not saved and ended {self._grace_secs:g} s after SIGTERM"
        self._end(self._trainers(), 0, signal.SIGTERM)
        patience = self._grace_secs + _LATE_SECS
        self._end(self._trainers(), patience, signal.SIGKILL, overdue)
        self._end(self._servers(), patience, signal.SIGTERM)
        self._end(self._servers(), patience + _STATELESS_GRACE_SECS, signal.SIGKILL)

    def _on_exit(self, process: TaskProcess) -> None:
        """Records a process' end, and plans what must follow."""
        task = process.task
        del self._running[task]
        code = process.reap()
        if self._template:
            self._template.reap_orphans({other.pid for other in self._running.values()})
        failure = _failure(process, code, is_stopped=self._num_stops > 0)
        end = TaskEnd(
            task,
            process.pid,
            code,
            process.seconds(),
            failure,
            was_overdue=bool(process.asked),
            last_lines=tuple(process.tail),
        )
        self._ends.append(end)
        cluster = self._clusters[task]
        if cluster.is_chief and code == 0:
            self._start_nothing_more()
            # It did without them, or they died when they were not needed any more.
            self._survive([end for end in self._ends if end.exit_code != EXIT_BUG])
            # Those that were on their way back may have heard of no chief, and wait for one.
            late = [other for other in self._came_back if other in self._running]
            self._end(late, _SERVERS_ALONE_SECS, signal.SIGKILL)
            overdue = f"was still running {_FAREWELL_SECS:g} s after {task} was done"
            self._end(self._running, _FAREWELL_SECS, signal.SIGTERM, overdue)
            self._end(self._running, _FAREWELL_SECS + _STATELESS_GRACE_SECS, signal.SIGKILL)
        elif code == EXIT_USAGE:  # Before anything was trained.
            self._start_nothing_more()
            self._end(self._running, 0, signal.SIGTERM)
            self._end(self._running, _STATELESS_GRACE_SECS, signal.SIGKILL)
        elif self._going_down and not self._is_cause(end):
            self._go_down()
        elif code == 0:
            pass
        elif self._is_done() and code != EXIT_BUG and (self._is_alone(task) or not process.asked):
            self._survive([end])  # The chief did without it.
        elif code == EXIT_RESTART and self._is_alone(task) and not self._is_ending:
            self._in(_CHIEF_FOLLOWS_SECS, partial(self._on_loss, end))
        else:
            self._on_loss(end)

    def _on_loss(self, end: TaskEnd) -> None:
        """A task ended, and the run cannot be as before."""
        if self._is_mended(end):
            return
        was_killed = bool(end.failure) and end.exit_code < 0
        if was_killed and self._is_alone(end.task) and self._others_work(end.task):
            self._survive([end])
            say(f"{end.task} (process {end.pid}) ended: {end.failure}. The other workers go on.")
            return
        self._start_nothing_more()
        patience = _PEER_LOST_SECS + self._grace_secs
        if not self._num_stops:  # A second SIGTERM would keep them from saving.
            self._end(self._trainers(), _PEER_LOST_SECS, signal.SIGTERM)
            self._end(self._trainers(), patience, signal.SIGKILL)
        # Servers stay while a trainer may still save what they hold; then nobody ends them.
        patience = patience if self._trainers() else _SERVERS_ALONE_SECS
        self._end(self._servers(), patience, signal.SIGTERM)
        self._end(self._servers(), patience + _STATELESS_GRACE_SECS, signal.SIGKILL)

    def _is_mended(self, end: TaskEnd) -> bool:
        """Whether what has gone with `end` is started again: if so, that is under way."""
        if self._is_ending or self._limit is None or not self._limit.max_restarts:
            return False
        if end.exit_code > 0 and end.exit_code != EXIT_RESTART:
            return False
        if end.seconds > _SHORT_LIFE_SECS:
            self._num_short_lives[end.task] = 0
        delay_secs = self._limit.next_delay_secs(self._num_short_lives[end.task])
        self._num_short_lives[end.task] += end.seconds <= _SHORT_LIFE_SECS
        if delay_secs is None:
            say(
                f"{end.task} is not started again: {self._limit.max_restarts} restarts within 10 "
                "minutes (--max_restarts) have brought neither a new checkpoint nor a later step."
            )
            return False
        is_alone = self._is_alone(end.task)
        tasks = (end.task,) if is_alone else tuple(self._clusters)
        what = end.task if is_alone else "all tasks"
        when = f"in {delay_secs:g} s" if delay_secs else "now"
        say(f"{end.task} (process {end.pid}) ended: {end.failure}. Starting {what} again {when}.")
        if is_alone:
            self._survive([end])
            self._came_back.add(end.task)
            self._start_again(end, tasks, delay_secs)
        else:
            self._start_nothing_yet()
            self._going_down = (end, time.monotonic() + delay_secs)
            # After 75 the others may be about to end themselves, with everything saved.
            patience = _PEER_LOST_SECS if end.exit_code == EXIT_RESTART else 0.0
            self._end(self._running, patience, signal.SIGKILL)
            self._go_down()
        return True

    def _is_cause(self, end: TaskEnd) -> bool:
        """Whether `end`, while all are taken down, is why another task has lost its peer."""
        assert self._going_down is not None
        return end.exit_code == EXIT_BUG and self._going_down[0].exit_code == EXIT_RESTART

    def _go_down(self) -> None:
        """One step further down, to the start of all tasks when the last has ended."""
        assert self._going_down is not None
        if not self._trainers():
            self._end(self._servers(), 0, signal.SIGKILL)
        if self._running:
            return
        cause, when = self._going_down
        self._start_nothing_yet()
        self._survive(self._ends)
        self._start_again(cause, tuple(self._clusters), when - time.monotonic())

    def _start_again(self, cause: TaskEnd, tasks: tuple[Task, ...], after_secs: float) -> None:
        self._to_start.update(tasks)

        def start() -> None:
            if self._to_start.issuperset(tasks):
                self._restarts.append(Restart(cause, tasks, now()))
                self._write_down(self._restarts[-1])
                self._start(tasks)

        self._in(after_secs, start)

    def _survive(self, ends: Sequence[TaskEnd]) -> None:
        """Notes that the run goes on after `ends`."""
        survived = set(map(id, ends))
        self._ends = [
            dataclasses.replace(end, survived=bool(end.failure)) if id(end) in survived else end
            for end in self._ends
        ]

    def _start_nothing_yet(self) -> None:
        """Forgets all that was planned: it was for tasks that are to be started anew."""
        self._to_start.clear()
        self._due.clear()
        self._came_back.clear()
        self._going_down = None

    def _start_nothing_more(self) -> None:
        """From now on the run is coming to its end; signals that were planned stay planned."""
        self._is_ending = True
        self._to_start.clear()
        self._going_down = None

    def _is_alone(self, task: Task) -> bool:
        """Whether a task can be lost alone: a worker that serves a chief."""
        return self._clusters[task].is_server and task.job == "worker"

    def _others_work(self, task: Task) -> bool:
        return any(other.job == task.job for other in self._running)

    def _is_done(self) -> bool:
        return any(self._clusters[e.task].is_chief and e.exit_code == 0 for e in self._ends)

    def _servers(self) -> list[Task]:
        return [task for task in self._running if self._clusters[task].is_server]

    def _trainers(self) -> list[Task]:
        return [task for task in self._running if not self._clusters[task].is_server]

    def _in(self, after_secs: float, act: Callable[[], None]) -> None:
        when = time.monotonic() + after_secs
        heapq.heappush(self._due, _Due(when, next(self._numbers), act))

    def _end(
        self, tasks: Iterable[Task], after_secs: float, signum: signal.Signals, overdue: str = ""
    ) -> None:
        """Sends `signum` to those of `tasks` that still run in `after_secs`.

        `overdue` says why running until then is their failure.
        """
        for task in tasks:
            self._in(after_secs, partial(self._send, self._running[task], signum, overdue))

    def _send(self, process: TaskProcess, signum: signal.Signals, overdue: str) -> None:
        if self._running.get(process.task) is not process:
            return
        process.asked = process.asked or overdue
        if signum == signal.SIGKILL:
            process.kill()
        else:
            process.send(signum)

    def _exit_code(self, first_failure: TaskEnd | None) -> int:
        ends = [end for end in self._ends if not end.survived]
        codes = [end.exit_code for end in ends]
        if self._num_stops:
            return EXIT_RESTART if any(codes) or not self._is_done() else 0
        if first_failure is None or first_failure.survived:
            return 0
        if EXIT_USAGE in codes:
            return EXIT_USAGE
        was_lost = first_failure.exit_code < 0 or first_failure.exit_code == EXIT_RESTART
        return EXIT_RESTART if was_lost and not first_failure.was_overdue else EXIT_BUG

    def _write_down(self, restart: Restart) -> None:
        """Adds `restart` to restarts.jsonl."""
        cause = restart.cause
        document = {
            "time": restart.when,
            "started_again": [str(task) for task in restart.tasks],
            "task": str(cause.task),
            "process": cause.pid,
            "seconds": round(cause.seconds, 1),
            "exit_code": cause.exit_code,
            "why": cause.failure,
            "last_lines": [line.rstrip() for line in cause.last_lines],
        }
        path = self._logs / _RESTARTS
        try:
            with path.open("a") as file:
                file.write(json.dumps(document) + "\n")
        except OSError as error:  # A full disk.
            say(f"A restart is missing in {path}: {error}")

    def _say_how_it_ended(self, first_failure: TaskEnd | None) -> None:
        if (num_before := len(self._restarts) - _SHOWN_RESTARTS) > 0:
            say(f"{num_before} restarts before these are in {self._logs / _RESTARTS}")
        for restart in self._restarts[-_SHOWN_RESTARTS:]:
            say(str(restart))
        if first_failure is None or first_failure.survived:
            return
        task = first_failure.task
        if not self._clusters[task].is_chief:
            for line in first_failure.last_lines:
                show(f"[{task}] {line.rstrip()}\n", sys.stderr)
        log = self._logs / f"{task.job}-{task.index}.log"
        say(
            f"{task} failed after {first_failure.seconds:.1f} s: {first_failure.failure}. "
            f"Its log: {log}"
        )


def logs_of(model_dir: str | Path) -> Path:
    """Where the logs of the tasks are: beside the run, or, if that is far away, under runs/."""
    if is_url(str(model_dir)):
        return Path("runs", str(model_dir).rstrip("/").rpartition("/")[2], "tasks").resolve()
    return Path(model_dir).resolve() / "tasks"


def _failure(process: TaskProcess, code: int, *, is_stopped: bool) -> str:
    if process.stall and code == -signal.SIGKILL:
        return process.stall
    if process.asked:
        return process.asked
    if process.asked is not None and code in (EXIT_RESTART, -signal.SIGTERM, -signal.SIGKILL):
        return ""
    if is_stopped and code == EXIT_RESTART:  # As the chief has told its servers.
        return ""
    return _how(code)


def _how(code: int) -> str:
    """An exit code in words; empty for 0."""
    if code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}" if code else ""
