"""Records of local files by byte ranges: a few large reads, then cut and checked by their CRCs.

    window = Windows().read(ranges)             # one buffer, all records between the ranges' ends
    records = window.records(numbers)           # bytes objects, by their place in the buffer

For one range tf.data takes as long as for 60 small records: datasets and iterators are made, and a
file is opened. Here it takes as long as for two or three. The framing is that of `data.records`.
"""

import dataclasses
import itertools
import operator
import os
import struct
from collections.abc import Sequence

import google_crc32c
import numpy as np

from data.order import Int64s
from data.records import FOOTER_BYTES, HEADER_BYTES, first_bad_header

_FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES
_MASK = np.uint32(0xA282EAD8)
_LENGTH = struct.Struct("<Q")


class DamagedError(Exception):
    """A range does not hold whole records, or a record does not fit its CRC."""


@dataclasses.dataclass(frozen=True)
class ByteRange:
    """Bytes [begin, end) of a file: whole records."""

    path: str
    begin: int
    end: int


class Windows:
    """Reads one window after the other into the same memory.

    A buffer made anew for each would cost as much again, in page faults.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def read(self, ranges: Sequence[ByteRange], num_records: int) -> "Window":
        """All of `ranges`, until the next call; those of one file stand together.

        Raises:
            DamagedError: a range does not end where a record ends, or its file does before, or they
                do not hold `num_records`.
            OSError: a file cannot be read.
        """
        range_bytes = [part.end - part.begin for part in ranges]
        num_bytes = sum(range_bytes)
        if num_bytes > len(self._buffer):
            self._buffer = bytearray(num_bytes)
        content = memoryview(self._buffer)[:num_bytes]
        left = content
        for path, of_file in itertools.groupby(ranges, operator.attrgetter("path")):
            with open(path, "rb", buffering=0) as file:
                for part in of_file:
                    _pread(file.fileno(), left[: part.end - part.begin], part.begin)
                    left = left[part.end - part.begin :]
        window = Window(content, *_cuts(content, range_bytes))
        if len(window.starts) != num_records:
            raise DamagedError
        return window


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """The bytes of some ranges, one after the other, and where each record's data lie in them.

    `starts`, `ends`: int64 [number of records].
    """

    content: memoryview
    starts: Int64s
    ends: Int64s

    def records(self, numbers: Int64s) -> list[bytes]:
        """The records at `numbers` [n], counted from 0 through all ranges.

        Raises:
            DamagedError: one does not fit its CRC, or its length does not.
        """
        starts, ends, content = self.starts[numbers], self.ends[numbers], self.content
        if first_bad_header(content, starts - HEADER_BYTES) is not None:
            raise DamagedError
        cuts = zip(starts.tolist(), ends.tolist(), strict=True)
        records = [bytes(content[start:end]) for start, end in cuts]
        crcs = np.fromiter(map(google_crc32c.value, records), np.uint32, len(records))
        masked = ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + _MASK
        footers = np.frombuffer(content, np.uint8)[ends[:, None] + np.arange(FOOTER_BYTES)]
        if not np.array_equal(masked, footers.view("<u4")[:, 0]):
            raise DamagedError
        return records


def _pread(descriptor: int, into: memoryview, begin: int) -> None:
    """Fills `into` from byte `begin` on."""
    while into:
        # A read may be shorter than it was asked to be, but not empty before the file's end.
        if not (num_bytes := os.preadv(descriptor, [into], begin)):
            raise DamagedError
        into, begin = into[num_bytes:], begin + num_bytes


def _cuts(content: memoryview, range_bytes: Sequence[int]) -> tuple[Int64s, Int64s]:
    """Where the data of each record begin and end."""
    length = _LENGTH.unpack_from(content)[0]
    stride = length + _FRAME_BYTES
    if len(content) % stride == 0:
        headers = np.frombuffer(content, np.uint8).reshape(-1, stride)[:, : _LENGTH.size]
        if (headers == headers[0]).all():
            # All of one length: no need to look at them one by one.
            starts = np.arange(HEADER_BYTES, len(content), stride, dtype=np.int64)
            return starts, starts + length
    length_at = _LENGTH.unpack_from
    begins, range_end, at = [], 0, 0
    for num_bytes in range_bytes:
        range_end += num_bytes
        last = range_end - _FRAME_BYTES
        while at <= last:
            begins.append(at)
            at += length_at(content, at)[0] + _FRAME_BYTES
        if at != range_end:
            raise DamagedError
    starts = np.array(begins, np.int64) + HEADER_BYTES
    return starts, np.append(starts[1:] - _FRAME_BYTES, len(content) - FOOTER_BYTES)
