"""Files on a disk that may be full, read-only or failing.

contents = contents_of("variables.index")      # when it is written
damage_of("variables.index", contents)         # later: "" or what is wrong with it
"""

import errno
import os
from collections.abc import Mapping

import google_crc32c
import tensorflow as tf

from data.files import is_url

# What cannot be written, or read: Python's own errors, and those of TensorFlow's file systems.
STORAGE_ERRORS = (OSError, tf.errors.OpError)

_BLOCK_BYTES = 1 << 20
# A file system that cannot flush, a directory above all, answers with one of these.
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def contents_of(path: str) -> dict[str, int | str]:
    """The length and checksum of a file: {"bytes": 10, "crc32c": "8 hexadecimal digits"}.

    Raises:
        OSError, tf.errors.OpError: it cannot be read.
    """
    checksum = google_crc32c.Checksum()
    num_bytes = 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            num_bytes += len(block)
            checksum.update(block)
    return {"bytes": num_bytes, "crc32c": checksum.hexdigest().decode()}


def size_damage_of(path: str, contents: Mapping[str, int | str]) -> str:
    """What is wrong with a file that had `contents`, as its length tells; empty if nothing."""
    try:
        num_bytes = int(tf.io.gfile.stat(path).length)
    except STORAGE_ERRORS as error:
        return f"{os.path.basename(path)} is missing or cannot be looked at ({error})"
    if num_bytes != contents["bytes"]:
        return f"{os.path.basename(path)} has {num_bytes:,} bytes instead of {contents['bytes']:,}"
    return ""


def damage_of(path: str, contents: Mapping[str, int | str]) -> str:
    """What is wrong with a file that had `contents`; reads all of it. Empty if nothing."""
    if damage := size_damage_of(path, contents):
        return damage
    try:
        found = contents_of(path)
    except STORAGE_ERRORS as error:
        return f"{os.path.basename(path)} cannot be read ({error})"
    if found != contents:
        return f"{os.path.basename(path)} has another checksum than when it was written"
    return ""


def flush_to_disk(path: str) -> None:
    """Returns when a local file or directory would survive a loss of power, if it ever can.

    Other file systems (`gs://`) keep a file when it is closed.

    Raises:
        OSError: the disk has failed.
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
