"""SVHN, cropped digits: {train,test,extra}_32x32.mat, http://ufldl.stanford.edu/housenumbers.

MATLAB's Level 5 format ("MAT-File Format", The MathWorks, chapter 1): a header of 128 bytes, then
elements, each a variable and usually compressed as a whole. `X` is uint8 [32, 32, 3, N] with the
first index running fastest, so the images lie one after the other and are unpacked in pieces.
scipy.io.loadmat would hold the 1.6 GB of `extra` in memory. `y` has 10 for the digit 0.
"""

import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from data.files import DataError
from data.sources import Options, Source, required
from data.sources.examples import Classes, ImageSplit, labelled_images

_SHAPE = (32, 32, 3)
_IMAGE_BYTES = 32 * 32 * 3
_NEEDED, _OPTIONAL = ("train", "test"), ("extra",)

_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_UINT8 = 2
# Data types of numbers in a file; MATLAB keeps a double array of small integers as bytes.
_NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8"}
_NUMBERS |= {12: "<i8", 13: "<u8"}
_BLOCK_BYTES = 1 << 16


def source(name: str, directory: str | None, options: Options) -> Source:
    """The files in `directory`: train and test, and extra if it is there; labels 0 to 9.

    Raises:
        DataError: a file is missing, is not a Level 5 MAT file, is damaged, or is not SVHN's.
    """
    directory = required(directory, name, "train_32x32.mat and test_32x32.mat")
    splits = {}
    for split in (*_NEEDED, *_OPTIONAL):
        path = os.path.join(directory, f"{split}_32x32.mat")
        if os.path.isfile(path):
            splits[split] = _image_split(path)
        elif split in _NEEDED:
            raise DataError(
                f"{directory} has no {split}_32x32.mat. Bring train_32x32.mat and test_32x32.mat "
                f"(and extra_32x32.mat, if wanted), then: python -m data.prepare {name} "
                "--source=DIR"
            )
    return labelled_images(name, _SHAPE, {"label": Classes(10)}, splits, options)


def _image_split(path: str) -> ImageSplit:
    with open(path, "rb") as file:
        variables = {variable.name: variable for variable in _variables(file, path)}
        missing = {"X", "y"} - variables.keys()
        if missing:
            raise DataError(
                f"{path} has variables {', '.join(variables) or 'none'}; needed are X and y."
            )
        pixels, labels = variables["X"], variables["y"]
        num_examples = math.prod(labels.dimensions)
        if pixels.dimensions != (*_SHAPE, num_examples) or pixels.data_type != _UINT8:
            raise DataError(
                f"{path} has X of {list(pixels.dimensions)} and {num_examples} labels; needed is "
                f"uint8 [32, 32, 3, N] and N labels."
            )
        stored = np.frombuffer(labels.data(file).read(labels.num_bytes), _number_type(path, labels))
    classes = stored.astype(np.int64) % 10
    if not ((stored >= 1) & (stored <= 10)).all() or not (stored == np.round(stored)).all():
        raise DataError(f"{path} has labels other than 1 to 10: it is not SVHN's.")

    def rows(first: int, last: int) -> Iterator[tuple[bytes, Sequence[int]]]:
        with open(path, "rb") as file:
            data = pixels.data(file)
            data.skip(first * _IMAGE_BYTES)
            for number in range(first, last):
                # Row runs fastest, then column, then colour.
                planes = np.frombuffer(data.read(_IMAGE_BYTES), np.uint8).reshape(3, 32, 32)
                yield planes.transpose(2, 1, 0).tobytes(), (int(classes[number]),)

    return ImageSplit(num_examples, rows)


class _Variable:
    """One array of a MAT file: what it is, and where its data lies."""

    def __init__(self, path: str, offset: int, num_bytes: int, is_compressed: bool) -> None:
        self._element = (path, offset, num_bytes, is_compressed)

    def read_header(self, file: BinaryIO) -> None:
        """Finds name, dimensions and data."""
        stream = _Stream(file, *self._element)
        if self._element[-1]:
            stream.tag()  # Of the matrix inside the compressed element.
        _, flags = stream.small_element()
        _, dimensions = stream.small_element()
        _, name = stream.small_element()
        self.name = name.decode("ascii", "replace")
        self.is_complex = bool(flags[1] & 0x08)
        self.dimensions = struct.unpack(f"<{len(dimensions) // 4}i", dimensions)
        self.data_type, self.num_bytes, self._inline = stream.tag()
        self._data_at = stream.position

    def data(self, file: BinaryIO) -> "_Stream":
        """The bytes of the numbers, from the first."""
        stream = _Stream(file, *self._element)
        # Data of up to four bytes lies in the tag itself.
        stream.skip(self._data_at - 4 if self._inline else self._data_at)
        return stream


