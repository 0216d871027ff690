"""A task tells the launcher every second that it is there, so that one that is not can be told.

    heartbeat = Heartbeat()                     # in the launcher
    start(command, env={**env, **heartbeat.env}, pass_fds=[heartbeat.fd])
    heartbeat.silent_secs()
    send_heartbeats()                           # in the task, first of all

What stands still without a word, a process that was stopped or whose interpreter is held, can be
found only from outside.
"""

import contextlib
import os
import threading
import time
from collections.abc import Mapping

_VARIABLE = "TRAINER_HEARTBEAT_FD"
_BEAT_SECS = 1.0
_MANY_BYTES = 65_536


class Heartbeat:
    """The launcher's end of one process' pipe.

    Attributes:
        fd: The process' end, which it must inherit.
        env: What its environment must have.
    """

    def __init__(self) -> None:
        """Counts from now on."""
        self._read, self.fd = os.pipe()
        for fd in (self._read, self.fd):
            os.set_blocking(fd, False)
        self.env: Mapping[str, str] = {_VARIABLE: str(self.fd)}
        self._last = time.monotonic()

    def started(self) -> None:
        """The process has its end: this one's copy is closed."""
        os.close(self.fd)

    def silent_secs(self) -> float:
        """The time since the last sign of life."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._read, _MANY_BYTES):
                self._last = time.monotonic()
        return time.monotonic() - self._last

    def close(self) -> None:
        """Listens no more."""
        os.close(self._read)


def send_heartbeats() -> None:
    """Begins to; does nothing where nobody listens."""
    variable = os.environ.pop(_VARIABLE, None)  # Popped: it is not for the task's own children.
    if variable is None:
        return
    fd = int(variable)
    os.set_inheritable(fd, False)

    def send() -> None:
        # A launcher that is gone, or too busy to read, is no concern of this thread.
        while True:
            with contextlib.suppress(OSError):
                os.write(fd, b".")
            time.sleep(_BEAT_SECS)

    threading.Thread(target=send, name="heartbeat", daemon=True).start()
