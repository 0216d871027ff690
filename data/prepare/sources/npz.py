"""NPZ: NumPy's archives of named arrays, whose rows are the examples.

    SOURCE.npz                 x and y, or x_train, y_train, x_test and y_test (Keras' mnist.npz)
    SOURCE/train.npz, test.npz

Arrays are read a few rows at a time, compressed or not. Numbers keep their type and exact value.
"""

import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from data.prepare.sources import Options, Source
from data.prepare.sources.columns import Array, TableColumn
from data.prepare.sources.examples import LISTED, RAW, Classes, classes_of, scalar, tensor, text
from data.prepare.sources.tables import Batch, Chunk, common_columns, split_files, table_source
from data.system.files import DataError
from data.tfrecord.examples import Values, fixed
from data.tfrecord.shard_names import SPLIT_NAMES

_SPLITS = "|".join(SPLIT_NAMES)
_COLUMN_OF_SPLIT = re.compile(rf"(?P<column>.+)_(?P<split>{_SPLITS})")
_SPLIT_OF_COLUMN = re.compile(rf"(?P<split>{_SPLITS})_(?P<column>.+)")
_BLOCK_BYTES = 1 << 18
_LABEL_ROWS = 4096
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGE = (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error)


class _Column(NamedTuple):
    """One array of an archive."""

    path: str
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def kind(self) -> tuple[tuple[int, ...], str]:
        """What must be equal in all splits; strings may differ in length."""
        return self.shape[1:], "str" if self.dtype.kind in "US" else self.dtype.name

    @property
    def is_list(self) -> bool:
        """True if a record holds a row as a list with one number, or as one string."""
        return len(self.shape) == 1 and (self.dtype.kind in "US" or self.dtype.name in LISTED)

    def feature(self) -> TableColumn:
        """The column as a feature."""
        if self.is_list:
            node = text() if self.dtype.kind in "US" else scalar(self.dtype.name)
        elif self.dtype.name in RAW:
            node = tensor(self.dtype.name, self.shape[1:])
        else:
            name = self.member.removesuffix(".npy")
            raise DataError(
                f"{self.path}: {name} is {self.dtype.name} {list(self.shape)}, which a record "
                f"cannot hold. Save it as one of {', '.join(RAW)}, or as strings [N]; uint64 as "
                f"int64 only if all are below 2**63, else [N] as {name}.astype(str)."
            )
        return TableColumn(node, self.row_bytes, self.convert)

    def blocks(self, rows: int) -> Iterator[Array]:
        """Yields all rows, `rows` at a time."""
        num_rows = self.shape[0]
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
                _read_header(file)
                for first in range(0, num_rows, rows):
                    count = min(rows, num_rows - first)
                    block = file.read(count * self.row_bytes)
                    yield np.frombuffer(block, self.dtype).reshape(count, *self.shape[1:])
        except _DAMAGE as error:
            raise DataError(f"{self.path}: {self.member} is damaged: {error}.") from None

    def convert(self, block: Any, classes: Classes | None = None) -> Values:
        """The rows of a block as a record holds them. `classes`: of the label."""
        if classes and classes.names:
            return classes.numbers(self._names(block))
        if not self.is_list:
            return fixed(block.astype(self.dtype.newbyteorder("<")))
        as_bytes = np.char.encode(block) if self.dtype.kind == "U" else block
        listed = {"U": np.object_, "S": np.object_, "f": np.float32}.get(self.dtype.kind, np.int64)
        values: Values = as_bytes.astype(listed)
        return values

    def classes(self) -> Iterator[int | str]:
        """The values of a label."""
        for block in self.blocks(_LABEL_ROWS):
            yield from self._names(block) if self.dtype.kind in "US" else block.tolist()

    def _names(self, block: Any) -> list[str]:
        """Strings; those of bytes are in UTF-8."""
        try:
            names: Array = np.char.decode(block) if self.dtype.kind == "S" else block
            return list(map(str, names))
        except UnicodeDecodeError as error:
            name = self.member.removesuffix(".npy")
            raise DataError(
                f"{self.path}: {name} has {error.object!r}, which is not UTF-8. Save "
                "np.char.decode(..., ENCODING) of it."
            ) from None


