"""A whole cluster on this machine: one process a task, supervised, and taken down whatever happens.

    cluster = local_cluster("ps", num_workers=2, num_ps=1)
    report = LocalCluster(cluster, sys.argv[1:], model_dir).run()
    sys.exit(report.exit_code)

What is seen: the chief's lines (worker 0's where no chief is named) appear on the launcher's
standard output as they are, so that one process and a cluster look the same. The other tasks' lines
do not: they are copies of the same, or the noise of servers. All lines of every task, the chief's
too, are in `<model_dir>/tasks/<job>-<index>.log`. When the first task that failed is not the chief,
its last lines are printed at the end, prefixed with its name.

What ends the run: a task that fails, except a worker that serves a chief and was killed; the
chief's end; a signal. Every process is started in a session of its own, so a terminal's Ctrl-C
reaches only the launcher, which asks the tasks to save and end.

What is left behind: nothing. Process groups are killed by their id when `run` ends, and if the
launcher itself is killed the tasks see the end of a pipe that it held (trainer/lifeline.py).
"""

import contextlib
import dataclasses
import heapq
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from strategies.cluster import Cluster, Task
from trainer.exits import EXIT_RESTART, EXIT_USAGE
from trainer.lifeline import Lifeline

_DEFAULT_COMMAND = (sys.executable, "-m", "trainer")
_TAIL_LINES = 40
# TensorFlow's coordination service reports a dead peer to the others within 10 s.
_PEER_LOST_SECS = 15.0
# From the chief's good end to that of tasks which have nothing left to do.
_FAREWELL_SECS = 10.0
# From the end of the last task that trains, if it failed, to SIGTERM for its servers.
_SERVERS_ALONE_SECS = 2.0
# From SIGTERM to SIGKILL for tasks without state to save.
_STATELESS_GRACE_SECS = 5.0


@dataclass(frozen=True)
class TaskEnd:
    """How one task ended; `failure` says why its end is a failure, and is empty if it is none."""

    task: Task
    pid: int
    exit_code: int  # As in subprocess: -n is death by signal n.
    seconds: float
    failure: str
    survived: bool = False  # The others could go on without it.


@dataclass(frozen=True)
class LaunchReport:
    """How the cluster ended: all tasks in the order of their ends.

    `exit_code` is 0 if the chief ended with 0 and so did every task that it needed; 2 if a task
    found bad usage; 75 if a signal stopped the cluster or killed a task, so that starting it again
    goes on; otherwise 1.
    `first_failure` is the task to look at. Tasks that ended with 75 because a peer was gone, or
    because the launcher ended them, are blamed only where nobody else is.
    """

    exit_code: int
    tasks: tuple[TaskEnd, ...]
    first_failure: TaskEnd | None


@dataclass(frozen=True, order=True)
class _Due:
    """A signal for a task that still runs at `when`; `overdue` says why running is its failure."""

    when: float
    task: Task = field(compare=False)
    signum: signal.Signals = field(compare=False)
    overdue: str = field(compare=False)


