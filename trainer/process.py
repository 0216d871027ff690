"""One task of a local cluster as a process: its output, its log, its end.

process = TaskProcess(task, begin, log, events, is_shown=True, start=1)
process.send(signal.SIGTERM)
exit_code = events.get().reap()     # it ended
"""

import contextlib
import datetime
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from strategies.cluster import Task
from trainer.heartbeat import Heartbeat

_TAIL_LINES = 40


class Child(Protocol):
    """A process of which this one is the parent, such as subprocess.Popen and template.Child."""

    @property
    def pid(self) -> int:
        """Its id."""

    @property
    def returncode(self) -> int | None:
        """None until `wait` has returned."""

    def wait(self) -> int:
        """Waits for the end, and reaps."""


class Begin(Protocol):
    """Starts a process in a session of its own."""

    def __call__(self, env: Mapping[str, str], fds: Sequence[int], output: int) -> Child:
        """With `env` on top of the launcher's, and `fds` open; what it prints goes to `output`.

        Raises:
            OSError: it cannot be started.
        """


class TaskProcess:
    """One task's process and process group, and the threads that follow its output and its end.

    `events` receives this when the process has ended; until `reap` its id is not used again, so
    that a signal can never reach a stranger. Methods are for the launcher's main thread.

    Attributes:
        tail: Its last lines.
        asked: None until the launcher asks it to end; then why it had to, if that is its failure.
        stall: Why it was killed, if it stood still.
    """

    def __init__(
        self,
        task: Task,
        begin: Begin,
        log: Path,
        events: "queue.SimpleQueue[TaskProcess | signal.Signals]",
        *,
        is_shown: bool,
        start: int,
    ) -> None:
        """Starts the process with `begin`; it is the task's `start`th.

        Raises:
            OSError: the log or the process could not be made.
        """
        self.task = task
        self.log = log
        self.is_shown = is_shown
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.asked: str | None = None
        self.stall = ""
        self._heartbeat = Heartbeat()
        self._events = events
        self._log_file = log.open("ab", buffering=0)
        self._started = time.monotonic()
        read, write = os.pipe()
        try:
            self._child = begin(self._heartbeat.env, [self._heartbeat.fd], write)
        except OSError:
            self._log_file.close()
            self._heartbeat.close()
            os.close(read)
            raise
        finally:
            self._heartbeat.started()
            os.close(write)
        self.pid = self._child.pid
        self._printed = os.fdopen(read, "rb")
        self._is_logging = True
        # Where a former process was killed in the middle of a line, a new one begins.
        line_end = "" if self._log_file.tell() == 0 else "\n"
        self._write(f"{line_end}=== {task}, start {start}, process {self.pid}, {now()}\n".encode())
        self._output = threading.Thread(target=self._copy_output, daemon=True)
        self._exit = threading.Thread(target=self._await_exit, daemon=True)
        self._output.start()
        self._exit.start()

    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self._started

    def silent_secs(self) -> float:
        """The time since its last sign of life."""
        return self._heartbeat.silent_secs()

    def send(self, signum: signal.Signals) -> None:
        """Signals the task alone: its children are its own to end."""
        if self._child.returncode is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kills the task and all it started in its process group."""
        if self._child.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Waits for the end and for the last line; returns the exit code, or -n for signal n."""
        if self._child.returncode is None:
            self._exit.join()
            self.kill()  # What it left behind: until it is reaped, its group's id is its own.
            self._child.wait()
            self._output.join(timeout=1.0)  # A child that left the group may hold the pipe open.
            self._heartbeat.close()
        return self._child.wait()

    def _await_exit(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._events.put(self)

    def _copy_output(self) -> None:
        with self._log_file, self._printed as output:
            for line in output:
                text = line.decode(errors="replace")
                self.tail.append(text)
                # Whatever happens here, go on reading: a task whose pipe is full stands still.
                self._write(line)
                if self.is_shown:
                    show(text, sys.stdout)

    def _write(self, line: bytes) -> None:
        try:
            self._log_file.write(line)
        except OSError as error:  # A full disk.
            if self._is_logging:
                say(f"Lines of {self.task} are missing in {self.log}: {error}")
            self._is_logging = False


def now() -> str:
    """The time here, as in 2026-11-21T14:42:07+00:00."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def say(text: str) -> None:
    """A line on standard error."""
    show(f"{text}\n", sys.stderr)


def show(text: str, stream: TextIO) -> None:
    """Writes `text` at once, if that is possible."""
    # A terminal that was closed, or `| head`, is no reason to end a run.
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()
