"""The records of one file: walked over by their headers, read, and their CRCs checked.

    with open_file(path) as file:
        starts = walk(file, path, 0, num_bytes, 0)
    for damage in content_damage(path, starts, numbers):
        print(damage)

A TFRecord file is a run of records, each `uint64 length, uint32 crc(length), data, uint32
crc(data)`, little endian, where crc is the masked CRC-32C (tensorflow/core/lib/io/record_writer.h).
Records have no numbers on disk, so the third record can be found only by walking over two.

TensorFlow is imported only where records' contents are read.
"""

import array
import dataclasses
import os
import struct
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from data.crc import FRAME_BYTES, HEADER_BYTES, Int64s, first_bad_header
from data.files import DataError, open_file

if TYPE_CHECKING:
    import tensorflow as tf

_SCAN_BYTES = 1 << 20
_SPARSE_SCAN_BYTES = 4 << 10
_SPARSE_RECORD_BYTES = 32 << 10
_VERIFY_BATCH = 1024


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


class BadRecord(Exception):
    """The walk met a record that is not one. `before`: where the good records before it begin."""

    def __init__(self, damage: Damage, before: Int64s) -> None:
        super().__init__(str(damage))
        self.damage = damage
        self.before = before


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
            raise BadRecord(Damage(path, number + count + bad, offset, reason), before)
        walked.append(here + block_begin)
        count += len(here)
        position = block_begin + at
        sparse = at > _SPARSE_RECORD_BYTES * len(here)
        block_bytes = _SPARSE_SCAN_BYTES if sparse else _SCAN_BYTES
    return np.concatenate(walked) if walked else np.zeros(0, np.int64)


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
