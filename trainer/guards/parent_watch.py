"""A socket by which a process and the parent that started it notice each other's end or silence.

    with ParentWatch() as watch:                 # in the parent
        watch.start(command)
        watch.silent_secs()
    has_parent = watch_parent()                  # in the task, before anything else

When the parent ends, even by SIGKILL, the kernel closes its end of the socket, and the task reads
the end of the stream. The task sends a heartbeat every second. A process that was stopped, or in
which native code holds Python's interpreter lock, cannot report this: only another process can.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from data.system.linux import signal_when_parent_ends
from trainer.exit_codes import EXIT_RESTART

_VARIABLE = "TRAINER_PARENT_WATCH_FD"
_BEAT_SECS = 1.0
_READ_BYTES = 65_536


class ParentWatch(contextlib.AbstractContextManager["ParentWatch"]):
    """The parent's end. Closing it ends the process that got `fd` and `env` and watches."""

    def __init__(self) -> None:
        """Opens the socket. Silence counts from now on."""
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.fd = theirs.detach()
        self.env = {_VARIABLE: str(self.fd)}
        self._last_beat = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the socket."""
        self._ours.close()
        os.close(self.fd)

    def start(
        self,
        command: Sequence[str],
        fds: Sequence[int] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        output: int | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Starts `command` in a new session; if it calls `watch_parent`, it ends with this process.

        It inherits `fds`, and the environment of this process with `env` added. It prints to the
        descriptor `output`, by default where this process prints.

        Raises OSError if the process could not be started.
        """
        return subprocess.Popen(
            command,
            # Unbuffered: a task's last lines before a SIGKILL matter most.
            env={**os.environ, **env, **self.env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[self.fd, *fds],
            start_new_session=True,
        )

    def silent_secs(self) -> float:
        """The time since the last heartbeat."""
        with contextlib.suppress(BlockingIOError):
            if self._ours.recv(_READ_BYTES):
                self._last_beat = time.monotonic()
        return time.monotonic() - self._last_beat


def watch_parent() -> bool:
    """Sends heartbeats, and ends this process and its process group when the parent ends.

    A task can end at once: what it has saved is complete, and later steps are repeated. Each task
    calls this first. Returns False, and does nothing, if the parent has opened no ParentWatch.
    """
    variable = os.environ.pop(_VARIABLE, None)  # Removed: it is not for the task's children.
    if variable is None:
        return False
    parent = socket.socket(fileno=int(variable))
    parent.set_inheritable(False)
    parent.settimeout(_BEAT_SECS)
    if sys.platform == "linux":
        # A stopped process reads no socket, so the kernel continues it when the parent ends.
        signal_when_parent_ends(signal.SIGCONT)

    def watch() -> None:
        try:
            with contextlib.suppress(ConnectionError):
                _beat_until_end(parent)
            os.write(2, b"The launcher of this task has ended, so this task ends.\n")
        finally:  # The write fails if the launcher read this task's standard error.
            if os.getpgrp() == os.getpid():  # True for processes of ParentWatch.start.
                os.killpg(0, signal.SIGKILL)
            os._exit(EXIT_RESTART)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
    return True


def _beat_until_end(parent: socket.socket) -> None:
    """Returns, or raises ConnectionError, when the other end of `parent` is closed."""
    while True:
        # `send` times out if the parent does not read; `recv` each second, as it never sends.
        with contextlib.suppress(TimeoutError):
            parent.send(b".")
            if not parent.recv(1):
                return
