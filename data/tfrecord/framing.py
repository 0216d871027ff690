"""The records of one TFRecord file: found by their headers, read, and checked by their CRCs.

    with open_file(path) as file:
        starts = walk(file, path, 0, num_bytes, 0)
    for damage in content_damage(path, starts, numbers):
        print(damage)

A TFRecord file is a sequence of records, each `uint64 length, uint32 crc(length), data, uint32
crc(data)`, little endian, where crc is the masked CRC-32C (tensorflow/core/lib/io/record_writer.h).
Records have no numbers on disk, so the third record is found only by walking over two.
Only functions that read the content of records import TensorFlow.
"""

import array
import contextlib
import dataclasses
import os
import struct
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from data.system.files import DataError, open_file
from data.tfrecord.crc import FRAME_BYTES, HEADER_BYTES, Int64s, first_bad_header

if TYPE_CHECKING:
    import tensorflow as tf

_SCAN_BYTES = 1 << 20
_SPARSE_SCAN_BYTES = 4 << 10
_SPARSE_RECORD_BYTES = 32 << 10
_VERIFY_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Damage:
    """Record `record` of a file and the lost records after it: `num_records`, None if unknown."""

    path: str
    record: int  # From 0.
    offset: int
    reason: str
    num_records: int | None = 1  # `damage.examine` counts them; `split.verify` does not.

    def __str__(self) -> str:
        return f"{self.path}: record {self.record} at byte {self.offset}: {self.reason}"


class BadRecord(Exception):
    """`walk` met a damaged record. `before`: the offsets of the records before it."""

    def __init__(self, damage: Damage, before: Int64s) -> None:
        super().__init__(str(damage))
        self.damage = damage
        self.before = before


def walk(file: BinaryIO, path: str, begin: int, end: int, number: int) -> Int64s:
    """The first byte of each record in bytes [begin, end), int64 [n]; only headers are read.

    `number`: the record number at `begin`, for messages.

    Raises:
        BadRecord: a length does not fit its CRC, or the last record ends after `end`.
    """
    length_at = struct.Struct("<Q").unpack_from
    walked: list[Int64s] = []
    position, block_bytes = begin, _SCAN_BYTES
    while position < end:
        file.seek(position)
        block = file.read(min(block_bytes, end - position))
        block_begin, last = position, len(block) - HEADER_BYTES
        at = 0
        starts = array.array("q")
        append = starts.append
        while at <= last:
            append(at)
            at += length_at(block, at)[0] + FRAME_BYTES
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
            raise BadRecord(Damage(path, number + len(before), offset, reason), before)
        walked.append(here + block_begin)
        position = block_begin + at
        sparse = at > _SPARSE_RECORD_BYTES * len(here)
        block_bytes = _SPARSE_SCAN_BYTES if sparse else _SCAN_BYTES
    return np.concatenate(walked) if walked else np.zeros(0, np.int64)


def content_damage(path: str, starts: Int64s, numbers: Int64s) -> list[Damage]:
    """The records whose data does not fit its CRC, found by TensorFlow's own reader."""
    import tensorflow as tf

    damages = []
    # Runs of consecutive records: a damaged length leaves a gap in the record numbers.
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = zip(np.split(starts, breaks), np.split(numbers, breaks), strict=True)
    for run_starts, run_numbers in runs:
        done = 0
        while done < len(run_starts):
            # An error in a batch loses the batch, so it is read again, record by record.
            for batch_records in (_VERIFY_BATCH, 1):
                records = records_from(path, int(run_starts[done])).take(len(run_starts) - done)
                with contextlib.suppress(tf.errors.DataLossError):
                    for size in records.batch(batch_records).map(tf.size):
                        done += int(size)
                    break
            else:
                number, offset = int(run_numbers[done]), int(run_starts[done])
                damages.append(Damage(path, number, offset, "the data does not fit its CRC"))
                done += 1
    return damages


def records_from(path: str, offset: int) -> "tf.data.Dataset":
    """The records of a file from byte `offset` on, which begins a record; CRCs are checked."""
    import tensorflow as tf

    # Built inside flat_map, because TensorFlow 2.21 loses byte_offsets when it rewrites a dataset's
    # graph: "3 inputs specified of 4 inputs in Op while building NodeDef 'TFRecordDatasetV2".
    offsets = tf.data.Dataset.from_tensors(np.int64(offset))
    return offsets.flat_map(lambda begin: records_at(path, begin, 256 << 10))


def records_at(path: "tf.Tensor", offset: "tf.Tensor", buffer_bytes: int) -> "tf.data.Dataset":
    """In the graph of a dataset: the records of a file from byte `offset` on."""
    import tensorflow as tf

    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=tf.reshape(path, [1]),
        compression_type="",
        buffer_size=buffer_bytes,
        byte_offsets=offset[tf.newaxis],
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))


def refuse_gzip(path: str) -> None:
    """Raises a DataError if the file is compressed."""
    with open_file(path) as file:
        if file.read(3) != b"\x1f\x8b\x08":
            return
    source = os.path.dirname(path) or "."
    raise DataError(
        f"{path} is compressed (GZIP), so it is not seekable. Rewrite the directory once: "
        f"python -m data.prepare rewrite --source={source} --data_dir={source}-plain"
    ) from None
