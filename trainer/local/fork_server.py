"""A process that imports modules once and then forks: a new process starts in 20 ms, not seconds.

    with ForkServer("label", preload=["trainer.task"]) as fork_server:
        fork = fork_server.spawn("trainer.__main__:run_from_command_line", "task", argv, env, fds)
        fork.wait()

It does what the fork server of `multiprocessing` does, for whole programs. All tasks of a local
cluster share one import of TensorFlow and its memory, and a task that died restarts at once.

The caller must preload only modules whose import starts no thread that lives at a fork, and creates
no TensorFlow op: threads and GPU contexts do not survive a fork. OpenBLAS, of NumPy, ends its
threads before each fork, and starts them again when it needs them. Forks have in common what
the import fixed: hash seeds, and environment variables that were read at import.

Each fork becomes a child of the launcher, not of the fork server: only a parent sees the exit code,
and only a parent's wait frees the process id. For this the launcher is a subreaper: when the parent
of a forked process ends, the kernel gives the process to the nearest subreaper. Subreapers and
passing descriptors over a socket make this Linux only. The fork server ends with the launcher.
"""

import fcntl
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self

from data.system.linux import become_subreaper, signal_when_parent_ends
from trainer.local.network_namespace import enter
from trainer.program import python_command

_MAX_BYTES = 1 << 20  # The largest message. A smaller limit of the socket raises an error.
_MAX_FDS = 64
_IMPORT_TIMEOUT_SECS = 300.0  # The imports may read from a slow remote disk.
_FORK_TIMEOUT_SECS = 10.0
_POLL_SECS = 0.0005