class LocalCluster:
    """Starts, supervises and ends the tasks of one cluster, each as `command argv --model_dir=...`.

    The task's place in the cluster is in its `TF_CONFIG`; directory and environment are the
    launcher's own. `grace_secs` is the time that tasks which train have for saving when they are
    asked to stop.
    """

    def __init__(
        self,
        cluster: Cluster,
        argv: Sequence[str],
        model_dir: Path,
        *,
        grace_secs: float = 30.0,
        command: Sequence[str] = _DEFAULT_COMMAND,
    ) -> None:
        """Checks and starts nothing."""
        self._model_dir = model_dir.resolve()
        self._command = [*command, *argv, f"--model_dir={self._model_dir}"]
        self._grace_secs = grace_secs
        self._clusters = {task: cluster.for_task(task) for task in cluster.tasks()}
        self._events: queue.SimpleQueue[Task | signal.Signals] = queue.SimpleQueue()
        self._running: dict[Task, _Process] = {}
        self._due: list[_Due] = []
        self._signalled: dict[Task, str] = {}  # By this launcher: the `overdue` text, or "".
        self._ends: list[TaskEnd] = []
        self._num_stops = 0

    def run(self) -> LaunchReport:
        """Runs the cluster to its end; to be called once, in the main thread.

        When it returns, or raises, no process that it started is left.

        Raises:
            OSError: a log file under `model_dir` or a process could not be made.
        """
        logs = self._model_dir / "tasks"
        logs.mkdir(parents=True, exist_ok=True)
        stops = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As nohup leaves it.
            stops.append(signal.SIGHUP)
        handlers = {signum: signal.signal(signum, self._on_signal) for signum in stops}
        started: list[_Process] = []
        try:
            with Lifeline() as lifeline:
                for task, cluster in self._clusters.items():
                    process = _Process(
                        task,
                        self._command,
                        os.environ | {"TF_CONFIG": cluster.tf_config()},
                        lifeline,
                        logs / f"{task.job}-{task.index}.log",
                        is_shown=cluster.is_chief,
                        events=self._events,
                    )
                    started.append(process)
                    self._running[task] = process
                while self._running:
                    self._handle_next_event()
        finally:
            for process in started:
                process.kill()
                process.reap()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        failures = [end for end in self._ends if end.failure]
        # A task with 75 only follows another: it is the first to look at where there is no other.
        first = min(failures, key=lambda end: end.exit_code == EXIT_RESTART, default=None)
        if first:
            process = next(process for process in started if process.task == first.task)
            _print_failure(first, process)
        return LaunchReport(self._exit_code(first), tuple(self._ends), first)

    def _on_signal(self, signum: int, frame: object) -> None:
        # SimpleQueue.put may interrupt a get of the same thread; Queue.put would dead-lock.
        self._events.put(signal.Signals(signum))

    def _handle_next_event(self) -> None:
        timeout_secs = max(0.0, self._due[0].when - time.monotonic()) if self._due else None
        try:
            event = self._events.get(timeout=timeout_secs)
        except queue.Empty:
            self._send(heapq.heappop(self._due))
        else:
            if isinstance(event, Task):
                self._on_exit(event)
            else:
                self._on_stop(event)

    def _on_stop(self, signum: signal.Signals) -> None:
        """The user, or a scheduler, ends the run: state is saved the first time it is asked."""
        self._num_stops += 1
        if self._num_stops > 1:
            self._end(self._running, 0, signal.SIGKILL)
            return
        _say(
            f"{signum.name}: the tasks save their state and end, within {self._grace_secs:g} s. "
            "Once more to end them at once."
        )
        overdue = f"had not saved and ended {self._grace_secs:g} s after SIGTERM"
        self._end(self._trainers(), 0, signal.SIGTERM)
        self._end(self._trainers(), self._grace_secs, signal.SIGKILL, overdue)
        self._end(self._servers(), self._grace_secs, signal.SIGTERM)
        self._end(self._servers(), self._grace_secs + _STATELESS_GRACE_SECS, signal.SIGKILL)

    def _on_exit(self, task: Task) -> None:
        """Records a task's end, and plans the others' where theirs must follow."""
        process = self._running.pop(task)
        code = process.reap()
        end = TaskEnd(task, process.pid, code, process.seconds(), self._failure(task, code))
        end = dataclasses.replace(end, survived=bool(end.failure) and self._is_survivable(end))
        self._ends.append(end)
        cluster = self._clusters[task]
        if cluster.is_chief and code == 0:
            overdue = f"was still running {_FAREWELL_SECS:g} s after {task} was done"
            self._end(self._running, _FAREWELL_SECS, signal.SIGTERM, overdue)
            self._end(self._running, _FAREWELL_SECS + _STATELESS_GRACE_SECS, signal.SIGKILL)
        elif code == EXIT_USAGE:  # Before anything was trained.
            self._end(self._running, 0, signal.SIGTERM)
            self._end(self._running, _STATELESS_GRACE_SECS, signal.SIGKILL)
        elif end.survived:
            # The place to start the task again, alone, at its address.
            _say(f"{task} (process {end.pid}) ended: {end.failure}. The other workers go on.")
        elif code != 0:
            patience = _PEER_LOST_SECS + self._grace_secs
            self._end(self._trainers(), _PEER_LOST_SECS, signal.SIGTERM)
            self._end(self._trainers(), patience, signal.SIGKILL)
            # Servers stay while a trainer may still save what they hold; then nobody ends them.
            patience = patience if self._trainers() else _SERVERS_ALONE_SECS
            self._end(self._servers(), patience, signal.SIGTERM)
            self._end(self._servers(), patience + _STATELESS_GRACE_SECS, signal.SIGKILL)

    def _is_survivable(self, end: TaskEnd) -> bool:
        """Whether the others can go on: a worker that serves was killed, and another one lives.

        A server that ends with a code of its own failed to start, and would fail again.
        """
        return (
            self._clusters[end.task].is_server
            and end.task.job == "worker"
            and end.exit_code < 0
            and any(task.job == "worker" for task in self._running)
        )

    def _servers(self) -> list[Task]:
        return [task for task in self._running if self._clusters[task].is_server]

    def _trainers(self) -> list[Task]:
        return [task for task in self._running if not self._clusters[task].is_server]

    def _end(
        self, tasks: Iterable[Task], after_secs: float, signum: signal.Signals, overdue: str = ""
    ) -> None:
        """Sends `signum` to those of `tasks` that still run in `after_secs`."""
        when = time.monotonic() + after_secs
        for task in tasks:
            heapq.heappush(self._due, _Due(when, task, signum, overdue))

    def _send(self, due: _Due) -> None:
        process = self._running.get(due.task)
        if process is None:
            return
        self._signalled[due.task] = self._signalled.get(due.task) or due.overdue
        if due.signum == signal.SIGKILL:
            process.kill()
        else:
            process.send(due.signum)

    def _failure(self, task: Task, code: int) -> str:
        if self._signalled.get(task):
            return self._signalled[task]
        if task in self._signalled and code in (EXIT_RESTART, -signal.SIGTERM, -signal.SIGKILL):
            return ""
        if code < 0:
            return f"signal {-code} ({signal.strsignal(-code)})"
        return f"exit code {code}" if code else ""

    def _exit_code(self, first_failure: TaskEnd | None) -> int:
        codes = [end.exit_code for end in self._ends]
        if self._num_stops:
            return EXIT_RESTART if any(codes) else 0
        if first_failure is None:
            return 0
        chief_is_done = any(
            self._clusters[end.task].is_chief and end.exit_code == 0 for end in self._ends
        )
        if chief_is_done and all(end.survived for end in self._ends if end.failure):
            return 0
        if EXIT_USAGE in codes:
            return EXIT_USAGE
        was_lost = first_failure.exit_code < 0 or first_failure.exit_code == EXIT_RESTART
        return EXIT_RESTART if was_lost and not self._signalled.get(first_failure.task) else 1


