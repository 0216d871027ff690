"""Directories for the time of one operation, below TMPDIR.

    with scratch_dir() as directory:
        object_store.download("s3://bucket/model.keras", f"{directory}/model.keras")
    with plain_path("runs/[a]/checkpoints/step-00001000") as path:
        tf.train.load_checkpoint(f"{path}/variables")

A process that is killed leaves its directory; the next call of any process removes it.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator

from data.system.errors import UsageError
from data.system.files import is_url

_PATTERN = frozenset("*?[\\{")


def check_temp_dir() -> None:
    """Raises UsageError if there is no directory for temporary files, which TensorFlow needs."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise UsageError(
            "Temporary files can be written neither to /tmp nor to /var/tmp, /usr/tmp or the "
            "current directory. Name a directory for them: export TMPDIR=DIR. In Kubernetes, mount "
            "a volume of the kind emptyDir at /tmp."
        ) from None


@contextlib.contextmanager
def scratch_dir() -> Iterator[str]:
    """An empty directory, which is removed at the end."""
    prefix = f"trainer-scratch-{os.getuid()}-"
    for left in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix}*")):
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
def plain_path(directory: str) -> Iterator[str]:
    """A path of `directory` in which TensorFlow sees no pattern: `directory` itself, or a link.

    TensorFlow reads a checkpoint only if its path, as a pattern, matches it (tensorflow#34290).
    """
    if is_url(directory) or _PATTERN.isdisjoint(os.path.abspath(directory)):
        yield directory
        return
    with scratch_dir() as scratch:
        link = os.path.join(scratch, "link")
        os.symlink(os.path.abspath(directory), link)
        yield link


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Holds a lock that ends with the process. Raises OSError if another process holds it.

    Also raises OSError for what another user may have put into TMPDIR under such a name: a link, or
    a FIFO, which would wait for a writer.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
