"""TFRecord shards: write, index, verify.

    split = records.open_split("datasets/digits", "train")
    print(split.num_examples, split.fingerprint)
    for damage in records.verify(split):
        print(damage)

A TFRecord file is a run of records, each `uint64 length, uint32 crc(length), data, uint32
crc(data)`, little endian, where crc is the masked CRC-32C (tensorflow/core/lib/io/record_writer.h).
Records have no numbers on disk, so the third record can be found only by walking over two. The
index is what makes a file seekable: the byte offset of every `chunk_examples`-th record. It is
built by reading the record headers alone, checked by their CRCs, and kept beside the shards as
`{split}.index.npz`.

TensorFlow is imported only where records' contents are read or written, or a path is a URL.
"""

import array
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tensorflow as tf

Int64s = npt.NDArray[np.int64]

HEADER_BYTES = 12
FOOTER_BYTES = 4
INDEX_VERSION = 1

_CHUNK_BYTES = 32 << 10
_MAX_CHUNK_EXAMPLES = 64
_MIN_CHUNKS = 1024
_SCAN_BYTES = 1 << 20
_SPARSE_SCAN_BYTES = 4 << 10
_SPARSE_RECORD_BYTES = 32 << 10
_VERIFY_BATCH = 1024
_REPORT_RECORDS = 256

_log = logging.getLogger(__name__)


class DataError(ValueError):
    """The data, or where it was said to be, is wrong: something for the user to put right."""


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """One TFRecord file, or a run of good records of a damaged one (see data/damage.py).

    `num_bytes`: of the file. `offsets`: int64 [ceil(num_records / chunk_examples)], where each
    chunk's first record begins. `first_record`: the number of the first in the file. `end_offset`:
    where the last one ends, if that is not the file's end.
    """

    path: str
    num_bytes: int
    num_records: int
    offsets: Int64s
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
    damages: "tuple[Damage, ...]" = ()

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


@dataclasses.dataclass(frozen=True)
class Damage:
    """A record that cannot be read, and those lost with it.

    `record` counts from 0 in its file. `num_records`: how many are lost; None if nobody knows.
    """

    path: str
    record: int
    offset: int
    reason: str
    num_records: int | None = 1

    def __str__(self) -> str:
        """For people: file, record, byte offset, reason."""
        return f"{self.path}: record {self.record} at byte {self.offset}: {self.reason}"