def _variables(file: BinaryIO, path: str) -> Iterator[_Variable]:
    """The arrays of a Level 5 MAT file.

    Raises:
        DataError: it is no such file, or is damaged.
    """
    header = file.read(_HEADER_BYTES)
    if not header.startswith(b"MATLAB 5.0") or header[126:128] != b"IM":
        begin = header[:19].decode("ascii", "replace")
        raise DataError(
            f"{path} is not a MAT file of Level 5, little endian: it begins with {begin!r}. "
            "Download it again, or save it again with scipy.io.savemat."
        )
    size = os.path.getsize(path)
    offset = _HEADER_BYTES
    while offset < size:
        file.seek(offset)
        kind, num_bytes = struct.unpack("<II", file.read(8).ljust(8, b"\0"))
        if kind not in (_MATRIX, _COMPRESSED) or offset + 8 + num_bytes > size:
            raise DataError(f"{path} is damaged or cut short at byte {offset}: download it again.")
        variable = _Variable(path, offset + 8, num_bytes, kind == _COMPRESSED)
        variable.read_header(file)
        yield variable
        offset += 8 + num_bytes


def _number_type(path: str, variable: _Variable) -> str:
    kind = _NUMBERS.get(variable.data_type)
    if kind is None or variable.is_complex:
        raise DataError(f"{path}: {variable.name} holds no real numbers.")
    return kind


class _Stream:
    """The bytes of one element, unpacked as they are read.

    Raises:
        DataError: from every method, when they are damaged or end too soon.
    """

    def __init__(
        self, file: BinaryIO, path: str, offset: int, num_bytes: int, is_compressed: bool
    ) -> None:
        file.seek(offset)
        self._file = file
        self._path = path
        self._left = num_bytes
        self._inflate = zlib.decompressobj() if is_compressed else None
        self._buffer = b""
        self.position = 0

    def read(self, num_bytes: int) -> bytes:
        """The next bytes, exactly so many."""
        parts = [self._buffer[:num_bytes]]
        self._buffer = self._buffer[num_bytes:]
        wanted = num_bytes - len(parts[0])
        while wanted:
            block = self._next_block()
            parts.append(block[:wanted])
            self._buffer = block[wanted:]
            wanted -= len(parts[-1])
        self.position += num_bytes
        return b"".join(parts)

    def skip(self, num_bytes: int) -> None:
        """Passes over the next bytes."""
        while num_bytes:
            num_bytes -= len(self.read(min(num_bytes, _BLOCK_BYTES)))

    def tag(self) -> tuple[int, int, bool]:
        """Data type and size of the next element; whether its data lies in the tag, now passed."""
        kind, num_bytes = struct.unpack("<II", self.read(8))
        if kind >> 16:
            return kind & 0xFFFF, kind >> 16, True
        return kind, num_bytes, False

    def small_element(self) -> tuple[int, bytes]:
        """Data type and data of the next element, whole."""
        first = self.read(8)
        kind, num_bytes = struct.unpack("<II", first)
        if kind >> 16:
            return kind & 0xFFFF, first[4 : 4 + (kind >> 16)]
        if num_bytes > _BLOCK_BYTES:
            raise self._damaged()
        return kind, self.read(-(-num_bytes // 8) * 8)[:num_bytes]

    def _next_block(self) -> bytes:
        """At least one byte."""
        while True:
            if self._inflate is None:
                block = self._file.read(min(_BLOCK_BYTES, self._left))
                self._left -= len(block)
            else:
                packed = self._inflate.unconsumed_tail
                if not packed:
                    packed = self._file.read(min(_BLOCK_BYTES, self._left))
                    self._left -= len(packed)
                try:
                    block = self._inflate.decompress(packed, _BLOCK_BYTES)
                except zlib.error:
                    raise self._damaged() from None
                if packed and not block and not self._inflate.eof:
                    continue
            if not block:
                raise self._damaged()
            return block

    def _damaged(self) -> DataError:
        return DataError(f"{self._path} is damaged or cut short: download it again.")