class _Process:
    """One task's process and process group, and the threads that follow its output and its end.

    `events` receives the task when its process has ended; until `reap` its id is not used again, so
    that a signal can never reach a stranger. Methods are for the launcher's main thread.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        env: Mapping[str, str],
        lifeline: Lifeline,
        log: Path,
        *,
        is_shown: bool,
        events: "queue.SimpleQueue[Task | signal.Signals]",
    ) -> None:
        """Starts the process, tied to `lifeline`."""
        self.task = task
        self.log = log
        self.is_shown = is_shown
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._events = events
        self._log_file = log.open("ab", buffering=0)
        self._started = time.monotonic()
        try:
            self._popen = lifeline.start(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError:
            self._log_file.close()
            raise
        self.pid = self._popen.pid
        self._output = threading.Thread(target=self._copy_output, daemon=True)
        self._exit = threading.Thread(target=self._await_exit, daemon=True)
        self._output.start()
        self._exit.start()

    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self._started

    def send(self, signum: signal.Signals) -> None:
        """Signals the task alone: its children are its own to end."""
        if self._popen.returncode is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kills the task and all it started in its process group."""
        if self._popen.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Waits for the end and for the last line; returns the exit code, or -n for signal n."""
        if self._popen.returncode is None:
            self._exit.join()
            self.kill()  # What it left behind: until it is reaped, its group's id is its own.
            self._popen.wait()
            self._output.join(timeout=1.0)  # A child that left the group may hold the pipe open.
        return self._popen.returncode

    def _await_exit(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._events.put(self.task)

    def _copy_output(self) -> None:
        assert self._popen.stdout is not None
        is_logging = True
        with self._log_file, self._popen.stdout as output:
            for line in output:
                text = line.decode(errors="replace")
                self.tail.append(text)
                # Whatever happens here, go on reading: a task whose pipe is full stands still.
                try:
                    self._log_file.write(line)
                except OSError as error:  # A full disk.
                    if is_logging:
                        _say(f"Lines of {self.task} are missing in {self.log}: {error}")
                    is_logging = False
                if self.is_shown:
                    _print(text, sys.stdout)


def _print_failure(end: TaskEnd, process: _Process) -> None:
    if not process.is_shown:
        for line in process.tail:
            _print(f"[{end.task}] {line.rstrip()}\n", sys.stderr)
    _say(f"{end.task} failed after {end.seconds:.1f} s: {end.failure}. Its log: {process.log}")


def _say(text: str) -> None:
    _print(f"{text}\n", sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    # A terminal that was closed, or `| head`, is no reason to end a run.
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()
