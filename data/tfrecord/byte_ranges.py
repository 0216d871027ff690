"""Records by byte ranges: a few large reads, then cut up and checked by CRCs.

    window = Windows().read(ranges)             # one buffer with all records of the ranges
    records = window.records(numbers)           # bytes objects, by their place in the buffer
    if window.copy_frames(numbers, into): ...   # or rows of an array, if all have one length

In tf.data one range costs as much as 60 small records, because datasets and iterators are made.
Here it costs as much as two or three. framing.py describes the format.
"""

import dataclasses
import functools
import itertools
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence

import google_crc32c
import numpy as np

from data.tfrecord.crc import (
    FOOTER_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    Int64s,
    Uint8s,
    are_complete,
    first_bad_header,
    masked,
)

_ALIGN_BYTES = 64  # The alignment of TensorFlow's tensors.


class DamagedError(Exception):
    """A range does not hold complete records, or a record does not fit its CRC."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByteRanges:
    """Bytes [begins[i], ends[i]) of paths[files[i]]: complete records, `num_records` in all.

    `files`, `begins`, `ends`: int64 [number of ranges]; the ranges of a file are consecutive.
    """

    paths: Sequence[str]
    files: Int64s
    begins: Int64s
    ends: Int64s
    num_records: int

    def by_file(self) -> Iterator[tuple[str, Int64s, Int64s]]:
        """Yields the path, begins and ends of the ranges of each file, in their order."""
        firsts = np.flatnonzero(np.diff(self.files, prepend=-1)).tolist()
        for first, last in itertools.pairwise([*firsts, len(self.files)]):
            yield self.paths[self.files[first]], self.begins[first:last], self.ends[first:last]


ReadInto = Callable[[ByteRanges, memoryview], None]


class Windows:
    """Reads windows into the same memory: page faults of new buffers would double the cost."""

    def __init__(self, read_into: ReadInto | None = None) -> None:
        """`read_into` reads the bytes of ranges; by default from local files."""
        self._buffer = bytearray()
        self._read_into = read_into or _read_files_into

    def read(self, ranges: ByteRanges) -> "Window":
        """The bytes of `ranges`, valid until the next call.

        Raises:
            DamagedError: a file ends before a range does.
            OSError: a file cannot be read.
        """
        range_bytes = ranges.ends - ranges.begins
        num_bytes = int(range_bytes.sum())
        if num_bytes > len(self._buffer):
            self._buffer = bytearray(num_bytes)
        content = memoryview(self._buffer)[:num_bytes]
        self._read_into(ranges, content)
        return Window(content, range_bytes, ranges.num_records)


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """The bytes of some ranges, mostly of a run of batches; should hold `num_records`."""

    content: memoryview
    range_bytes: Int64s
    num_records: int

    def records(self, numbers: Int64s) -> list[bytes]:
        """The records at `numbers` [n], counted from 0 through all ranges.

        Raises:
            DamagedError: a range does not end where a record ends, the number of records is not
                `num_records`, or the length or data of a record of `numbers` do not fit its CRCs.
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

    def copy_frames(self, numbers: Int64s, into: Uint8s) -> bool:
        """Copies the records at `numbers` [n] with their framing to `into`, uint8 [n, bytes].

        Returns True if the window has the size of as many such records, and the copies fit CRCs.
        """
        frame_bytes = into.shape[1]
        if len(self.content) != frame_bytes * self.num_records:
            return False
        frames = np.frombuffer(self.content, np.uint8).reshape(-1, frame_bytes)
        # All numbers are in range. The default mode would check that, at the cost of a copy.
        np.take(frames, numbers, axis=0, out=into, mode="clip")
        return are_complete(into)

    @functools.cached_property
    def _cuts(self) -> tuple[Int64s, Int64s]:
        content, length_at = self.content, struct.Struct("<Q").unpack_from
        length = length_at(content)[0]
        stride = length + FRAME_BYTES
        if len(content) % stride == 0:
            headers = np.frombuffer(content, np.uint8).reshape(-1, stride)[:, :8]
            if (headers == headers[0]).all():
                # All records have one length: no loop over them.
                starts = np.arange(HEADER_BYTES, len(content), stride, dtype=np.int64)
                return starts, starts + length
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
    """Memory for arrays that TensorFlow uses without a copy, reused when it releases them.

    For new arrays the kernel must map new pages, which takes longer than to fill the arrays.
    """

    def __init__(self) -> None:
        self._free: list[Uint8s] = []

    def array(self, shape: tuple[int, ...]) -> Uint8s:
        """An uninitialized uint8 array. Its memory is not reused while a view of it exists."""
        num_bytes = math.prod(shape)
        memory = self._free.pop() if self._free else aligned(num_bytes)
        if len(memory) < num_bytes:
            memory = aligned(num_bytes)
        return np.asarray(_Lent(memory, self._free))[:num_bytes].reshape(shape)


class _Lent:
    """The owner of an array's memory. Returns it to `free` when no array uses it any more."""

    def __init__(self, memory: Uint8s, free: list[Uint8s]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


def aligned(num_bytes: int) -> Uint8s:
    """Memory that TensorFlow can use as a tensor without a copy."""
    memory = np.empty(num_bytes + _ALIGN_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGN_BYTES
    return memory[begin : begin + num_bytes]


def _read_files_into(ranges: ByteRanges, content: memoryview) -> None:
    at = 0
    for path, begins, ends in ranges.by_file():
        with open(path, "rb", buffering=0) as file:
            descriptor = file.fileno()
            for begin, size in zip(begins.tolist(), (ends - begins).tolist(), strict=True):
                pread(descriptor, content[at : at + size], begin)
                at += size


def pread(descriptor: int, into: memoryview, begin: int) -> None:
    """Fills `into` with the bytes of a file from `begin` on; DamagedError if it ends before."""
    num_bytes = os.preadv(descriptor, [into], begin)
    # A read may return fewer bytes than asked for. It returns 0 bytes at the file's end only.
    while num_bytes < len(into):
        if not num_bytes:
            raise DamagedError
        into, begin = into[num_bytes:], begin + num_bytes
        num_bytes = os.preadv(descriptor, [into], begin)
