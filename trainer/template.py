"""A process that has imported TensorFlow and does nothing else: tasks begin as copies of it.

    with Template(model_dir) as template:                       # in the launcher
        child = template.start(argv, env, {1: pipe, 2: pipe})   # python -m trainer argv, in 20 ms
        child.wait()

The import takes seconds of CPU, and all tasks of a cluster on one machine would do the same one
after another. So it is done once, and a task is a fork: it also shares the memory of the 3,000
modules, and one that died is back at once.

A fork is as good as a new process because there is nothing in the template that a fork does not
have: no TensorFlow op has run, so that no thread of TensorFlow and no GPU is there; the command
line is parsed, and the config imported, in the fork.

A task is the launcher's own child, which alone sees how it ended, and reuses its process id only
then: the fork of a fork whose parent ended is the nearest subreaper's. That, and passing
descriptors, is Linux's. With the launcher the template ends too.
"""

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
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from trainer.isolation import Namespace

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A request is one message: a command line of the length that Linux allows by default, and more.
_MOST_BYTES = 1 << 20
_MOST_FDS = 32
# Above all that a launcher has open by itself.
_HIGH_FD = 512


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

    def wait(self) -> int:
        """Waits for the end, and reaps; returns `returncode`."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Template:
    """The launcher's hold on the template; leaving the context ends it."""

    def __init__(self, label: str, namespace: Namespace | None = None) -> None:
        """`label` is for those who list processes. Tasks begin in `namespace`, if there is one."""
        self._label = label
        self._namespace = namespace
        self._connection: socket.socket | None = None
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

    def start(self, argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int]) -> Child:
        """`python -m trainer argv`, in a session of its own, its standard input empty.

        `env` is set on top of the environment that this process had when the context was entered.
        `fds` are its other descriptors: number there -> number here.

        Raises:
            OSError: the template cannot be started, or ends at once, or cannot fork.
        """
        request = json.dumps({"argv": list(argv), "env": dict(env), "fds": list(fds)}).encode()
        try:
            answer = self._ask(request, list(fds.values()))
        except (BrokenPipeError, ConnectionResetError):  # It was killed.
            self._close()
            self._open()
            answer = self._ask(request, list(fds.values()))
        document: dict[str, Any] = json.loads(answer)
        if "error" in document:
            raise OSError(f"a task could not be forked: {document['error']}")
        return Child(int(document["pid"]))

    def _ask(self, request: bytes, fds: Sequence[int]) -> bytes:
        assert self._connection is not None, "the context was not entered"
        socket.send_fds(self._connection, [request], fds)
        answer = self._connection.recv(_MOST_BYTES)
        if not answer:
            raise ConnectionResetError("the template of the tasks has ended")
        return answer

    def _open(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = [str(theirs.fileno()), str(os.getpid())]
        command = [sys.executable, "-m", "trainer.template", *numbers, self._label]
        inherited = [theirs.fileno()]
        if self._namespace:
            command = self._namespace.command(command)
            inherited += self._namespace.fds
        self._connection = ours
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # Unbuffered: the last lines before a SIGKILL are the ones that matter.
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=inherited,
                start_new_session=True,  # A Ctrl-C is for the launcher.
            )

    def _close(self) -> None:
        assert self._connection is not None
        self._connection.close()
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def _serve(connection: socket.socket, launcher: int) -> Sequence[str]:
    """Forks for each request; returns in the forks, with what they are to be called with."""
    while True:
        request, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FDS)
        if not request:
            os._exit(0)
        document = json.loads(request)
        try:
            pid = _fork_for(launcher)
        except OSError as error:
            connection.send(json.dumps({"error": str(error)}).encode())
        else:
            if pid == 0:
                connection.close()
                return _become(document, fds)
            connection.send(json.dumps({"pid": pid}).encode())
        for fd in fds:
            os.close(fd)


def _fork_for(launcher: int) -> int:
    """Forks a child of `launcher` with a session of its own: its id, and in it 0.

    Raises:
        OSError: that is not possible.
    """
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(write, str(error).encode())
            os._exit(1)
        if pid:
            os._exit(0)
        os.setsid()
        while os.getppid() == parent:
            time.sleep(0.0005)
        if os.getppid() != launcher:  # It is gone.
            os._exit(1)
        os.write(write, str(os.getpid()).encode())
        os.close(read)
        os.close(write)
        return 0
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(between, 0)
    if not text.isdecimal():
        raise OSError(text or "it ended at once")
    return int(text)


def _become(document: Mapping[str, Any], fds: Sequence[int]) -> Sequence[str]:
    """Makes this fork a process like one that was executed; returns its arguments."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, document["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(document["env"])
    return list(document["argv"])


def main() -> NoReturn:
    """Imports, then serves; in the forks it is `python -m trainer`."""
    connection, launcher = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # It was gone before.
        os._exit(0)
    os.set_inheritable(connection.fileno(), False)
    from trainer.start import import_tensorflow, set_environment

    set_environment()
    import_tensorflow()
    # What every task imports: see trainer/__main__.py.
    import trainer.__main__
    import trainer.preflight
    import trainer.run

    gc.freeze()  # Or the first look for garbage in a task would copy all of it.
    sys.argv = [trainer.__main__.__file__, *_serve(connection, launcher)]
    trainer.__main__.run_from_command_line()


if __name__ == "__main__":
    main()
