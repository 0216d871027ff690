"""The lock of a MODEL_DIR: only one chief at a time trains there.

    wait_until_free(model_dir, wait_secs, say)      # before a launcher starts tasks
    with locked(model_dir, wait_secs, say):         # in the chief, while it trains
        ...

Two chiefs in one directory would mix their reports. It is a lock of the operating system (flock):
it ends with its process, in whatever way that ends, and a frozen process keeps it. It holds between
hosts where the file system supports that, as NFS does. Without such locks, as at s3:// and gs://,
nothing is locked.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import IO

from data.system.errors import RunFailed
from data.system.files import is_url
from trainer.exit_codes import EXIT_RESTART

_NAME = ".lock"
_POLL_SECS = 0.2
_SETTLING_SECS = 30.0

Say = Callable[[str], None]


class LockedError(RunFailed):
    """Another process trains in this MODEL_DIR. Exit code 75: start again when it has ended."""

    exit_code = EXIT_RESTART


def wait_secs(grace_secs: float) -> float:
    """How long a run that was told to end may take, with its `grace_secs` to save."""
    return grace_secs + _SETTLING_SECS


@contextlib.contextmanager
def locked(model_dir: str, wait_secs: float, say: Say) -> Iterator[None]:
    """Holds the lock within the context. `model_dir` exists.

    Raises LockedError if another process has it after `wait_secs`. `say` gets a message if it
    waits.
    """
    with contextlib.ExitStack() as stack:
        if (file := _opened(model_dir, "a+")) is not None:
            stack.enter_context(file)
            _take(file, model_dir, wait_secs, say)
            with contextlib.suppress(OSError):  # A full disk: then no message has its name.
                file.truncate(0)
                file.write(f"process {os.getpid()} of host {socket.gethostname()}")
                file.flush()
        yield


def wait_until_free(model_dir: str, wait_secs: float, say: Say) -> bool:
    """Returns when no other process has the lock: True if it had to wait.

    Raises LockedError as `locked` does.
    """
    file = _opened(model_dir, "r")
    if file is None:
        return False
    with file:
        return _take(file, model_dir, wait_secs, say)


def _opened(model_dir: str, mode: str) -> IO[str] | None:
    if is_url(model_dir):
        return None
    # What cannot be written is explained by whoever writes there first.
    with contextlib.suppress(OSError):
        return open(os.path.join(model_dir, _NAME), mode)
    return None


def _take(file: IO[str], model_dir: str, wait_secs: float, say: Say) -> bool:
    deadline = time.monotonic() + wait_secs
    has_waited = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return has_waited
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
        except OSError:  # The file system has no locks.
            return has_waited
        if time.monotonic() > deadline:
            raise LockedError(
                f"{model_dir} is in use: {holder} trains there. Start again when it has ended, or "
                "give another --model_dir."
            )
        if not has_waited:
            say(f"{holder} trains in {model_dir}: waiting up to {wait_secs:.0f} s until it ends.")
            has_waited = True
        time.sleep(_POLL_SECS)
