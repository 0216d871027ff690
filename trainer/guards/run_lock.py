"""The lock of a MODEL_DIR: only one run at a time trains there.

    with locked(model_dir, longest_wait_secs(grace_secs), say) as has_waited:
        ...                                         # the launcher, or the only process, of a run

Two runs in one directory would mix their reports. It is a lock of the operating system on
MODEL_DIR/.lock: it ends with the process that holds it, its children do not inherit it, and a
frozen process keeps it. It holds between hosts where the file system supports that, as NFS does;
NFS takes up to minutes to release the lock of a host that is gone. At s3:// and gs:// nothing is
locked. The file stays after the run. Whoever deletes it, or the directory, deletes the lock.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator

from data.system import locks
from data.system.errors import RunFailed
from data.system.files import is_url
from trainer.exit_codes import EXIT_RESTART

RUN_LOCK = ".lock"
_SETTLING_SECS = 30.0
_MOST_CHARACTERS = 1000  # Of the name of the holder.


class LockedError(RunFailed):
    """Another run uses this MODEL_DIR. Exit code 75: start again when it has ended."""

    exit_code = EXIT_RESTART


def longest_wait_secs(grace_secs: float) -> float:
    """How long a run that was told to end may take, with its `grace_secs` to save."""
    return grace_secs + _SETTLING_SECS


@contextlib.contextmanager
def locked(model_dir: str, wait_secs: float, say: Callable[[str], None]) -> Iterator[bool]:
    """Holds the lock within the context. The value: True if it had to wait.

    If no file of a run was written to a new or empty `model_dir`, the lock's file is removed at
    the end, and so are `model_dir` and its parent if it has made them.

    `say` gets a message before it waits, or if nothing can be locked.

    Raises LockedError if another process has the lock for `wait_secs`.
    """
    if is_url(model_dir):
        yield False
        return
    has_waited = False
    to_make = [d for d in (model_dir, os.path.dirname(model_dir)) if d and not os.path.exists(d)]
    is_empty = bool(to_make) or (os.path.isdir(model_dir) and not os.listdir(model_dir))
    path = os.path.join(model_dir, RUN_LOCK)
    deadline = time.monotonic() + wait_secs

    def on_wait() -> None:
        nonlocal has_waited
        holder = "another process"
        with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
            holder = file.read(_MOST_CHARACTERS) or holder
        if time.monotonic() > deadline:
            raise LockedError(
                f"{model_dir} is in use: {holder} trains there. Start again when it has "
                f"ended, or give another --model_dir. If its host is gone, delete {path}."
            )
        if not has_waited:
            say(f"{holder} trains in {model_dir}: waiting up to {wait_secs:.0f} s for its end")
        has_waited = True

    with contextlib.ExitStack() as stack:
        try:
            # Not flock: children that a process has forked would keep it.
            descriptor = stack.enter_context(locks.locked(path, on_wait, fcntl.lockf))
        except OSError as error:
            say(f"{model_dir} is not locked against a second run: {error.strerror or error}")
            yield has_waited
            return
        with contextlib.suppress(OSError):  # A full disk: then no message has the name.
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} of host {socket.gethostname()}".encode())
        try:
            yield has_waited
        finally:
            # It may be deleted by now, or another process may have just opened its lock there.
            with contextlib.suppress(OSError):
                if is_empty and os.listdir(model_dir) == [RUN_LOCK]:
                    os.remove(path)
                    for directory in to_make:
                        os.rmdir(directory)