def chunk_examples_for(num_examples: int, num_bytes: int) -> int:
    """Records in a chunk: about 32 KiB, at most 64, and 1,024 chunks or more where possible.

    A function of the split's totals alone, so every host comes to the same order.
    """
    mean_bytes = max(1, num_bytes // num_examples)
    return max(1, min(_MAX_CHUNK_EXAMPLES, _CHUNK_BYTES // mean_bytes, num_examples // _MIN_CHUNKS))


def open_split(data_dir: str, split: str) -> Split:
    """The shards of `split` in `data_dir`, indexed.

    Known names: `NAME-SPLIT.tfrecord-00000-of-00003` (tensorflow-datasets), `SPLIT.tfrecord*`,
    `SPLIT-00000-of-00003*` and `SPLIT-*.tfrecord`. A kept index that fits is used; otherwise the
    record headers are read, about a million a second, and the index is kept if the directory can be
    written to.

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
                f"Remove {data_dir} and prepare it again: {_prepare_again(data_dir)}"
            )
    path_of_index = index_path(data_dir, split)
    kept = _read_index(path_of_index, split, paths, sizes)
    if kept is not None:
        _check_lengths(data_dir, kept)
        return kept
    starts = [_record_starts(path, size) for path, size in zip(paths, sizes, strict=True)]
    indexed = _index(split, paths, sizes, starts)
    _check_lengths(data_dir, indexed)
    try:
        _write_index(path_of_index, indexed)
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


def splits_in(data_dir: str) -> list[str]:
    """Names of the splits that have shards in `data_dir`.

    Raises:
        DataError: the directory is missing or cannot be read.
    """
    return sorted(_split_names(_list(data_dir)))


def shard_paths(data_dir: str, split: str, *, missing_too: bool = False) -> list[str]:
    """Paths of the shards of `split`, in order and complete; they are not opened.

    `missing_too`: those of a numbered set that are missing are listed like the others.

    Raises:
        DataError: the directory or the split is missing, or one of its shards.
    """
    return [join(data_dir, name) for name in _shard_names(data_dir, split, missing_too)]


def write_shards(
    examples: Iterable[bytes],
    out_dir: str,
    name: str,
    split: str,
    num_shards: int,
    num_examples: int,
) -> Split:
    """Write `examples` in order to `out_dir/NAME-SPLIT.tfrecord-*`, with their index.

    The shards are contiguous and differ by one record at most. Nothing carries its final name
    before the last byte of the last shard is written. Equal examples give equal files.

    Raises:
        DataError: `examples` is empty, or holds another number of examples than `num_examples`.
    """
    return write_split(
        lambda first, last: iter(examples), out_dir, name, split, num_shards, num_examples
    )


def write_split(
    examples: Callable[[int, int], Iterator[bytes]],
    out_dir: str,
    name: str,
    split: str,
    num_shards: int,
    num_examples: int,
    num_processes: int = 1,
    report: Callable[[int], None] = lambda count: None,
) -> Split:
    """`write_shards`, by several processes: each writes some consecutive shards.

    `examples(first, last)` yields examples first..last-1, and is called once by each process. The
    files are the same, whatever the number of processes. They are forked, so nothing need be
    pickled; but never from a process that has imported TensorFlow, whose threads a fork loses:
    there this process writes alone. `report`: called here now and then, with how many are written.

    Raises:
        DataError: there are none, or `examples` does not yield as many as were asked for.
    """
    if num_examples < 1:
        raise DataError(
            f"Split {split!r} of {name} has no examples. A split needs at least one: "
            "check the source files."
        )
    num_shards = max(1, min(num_shards, num_examples))
    os.makedirs(out_dir, exist_ok=True)
    names = [f"{name}-{split}.tfrecord-{i:05d}-of-{num_shards:05d}" for i in range(num_shards)]
    paths = [join(out_dir, file) for file in names]
    partial = [f"{path}.partial-{os.getpid()}" for path in paths]
    bounds = [shard * num_examples // num_shards for shard in range(num_shards + 1)]

    def write(shards: range, count_one: Callable[[], None]) -> list[Int64s]:
        iterator = iter(examples(bounds[shards.start], bounds[shards.stop]))
        ends = []
        for shard in shards:
            count = bounds[shard + 1] - bounds[shard]
            ends.append(_write_shard(partial[shard], itertools.islice(iterator, count), count_one))
            if len(ends[-1]) < count:
                raise DataError(
                    f"Split {split!r} of {name} ended after {bounds[shard] + len(ends[-1])} "
                    f"examples; {num_examples} were announced. The source is incomplete."
                )
        if next(iterator, None) is not None:
            raise DataError(
                f"Split {split!r} of {name} has more than the {num_examples} examples announced."
            )
        return ends

    try:
        if num_processes == 1 or "tensorflow" in sys.modules:
            counter = itertools.count(1)
            ends = write(range(num_shards), lambda: report(next(counter)))
        else:
            # Also a single part, or this process would import TensorFlow and write the rest alone.
            num_parts = min(num_processes, num_shards)
            cuts = [i * num_shards // num_parts for i in range(num_parts + 1)]
            ends = _write_in_processes(write, list(map(range, cuts, cuts[1:])), report)
        for source, target in zip(partial, paths, strict=True):
            os.replace(source, target)
    finally:
        for path in partial:
            if os.path.exists(path):
                os.remove(path)
    sizes = [int(shard[-1]) for shard in ends]
    starts = [np.concatenate([np.zeros(1, np.int64), shard[:-1]]) for shard in ends]
    indexed = _index(split, paths, sizes, starts)
    _write_index(join(out_dir, f"{split}.index.npz"), indexed)
    return indexed


def _write_in_processes(
    write: Callable[[range, Callable[[], None]], list[Int64s]],
    parts: list[range],
    report: Callable[[int], None],
) -> list[Int64s]:
    """`write` of each part in a process of its own; what all of them return, in order.

    None of them outlives this function, nor this process for long.

    Raises:
        Exception: what the first to fail raised.
    """
    context = multiprocessing.get_context("fork")
    done = context.Value("q", 0)
    parent = os.getpid()

    def run(shards: range, answer: multiprocessing.connection.Connection) -> None:
        count = 0

        def count_one() -> None:
            nonlocal count
            count += 1
            if count % _REPORT_RECORDS == 0:
                if os.getppid() != parent:
                    os._exit(1)
                with done.get_lock():
                    done.value += _REPORT_RECORDS

        # Ctrl-C goes to all processes of a terminal; the first one ends the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            answer.send(write(shards, count_one))
        except Exception as error:
            answer.send(error)

    answers: list[list[Int64s] | None] = [None] * len(parts)
    processes = []
    waiting = {}
    try:
        for number, shards in enumerate(parts):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(shards, theirs))
            process.start()
            processes.append(process)
            theirs.close()
            waiting[ours] = number
        while waiting:
            for answer in multiprocessing.connection.wait(list(waiting), timeout=1.0):
                assert isinstance(answer, multiprocessing.connection.Connection)
                try:
                    received = answer.recv()
                except EOFError:
                    process = processes[waiting[answer]]
                    process.join()
                    raise OSError(
                        f"A process that wrote shards was ended (exit code {process.exitcode})"
                    ) from None
                if isinstance(received, Exception):
                    raise received
                answers[waiting.pop(answer)] = received
            report(done.value)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return [ends for part in answers if part is not None for ends in part]


def _write_shard(path: str, examples: Iterable[bytes], count_one: Callable[[], None]) -> Int64s:
    """Write one file; returns where each record ends."""
    import tensorflow as tf

    lengths = array.array("q")
    with tf.io.TFRecordWriter(path) as writer:
        for example in examples:
            writer.write(example)
            lengths.append(HEADER_BYTES + len(example) + FOOTER_BYTES)
            count_one()
    return np.cumsum(np.frombuffer(lengths, np.int64))


def verify(split: Split) -> list[Damage]:
    """Read every byte of `split`, and name each record whose CRCs do not fit.

    After a damaged length nothing in that chunk can be found, so the rest of the chunk is part of
    the same Damage; reading goes on at the next chunk of the index.
    """
    damages: list[Damage] = []
    for shard in split.shards:
        damages += _shard_damage(shard, split.chunk_examples)
    return damages


def _shard_damage(shard: Shard, chunk_examples: int) -> list[Damage]:
    size = num_bytes_of(shard.path)
    if size != shard.num_bytes:
        return [
            Damage(
                shard.path,
                record=shard.first_record
                + int(np.searchsorted(shard.offsets, size)) * chunk_examples,
                offset=min(size, shard.num_bytes),
                reason=f"the file has {size} bytes; its index was built for {shard.num_bytes}",
            )
        ]
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


def content_damage(path: str, starts: Int64s, numbers: Int64s) -> list[Damage]:
    """Records whose data does not fit its CRC; TensorFlow's own reader is the judge."""
    import tensorflow as tf

    damages = []
    # Runs that can be read without a break: a damaged length leaves a gap in the record numbers.
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    for run_starts, run_numbers in zip(
        np.split(starts, breaks), np.split(numbers, breaks), strict=True
    ):
        done = 0
        while done < len(run_starts):
            dataset = records_from(path, int(run_starts[done])).take(len(run_starts) - done)
            try:
                for batch in dataset.batch(_VERIFY_BATCH).map(tf.size):
                    done += int(batch)
                break
            except tf.errors.DataLossError:
                pass  # Somewhere in the next batch: found below, record by record.
            dataset = records_from(path, int(run_starts[done])).take(len(run_starts) - done)
            try:
                for _ in dataset:
                    done += 1
            except tf.errors.DataLossError:
                damages.append(
                    Damage(
                        path,
                        int(run_numbers[done]),
                        int(run_starts[done]),
                        "the data does not fit its CRC",
                    )
                )
                done += 1
    return damages


def records_from(path: str, offset: int) -> "tf.data.Dataset":
    """The records of a file from the one that begins at that byte; each CRC is checked."""
    import tensorflow as tf

    def records(offset: tf.Tensor) -> tf.data.Dataset:
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path],
            compression_type="",
            buffer_size=256 << 10,
            byte_offsets=offset[tf.newaxis],
        )
        return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))

    # Inside a function, because TensorFlow 2.21 loses byte_offsets when it rewrites a dataset's
    # graph: "3 inputs specified of 4 inputs in Op while building NodeDef 'TFRecordDatasetV2".
    return tf.data.Dataset.from_tensors(np.int64(offset)).flat_map(records)


