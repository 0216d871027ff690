"""A process that has imported TensorFlow and does nothing else: tasks begin as copies of it.

    with Template(model_dir) as template:                           # in the launcher
        child = template.start("worker-0", argv, env, {1: pipe})    # trainer argv, in 20 ms
        child.wait()

The import takes seconds of CPU, and all tasks of a cluster on one machine would do the same one
after another. So it is done once, and a task is a fork: it also shares the memory of the 3,000
modules, and one that died is back at once.

No TensorFlow op has run in the template, so that no thread of TensorFlow and no GPU is there that a
fork would miss; the command line is parsed, and the config imported, in the fork. What a fork has
in common with the others is what was chosen at the import: hash seeds, and what TensorFlow reads
from the environment when it is imported.

A task is the launcher's own child, which alone sees how it ended, and reuses its process id only
then: the fork of a fork whose parent ended is the nearest subreaper's. That, and passing
descriptors, is Linux's. With the launcher the template ends too.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from trainer.isolation import enter

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Of one message; the socket takes less, and says so.
_MOST_BYTES = 1 << 20
_MOST_FDS = 64
# Of the import, from a cold and distant disk; and of a fork.
_IMPORT_SECS = 300.0
_FORK_SECS = 10.0
_IS_READY = b"ready"
_COMMAND = (sys.executable, "-m", "trainer.template")


class Child:
    """A child of this process: what subprocess.Popen is, of one that another has forked.

    Attributes:
        pid: Its id.
        returncode: None until `wait` has returned; then the exit code, or -n for signal n.
    """

    def __init__(self, pid: int) -> None:
        """Takes over child `pid`."""
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        """Kills it, with all in its session that is in its process group."""
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits for the end, and reaps; returns `returncode`."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Template:
    """The launcher's hold on the template; leaving the context ends it."""

    def __init__(self, label: str) -> None:
        """`label` is for those who list processes."""
        self._label = label
        self._connection: socket.socket | None = None
        self._is_ready = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Starts it: it imports while this process goes on."""
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1):
            raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it; what it has started goes on."""
        self._close()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        fds: Mapping[int, int],
        namespace: Sequence[int] = (),
    ) -> Child:
        """`python -m trainer argv`, in a session of its own, its standard input empty.

        Args:
            name: For those who list processes; of up to 15 characters.
            argv: The command line, without the program.
            env: What is set on top of the environment that this process had when the context was
                entered.
            fds: Its other descriptors: number there -> number here.
            namespace: Descriptors of namespaces to enter.

        Raises:
            OSError: it cannot be started: the template ends, or does not answer, twice.
        """
        document = {"name": name, "argv": list(argv), "env": dict(env), "fds": list(fds)}
        request = json.dumps(document).encode()
        passed = [*fds.values(), *namespace]
        try:
            answer = self._ask(request, passed)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):  # Killed, or stopped.
            self._close()
            self._open()
            answer = self._ask(request, passed)
        told: dict[str, Any] = json.loads(answer)
        if "error" in told:
            raise OSError(f"a task could not be forked: {told['error']}")
        return Child(int(told["pid"]))

    def reap_orphans(self, known: Container[int]) -> None:
        """Reaps what tasks have left behind, which is this process' now; not those of `known`."""
        assert self._process is not None
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in known or ended.si_pid == self._process.pid:
                return  # Who waits for that one reaps it; the rest can wait until then.
            os.waitpid(ended.si_pid, 0)

    def _ask(self, request: bytes, fds: Sequence[int]) -> bytes:
        assert self._connection is not None, "the context was not entered"
        if not self._is_ready:
            self._connection.settimeout(_IMPORT_SECS)
            if self._connection.recv(_MOST_BYTES) != _IS_READY:
                raise ConnectionResetError("the template of the tasks has ended")
            self._is_ready = True
            self._connection.settimeout(_FORK_SECS)
        socket.send_fds(self._connection, [request], fds)
        answer = self._connection.recv(_MOST_BYTES)
        if not answer:
            raise ConnectionResetError("the template of the tasks has ended")
        return answer

    def _open(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection, self._is_ready = ours, False
        number = theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, str(number), str(os.getpid()), self._label],
                stdin=subprocess.DEVNULL,
                # Unbuffered: the last lines before a SIGKILL are the ones that matter.
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=[number],
                start_new_session=True,  # A Ctrl-C is for the launcher.
            )

    def _close(self) -> None:
        assert self._connection is not None
        self._connection.close()
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def _serve(connection: socket.socket, launcher: int) -> Sequence[str]:
    """Forks for each request; returns in the forks, with what becomes sys.argv."""
    connection.send(_IS_READY)
    while True:
        request, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FDS)
        if not request:
            os._exit(0)
        try:
            between = os.fork()
        except OSError as error:
            _answer(connection, error=str(error))
        else:
            if between == 0:
                _fork_for(launcher, connection)
                connection.close()
                return _become(json.loads(request), fds)
            os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _fork_for(launcher: int, connection: socket.socket) -> None:
    """Returns in a fork of this process that is a child of `launcher`, with a session of its own.

    The fork itself answers, and goes on only if it could: who has no answer has no task.
    """
    parent = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        _answer(connection, error=str(error))
        os._exit(1)
    os.setsid()
    while os.getppid() == parent:
        time.sleep(0.0005)
    if os.getppid() != launcher:  # It is gone.
        os._exit(1)
    try:
        _answer(connection, pid=os.getpid())
    except OSError:
        os._exit(1)


def _answer(connection: socket.socket, **told: object) -> None:
    connection.send(json.dumps(told).encode())


def _become(document: Mapping[str, Any], fds: Sequence[int]) -> Sequence[str]:
    """Makes this fork a process like one that was executed; returns sys.argv."""
    numbers: list[int] = document["fds"]
    namespace = fds[len(numbers) :]
    # First out of the way of each other.
    above = max(*numbers, *fds) + 1
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds[: len(numbers)]]
    enter(namespace)
    for fd in fds[: len(numbers)]:
        os.close(fd)
    for fd, number in zip(kept, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(document["env"])
    import numpy as np

    np.random.seed()  # Python's own is seeded anew in each fork.
    # The first becomes the name of the process: absl.app sees to that.
    return [document["name"], *document["argv"]]


def main() -> NoReturn:
    """Imports, then serves; in the forks it is `python -m trainer`."""
    connection, launcher = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # It was gone before.
        os._exit(0)
    os.set_inheritable(connection.fileno(), False)
    from trainer.start import (
        configure_logging,
        import_tensorflow,
        keep_freed_memory,
        set_environment,
    )

    configure_logging()
    set_environment()
    keep_freed_memory()
    import_tensorflow()
    # What every task imports: see trainer/command.py.
    import trainer.__main__
    import trainer.command
    import trainer.preflight
    import trainer.run

    gc.freeze()  # Or the first look for garbage in a task would copy all of it.
    with contextlib.suppress(ConnectionError):  # The launcher is gone.
        sys.argv = list(_serve(connection, launcher))
        trainer.__main__.run_from_command_line()
    os._exit(0)


if __name__ == "__main__":
    main()
