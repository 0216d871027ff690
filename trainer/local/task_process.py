"""One task of a local cluster as a process: its output, its log, its end.

starter = TaskStarter([f"--model_dir={model_dir}"], fork_server=fork_server)
process = TaskProcess(starter, cluster, logs, ended.put, is_shown=True, start=1)
process.send(signal.SIGTERM)
exit_code = ended.get().reap()
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from subprocess import Popen

import psutil

from data.system.cores import affinity_env
from strategies.cluster.tf_config import Cluster, Task
from trainer.flags.checks import METRICS_FD
from trainer.guards.parent_watch import ParentWatch
from trainer.hooks.terminal import progress_in, terminal_env
from trainer.local.fork_server import Fork, ForkServer
from trainer.local.network_namespace import Namespace
from trainer.local.task_logs import TaskLogs, now, say
from trainer.program import python_command

_TAIL_LINES = 40
_POLL_SECS = 0.05
TARGET = "trainer.__main__:run_from_command_line"  # What a task runs if it is forked.
# Lines that tasks print several times for each lost worker. Only the log of the task has them.
_REPEATED = re.compile(
    r"\] Failed to register function remotely due to"
    r"|\] BaseCollectiveExecutor::StartAbort (UNAVAILABLE|ABORTED|CANCELLED)\b"
    r"|^Additional GRPC error information from remote target "
    r"|^:UNKNOWN:Error received from peer "
    r"|^This could happen if the remote target has been disconnected from the client"
)
_ASKED = "this task saves and ends"  # After a signal; the launcher that sent it says so itself.


@dataclass(frozen=True)
class TaskStarter:
    """Starts the processes of tasks: forks that have imported TensorFlow, or executed commands.

    A process inherits the working directory and the environment. The place of its task in the
    cluster is in its `TF_CONFIG`.
    """

    argv: Sequence[str]  # Of each task, with --model_dir.
    _: KW_ONLY
    command: Sequence[str] = field(default_factory=partial(python_command, "-m", "trainer"))
    cores: Mapping[Task, Collection[int]] = field(default_factory=dict)  # Their CPU affinity.
    namespace: Namespace | None = None  # Tasks run inside it.
    fork_server: ForkServer | None = None  # If it is None or fails, tasks execute `command`.
    listener: socket.socket | None = None  # The chief serves its metrics there.

    def start(self, cluster: Cluster, watch: ParentWatch, output: int) -> Popen[bytes] | Fork:
        """Starts the task of `cluster`, in a new session; it prints to the descriptor `output`.

        Raises OSError if the process could not be made.
        """
        affinity = affinity_env(self.cores.get(cluster.task, ()))
        env = {**affinity, **terminal_env(), "TF_CONFIG": cluster.tf_config()}
        namespace_fds = self.namespace.fds if self.namespace else ()
        served = [self.listener.fileno()] if self.listener and cluster.is_chief else []
        if served:
            env[METRICS_FD] = str(served[0])
        if self.fork_server:
            try:
                return self.fork_server.spawn(
                    TARGET,
                    f"{cluster.task.job}-{cluster.task.index}",
                    self.argv,
                    {**env, **watch.env},
                    {1: output, 2: output, **{fd: fd for fd in (watch.fd, *served)}},
                    namespace_fds,
                )
            except OSError as error:
                say(
                    f"The fork server failed ({error}); {cluster.task} is started as a new Python "
                    "process, which takes a few seconds more"
                )
        command = [*self.command, *self.argv]
        if self.namespace:
            command = self.namespace.command(command)
        return watch.start(command, [*namespace_fds, *served], env, output)


class TaskProcess:
    """One task's process and process group, and the threads that follow its output and its end.

    Until `reap` the process id stays taken, so that a signal cannot reach another process. The
    methods are for the main thread.

    Attributes:
        tail: The last lines of the output.
        unresponsive: Why the launcher killed the process, if it sent no heartbeats; else empty.
        end_reason: Set when the launcher asks the process to end: why that is a failure (it did not
            end in time), or empty. None before, and if it was only killed as unresponsive.
    """

    def __init__(
        self,
        starter: TaskStarter,
        cluster: Cluster,
        logs: TaskLogs,
        on_exit: "Callable[[TaskProcess], None]",
        *,
        is_shown: bool,
        start: int,
        host: str = "",
    ) -> None:
        """Starts the task of `cluster`, for the `start`th time.

        Its output is appended to its log, and, if `is_shown`, copied to standard output, each line
        after the `host`, if given. A thread calls `on_exit` when the process has ended.

        Raises OSError if the process could not be made.
        """
        self.task = cluster.task
        self.watch = ParentWatch()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.unresponsive = ""
        self.end_reason: str | None = None
        self._is_shown = is_shown
        self._prefix = f"[{host}] " if host else ""
        self._on_exit = on_exit
        self._logs, self._log = logs, logs.path(cluster.task)
        self._started = time.monotonic()
        read, write = os.pipe()
        try:
            self._child = starter.start(cluster, self.watch, write)
        except OSError:
            self.watch.close()
            os.close(read)
            raise
        finally:
            os.close(write)
        self.pid = self._child.pid
        self._pipe = os.fdopen(read, "rb")
        where = f" on {host}" if host else ""
        begin = f"=== {self.task}{where}, start {start}, process {self.pid}, {now()}\n"
        logs.append(self._log, begin.encode(), begins_line=True)
        self._output = threading.Thread(target=self._copy_output, daemon=True)
        self._exit = threading.Thread(target=self._await_exit, daemon=True)
        self._output.start()
        self._exit.start()

    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self._started

    def send(self, signum: signal.Signals) -> None:
        """Signals the task, which ends its own children; SIGKILL goes to its process group."""
        if self._child.returncode is None:
            kill = os.killpg if signum == signal.SIGKILL else os.kill
            with contextlib.suppress(PermissionError):  # On macOS, if it has just ended.
                kill(self.pid, signum)

    def reap(self) -> int:
        """Waits for the end and for the last line; returns the exit code, or -n for signal n."""
        if self._child.returncode is None:
            self._exit.join()
            # Its children: until it is reaped, no other process group has its id.
            self.send(signal.SIGKILL)
            self._child.wait()
            self._output.join(timeout=1.0)  # A child that left the group may hold the pipe open.
            self.watch.close()
        return self._child.wait()

    def _await_exit(self) -> None:
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # On macOS with Python before 3.13.
            while psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(_POLL_SECS)
        self._on_exit(self)

    def _copy_output(self) -> None:
        with self._pipe:
            for line in self._pipe:
                text = line.decode(errors="replace")
                if progress_in(text) is None:
                    self.tail.append(text)
                    # An error here must not end this loop: a task blocks when its pipe is full.
                    self._logs.append(self._log, line)
                is_repeated = self.end_reason is not None and _ASKED in text
                if self._is_shown and not is_repeated and not _REPEATED.search(text):
                    say(self._prefix + text, sys.stdout, end="")
