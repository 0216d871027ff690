"""The records of one TFRecord file: found by their headers, read, and checked by their CRCs.

    with open_file(path) as file:
        starts = walk(file, path, 0, num_bytes, 0)
    for record in read_records(path, 0, num_bytes, 0):
        print(record)

A TFRecord file is a sequence of records, each `uint64 length, uint32 crc(length), data, uint32
crc(data)`, little endian, where crc is the masked CRC-32C (tensorflow/core/lib/io/record_writer.h).
Records have no numbers on disk, so the third record is found only by walking over two.
"""

import array
import contextlib
import dataclasses
import io
import struct
import zlib
from collections.abc import Iterator
from shlex import quote
from typing import BinaryIO

import google_crc32c
import numpy as np

from data.system.files import DataError, open_file
from data.tfrecord.crc import (
    FOOTER_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    Int64s,
    first_bad_header,
    stored,
)

CUT_SHORT = "the file ends at byte {}, inside this record: it was cut short"
NO_LENGTH = "not a TFRecord: its length does not fit its CRC"
_SCAN_BYTES = 1 << 20
_SPARSE_SCAN_BYTES = 4 << 10
_SPARSE_RECORD_BYTES = 32 << 10


@dataclasses.dataclass(frozen=True)
class Damage:
    """Record `record` of a file and the lost records after it: `num_records`, None if unknown."""

    path: str
    record: int  # From 0.
    offset: int
    reason: str
    num_records: int | None = 1

    def __str__(self) -> str:
        lost = ""
        if self.num_records is None:
            lost = "; an unknown number of records is lost"
        elif self.num_records > 1:
            lost = f"; {self.num_records:,} records are lost"
        return f"{self.path}: record {self.record} at byte {self.offset}: {self.reason}{lost}"


class BadRecord(DataError):
    """A damaged record was met."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage)  # Not the message: an error may be pickled.
        self.damage = damage

    def __str__(self) -> str:
        advice = "To name all of them: python -m data.inspect --data_dir=DIR --verify"
        return f"Records are corrupt ({self.damage}). {advice}"


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
            reason = CUT_SHORT.format(end)
        else:
            reason = NO_LENGTH
        if bad is not None:
            offset = block_begin + (int(here[bad]) if len(here) else 0)
            raise BadRecord(Damage(path, number + sum(map(len, walked)) + bad, offset, reason))
        walked.append(here + block_begin)
        position = block_begin + at
        sparse = at > _SPARSE_RECORD_BYTES * len(here)
        block_bytes = _SPARSE_SCAN_BYTES if sparse else _SCAN_BYTES
    return np.concatenate(walked) if walked else np.zeros(0, np.int64)


def read_records(path: str, begin: int, end: int, number: int) -> Iterator[bytes]:
    """The records in bytes [begin, end) of a file, which is read in sequence.

    `number`: the record number at `begin`, for messages. Raises BadRecord at the first that does
    not fit its CRCs.
    """
    with buffered(path) as file:
        while begin < end:
            record_end = end_of(file, begin)
            record = read_data(file, record_end - begin - FRAME_BYTES) if record_end else None
            if record is None:
                reason = "the length or the data does not fit its CRC, or the file was cut short"
                raise BadRecord(Damage(path, number, begin, reason))
            yield record
            begin, number = record_end, number + 1


@contextlib.contextmanager
def buffered(path: str) -> Iterator[BinaryIO]:
    """Opens a file to read it in sequence, or nearly so."""
    with open_file(path) as file:
        yield io.BufferedReader(file, _SCAN_BYTES) if isinstance(file, io.FileIO) else file


def end_of(file: BinaryIO, start: int) -> int:
    """The end of the record at byte `start`, by its length; 0 if that does not fit its CRC."""
    file.seek(start)
    header = file.read(HEADER_BYTES)
    if not _begins_record(header):
        return 0
    return start + int(struct.unpack_from("<Q", header)[0]) + FRAME_BYTES


def read_data(file: BinaryIO, length: int, *, keeps: bool = True) -> bytes | None:
    """The data of the record whose `end_of` was just read, or None if it is damaged.

    Without `keeps` a part of it: a long record is checked without memory for all of it.
    """
    record, crc = b"", 0
    while length:
        num_bytes = length if keeps else min(length, _SCAN_BYTES)
        record = file.read(num_bytes)
        if len(record) < num_bytes:
            return None
        crc, length = google_crc32c.extend(crc, record), length - len(record)
    return record if file.read(FOOTER_BYTES) == stored(crc) else None


def compression_of(path: str) -> str | None:
    """The compression of a TFRecord file, as TensorFlow names it: "" (none), "GZIP" or "ZLIB".

    None if the file is no TFRecord file. The first bytes decide, not the name.
    """
    with open_file(path) as file:
        head = file.read(_SPARSE_SCAN_BYTES)
    if not head or _begins_record(head):
        return ""
    try:
        plain = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(head, HEADER_BYTES)
    except zlib.error:
        return None
    if plain and not _begins_record(plain):
        return None
    return "GZIP" if head.startswith(b"\x1f\x8b") else "ZLIB"


def _begins_record(head: bytes) -> bool:
    length, crc = head[:8], head[8:HEADER_BYTES]
    return len(head) >= HEADER_BYTES and stored(google_crc32c.value(length)) == crc


def refuse_compressed(path: str, data_dir: str) -> None:
    """Raises a DataError if a file of `data_dir` is compressed."""
    if not (compression := compression_of(path)):
        return
    source = data_dir.rstrip("/") or "."
    raise DataError(
        f"{path} is compressed ({compression}), so it is not seekable. Rewrite the directory once: "
        f"python -m data.prepare rewrite --source={quote(source)} "
        f"--data_dir={quote(f'{source}-plain')}"
    ) from None
