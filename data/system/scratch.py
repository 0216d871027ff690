"""Directories for the time of one operation, below TMPDIR.

    with scratch_dir() as directory:
        object_store.download("s3://bucket/model.keras", f"{directory}/model.keras")

A process that is killed leaves its directory; the next call of any process removes it.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def scratch_dir() -> Iterator[str]:
    """An empty directory, which is removed at the end."""
    prefix = f"trainer-scratch-{os.getuid()}-"
    for left in glob.glob(os.path.join(tempfile.gettempdir(), f"{prefix}*")):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    while True:
        directory = tempfile.mkdtemp(prefix=prefix)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_locked(directory))
                os.stat(directory)
            except OSError:  # Another process has just removed it, because it was not locked yet.
                continue
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            yield directory
            return


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Holds a lock that ends with the process. Raises OSError if another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