@dataclass
class Fork:
    """A child of this process that was forked, with Popen's pid, returncode and wait."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Waits until the process has ended; returns `returncode`."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass
class ForkServer:
    """The launcher's handle of a fork server, which runs while the context is open."""

    label: str  # In the command line of the process, for `ps`.
    _: KW_ONLY
    setup: Sequence[str] = ()  # Functions that it calls first: "module:function".
    preload: Sequence[str] = ()  # Modules that it imports then.

    def __enter__(self) -> Self:
        become_subreaper()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = ours
        ours.settimeout(_IMPORT_TIMEOUT_SECS)  # The first answer comes after the import.
        ours.send(json.dumps([[*map(str, sys.path)], self.setup, self.preload]).encode())
        fd = theirs.fileno()
        command = python_command("-m", "trainer.local.fork_server")
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(fd), str(os.getpid()), self.label],
                stdin=subprocess.DEVNULL,
                # Unbuffered: a task's last lines before a SIGKILL matter most.
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=[fd],
                start_new_session=True,  # So that Ctrl-C reaches only the launcher.
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def spawn(
        self,
        target: str,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        fds: Mapping[int, int],
        namespace: Sequence[int] = (),
    ) -> Fork:
        """Calls `target` in a fork that has a new session and an empty standard input.

        Args:
            target: "module:function", called without arguments.
            name: Becomes sys.argv[0] and the process name, of which the kernel keeps 15 characters.
            argv: The other elements of sys.argv.
            env: Added to the environment that this process had when the context was entered.
            fds: Descriptors to pass: number in the fork -> number in this process. Without 1 and 2
                the fork prints where this process prints.
            namespace: Descriptors of namespaces to enter.

        Raises OSError if the fork failed, or if the fork server ended or did not answer, twice.
        """
        request = json.dumps([target, name, list(argv), dict(env), list(fds)]).encode()
        try:
            answer = self._ask(request, [*fds.values(), *namespace])
        except (ConnectionError, TimeoutError):  # Killed, or stopped.
            answer = self._ask(request, [*fds.values(), *namespace])
        if not answer.isdigit():
            raise OSError(f"the fork server could not fork: {answer}")
        return Fork(int(answer))

    def reap_orphans(self, known: Container[int]) -> None:
        """Reaps ended processes, except `known`, that tasks left to this process, a subreaper."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in known or ended.si_pid == self._process.pid:
                return  # Another caller reaps this process; later orphans wait until then.
            os.waitpid(ended.si_pid, 0)

    def _ask(self, request: bytes, fds: Sequence[int]) -> str:
        """Returns the process id of the fork, or an error message.

        After a ConnectionError or a TimeoutError the next call starts another fork server.
        """
        if self._process.returncode is not None:
            self.__enter__()
        try:
            socket.send_fds(self._connection, [request], fds)
            answer = self._connection.recv(_MAX_BYTES).decode()
        except TimeoutError:
            self.__exit__()  # A fork that comes late finds no launcher, and ends.
            raise TimeoutError("the fork server did not answer") from None
        except ConnectionError:
            answer = ""
        if not answer:
            self.__exit__()
            raise ConnectionResetError("the fork server has ended")
        self._connection.settimeout(_FORK_TIMEOUT_SECS)
        return answer


def _serve(connection: socket.socket, launcher: int) -> Callable[[], object]:
    """Forks for each request. Returns only in the forks, with the function to call."""
    while True:
        request, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_FDS)
        if not request:
            os._exit(0)
        try:
            intermediate = _fork()
        except OSError as error:
            connection.send(str(error).encode())
        else:
            if intermediate == 0:
                _fork_for(launcher, connection)
                connection.close()
                return _become(fds, *json.loads(request))
            os.waitpid(intermediate, 0)
        for fd in fds:
            os.close(fd)


def _fork() -> int:
    # After a fork Python 3.12 counts the threads of the parent, and warns. The kernel may still
    # count those that OpenBLAS has just ended and joined: none of them held a lock at the fork.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return os.fork()


def _fork_for(launcher: int, connection: socket.socket) -> None:
    """Returns in a fork of this process that is a child of `launcher`, in a new session.

    The fork answers the launcher itself, and exits if it cannot: no answer means no fork.
    """
    parent = os.getpid()
    try:
        if _fork():
            os._exit(0)
    except OSError as error:
        connection.send(str(error).encode())
        os._exit(1)
    os.setsid()
    while os.getppid() == parent:
        time.sleep(_POLL_SECS)
    if os.getppid() != launcher:  # The launcher has ended.
        os._exit(1)
    try:
        connection.send(str(os.getpid()).encode())
    except OSError:
        os._exit(1)


def _become(
    fds: Sequence[int],
    target: str,
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    numbers: Sequence[int],
) -> Callable[[], object]:
    """Sets this fork up as a newly executed process; returns the function `target`.

    `fds` become `numbers`; the namespaces to enter follow them. The others are as of `spawn`.
    """
    files, namespace = fds[: len(numbers)], fds[len(numbers) :]
    # Copies above all numbers in use, so that no dup2 below overwrites a descriptor still needed.
    above = max([2, *numbers, *fds]) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in files]
    enter(namespace)
    for fd in files:
        os.close(fd)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.environ.update(env)
    if "numpy" in sys.modules:  # Python's own generator gets a new seed in each fork by itself.
        sys.modules["numpy"].random.seed()
    Path("/proc/self/comm").write_text(name)
    sys.argv = [name, *argv]
    function: Callable[[], object] = pkgutil.resolve_name(target)
    return function


def main() -> None:
    """Imports, then serves. In a fork it calls the target, and returns when the target does."""
    connection, launcher = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != launcher:  # It ended before the call above.
        os._exit(0)
    os.set_inheritable(connection.fileno(), False)
    path, setup, preload = json.loads(connection.recv(_MAX_BYTES))
    sys.path[:] = path  # A config file's imports are the same in all processes.
    for function in setup:
        pkgutil.resolve_name(function)()
    for module in preload:
        importlib.import_module(module)
    gc.freeze()  # Otherwise the first garbage collection of a fork copies all shared memory.
    try:
        run = _serve(connection, launcher)
    except ConnectionError:  # The launcher has ended.
        os._exit(0)
    run()


if __name__ == "__main__":
    main()
