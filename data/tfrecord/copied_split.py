"""A split at s3:// with copies of its shards on this machine.

    split = with_copies(split, directory="/disk/copies", max_bytes=100 << 30)
    complete_copies(split)                      # whole files, for readers in TensorFlow

Without `complete_copies` the copies are filled while records are read.
"""

import dataclasses
import os

from data.system import files
from data.system.files import DataError
from data.system.object_store import UnavailableError
from data.tfrecord.damage import verify
from data.tfrecord.shard_copies import ShardCopies
from data.tfrecord.split import Split


def with_copies(split: Split, directory: str, max_bytes: int) -> Split:
    """`split` with copies of its shards in `directory`, if they are at s3://.

    Without `directory`, copies are in the user's cache.

    Raises:
        DataError: the directory cannot be written.
    """
    urls = list(dict.fromkeys(shard.path for shard in split.shards))
    if not files.is_s3(urls[0]):
        return split
    if not directory:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        directory = os.path.join(cache, "tf-distribution-trainer", "shards")
    directory = os.path.abspath(os.path.expanduser(directory))
    try:
        return dataclasses.replace(split, copies=ShardCopies(urls, directory, max_bytes))
    except UnavailableError:
        raise
    except OSError as error:
        raise DataError(
            f"Copies of {files.parent(urls[0])} cannot be kept in {directory}: {error}. Give a "
            "directory on a local disk with room: --data_cache_dir=DIR"
        ) from error


def complete_copies(split: Split) -> None:
    """Fetches what is missing of all shards, and compares every record with its CRCs.

    Raises:
        DataError: a shard has no copy, because not all copies fit in the directory.
    """
    if split.copies is None:
        return

    def is_damaged(url: str, path: str) -> bool:
        shards = [dataclasses.replace(s, path=path) for s in split.shards if s.path == url]
        left_out = [dataclasses.replace(d, path=path) for d in split.damages if d.path == url]
        copied = dataclasses.replace(split, shards=tuple(shards), damages=tuple(left_out))
        return bool(verify(copied))

    split.copies.complete(split.name, is_damaged)
