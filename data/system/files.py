"""File operations with the same calls for local paths and for URLs.

    if not files.exists(files.join("gs://bucket/digits", "features.json")):
        files.replace_file("gs://bucket/digits/features.json", b"{}")

A path with "://" in it is a URL. object_store.py opens s3://, and tf.io.gfile others: gs://, hdfs://,
ram://. Other paths belong to the operating system and need no TensorFlow, which takes seconds to
import.

An operation that is not possible is an OSError, at a URL too, but reading an open URL may raise
TensorFlow's errors, as etils.epath does. An error that a user can correct is a DataError.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from glob import iglob
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import BinaryIO, TypeVar, cast

from data.system import object_store
from data.system.errors import UsageError

# What to do about damaged data: `on_corrupt`.
FAIL, SKIP = "fail", "skip"

T = TypeVar("T")


class DataError(UsageError):
    """The data or the path to it is wrong, and the user can correct it."""


def is_url(path: str) -> bool:
    """Returns True if the operating system does not open this path."""
    return "://" in path


def is_s3(path: str) -> bool:
    """Returns True if neither the operating system nor TensorFlow opens this path."""
    return path.startswith(object_store.SCHEME)


def join(directory: str, name: str) -> str:
    """The path of a file in a directory."""
    return f"{directory.rstrip('/')}/{name}" if is_url(directory) else os.path.join(directory, name)


def expanded(path: str) -> str:
    """`path` with the home directory in place of `~` in `~/...`.

    Not of `~` alone, or of `~name`: a value of a flag that begins so need not be a path.
    """
    return os.path.expanduser(path) if path.startswith("~/") else path


def absolute(path: str) -> str:
    """The absolute path, also of `~/...`; a URL without its last "/"."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(expanded(path))


def shown(path: str) -> str:
    """`path` for people: relative to the working directory if it is below it."""
    if is_url(path):
        return path
    try:
        relative = os.path.relpath(path)
    except OSError:  # The working directory was deleted.
        return path
    return path if relative.startswith(os.pardir) else relative


def parent(path: str) -> str:
    """The directory of a file or directory; "" for the current directory."""
    return path.rpartition("/")[0] if is_url(path) else os.path.dirname(path)


def exists(path: str) -> bool:
    """Returns True if there is such a file or directory."""
    if is_s3(path):
        return object_store.exists(path)
    return _gfile(lambda gfile: gfile.exists(path)) if is_url(path) else os.path.exists(path)


def is_dir(path: str) -> bool:
    """Returns True if there is such a directory."""
    if is_s3(path):
        return object_store.is_dir(path)
    if not is_url(path):
        return os.path.isdir(path)
    try:  # Not gfile.isdir, to which a store that does not answer has no directories.
        return _gfile(lambda gfile: bool(gfile.stat(path).is_directory))
    except FileNotFoundError:
        return False


def names_in(directory: str) -> list[str]:
    """Names of the files and directories in a directory."""
    if is_s3(directory):
        return object_store.names_in(directory)
    if not is_url(directory):
        return os.listdir(directory)
    try:
        return [name.rstrip("/") for name in _gfile(lambda gfile: gfile.listdir(directory))]
    except FileNotFoundError:
        is_dir(directory)  # Raises UnavailableError, where gfile finds nothing.
        raise


def files_in(directory: str) -> list[str]:
    """Names of the files in a directory, without directories."""
    if is_s3(directory):
        return list(object_store.stamps_in(directory))
    return [name for name in names_in(directory) if not is_dir(join(directory, name))]


def glob(directory: str, pattern: str) -> list[str]:
    """The paths of files in or below a directory that fit a shell's pattern, in order."""
    if is_url(directory):
        paths = _gfile(lambda gfile: gfile.glob(join(directory, pattern)))
    else:
        paths = [join(directory, name) for name in iglob(pattern, root_dir=directory)]
    return sorted(path for path in paths if not is_dir(path))


def files_below(directory: str, is_left_out: Callable[[str], bool], *others: str) -> list[str]:
    """The paths of all files below a local directory, in order; links are followed.

    Left out are paths for which `is_left_out` returns True, the directories `others`, and those
    that hold `directory`. A directory to which links lead too is read once, so no loop is endless.
    """
    seen = {*map(str, Path(os.path.realpath(directory)).parents), *map(os.path.realpath, others)}
    found: list[str] = []
    tops = [directory]
    for top in tops:  # Links to directories are appended: they come after all directories.
        for parent, directories, names in os.walk(top):
            if (real := os.path.realpath(parent)) in seen:
                directories.clear()
                continue
            seen.add(real)
            directories.sort()  # Which of two links to a directory counts must not vary.
            below, here = (
                [path for name in some if not is_left_out(path := os.path.join(parent, name))]
                for some in (directories, names)
            )
            directories[:] = map(os.path.basename, below)
            tops += filter(os.path.islink, below)
            found += here
    return sorted(found)


def num_bytes_of(path: str) -> int:
    """The size of a file."""
    return _stamp(path)[0]


def sizes_of(paths: Sequence[str]) -> list[int]:
    """The sizes of files in one directory; at s3:// by one request for all."""
    if not is_s3(paths[0]):
        return [num_bytes_of(path) for path in paths]
    stamps = object_store.stamps_in(parent(paths[0]))
    return [stamps[os.path.basename(path)][0] for path in paths]


def stamp(path: str) -> tuple[int, int]:
    """Size and time of the last change, in ns; (-1, -1) if the file is missing."""
    return _stamp(path) if exists(path) else (-1, -1)


