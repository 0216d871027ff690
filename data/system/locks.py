"""A lock between processes, on a file. It ends with the process that holds it.

with locked("datasets/.mnist.lock", on_wait=lambda: print("waiting")) as descriptor:
    ...
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator

_POLL_SECS = 0.2


@contextlib.contextmanager
def locked(
    path: str,
    on_wait: Callable[[], None] | None = None,
    lock: Callable[[int, int], None] = fcntl.flock,
) -> Iterator[int]:
    """Holds the lock of the file at `path`; yields its descriptor.

    The file is made if it is missing, also its directory. While another process has the lock,
    `on_wait` is called every 0.2 s, and may raise an error. Forked children share the lock with
    fcntl.flock; with fcntl.lockf they do not.
    """
    operation = fcntl.LOCK_EX | (fcntl.LOCK_NB if on_wait else 0)
    while True:
        with contextlib.ExitStack() as closing:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            closing.callback(os.close, descriptor)
            is_held = False
            try:
                lock(descriptor, operation)
                is_held = os.path.samestat(os.fstat(descriptor), os.stat(path))
            except FileNotFoundError:
                pass  # A former holder has removed the file, or its directory.
            except (BlockingIOError, PermissionError) as error:
                if on_wait is None or (lock is fcntl.flock and error.errno == errno.EACCES):
                    raise  # Only lockf may say EACCES for a lock of another process.
                on_wait()
            if is_held:
                yield descriptor
                return
        time.sleep(_POLL_SECS)
