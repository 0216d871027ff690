"""The shards of a split, with the index that makes them seekable.

    split = open_split("datasets/digits", "train")
    print(split.num_examples, split.fingerprint)

The index has the byte offset of every `chunk_examples`-th record. It is built by reading the record
headers alone, checked by their CRCs, and saved next to the shards as `.{split}.index.npz`.
"""

import dataclasses
import hashlib
import io
import itertools
import logging
import os
import zipfile
from collections.abc import Iterator
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from data.system import files
from data.system.files import DataError, join, num_bytes_of, open_file, parent, replace_file
from data.tfrecord.crc import FRAME_BYTES, Int64s
from data.tfrecord.framing import BadRecord, Damage, read_records, refuse_compressed, walk
from data.tfrecord.shard_names import (
    INDEX,
    name_of,
    prepare_again,
    saved_path,
    shard_lengths_announced,
    shard_paths,
)

if TYPE_CHECKING:
    from data.tfrecord.shard_copies import ShardCopies

_INDEX_VERSION = 2

_CHUNK_BYTES = 32 << 10
_MAX_CHUNK_EXAMPLES = 64
_MIN_CHUNKS = 1024

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """One TFRecord file, or a run of readable records of a damaged file (see damage.py).

    Attributes:
        num_bytes: The size of the file.
        offsets: int64 [ceil(num_records / chunk_examples)], the first byte of each chunk.
        frame_bytes: The length of each record with its framing, or 0 if lengths differ.
        first_record: The number in the file of the first record.
        end_offset: The end of the last record in a run of a damaged file; None for a whole file.
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
        """The byte at which the last record ends."""
        return self.num_bytes if self.end_offset is None else self.end_offset

    @property
    def record_bytes(self) -> int:
        """The bytes of all records with their framing."""
        return self.end - int(self.offsets[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The shards of one split ("train", "test") in their numbered order, seekable by their offsets.

    `damages` are the records that were left out, which `on_corrupt="skip"` allows. `copies` are
    local copies of shards at s3:// (see shard_copies.py).
    """

    name: str
    shards: tuple[Shard, ...]
    chunk_examples: int
    damages: tuple[Damage, ...] = ()
    copies: "ShardCopies | None" = None

    @property
    def num_skipped(self) -> int:
        """The number of records in `damages`."""
        return sum(damage.num_records or 0 for damage in self.damages)

    @property
    def num_examples(self) -> int:
        """The number of records in all shards."""
        return sum(shard.num_records for shard in self.shards)

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """The number of records in each shard."""
        return tuple(shard.num_records for shard in self.shards)

    @property
    def mean_record_bytes(self) -> int:
        """The mean bytes of a record with its framing; at least 1."""
        return max(1, sum(shard.record_bytes for shard in self.shards) // self.num_examples)

    @property
    def fingerprint(self) -> str:
        """12 hex digits to compare data: a hash of shard names, sizes, lengths and chunk size."""
        digest = hashlib.sha256(f"{self.name} {self.chunk_examples}\n".encode())
        for shard in self.shards:
            name = os.path.basename(shard.path)
            part = "" if shard.end_offset is None else f" {shard.first_record}"
            digest.update(f"{name} {shard.num_bytes} {shard.num_records}{part}\n".encode())
        return digest.hexdigest()[:12]


def chunk_examples_for(num_examples: int, num_bytes: int) -> int:
    """How many records a chunk has: up to 64, about 32 KiB, for 1,024 chunks if possible.

    A function of the split's totals alone, so that every host computes the same order.
    """
    mean_bytes = max(1, num_bytes // num_examples)
    return max(1, min(_MAX_CHUNK_EXAMPLES, _CHUNK_BYTES // mean_bytes, num_examples // _MIN_CHUNKS))


def open_split(data_dir: str, split: str) -> Split:
    """The shards of `split` in `data_dir`, indexed. Empty files are left out.

    A saved index is used if it fits. Otherwise the record headers are read, about a million a
    second, and the index is saved if the directory can be written to.
    """
    paths = shard_paths(data_dir, split)
    sizes = files.sizes_of(paths)
    indexed = _fitting_index(data_dir, split, paths, sizes)
    if indexed is None:
        indexed = _new_index(data_dir, split, paths, sizes)
    # Programs that write one file for each task write empty files too.
    return dataclasses.replace(indexed, shards=tuple(s for s in indexed.shards if s.num_records))


def _new_index(data_dir: str, split: str, paths: list[str], sizes: list[int]) -> Split:
    """The split with an index made from all record headers; the index is saved if possible."""
    if not any(sizes):
        raise DataError(
            f"Split {split!r} in {data_dir} has no records: {paths[0]} is empty (0 bytes)"
            f"{', as the others are' if len(paths) > 1 else ''}. Copy its files again, or write "
            f"them: {prepare_again(data_dir)}"
        )
    if 0 in sizes:
        _log.warning(
            "%d of the %d files of split %r are empty, for example %s: they are left out.",
            *(sizes.count(0), len(sizes), split, paths[sizes.index(0)]),
        )
    starts = [record_starts(path, size, data_dir) for path, size in zip(paths, sizes, strict=True)]
    indexed = index_of(split, paths, sizes, starts)
    _check_lengths(data_dir, indexed)
    try:
        write_index(data_dir, indexed)
    except OSError as error:
        path = index_path(data_dir, split)
        why = f"{error.strerror}, so every process reads all record headers again"
        _log.warning("%s was not saved (%s). Make the directory writable once.", path, why)
    return indexed


def index_path(data_dir: str, split: str) -> str:
    """The file of the index of a split."""
    return saved_path(data_dir, split, INDEX)


def batched_records(split: Split, size: int) -> Iterator[list[bytes]]:
    """All records in the order of the files, `size` at a time. Raises BadRecord if damaged."""
    records = itertools.chain.from_iterable(
        read_records(shard.path, int(shard.offsets[0]), shard.end, shard.first_record)
        for shard in split.shards
    )
    while batch := list(itertools.islice(records, size)):
        yield batch


def changed_files(split: Split) -> list[Damage]:
    """The shards whose size has changed since `split` was opened."""
    damages = []
    for shard in split.shards:
        is_there = files.exists(shard.path)
        size = num_bytes_of(shard.path) if is_there else 0
        if size != shard.num_bytes:
            record = int(np.searchsorted(shard.offsets, size)) * split.chunk_examples
            reason = f"the file has {size} bytes; its index was built for {shard.num_bytes}"
            if not is_there:
                reason = "the file is missing, so it cannot be read any more"
            offset = min(size, shard.num_bytes)
            damages.append(Damage(shard.path, shard.first_record + record, offset, reason))
    return damages


def check_record_bytes(split: Split, most: int) -> None:
    """Raises DataError if a record has more than `most` bytes.

    Records are held in memory, so a wrong or hostile length in a large file would take all of it.
    The index tells which chunks can have such a record: only their headers are read.
    """
    for shard in split.shards:
        ends = np.append(shard.offsets[1:], shard.end)
        for chunk in np.flatnonzero(ends - shard.offsets > most + FRAME_BYTES).tolist():
            begin, end = int(shard.offsets[chunk]), int(ends[chunk])
            first = shard.first_record + chunk * split.chunk_examples
            starts = record_starts(shard.path, end, parent(shard.path), begin, first)
            lengths = np.diff(starts, append=end) - FRAME_BYTES
            if (longest := int(lengths.max())) > most:
                at = int(lengths.argmax())
                raise DataError(
                    f"{shard.path}: record {first + at} at byte {starts[at]} has {longest:,} "
                    f"bytes, more than config.data.max_record_bytes={most}. Records are read into "
                    "memory, each several times. If this one is as it should be, train with "
                    f"--config.data.max_record_bytes={longest}. Otherwise write the file again."
                )


def record_starts(
    path: str, end: int, data_dir: str, begin: int = 0, first_record: int = 0
) -> Int64s:
    """The offsets of the records in bytes [begin, end) of a file; a DataError if one is damaged."""
    try:
        with open_file(path) as file:
            return walk(file, path, begin, end, first_record)
    except BadRecord as error:
        refuse_compressed(path, data_dir)
        raise DataError(
            f"{error.damage}. Copy the file again from where it came, or prepare it again: "
            f"{prepare_again(data_dir)}"
        ) from None


def index_of(split: str, paths: list[str], sizes: list[int], starts: list[Int64s]) -> Split:
    """The split whose files have these sizes and these record offsets."""
    chunk_examples = chunk_examples_for(sum(len(s) for s in starts), sum(sizes))
    shards = tuple(
        shard_of(path, size, at, chunk_examples)
        for path, size, at in zip(paths, sizes, starts, strict=True)
    )
    return Split(split, shards, chunk_examples)


def shard_of(
    path: str,
    num_bytes: int,
    starts: Int64s,
    chunk_examples: int,
    first_record: int = 0,
    end_offset: int | None = None,
) -> Shard:
    """The shard with records at the offsets `starts`."""
    offsets = np.ascontiguousarray(starts[::chunk_examples])
    lengths = np.diff(starts, append=num_bytes if end_offset is None else end_offset)
    frame_bytes = int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0
    return Shard(path, num_bytes, len(starts), offsets, frame_bytes, first_record, end_offset)


def write_index(data_dir: str, split: Split) -> None:
    """Replaces the saved index atomically: a reader sees the old one or the new one, complete."""
    content = io.BytesIO()
    np.savez(
        content,
        version=np.int64(_INDEX_VERSION),
        names=np.array([name_of(shard.path, data_dir) for shard in split.shards]),
        num_bytes=np.array([shard.num_bytes for shard in split.shards], np.int64),
        num_records=np.array([shard.num_records for shard in split.shards], np.int64),
        frame_bytes=np.array([shard.frame_bytes for shard in split.shards], np.int64),
        chunk_examples=np.int64(split.chunk_examples),
        offsets=np.concatenate([shard.offsets for shard in split.shards]),
    )
    replace_file(join(data_dir, f".{split.name}{INDEX}"), content.getvalue())


def load_index(data_dir: str, split: str) -> Split | None:
    """The saved index, which may not fit the shards on disk; None if missing or unreadable."""
    path = index_path(data_dir, split)
    if not files.exists(path):
        return None
    try:
        with open_file(path) as file, np.load(io.BytesIO(file.read())) as saved:
            if (version := int(saved["version"])) != _INDEX_VERSION:
                raise ValueError(f"it has version {version}")
            chunk_examples, num_records = int(saved["chunk_examples"]), saved["num_records"]
            chunks = -(-num_records // chunk_examples)
            if chunks.sum() != len(saved["offsets"]):
                raise ValueError("it does not fit its own counts")
            offsets = np.split(np.asarray(saved["offsets"], np.int64), np.cumsum(chunks)[:-1])
            names, num_bytes = saved["names"].tolist(), saved["num_bytes"].tolist()
            columns = num_bytes, num_records.tolist(), offsets, saved["frame_bytes"].tolist()
            shards = tuple(
                Shard(join(data_dir, name), *values)
                for name, *values in zip(names, *columns, strict=True)
            )
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s cannot be read (%s): building it again.", path, error)
        return None
    return Split(split, shards, chunk_examples)


def _fitting_index(data_dir: str, split: str, paths: list[str], sizes: list[int]) -> Split | None:
    """The split with its saved index; None if there is none for these files."""
    path = index_path(data_dir, split)
    if (saved := load_index(data_dir, split)) is None:
        return None
    if [shard.path for shard in saved.shards] != paths:
        _log.warning("%s was built for other shards: building it again.", path)
        return None
    for shard, size in zip(saved.shards, sizes, strict=True):
        if shard.num_bytes != size:
            # This error is more precise if the file ends inside a record.
            record_starts(shard.path, size, data_dir)
            raise DataError(
                f"{shard.path} has {size:,} bytes, and had {shard.num_bytes:,} when {path} was "
                "made: it was cut short, or replaced. Copy the file again; or, if it is as it "
                f"should be, remove its index: rm {quote(path)}"
            )
    _check_lengths(data_dir, saved)
    return saved


def _check_lengths(data_dir: str, split: Split) -> None:
    """Raises DataError if dataset_info.json announces other numbers of records."""
    announced = shard_lengths_announced(data_dir, split.name)
    if announced is None or len(announced) != len(split.shards):
        return
    for shard, length in zip(split.shards, announced, strict=True):
        if shard.num_records != length:
            raise DataError(
                f"{shard.path} has {shard.num_records:,} records, and dataset_info.json next to it "
                f"says {length:,}: it was cut short, or replaced. Copy the file again, or prepare "
                f"it again: {prepare_again(data_dir)}"
            )