def _stamp(path: str) -> tuple[int, int]:
    if is_s3(path):
        return object_store.stamp(path)
    if is_url(path):
        status = _gfile(lambda gfile: gfile.stat(path))
        return int(status.length), int(status.mtime_nsec)
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def open_file(path: str) -> BinaryIO:
    """Opens a file to read bytes; a DataError if this user may not read it."""
    if is_s3(path):
        return object_store.open_object(path)
    if is_url(path):
        # gfile opens the file at the first read, and then raises TensorFlow's error.
        if not exists(path):
            raise FileNotFoundError(f"There is no {path}")
        return cast(BinaryIO, _gfile(lambda gfile: gfile.GFile(path, "rb")))
    try:
        return open(path, "rb", buffering=0)
    except PermissionError:
        raise DataError(
            f"{path} cannot be read by this user (permission denied): chmod a+r {quote(path)}"
        ) from None


def create_file(path: str) -> BinaryIO:
    """Opens a file to write bytes; it is created or overwritten. Not for s3://."""
    if is_url(path):
        return cast(BinaryIO, _gfile(lambda gfile: gfile.GFile(path, "wb")))
    return open(path, "wb", buffering=1 << 20)


def read_text(path: str) -> str:
    """The content of a text file in UTF-8; a DataError if this user may not read it."""
    with open_file(path) as file:
        content = _gfile(lambda _: file.read()) if is_url(path) and not is_s3(path) else file.read()
    return content.decode()


def replace_file(path: str, content: bytes) -> None:
    """Writes a file in one operation: a reader sees all of the old file or all of the new one."""
    if is_s3(path):
        return object_store.put(path, content)
    partial = partial_name(path)

    def write() -> None:
        with create_file(partial) as file:
            file.write(content)

    try:
        _gfile(lambda _: write()) if is_url(path) else write()
        rename(partial, path)
    finally:
        if exists(partial):
            remove_file(partial)


def check_writable(path: str, flag: str) -> None:
    """Raises DataError if the local file `path`, which `flag` gives, cannot be written.

    Nothing is changed: a command calls it before its work, and writes the file at its end.
    """
    if is_url(path):  # Object stores have no directories that may be missing.
        return
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = partial_name(path)
        create_new(partial, b"")
        remove_file(partial)
    except OSError as error:
        ending = os.path.splitext(path)[1]
        raise DataError(
            f"{path} cannot be written: {error.strerror}. Give a file in a directory that exists "
            f"and can be written: --{flag}=FILE{ending}"
        ) from None


def create_new(path: str, content: bytes) -> bool:
    """Writes a file if there is none; returns False, and changes nothing, if there is one.

    Of several processes that call this at the same time one gets True. The exception are URLs other
    than s3://: TensorFlow's file systems cannot do this in one operation.
    """
    if is_s3(path):
        return object_store.put_new(path, content)
    if is_url(path):
        if exists(path):
            return False
        replace_file(path, content)
        return True
    try:
        with open(path, "xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def partial_name(path: str) -> str:
    """A unique name for an incomplete file, which is renamed to `path` once it is complete."""
    return f"{path}.partial-{os.getpid()}-{os.urandom(4).hex()}"


def rename(source: str, target: str) -> None:
    """Moves a file; overwrites `target`. Not for s3://."""
    if is_url(target):
        _gfile(lambda gfile: gfile.rename(source, target, overwrite=True))
    else:
        os.replace(source, target)


def remove_file(path: str) -> None:
    """Removes a file; a DataError if this user may not."""
    try:
        if is_s3(path):
            object_store.remove(path)
        else:
            _gfile(lambda gfile: gfile.remove(path)) if is_url(path) else os.remove(path)
    except PermissionError as error:
        raise DataError(f"{path} cannot be removed by this user: {error.strerror}") from None


def remove_tree(directory: str) -> None:
    """Removes a directory with its content, if there is one."""
    if is_s3(directory):
        object_store.remove_tree(directory)
    elif not is_url(directory):
        shutil.rmtree(directory, ignore_errors=True)
    elif exists(directory):
        _gfile(lambda gfile: gfile.rmtree(directory))


def make_dirs(directory: str) -> None:
    """Creates a directory and its missing parents. s3:// needs none."""
    if is_s3(directory):
        return
    if is_url(directory):
        _gfile(lambda gfile: gfile.makedirs(directory))
    else:
        os.makedirs(directory, exist_ok=True)


def _gfile(call: Callable[[ModuleType], T]) -> T:
    """Calls with tf.io.gfile, imported at the first call; TensorFlow's errors become OSErrors."""
    import tensorflow as tf

    with gfile_errors():
        return call(tf.io.gfile)


@contextlib.contextmanager
def gfile_errors() -> Iterator[None]:
    """Within it, errors of TensorFlow's file systems become OSErrors."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(0, error.message) from None
    except tf.errors.PermissionDeniedError as error:
        raise PermissionError(0, error.message) from None
    except tf.errors.UnimplementedError as error:
        raise DataError(f"{error.message}. Give a path of a file, s3://..., or gs://...") from None
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(errno.ENOSPC, error.message) from None
    except tf.errors.OpError as error:
        # The file system of gs:// gives this for all errors of the network.
        is_of_network = error.message.startswith("Error executing an HTTP request")
        passing = tf.errors.UnavailableError, tf.errors.DeadlineExceededError
        if is_of_network or isinstance(error, passing):
            message = " ".join(error.message.split())
            raise object_store.UnavailableError(errno.EIO, message) from None
        raise OSError(0, error.message) from None