class BadRecord(Exception):
    """The walk met a record that is not one. `before`: where the good records before it begin."""

    def __init__(self, damage: Damage, before: Int64s) -> None:
        super().__init__(str(damage))
        self.damage = damage
        self.before = before


def _record_starts(path: str, size: int) -> Int64s:
    """Where each record of the file begins, or a DataError that names the first bad one."""
    try:
        with open_file(path) as file:
            return walk(file, path, 0, size, 0)
    except BadRecord as error:
        refuse_gzip(path)
        raise DataError(
            f"{error.damage}. Copy the file again from where it came, or prepare it again: "
            f"{_prepare_again(os.path.dirname(path))}"
        ) from None


def refuse_gzip(path: str) -> None:
    """Returns if the file is not compressed.

    Raises:
        DataError: it is.
    """
    with open_file(path) as file:
        if file.read(3) != b"\x1f\x8b\x08":
            return
    source = os.path.dirname(path) or "."
    raise DataError(
        f"{path} is compressed (GZIP), and compressed files cannot be sought in. Rewrite the "
        f"directory once: python -m data.prepare rewrite --source={source} --out={source}-plain"
    ) from None


def walk(file: BinaryIO, path: str, begin: int, end: int, number: int) -> Int64s:
    """Where each record in bytes [begin, end) starts, by headers alone.

    `number`: the record number at `begin`, for messages.

    Raises:
        BadRecord: a length does not fit its CRC, or the last record passes `end`.
    """
    length_at = struct.Struct("<Q").unpack_from
    walked: list[Int64s] = []
    count = 0
    position = begin
    block_bytes = _SCAN_BYTES
    while position < end:
        file.seek(position)
        block = file.read(min(block_bytes, end - position))
        block_begin, last = position, len(block) - HEADER_BYTES
        at = 0
        starts = array.array("q")
        append = starts.append
        while at <= last:
            append(at)
            at += length_at(block, at)[0] + (HEADER_BYTES + FOOTER_BYTES)
        here = np.frombuffer(starts, np.int64)
        bad = first_bad_header(block, here)
        if bad is None and (len(here) == 0 or block_begin + at > end):
            # The header, or the record it announces, is cut off by the end of the file.
            bad = max(0, len(here) - 1)
            reason = f"the file ends at byte {end}, inside this record: it was cut short"
        else:
            reason = "not a TFRecord: its length does not fit its CRC"
        if bad is not None:
            before = np.concatenate([*walked, here[:bad] + block_begin])
            offset = block_begin + (int(here[bad]) if len(here) else 0)
            raise BadRecord(Damage(path, number + count + bad, offset, reason), before)
        walked.append(here + block_begin)
        count += len(here)
        position = block_begin + at
        sparse = at > _SPARSE_RECORD_BYTES * len(here)
        block_bytes = _SPARSE_SCAN_BYTES if sparse else _SCAN_BYTES
    return np.concatenate(walked) if walked else np.zeros(0, np.int64)


