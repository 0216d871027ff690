"""Files of this machine and of any other file system that TensorFlow knows, by the same calls.

A path with "://" in it is a URL, and TensorFlow's (tf.io.gfile): gs://, s3://, hdfs://, ram://.
Other paths are the operating system's: they need no TensorFlow, which takes seconds to import.

What goes wrong at a URL is an OSError, as it is here; what a user can put right is a DataError.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import BinaryIO

# What to do about damaged data: `on_corrupt`.
FAIL, SKIP = "fail", "skip"


class DataError(ValueError):
    """The data, or where it was said to be, is wrong: something for the user to put right."""


def is_url(path: str) -> bool:
    """Whether that is TensorFlow's to open."""
    return "://" in path


def join(directory: str, name: str) -> str:
    """The path of a file in a directory."""
    return f"{directory.rstrip('/')}/{name}" if is_url(directory) else os.path.join(directory, name)


def absolute(path: str) -> str:
    """The path from the root; a URL is one already."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(path)


def parent(path: str) -> str:
    """The directory that a file or directory is in; "" for this one."""
    return path.rpartition("/")[0] if is_url(path) else os.path.dirname(path)


def exists(path: str) -> bool:
    """Whether there is such a file or directory."""
    if not is_url(path):
        return os.path.exists(path)
    import tensorflow as tf

    with _as_os_errors():
        return bool(tf.io.gfile.exists(path))


def is_dir(path: str) -> bool:
    """Whether there is such a directory."""
    if not is_url(path):
        return os.path.isdir(path)
    import tensorflow as tf

    with _as_os_errors():
        return bool(tf.io.gfile.isdir(path))


def names_in(directory: str) -> list[str]:
    """Names of what is in a directory.

    Raises:
        OSError: there is none, it is a file, or this user may not look into it.
    """
    if not is_url(directory):
        return os.listdir(directory)
    import tensorflow as tf

    with _as_os_errors():
        return [str(name).rstrip("/") for name in tf.io.gfile.listdir(directory)]


def num_bytes_of(path: str) -> int:
    """The size of a file.

    Raises:
        OSError: there is none.
    """
    if not is_url(path):
        return os.path.getsize(path)
    import tensorflow as tf

    with _as_os_errors():
        return int(tf.io.gfile.stat(path).length)


def stamp(path: str) -> tuple[int, int]:
    """Size and time of change, in ns; (-1, -1) if there is no such file."""
    if not exists(path):
        return -1, -1
    if not is_url(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    import tensorflow as tf

    with _as_os_errors():
        remote = tf.io.gfile.stat(path)
    return int(remote.length), int(remote.mtime_nsec)


def open_file(path: str) -> BinaryIO:
    """The bytes of a file, to read.

    Raises:
        DataError: this user may not read it.
        OSError: there is none.
    """
    if is_url(path):
        import tensorflow as tf

        # It is opened by the first read, which then raises TensorFlow's error.
        if not exists(path):
            raise FileNotFoundError(f"There is no {path}")
        remote: BinaryIO = tf.io.gfile.GFile(path, "rb")
        return remote
    try:
        return open(path, "rb", buffering=0)
    except PermissionError:
        raise DataError(
            f"{path} cannot be read by this user (permission denied): chmod a+r {path}"
        ) from None


def create_file(path: str) -> BinaryIO:
    """A new file, or one that is overwritten, to write bytes to.

    Raises:
        OSError: it cannot be made.
    """
    if not is_url(path):
        return open(path, "wb", buffering=1 << 20)
    import tensorflow as tf

    remote: BinaryIO = tf.io.gfile.GFile(path, "wb")
    return remote


def read_text(path: str) -> str:
    """The whole of a text file in UTF-8.

    Raises:
        DataError: this user may not read it.
        OSError: there is none.
    """
    with open_file(path) as file:
        return file.read().decode()


def replace_file(path: str, content: bytes) -> None:
    """Write a file at once: a reader sees the former one or the new one, whole.

    Raises:
        OSError: the directory cannot be written to.
    """
    partial = partial_name(path)
    try:
        if is_url(path):
            import tensorflow as tf

            with _as_os_errors(), tf.io.gfile.GFile(partial, "wb") as remote:
                remote.write(content)
        else:
            with open(partial, "xb") as local:
                local.write(content)
        rename(partial, path)
    finally:
        if exists(partial):
            remove_file(partial)


def partial_name(path: str) -> str:
    """A name for what will be renamed to `path` once it is whole; no other process has it."""
    return f"{path}.partial-{os.getpid()}-{os.urandom(4).hex()}"


def rename(source: str, target: str) -> None:
    """Move a file over another one, or where there was none.

    Raises:
        OSError: that is not possible.
    """
    if not is_url(target):
        os.replace(source, target)
        return
    import tensorflow as tf

    with _as_os_errors():
        tf.io.gfile.rename(source, target, overwrite=True)


def remove_file(path: str) -> None:
    """Remove a file.

    Raises:
        DataError: this user may not.
        OSError: there is none.
    """
    try:
        if not is_url(path):
            os.remove(path)
            return
        import tensorflow as tf

        with _as_os_errors():
            tf.io.gfile.remove(path)
    except PermissionError as error:
        raise DataError(f"{path} cannot be removed by this user: {error.strerror}") from None


def remove_tree(directory: str) -> None:
    """Remove a directory and all that is in it, if there is one."""
    if not is_url(directory):
        shutil.rmtree(directory, ignore_errors=True)
    elif exists(directory):
        import tensorflow as tf

        with _as_os_errors():
            tf.io.gfile.rmtree(directory)


def make_dirs(directory: str) -> None:
    """Make a directory, and those above it, where they are missing.

    Raises:
        OSError: that is not possible.
    """
    if not is_url(directory):
        os.makedirs(directory, exist_ok=True)
        return
    import tensorflow as tf

    with _as_os_errors():
        tf.io.gfile.makedirs(directory)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """TensorFlow's errors about files, as the operating system's would be."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(0, error.message) from None
    except tf.errors.PermissionDeniedError as error:
        raise PermissionError(0, error.message) from None
    except tf.errors.OpError as error:
        raise OSError(0, error.message) from None
