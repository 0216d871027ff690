"""A pipe that ties the life of a task to that of the process which started it.

    with Lifeline() as lifeline:                # in the starter
        lifeline.start(command)
    is_started = watch_lifeline()               # in the task, first of all

The starter holds the write end and never writes. However it ends, even by SIGKILL, the pipe closes,
and the task sees it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from trainer.exits import EXIT_RESTART

_VARIABLE = "TRAINER_LIFELINE_FD"
_PR_SET_PDEATHSIG = 1


class Lifeline:
    """The starter's end; leaving the context ends every task that was started on it.

    Attributes:
        fd: The task's end, which it must inherit.
        env: What its environment must have.
    """

    def __enter__(self) -> Self:
        """Opens the pipe."""
        self.fd, self._write = os.pipe()
        self.env: Mapping[str, str] = {_VARIABLE: str(self.fd)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        os.close(self._write)
        os.close(self.fd)

    def start(
        self, command: Sequence[str], fds: Sequence[int] = (), **options: Any
    ) -> "subprocess.Popen[bytes]":
        """`command` as a process of its own, tied to this one, with `fds` open too.

        `options` are Popen's.

        Raises:
            OSError: it cannot be started.
        """
        # Unbuffered: the last lines before a SIGKILL are the ones that matter.
        env = {**options.pop("env", os.environ), **self.env, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            pass_fds=[self.fd, *fds],
            start_new_session=True,
            **options,
        )


def watch_lifeline() -> bool:
    """Ties this task's life to its starter's; every task's main calls it first.

    When the starter is gone this process ends at once, and all that it started with it: what it had
    saved is whole, and the rest is repeated. Returns whether there is one; does nothing if there is
    none.
    """
    lifeline = os.environ.pop(_VARIABLE, None)  # Popped: it is not for the task's own children.
    if lifeline is None:
        return False
    fd = int(lifeline)
    os.set_inheritable(fd, False)
    if sys.platform == "linux":  # A process that is stopped sees no pipe: the kernel wakes it then.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    def wait_for_end() -> None:
        try:
            # It returns when the last write end, the starter's, closes.
            os.read(fd, 1)
            os.write(2, b"The launcher of this task is gone: ending.\n")
        finally:  # Where standard error went to the launcher, writing fails.
            if os.getpgrp() == os.getpid():  # As Lifeline.start makes it.
                os.killpg(0, signal.SIGKILL)
            os._exit(EXIT_RESTART)

    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()
    return True
