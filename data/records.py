"""The shards of a split, with the index that makes them seekable: open, verify.

    split = open_split("datasets/digits", "train")
    print(split.num_examples, split.fingerprint)
    for damage in verify(split):
        print(damage)

The index has the byte offset of every `chunk_examples`-th record. It is built by reading the record
headers alone, checked by their CRCs, and kept beside the shards as `{split}.index.npz`.
"""

import dataclasses
import hashlib
import io
import logging
import os
import zipfile

import numpy as np

from data import files
from data.crc import Int64s
from data.files import DataError, join, num_bytes_of, open_file, replace_file
from data.frames import BadRecord, Damage, content_damage, refuse_gzip, walk
from data.names import prepare_again, shard_lengths_announced, shard_paths

_INDEX_VERSION = 2

_CHUNK_BYTES = 32 << 10
_MAX_CHUNK_EXAMPLES = 64
_MIN_CHUNKS = 1024

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """One TFRecord file, or a run of good records of a damaged one (see data/damage.py).

    `num_bytes`: of the file. `offsets`: int64 [ceil(num_records / chunk_examples)], where each
    chunk's first record begins. `frame_bytes`: of each record with its framing, if all are of one
    length; else 0. `first_record`: the number of the first in the file. `end_offset`: where the
    last one ends, if that is not the file's end.
    """

    path: str
    num_bytes: int
    num_records: int
    offsets: Int64s
    frame_bytes: int
    first_record: int = 0
    end_offset: int | None = None

    @property
    def end(self) -> int:
        """Where the last record ends."""
        return self.num_bytes if self.end_offset is None else self.end_offset

    @property
    def record_bytes(self) -> int:
        """Bytes of the records, their framing included."""
        return self.end - int(self.offsets[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The shards of one split ("train", "test") in their numbered order, ready to be sought in.

    `damages`: what was left out; a split is opened without it only where that was asked for.
    """

    name: str
    shards: tuple[Shard, ...]
    chunk_examples: int
    damages: tuple[Damage, ...] = ()

    @property
    def num_skipped(self) -> int:
        """How many records are left out, because they cannot be read."""
        return sum(damage.num_records or 0 for damage in self.damages)

    @property
    def num_examples(self) -> int:
        """How many records all shards hold together."""
        return sum(shard.num_records for shard in self.shards)

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Records in each shard."""
        return tuple(shard.num_records for shard in self.shards)

    @property
    def mean_record_bytes(self) -> int:
        """Bytes of an average record on disk, its framing included; at least 1."""
        return max(1, sum(shard.record_bytes for shard in self.shards) // self.num_examples)

    @property
    def max_chunk_bytes(self) -> int:
        """Bytes of the longest chunk on disk."""
        return max(int(np.diff(shard.offsets, append=shard.end).max()) for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """12 hex digits over everything the order depends on: file names, sizes, counts, chunks.

        Directories do not count, so two hosts, or two runs, can compare what they read.
        """
        digest = hashlib.sha256(f"{self.name} {self.chunk_examples}\n".encode())
        for shard in self.shards:
            name = os.path.basename(shard.path)
            part = "" if shard.end_offset is None else f" {shard.first_record}"
            digest.update(f"{name} {shard.num_bytes} {shard.num_records}{part}\n".encode())
        return digest.hexdigest()[:12]


def chunk_examples_for(num_examples: int, num_bytes: int) -> int:
    """Records in a chunk: about 32 KiB, at most 64, and 1,024 chunks or more where possible.

    A function of the split's totals alone, so every host comes to the same order.
    """
    mean_bytes = max(1, num_bytes // num_examples)
    return max(1, min(_MAX_CHUNK_EXAMPLES, _CHUNK_BYTES // mean_bytes, num_examples // _MIN_CHUNKS))


def open_split(data_dir: str, split: str) -> Split:
    """The shards of `split` in `data_dir`, indexed.

    A kept index that fits is used; otherwise the record headers are read, about a million a second,
    and the index is kept if the directory can be written to.

    Raises:
        DataError: the directory or the split is missing or cannot be read; a shard of the numbered
            set is missing, empty, compressed, cut short, not a TFRecord file, of another size than
            when it was indexed, or of another length than dataset_info.json says.
    """
    data_dir = os.fspath(data_dir)
    paths = shard_paths(data_dir, split)
    sizes = [num_bytes_of(path) for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if size == 0:
            raise DataError(
                f"{path} is empty (0 bytes), so it was not written to its end. "
                f"Remove {data_dir} and prepare it again: {prepare_again(data_dir)}"
            )
    path_of_index = index_path(data_dir, split)
    kept = _read_index(path_of_index, split, paths, sizes)
    if kept is not None:
        _check_lengths(data_dir, kept)
        return kept
    starts = [_record_starts(path, size) for path, size in zip(paths, sizes, strict=True)]
    indexed = index_of(split, paths, sizes, starts)
    _check_lengths(data_dir, indexed)
    try:
        write_index(path_of_index, indexed)
    except OSError as error:
        _log.warning(
            "The index of %s was not kept (%s): every process that opens it reads all record "
            "headers again. Make the directory writable once.",
            data_dir,
            error.strerror,
        )
    return indexed


def index_path(data_dir: str, split: str) -> str:
    """Where the index of a split is kept."""
    return join(data_dir, f"{split}.index.npz")


def verify(split: Split) -> list[Damage]:
    """Read every byte of `split`, and name each record whose CRCs do not fit.

    After a damaged length nothing in that chunk can be found, so the rest of the chunk is part of
    the same Damage; reading goes on at the next chunk of the index.
    """
    damages = changed_files(split)
    changed = {damage.path for damage in damages}
    for shard in split.shards:
        if shard.path not in changed:
            damages += _shard_damage(shard, split.chunk_examples)
    return damages


def changed_files(split: Split) -> list[Damage]:
    """The shards that have another size than when `split` was opened."""
    damages = []
    for shard in split.shards:
        size = num_bytes_of(shard.path) if files.exists(shard.path) else 0
        if size != shard.num_bytes:
            record = int(np.searchsorted(shard.offsets, size)) * split.chunk_examples
            reason = f"the file has {size} bytes; its index was built for {shard.num_bytes}"
            offset = min(size, shard.num_bytes)
            damages.append(Damage(shard.path, shard.first_record + record, offset, reason))
    return damages


def _shard_damage(shard: Shard, chunk_examples: int) -> list[Damage]:
    damages = []
    starts: list[Int64s] = []
    numbers: list[Int64s] = []
    bounds = np.append(shard.offsets, shard.end)
    with open_file(shard.path) as file:
        for chunk in range(len(shard.offsets)):
            expected = min(chunk_examples, shard.num_records - chunk * chunk_examples)
            number = shard.first_record + chunk * chunk_examples
            try:
                found = walk(file, shard.path, int(bounds[chunk]), int(bounds[chunk + 1]), number)
            except BadRecord as error:
                damages.append(error.damage)
                found = error.before
            else:
                if len(found) != expected:
                    damages.append(
                        Damage(
                            shard.path,
                            number,
                            int(bounds[chunk]),
                            f"{len(found)} records up to the next chunk, where the index "
                            f"has {expected}",
                        )
                    )
            starts.append(found)
            numbers.append(number + np.arange(len(found), dtype=np.int64))
    if damages and _is_whole(shard):
        reason = "the file is whole, but its index does not fit it: remove the index"
        return [dataclasses.replace(damages[0], reason=reason)]
    damages += content_damage(shard.path, np.concatenate(starts), np.concatenate(numbers))
    return sorted(damages, key=lambda damage: damage.offset)


def _is_whole(shard: Shard) -> bool:
    """Whether all of the file can be walked over, without its index."""
    try:
        with open_file(shard.path) as file:
            walk(file, shard.path, 0, shard.num_bytes, 0)
    except BadRecord:
        return False
    return True


def _record_starts(path: str, size: int) -> Int64s:
    """Where each record of the file begins, or a DataError that names the first bad one."""
    try:
        with open_file(path) as file:
            return walk(file, path, 0, size, 0)
    except BadRecord as error:
        refuse_gzip(path)
        raise DataError(
            f"{error.damage}. Copy the file again from where it came, or prepare it again: "
            f"{prepare_again(os.path.dirname(path))}"
        ) from None


def index_of(split: str, paths: list[str], sizes: list[int], starts: list[Int64s]) -> Split:
    """The split whose files have these sizes, and records that begin there."""
    chunk_examples = chunk_examples_for(sum(len(s) for s in starts), sum(sizes))
    shards = tuple(
        Shard(
            path,
            size,
            len(at),
            np.ascontiguousarray(at[::chunk_examples]),
            frame_bytes_of(at, size),
        )
        for path, size, at in zip(paths, sizes, starts, strict=True)
    )
    return Split(split, shards, chunk_examples)


def frame_bytes_of(starts: Int64s, end: int) -> int:
    """How long each record is that begins there, framing included; 0 if that varies."""
    lengths = np.diff(starts, append=end)
    return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0


def write_index(path: str, split: Split) -> None:
    """Replace the kept index at once: a reader sees the old one or the new one, whole.

    Raises:
        OSError: the directory cannot be written to.
    """
    content = io.BytesIO()
    np.savez(
        content,
        version=np.int64(_INDEX_VERSION),
        names=np.array([os.path.basename(shard.path) for shard in split.shards]),
        num_bytes=np.array([shard.num_bytes for shard in split.shards], np.int64),
        num_records=np.array([shard.num_records for shard in split.shards], np.int64),
        frame_bytes=np.array([shard.frame_bytes for shard in split.shards], np.int64),
        chunk_examples=np.int64(split.chunk_examples),
        offsets=np.concatenate([shard.offsets for shard in split.shards]),
    )
    replace_file(path, content.getvalue())


@dataclasses.dataclass(frozen=True, eq=False)
class KeptIndex:
    """What an index file says; whether it fits the shards is another question.

    By shard: `names`, `num_bytes`, `num_records`, `frame_bytes`, and the `offsets` of its chunks.
    """

    names: tuple[str, ...]
    num_bytes: tuple[int, ...]
    num_records: tuple[int, ...]
    frame_bytes: tuple[int, ...]
    offsets: tuple[Int64s, ...]
    chunk_examples: int


def load_index(path: str) -> KeptIndex | None:
    """The index in that file; None where there is none, or none that can be understood."""
    if not files.exists(path):
        return None
    try:
        with open_file(path) as file, np.load(io.BytesIO(file.read())) as kept:
            version = int(kept["version"])
            if version != _INDEX_VERSION:
                _log.warning("%s has version %d: building it again.", path, version)
                return None
            names = tuple(str(name) for name in kept["names"])
            num_bytes = tuple(int(size) for size in kept["num_bytes"])
            num_records = tuple(int(count) for count in kept["num_records"])
            frame_bytes = tuple(int(size) for size in kept["frame_bytes"])
            chunk_examples = int(kept["chunk_examples"])
            offsets = np.asarray(kept["offsets"], np.int64)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s cannot be read (%s): building it again.", path, error)
        return None
    chunks = [-(-count // chunk_examples) for count in num_records]
    if sum(chunks) != len(offsets) or not (
        len(chunks) == len(names) == len(num_bytes) == len(frame_bytes)
    ):
        _log.warning("%s does not fit its own counts: building it again.", path)
        return None
    parts = tuple(np.split(offsets, np.cumsum(chunks)[:-1]))
    return KeptIndex(names, num_bytes, num_records, frame_bytes, parts, chunk_examples)


def _read_index(path: str, split: str, paths: list[str], sizes: list[int]) -> Split | None:
    """The kept index, or None where there is none of these shards.

    Raises:
        DataError: a shard is not as long as it was when it was indexed.
    """
    kept = load_index(path)
    if kept is None:
        return None
    if kept.names != tuple(os.path.basename(file) for file in paths):
        _log.warning("%s was built for other shards: building it again.", path)
        return None
    for file, kept_size, size in zip(paths, kept.num_bytes, sizes, strict=True):
        if kept_size != size:
            _record_starts(file, size)  # Says where a file ends in the middle of a record.
            raise DataError(
                f"{file} has {size:,} bytes, and had {kept_size:,} when {path} was made: it was "
                "cut short, or replaced. Copy the file again; or, if it is as it should be, "
                f"remove its index: rm {path}"
            )
    shards = tuple(
        Shard(file, size, count, part, frame_bytes)
        for file, size, count, part, frame_bytes in zip(
            paths, sizes, kept.num_records, kept.offsets, kept.frame_bytes, strict=True
        )
    )
    return Split(split, shards, kept.chunk_examples)


def _check_lengths(data_dir: str, split: Split) -> None:
    """Returns if every shard has as many records as dataset_info.json says, if it says so.

    Raises:
        DataError: a shard was cut off between two records, or is another one.
    """
    announced = shard_lengths_announced(data_dir, split.name)
    if announced is None or len(announced) != len(split.shards):
        return
    for shard, length in zip(split.shards, announced, strict=True):
        if shard.num_records != length:
            raise DataError(
                f"{shard.path} has {shard.num_records:,} records, and dataset_info.json beside it "
                f"says {length:,}: it was cut short, or replaced. Copy the file again, or prepare "
                f"it again: {prepare_again(data_dir)}"
            )