def source(name: str, path: str, options: Options) -> Source:
    """The columns of an NPZ file, or of one file for each split, as features with the same names.

    Records hold arrays of more than one dimension as bytes.
    """
    files = split_files(path, ".npz")
    splits = {split: _columns(file) for split, file in files.items()}
    if "" in splits:
        splits = _splits_by_name(splits[""]) or splits
    for split, columns in splits.items():
        counts = {key: column.shape[0] for key, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise DataError(
                f"{path}: columns of split {split!r} differ in their rows ({counts}). An "
                "example is a row of every column."
            )
    kinds_by_split = {
        split: {key: column.kind for key, column in columns.items()}
        for split, columns in splits.items()
    }
    kinds = common_columns(path, kinds_by_split, files, options)
    shown = {key: column.feature() for key, column in next(iter(splits.values())).items()}
    labels: dict[str, Classes] = {}
    notes: Sequence[str] = ()
    if (label := options.label) is not None:
        shape, kind = kinds[label]
        if shape or (kind != "str" and "int" not in kind):
            classes = "" if shape else f"If it has classes, save {label}.astype(np.int64). Or leave"
            raise DataError(
                f"{path}: {label} is {kind} {['N', *shape]}, and a label is an integer or a name "
                f"for each row. {classes or 'Leave'} --label out, and train with "
                f"--config.data.label={label}, or with a `parse`."
            )
        values = (value for columns in splits.values() for value in columns[label].classes())
        labels[label], notes = classes_of(values, f"{path}: {label}")
    tables = {split: [_chunk(path, columns)] for split, columns in splits.items()}
    return table_source(name, tables, shown, labels, options)._replace(notes=notes)


def _columns(path: str) -> dict[str, _Column]:
    try:
        with zipfile.ZipFile(path) as archive:
            headers = {}
            for member in archive.namelist():
                with archive.open(member) as file:
                    headers[member] = _read_header(file)
    except _DAMAGE as error:
        raise DataError(f"{path} is not an NPZ file, or is damaged: {error}.") from None
    for member, (shape, is_fortran, dtype) in headers.items():
        if dtype.hasobject or not shape:
            raise DataError(
                f"{path}: {member} is {dtype.name} {list(shape)}, and an array of numbers or "
                "strings with a row for each example is needed."
            )
        if is_fortran and len(shape) > 1:
            raise DataError(
                f"{path}: {member} is stored column by column, so its rows cannot be read one by "
                "one. Save np.ascontiguousarray(...) of it."
            )
    if not headers:
        raise DataError(f"{path} holds no array.")
    return {
        member.removesuffix(".npy"): _Column(path, member, shape, dtype)
        for member, (shape, _, dtype) in headers.items()
    }


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = np.lib.format.read_magic(file)
    if version not in _READ_HEADER:
        raise ValueError(f"an array of format {version}")
    return _READ_HEADER[version](file)


def _splits_by_name(columns: Mapping[str, _Column]) -> dict[str, dict[str, _Column]]:
    splits: dict[str, dict[str, _Column]] = {}
    for key, column in columns.items():
        match = _COLUMN_OF_SPLIT.fullmatch(key) or _SPLIT_OF_COLUMN.fullmatch(key)
        if not match:
            return {}
        splits.setdefault(match["split"], {})[match["column"]] = column
    return splits


def _chunk(path: str, columns: Mapping[str, _Column]) -> Chunk:
    row_bytes = sum(column.row_bytes for column in columns.values())
    at_once = max(1, _BLOCK_BYTES // max(1, row_bytes))

    def batches(names: Sequence[str]) -> Iterator[Batch]:
        for blocks in zip(*(columns[name].blocks(at_once) for name in names), strict=True):
            yield range(len(blocks[0])), dict(zip(names, blocks, strict=True))

    return Chunk(path, next(iter(columns.values())).shape[0], batches)