def first_bad_header(block: bytes | memoryview, starts: Int64s) -> int | None:
    """The first of `starts` whose 8 bytes of length do not fit the 4 bytes of CRC after them."""
    data = np.frombuffer(block, np.uint8)
    headers = data[starts[:, None] + np.arange(HEADER_BYTES)]
    crc = np.full(len(headers), 0xFFFFFFFF, np.uint32)
    for i in range(8):
        crc = _CRC32C[(crc ^ headers[:, i]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    crc = ~crc
    masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
    stored = np.ascontiguousarray(headers[:, 8:]).view("<u4").reshape(-1)
    bad = np.flatnonzero(masked != stored)
    return int(bad[0]) if len(bad) else None


def _crc32c_table() -> npt.NDArray[np.uint32]:
    """Castagnoli's polynomial, reflected: RFC 3720, appendix B.4."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (np.uint32(0x82F63B78) * (table & np.uint32(1)))
    return table


_CRC32C = _crc32c_table()


def _index(split: str, paths: list[str], sizes: list[int], starts: list[Int64s]) -> Split:
    chunk_examples = chunk_examples_for(sum(len(s) for s in starts), sum(sizes))
    shards = tuple(
        Shard(path, size, len(at), np.ascontiguousarray(at[::chunk_examples]))
        for path, size, at in zip(paths, sizes, starts, strict=True)
    )
    return Split(split, shards, chunk_examples)


def _write_index(path: str, split: Split) -> None:
    """Replace the kept index at once: a reader sees the old one or the new one, whole.

    Raises:
        OSError: the directory cannot be written to.
    """
    content = io.BytesIO()
    np.savez(
        content,
        version=np.int64(INDEX_VERSION),
        names=np.array([os.path.basename(shard.path) for shard in split.shards]),
        num_bytes=np.array([shard.num_bytes for shard in split.shards], np.int64),
        num_records=np.array([shard.num_records for shard in split.shards], np.int64),
        chunk_examples=np.int64(split.chunk_examples),
        offsets=np.concatenate([shard.offsets for shard in split.shards]),
    )
    replace_file(path, content.getvalue())


def replace_file(path: str, content: bytes) -> None:
    """Write a file at once: a reader sees the former one or the new one, whole.

    Raises:
        OSError: the directory cannot be written to.
    """
    partial = f"{path}.partial-{os.getpid()}-{os.urandom(4).hex()}"
    if _is_url(path):
        import tensorflow as tf

        try:
            with tf.io.gfile.GFile(partial, "wb") as file:
                file.write(content)
            tf.io.gfile.rename(partial, path, overwrite=True)
        except tf.errors.OpError as error:
            raise OSError(0, error.message) from None
        return
    try:
        with open(partial, "xb") as local:
            local.write(content)
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


@dataclasses.dataclass(frozen=True, eq=False)
class KeptIndex:
    """What an index file says; whether it fits the shards is another question.

    By shard: `names`, `num_bytes`, `num_records`, and the `offsets` of its chunks.
    """

    names: tuple[str, ...]
    num_bytes: tuple[int, ...]
    num_records: tuple[int, ...]
    offsets: tuple[Int64s, ...]
    chunk_examples: int


def load_index(path: str) -> KeptIndex | None:
    """The index in that file; None where there is none, or none that can be understood."""
    if not exists(path):
        return None
    try:
        with open_file(path) as file, np.load(io.BytesIO(file.read())) as kept:
            version = int(kept["version"])
            names = tuple(str(name) for name in kept["names"])
            num_bytes = tuple(int(size) for size in kept["num_bytes"])
            num_records = tuple(int(count) for count in kept["num_records"])
            chunk_examples = int(kept["chunk_examples"])
            offsets = np.asarray(kept["offsets"], np.int64)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s cannot be read (%s): building it again.", path, error)
        return None
    if version != INDEX_VERSION:
        _log.warning("%s has version %d, not %d: building it again.", path, version, INDEX_VERSION)
        return None
    chunks = [-(-count // chunk_examples) for count in num_records]
    if sum(chunks) != len(offsets) or not len(chunks) == len(names) == len(num_bytes):
        _log.warning("%s does not fit its own counts: building it again.", path)
        return None
    parts = tuple(np.split(offsets, np.cumsum(chunks)[:-1]))
    return KeptIndex(names, num_bytes, num_records, parts, chunk_examples)


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
        Shard(file, size, count, part)
        for file, size, count, part in zip(
            paths, sizes, kept.num_records, kept.offsets, strict=True
        )
    )
    return Split(split, shards, kept.chunk_examples)


def shard_lengths_announced(data_dir: str, split: str) -> list[int] | None:
    """How many records each shard was written with; None where no dataset_info.json tells."""
    path = join(data_dir, "dataset_info.json")
    if not exists(path):
        return None
    try:
        with open_file(path) as file:
            info = json.loads(file.read())
        for described in info["splits"]:
            if described["name"] == split:
                return [int(length) for length in described["shardLengths"]]
    except (KeyError, TypeError, ValueError):
        pass  # Not needed for reading: another program's, or none at all.
    return None


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
                f"it again: {_prepare_again(data_dir)}"
            )


_NUMBERED = re.compile(r"(\d+)-of-(\d+)")
# In this order: what follows the first would match the names before it, with another split.
_SPLIT_OF = (
    re.compile(r"(?:.*-)?(?P<split>[^-.]+)\.tfrecords?-\d+-of-\d+(?:\.gz)?"),
    re.compile(r"(?P<split>[^.]+?)[-.]\d+-of-\d+(?:\.tfrecords?)?(?:\.gz)?"),
    re.compile(r"(?P<split>[^.]+?)[-_.]?\d+\.tfrecords?(?:\.gz)?"),
    re.compile(r"(?:.*-)?(?P<split>[^-.]+)\.tfrecords?(?:\.gz)?"),
)


def _shard_names(data_dir: str, split: str, missing_too: bool) -> list[str]:
    """The file names of `split`, in order, proved complete."""
    names = sorted(_list(data_dir))
    quoted = re.escape(split)
    patterns = [
        re.compile(rf"(?:.*-)?{quoted}\.tfrecords?(?:-\d+-of-\d+)?(?:\.gz)?"),
        re.compile(rf"{quoted}[-.]\d+-of-\d+(?:\.tfrecords?)?(?:\.gz)?"),
        re.compile(rf"{quoted}[-_.]?[^.]*\.tfrecords?(?:\.gz)?"),
    ]
    for pattern in patterns:
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            break
    else:
        raise DataError(_nothing_found(data_dir, split, names))
    numbered = [(name, match) for name in found if (match := _NUMBERED.search(name))]
    if not numbered:
        return found
    sets = sorted({_NUMBERED.sub(rf"*-of-{match[2]}", name) for name, match in numbered})
    if len(sets) > 1 or len(numbered) < len(found):
        others = [name for name in found if name not in {name for name, _ in numbered}]
        raise DataError(
            f"{data_dir} holds more than one set of {split!r} shards: "
            f"{', '.join(sets + others)}. Keep one set in the directory."
        )
    total = int(numbered[0][1][2])
    present = {int(match[1]): name for name, match in numbered}
    sample, match = numbered[0]
    missing = {
        i: sample[: match.start(1)] + f"{i:0{len(match[1])}d}" + sample[match.end(1) :]
        for i in range(total)
        if i not in present
    }
    if missing and not missing_too:
        raise DataError(
            f"{data_dir} has {len(present)} of the {total} shards of split {split!r}; "
            f"{len(missing)} missing, the first is {min(missing.values())}. "
            f"Copy what is missing, or prepare it again: {_prepare_again(data_dir)}"
        )
    if len(present) != len(numbered) or max(present) >= total:
        raise DataError(
            f"{data_dir} has {len(numbered)} files for the {total} numbered shards of split "
            f"{split!r}: keep exactly numbers 0 to {total - 1}."
        )
    return [(present | missing)[i] for i in range(total)]


def _nothing_found(data_dir: str, split: str, names: list[str]) -> str:
    needed = (
        f"needed is {split}.tfrecord or *-{split}.tfrecord-00000-of-00001; "
        "to write it: python -m data.prepare digits (or mnist, or tfds:NAME)"
    )
    if not names:
        return f"{data_dir} is empty; {needed}"
    others = _split_names(names)
    if others:
        return (
            f"{data_dir} has no split {split!r}, only {', '.join(sorted(others))}. "
            "Name one of those in the config, or add the shards."
        )
    below = _dirs_with_shards(data_dir, names)
    if below:
        return f"{data_dir} holds no TFRecord shards, but {below[0]} does: --data_dir={below[0]}"
    return f"{data_dir} holds no TFRecord shards ({', '.join(names[:3])}, ...); {needed}"


def _split_names(names: list[str]) -> set[str]:
    return {split for name in names if (split := _split_of(name))}


def _split_of(name: str) -> str | None:
    """The split that a file is of, by its name; None if that is no shard's."""
    matches = (pattern.fullmatch(name) for pattern in _SPLIT_OF)
    return next((match["split"] for match in matches if match), None)


def _dirs_with_shards(data_dir: str, names: list[str]) -> list[str]:
    """Directories one or two levels below that hold shards: NAME/VERSION of tensorflow-datasets."""
    if _is_url(data_dir):
        return []
    found = []
    for name in names:
        for root, dirs, files in os.walk(os.path.join(data_dir, name)):
            if any(_split_of(file) for file in files):
                found.append(root)
            if root != os.path.join(data_dir, name):
                dirs.clear()
    return sorted(found)


def _prepare_again(data_dir: str) -> str:
    return (
        f"python -m data.prepare NAME --out={data_dir or '.'} (NAME: digits, mnist, tfds:NAME, ...)"
    )


def _is_url(path: str) -> bool:
    return "://" in path


def join(directory: str, name: str) -> str:
    """The path of a file in a directory, which may be a URL."""
    return (
        f"{directory.rstrip('/')}/{name}" if _is_url(directory) else os.path.join(directory, name)
    )


def _list(data_dir: str) -> list[str]:
    if _is_url(data_dir):
        import tensorflow as tf

        try:
            return [str(name).rstrip("/") for name in tf.io.gfile.listdir(data_dir)]
        except tf.errors.OpError as error:
            raise DataError(f"{data_dir} cannot be listed: {error.message}") from None
    try:
        return os.listdir(data_dir)
    except FileNotFoundError:
        raise DataError(
            f"There is no directory {data_dir}. "
            f"Write the data there first: {_prepare_again(data_dir)}, "
            "or give the directory that holds your TFRecord shards: --data_dir=DIR"
        ) from None
    except NotADirectoryError:
        raise DataError(
            f"{data_dir} is a file; --data_dir needs the directory that holds the shards: "
            f"--data_dir={os.path.dirname(data_dir) or '.'}"
        ) from None
    except PermissionError:
        raise DataError(
            f"{data_dir} cannot be read by this user (permission denied): chmod -R a+rX {data_dir}"
        ) from None


def exists(path: str) -> bool:
    """Whether there is such a file, here or at a URL."""
    if _is_url(path):
        import tensorflow as tf

        return bool(tf.io.gfile.exists(path))
    return os.path.exists(path)


def num_bytes_of(path: str) -> int:
    """The size of a file, here or at a URL."""
    if _is_url(path):
        import tensorflow as tf

        return int(tf.io.gfile.stat(path).length)
    return os.path.getsize(path)


def remove_file(path: str) -> None:
    """Remove a file, here or at a URL.

    Raises:
        DataError: this user may not.
    """
    import tensorflow as tf

    try:
        tf.io.gfile.remove(path)
    except tf.errors.OpError as error:
        raise DataError(f"{path} cannot be removed: {error.message}") from None


def stamp(path: str) -> tuple[int, int]:
    """Size and time of change, in ns, of a file here or at a URL; (-1, -1) if there is none."""
    if not exists(path):
        return -1, -1
    if not _is_url(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    import tensorflow as tf

    remote = tf.io.gfile.stat(path)
    return int(remote.length), int(remote.mtime_nsec)


def open_file(path: str) -> BinaryIO:
    """The bytes of a file, here or at a URL.

    Raises:
        DataError: this user may not read it.
    """
    if _is_url(path):
        import tensorflow as tf

        remote: BinaryIO = tf.io.gfile.GFile(path, "rb")
        return remote
    try:
        return open(path, "rb", buffering=0)
    except PermissionError:
        raise DataError(
            f"{path} cannot be read by this user (permission denied): chmod a+r {path}"
        ) from None
