"""Records of local files by byte ranges: a few large reads, then cut and checked by their CRCs.

    window = Windows().read(ranges)             # one buffer, all records between the ranges' ends
    records = window.records(numbers)           # bytes objects, by their place in the buffer
    if window.frames(numbers, into): ...        # or rows of an array, if all are of one length

For one range tf.data takes as long as for 60 small records: datasets and iterators are made, and a
file is opened. Here it takes as long as for two or three. The framing is that of `data.frames`.
"""

import dataclasses
import functools
import itertools
import math
import os
import struct
from collections.abc import Sequence

import google_crc32c
import numpy as np

from data.crc import (
    FOOTER_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    Int64s,
    Uint8s,
    first_bad_header,
    masked,
    whole_frames,
)

_LENGTH = struct.Struct("<Q")
_ALIGN_BYTES = 64  # Of TensorFlow's tensors.


class DamagedError(Exception):
    """A range does not hold whole records, or a record does not fit its CRC."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByteRanges:
    """Bytes [begins[i], ends[i]) of paths[files[i]]: whole records, `num_records` in all.

    `files`, `begins`, `ends`: int64 [number of ranges]; those of one file stand together.
    """

    paths: Sequence[str]
    files: Int64s
    begins: Int64s
    ends: Int64s
    num_records: int


class Windows:
    """Reads one window after the other into the same memory.

    A buffer made anew for each would cost as much again, in page faults.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def read(self, ranges: ByteRanges) -> "Window":
        """All of `ranges`, until the next call.

        Raises:
            DamagedError: a file ends before a range does.
            OSError: a file cannot be read.
        """
        range_bytes = ranges.ends - ranges.begins
        num_bytes = int(range_bytes.sum())
        if num_bytes > len(self._buffer):
            self._buffer = bytearray(num_bytes)
        content = memoryview(self._buffer)[:num_bytes]
        begins, sizes = ranges.begins.tolist(), range_bytes.tolist()
        first_of_file = np.flatnonzero(np.diff(ranges.files, prepend=-1)).tolist()
        at = 0
        for first, last in itertools.pairwise([*first_of_file, len(begins)]):
            path = ranges.paths[ranges.files[first]]
            with open(path, "rb", buffering=0) as file:
                descriptor = file.fileno()
                for begin, size in zip(begins[first:last], sizes[first:last], strict=True):
                    _pread(descriptor, content[at : at + size], begin)
                    at += size
        return Window(content, range_bytes, ranges.num_records)


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """The bytes of some ranges, one after the other, that should hold `num_records`."""

    content: memoryview
    range_bytes: Int64s
    num_records: int

    def records(self, numbers: Int64s) -> list[bytes]:
        """The records at `numbers` [n], counted from 0 through all ranges.

        Raises:
            DamagedError: a range does not end where a record ends, there are not as many as there
                should be, or one of `numbers` does not fit its CRC, or its length does not.
        """
        starts, ends = self._cuts
        if len(starts) != self.num_records:
            raise DamagedError
        starts, ends, content = starts[numbers], ends[numbers], self.content
        if first_bad_header(content, starts - HEADER_BYTES) is not None:
            raise DamagedError
        cuts = zip(starts.tolist(), ends.tolist(), strict=True)
        records = [bytes(content[start:end]) for start, end in cuts]
        crcs = np.fromiter(map(google_crc32c.value, records), np.uint32, len(records))
        footers = np.frombuffer(content, np.uint8)[ends[:, None] + np.arange(FOOTER_BYTES)]
        if not np.array_equal(masked(crcs), footers.view("<u4")[:, 0]):
            raise DamagedError
        return records

    def frames(self, numbers: Int64s, into: Uint8s) -> bool:
        """Copies the records at `numbers` [n] with their framing to `into`, uint8 [n, bytes].

        False unless all records here are of that many bytes, and the chosen ones whole.
        """
        frame_bytes = into.shape[1]
        if len(self.content) != frame_bytes * self.num_records:
            return False
        frames = np.frombuffer(self.content, np.uint8).reshape(-1, frame_bytes)
        # No number is outside; to look for one would take a copy more.
        np.take(frames, numbers, axis=0, out=into, mode="clip")
        return whole_frames(into)

    @functools.cached_property
    def _cuts(self) -> tuple[Int64s, Int64s]:
        """Where the data of each record begin and end."""
        content = self.content
        length = _LENGTH.unpack_from(content)[0]
        stride = length + FRAME_BYTES
        if len(content) % stride == 0:
            headers = np.frombuffer(content, np.uint8).reshape(-1, stride)[:, : _LENGTH.size]
            if (headers == headers[0]).all():
                # All of one length: no need to look at them one by one.
                starts = np.arange(HEADER_BYTES, len(content), stride, dtype=np.int64)
                return starts, starts + length
        length_at = _LENGTH.unpack_from
        begins, range_end, at = [], 0, 0
        for num_bytes in self.range_bytes.tolist():
            range_end += num_bytes
            last = range_end - FRAME_BYTES
            while at <= last:
                begins.append(at)
                at += length_at(content, at)[0] + FRAME_BYTES
            if at != range_end:
                raise DamagedError
        starts = np.array(begins, np.int64) + HEADER_BYTES
        return starts, np.append(starts[1:] - FRAME_BYTES, len(content) - FOOTER_BYTES)


class Buffers:
    """Memory for arrays that TensorFlow takes without a copy, used again once it lets go of them.

    Arrays made anew are pages made anew by the kernel, which takes longer than to fill them.
    """

    def __init__(self) -> None:
        self._free: list[Uint8s] = []

    def array(self, shape: tuple[int, ...]) -> Uint8s:
        """A uint8 array of that shape, of any content. Views of it keep its memory from others."""
        num_bytes = math.prod(shape)
        memory = self._free.pop() if self._free else aligned(num_bytes)
        if len(memory) < num_bytes:
            memory = aligned(num_bytes)
        return np.asarray(_Lent(memory, self._free))[:num_bytes].reshape(shape)


class _Lent:
    """The owner of an array's memory. When no array needs it any more, it goes back."""

    def __init__(self, memory: Uint8s, free: list[Uint8s]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


def aligned(num_bytes: int) -> Uint8s:
    """Memory that TensorFlow can use as a tensor's, so that there is no copy of it."""
    memory = np.empty(num_bytes + _ALIGN_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGN_BYTES
    return memory[begin : begin + num_bytes]


def _pread(descriptor: int, into: memoryview, begin: int) -> None:
    """Fills `into` from byte `begin` on."""
    num_bytes = os.preadv(descriptor, [into], begin)
    # A read may be shorter than it was asked to be, but not empty before the file's end.
    while num_bytes < len(into):
        if not num_bytes:
            raise DamagedError
        into, begin = into[num_bytes:], begin + num_bytes
        num_bytes = os.preadv(descriptor, [into], begin)
