"""Checks of files on a disk that may be full, read-only or failing.

contents = contents_of("variables.index")      # when the file is written
damage_of("variables.index", contents)         # later: "", or a description of the damage
"""

import errno
import os
from collections.abc import Mapping

import google_crc32c
import tensorflow as tf

from data.system.errors import RunFailed
from data.system.files import is_url, num_bytes_of
from data.system.object_store import UnavailableError
from trainer.exit_codes import EXIT_RESTART

# Errors of reading and writing: Python's own, and those of TensorFlow's file systems.
STORAGE_ERRORS = (OSError, tf.errors.OpError)

_BLOCK_BYTES = 1 << 20
# The errors of a file system that cannot flush a file, or more often a directory.
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


class DiskError(RunFailed):
    """The disk of --model_dir is full or fails. Exit code 75: start again when it is repaired."""

    exit_code = EXIT_RESTART


def contents_of(path: str) -> dict[str, int | str]:
    """Returns the length and checksum of a file: {"bytes": 10, "crc32c": "8 hexadecimal digits"}.

    Raises one of STORAGE_ERRORS if it cannot be read.
    """
    checksum = google_crc32c.Checksum()
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
        return {"bytes": file.tell(), "crc32c": checksum.hexdigest().decode()}


def damage_of(path: str, contents: Mapping[str, int | str], *, reads: bool = True) -> str:
    """Describes the damage of a file that had `contents`; "" if there is none.

    Without `reads` only the length is compared.
    """
    name = os.path.basename(path)
    try:
        num_bytes = num_bytes_of(path)
    except UnavailableError:
        raise
    except STORAGE_ERRORS as error:
        return f"{name} is missing or cannot be accessed ({error})"
    if num_bytes != contents["bytes"]:
        return f"{name} has {num_bytes:,} bytes instead of {contents['bytes']:,}"
    try:
        is_same = not reads or contents_of(path) == contents
    except STORAGE_ERRORS as error:
        return f"{name} cannot be read ({error})"
    return "" if is_same else f"{name} has another checksum than when it was written"


def flush_to_disk(path: str) -> None:
    """Returns when a local file or directory is on the disk, if the file system can flush.

    Other file systems (`gs://`) are durable when a file is closed.
    """
    if is_url(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:
            raise
    finally:
        os.close(descriptor)
