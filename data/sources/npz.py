"""NPZ: numpy's archives of named arrays, whose rows are the examples.

    SOURCE.npz                 x and y, or x_train, y_train, x_test and y_test (Keras' mnist.npz)
    SOURCE/train.npz, test.npz

Arrays are read a few rows at a time, packed or not. Numbers keep their type and exact value.
"""

import dataclasses
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO

import numpy as np
import numpy.typing as npt

from data.files import DataError
from data.sources import SPLIT_NAMES, Options, Source, required
from data.sources.examples import Classes, Node, Value, scalar, tensor, text
from data.sources.tables import Row, Table, check_label, classes_of, split_files, table_source

_SPLITS = "|".join(SPLIT_NAMES)
_COLUMN_SPLIT = re.compile(rf"(.+)_({_SPLITS})")
_SPLIT_COLUMN = re.compile(rf"({_SPLITS})_(.+)")
_BLOCK_BYTES = 1 << 18
# Types that tf.io.decode_raw knows, and scalars that a list of int64 or float32 keeps exactly.
_RAW = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64")
_LISTED = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "float32")


@dataclasses.dataclass(frozen=True)
class _Column:
    """One array: where it lies, and what it is."""

    path: str
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def kind(self) -> tuple[tuple[int, ...], str]:
        """What must be the same in all splits; strings may be of other lengths."""
        return self.shape[1:], "str" if self.dtype.kind in "US" else self.dtype.name

    @property
    def is_scalar(self) -> bool:
        """Whether it lies in the record as a list of one number."""
        return len(self.shape) == 1 and self.dtype.name in _LISTED

    def node(self) -> Node:
        """Its feature.

        Raises:
            DataError: a record has no place for it.
        """
        if self.dtype.kind in "US" and len(self.shape) == 1:
            return text()
        if self.is_scalar:
            return scalar(self.dtype.name)
        if self.dtype.name in _RAW:
            return tensor(self.dtype.name, self.shape[1:], "bytes")
        raise DataError(
            f"{self.path}: {self.member} is {self.dtype.name} {list(self.shape)}, which a record "
            f"has no place for. Save it as one of {', '.join(_RAW)}, or as strings [N]."
        )

    def values(self) -> Iterator[Value]:
        """A value of a record for each row."""
        if self.dtype.kind in "US":
            for block in self._blocks():
                yield from (
                    item.encode() if isinstance(item, str) else item for item in block.tolist()
                )
        elif self.is_scalar:
            for block in self._blocks():
                yield from (int(x) if isinstance(x, bool) else x for x in block.tolist())
        else:
            little = self.dtype.newbyteorder("<")
            for block in self._blocks():
                yield from (row.tobytes() for row in block.astype(little))

    def _blocks(self) -> Iterator[npt.NDArray[np.generic]]:
        """The rows, some at a time."""
        at_once = max(1, _BLOCK_BYTES // max(1, self.row_bytes))
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
                _read_header(file)
                for first in range(0, self.num_rows, at_once):
                    count = min(at_once, self.num_rows - first)
                    block = file.read(count * self.row_bytes)
                    yield np.frombuffer(block, self.dtype).reshape(count, *self.shape[1:])
        except (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{self.path}: {self.member} is damaged: {error}.") from None


def source(name: str, path: str | None, options: Options) -> Source:
    """The columns of an NPZ file, or of one for each split, as features of those names.

    With `label`, that column is a ClassLabel: integers from 0, or names, which are numbered in
    their order. Numbers of more than one dimension lie in the record as bytes.

    Raises:
        DataError: a file is missing or damaged, the columns of a split have different numbers of
            rows, splits have different columns, or a type has no place in a record.
    """
    path = required(path, name, "an NPZ file, or a directory with train.npz and test.npz")
    splits: dict[str, dict[str, _Column]] = {}
    files = split_files(path, ".npz")
    for split, file in files.items():
        splits[split] = _columns(file)
    if "" in files:
        splits = _splits_by_name(splits[""]) or splits
    for split, columns in splits.items():
        counts = {key: column.num_rows for key, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise DataError(
                f"{path}: columns of split {split!r} differ in their rows ({counts}). An "
                "example is a row of every column."
            )
    first = next(iter(splits.values()))
    kinds = {key: column.kind for key, column in first.items()}
    for split, columns in splits.items():
        others = {key: column.kind for key, column in columns.items()}
        if others != kinds:
            raise DataError(
                f"{path}: split {split!r} has columns {others}, and {next(iter(splits))!r} "
                f"{kinds}: they must be the same."
            )
    check_label(options, first, path)
    classes: dict[str, Classes] = {}
    if options.label is not None:
        where = f"{path}: {options.label}"
        shape, kind = kinds[options.label]
        if shape or (kind != "str" and "int" not in kind):
            raise DataError(
                f"{where} is {kind} [N, {', '.join(map(str, shape))}], and a label is an integer "
                "or a name for each row. Leave --label out, and `parse` the column yourself."
            )
        columns_of_label = [columns[options.label] for columns in splits.values()]
        classes[options.label] = classes_of(_label_values(columns_of_label), where)
    return table_source(
        name,
        {split: _table(columns) for split, columns in splits.items()},
        {key: column.node() for key, column in first.items()},
        classes,
        options,
    )


def _columns(path: str) -> dict[str, _Column]:
    """Every array in the file, by its name."""
    columns = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                with archive.open(member) as file:
                    shape, is_fortran, dtype = _read_header(file)
                if dtype.hasobject or not shape:
                    raise DataError(
                        f"{path}: {member} is {dtype.name} {list(shape)}, and an array of numbers "
                        "or strings with a row for each example is needed."
                    )
                if is_fortran and len(shape) > 1:
                    raise DataError(
                        f"{path}: {member} lies column by column, so that its rows cannot be read "
                        "one by one. Save np.ascontiguousarray(...) of it."
                    )
                columns[member.removesuffix(".npy")] = _Column(path, member, shape, dtype)
    except (EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not an NPZ file, or is damaged: {error}.") from None
    if not columns:
        raise DataError(f"{path} holds no array.")
    return columns


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"an array of format {version}")


def _splits_by_name(columns: Mapping[str, _Column]) -> dict[str, dict[str, _Column]]:
    """Of x_train, x_test, ... or train_x, test_x, ...; empty if they are not named so."""
    splits: dict[str, dict[str, _Column]] = {}
    for key, column in columns.items():
        if match := _COLUMN_SPLIT.fullmatch(key):
            splits.setdefault(match[2], {})[match[1]] = column
        elif match := _SPLIT_COLUMN.fullmatch(key):
            splits.setdefault(match[1], {})[match[2]] = column
        else:
            return {}
    return splits


def _table(columns: Mapping[str, _Column]) -> Table:
    def rows() -> Iterator[Row]:
        values = [column.values() for column in columns.values()]
        for row in zip(*values, strict=True):
            yield dict(zip(columns, row, strict=True))

    num_rows = next(iter(columns.values())).num_rows
    return Table(num_rows, sum(column.row_bytes + 30 for column in columns.values()), rows)


def _label_values(columns: list[_Column]) -> Iterator[int | str]:
    for column in columns:
        for row, value in enumerate(column.values()):
            if isinstance(value, bytes):
                try:
                    yield value.decode()
                except UnicodeDecodeError:
                    raise DataError(
                        f"{column.path}: row {row} of {column.member.removesuffix('.npy')} is "
                        f"{value!r}, which is not UTF-8, and a label that is a name must be. Save "
                        "the column as np.char.decode(..., ENCODING) of it."
                    ) from None
            elif isinstance(value, int):
                yield value
