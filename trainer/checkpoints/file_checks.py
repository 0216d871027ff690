"""Checks of files on a disk that may be full, read-only or failing.

contents = contents_of("variables.index")      # when the file is written; marks.check_file: later
"""

import errno
import os

import google_crc32c
import tensorflow as tf

from data.system.errors import RunFailed
from data.system.files import gfile_errors, is_url, open_file
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

    Raises OSError if it cannot be read.
    """
    checksum = google_crc32c.Checksum()
    with gfile_errors(), open_file(path) as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
        return {"bytes": file.tell(), "crc32c": checksum.hexdigest().decode()}


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
