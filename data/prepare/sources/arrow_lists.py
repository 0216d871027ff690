"""Columns of Arrow tables whose values are lists: tensors of one shape.

Lists that all have one length, also nested lists, become a tensor. If lengths differ, short lists
are filled up to the longest: with -1, or with empty text. Lists of floats are refused then, because
no float marks what was filled up. A missing list is not an empty list: --missing=drop leaves out
its row.
"""

import math
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.numerals import TEXT
from data.prepare.sources import DROP
from data.prepare.sources.arrow_columns import (
    LISTS,
    MOST_FLOAT64_INTEGER,
    Array,
    Mask,
    as_text,
    family_of,
    numbers_of,
    plain,
    texts_of,
)
from data.prepare.sources.columns import First, Missing, padding_error
from data.prepare.sources.examples import Classes, Node, tensor
from data.prepare.sources.tables import typed
from data.system.files import DataError
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import PADDING, Texts, Values, fixed

# Types that tf.io.decode_raw reads. Others become int64; of bool, uint8.
_STORED = ("uint8", "int8", "uint16", "int16", "int32", "float16", "float32", "float64")


class ArrowLists:
    """A column of lists."""

    def __init__(self, name: str, *, is_text: bool) -> None:
        """`is_text`: the items become text, also numbers."""
        self.name, self._is_text = name, is_text
        self._least: list[int] = []  # By level, from the outermost.
        self._most: list[int] = []
        self._dtypes: set[str] = set()
        self._padding: First | None = None  # The first item that has its value.
        self._long: First | None = None  # The first integer that float64 may change.
        self._missing: First | None = None  # The first missing list.
        self.num_missing = 0
        self._text_bytes = self._num_rows = 0
        self._where = ""  # The first row.

    def add_array(self, array: pa.Array, path: str, row: int) -> None:
        """Adds lists; the first is in `row` of file `path`."""
        is_missing = self.lacks(array)
        places = np.flatnonzero(~is_missing)
        if is_missing.any():
            self._missing = self._missing or First(path, row + int(is_missing.argmax()), "", "row")
            self.num_missing += int(np.count_nonzero(is_missing))
            array = array.drop_null()
        if not len(array):
            return
        self._where = self._where or First(path, row, "", "row").where
        self._num_rows += len(array)
        lengths, items = _levels(plain(array))
        depth = len(lengths)

        def where(item: int, level: int = depth) -> First:
            for counts in reversed(lengths[:level]):
                item = int(np.searchsorted(np.cumsum(counts), item, side="right"))
            return First(path, row + int(places[item]), "", "row")

        for level, counts in enumerate(lengths):
            if (counts < 0).any():
                raise self._no_item(where(int((counts < 0).argmax()), level))
            least, most = int(counts.min(initial=2**62)), int(counts.max(initial=0))
            if level == len(self._most):
                self._least.append(least)
                self._most.append(most)
            self._least[level] = min(self._least[level], least)
            self._most[level] = max(self._most[level], most)

        lacking = items.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
        if lacking.any():
            raise self._no_item(where(int(lacking.argmax())))
        if self._is_text or family_of(items.type) == TEXT:
            self._dtypes.add("string")
            self._text_bytes += pc.sum(pc.binary_length(as_text(items))).as_py() or 0
            return
        values, _, wrong = numbers_of(items)
        if values.dtype != np.int64:
            wrong |= ~np.isfinite(values)
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(
                f"{where(first).where}: an item of {self.name} is {items[first]}. Needed are "
                "numbers, finite, and integers that int64 holds. Replace it in the source; or "
                f"leave the column out, by --columns; or add {typed('text', self.name)}."
            )
        if not self._padding and (found := values == PADDING).any():
            self._padding = where(int(found.argmax()))
        most = MOST_FLOAT64_INTEGER
        if values.dtype == np.int64 and not self._long:
            beyond = np.greater(values, most) | np.less(values, -most)
            self._long = where(int(beyond.argmax())) if beyond.any() else None
        if not pa.types.is_null(items.type):
            self._dtypes.add(_dtype_of(items.type, values))

    def _no_item(self, where: First) -> DataError:
        return DataError(
            f"{where.where}: an item of {self.name} is missing. Replace it in the source, or leave "
            "the column out, by --columns."
        )

    def lacks(self, array: pa.Array) -> Mask:
        """A mask, bool [n]: true where a list is missing."""
        lacking: Mask = plain(array).is_null().to_numpy(zero_copy_only=False)
        return lacking

    def finish(self, missing: Missing) -> None:
        """Raises DataError if the lists make no tensor of one shape, or if some are missing."""
        if self._missing and not missing.drops:
            raise DataError(
                f"{self._missing.where}: column {self.name} has 'null': {self.num_missing:,} of "
                f"its lists are missing. Add --missing={DROP}, which leaves out such rows; or "
                "replace them in the source, by empty lists for example."
            )
        if len(self._dtypes) > 1 and "string" in self._dtypes:
            raise DataError(
                f"{self._where}: the items of {self.name} are text in some rows, numbers in "
                f"others. If all are text, add {typed('text', self.name)}."
            )
        if self._long and "float" in self._dtype:
            raise DataError(
                f"{self._long.where}: column {self.name} has integers above 2**53, which float64 "
                "may change, and numbers with a fraction elsewhere. Make all of them floats in the "
                f"source; or, if all are text, add {typed('text', self.name)}."
            )
        if not self._is_padded:
            return
        lengths = f"lists of {self._least[0]} to {self._most[0]} items"
        if len(self._most) > 1 or "float" in self._dtype:
            what = "nested lists" if len(self._most) > 1 else "numbers with a fraction"
            raise DataError(
                f"{self._where}: column {self.name} has {lengths}, of {what}. Needed are lists of "
                "one length: only lists of integers or of text are filled up. Fill them up in the "
                "source, or leave the column out, by --columns."
            )
        if self._padding and not self._is_string:
            raise padding_error(self._padding, self.name, typed("text", self.name))

    def notes(self, path: str) -> Iterator[str]:
        """What a user should know of the column."""
        if self._is_padded:
            yield f"{path}: the longest list of {self.name} has {self._shape[0]:,} items"

    @property
    def node(self) -> Node:
        """The feature that describes the column."""
        return tensor("string" if self._is_string else self._dtype, self._shape)

    @property
    def stored(self) -> str:
        """The type in the records."""
        return f"{'text' if self._is_string else self._dtype} {self._shape}"

    @property
    def num_bytes(self) -> int:
        """The bytes of a value, on average."""
        items = math.prod(self._shape)
        if self._is_string:
            return 2 * items + self._text_bytes // max(1, self._num_rows)
        return items * np.dtype(self._dtype).itemsize

    @property
    def _is_padded(self) -> bool:
        return self._least != self._most or 0 in self._most

    @property
    def _is_string(self) -> bool:
        return self._is_text or self._dtypes == {"string"}

    @property
    def _shape(self) -> list[int]:
        return [max(1, length) for length in self._most]

    @property
    def _dtype(self) -> str:
        if len(self._dtypes) == 1 and not self._is_padded:
            return next(iter(self._dtypes))
        is_float = any("float" in dtype for dtype in self._dtypes)
        return "float64" if is_float else "int64"

    def convert(self, array: pa.Array, classes: Classes | None = None) -> Values:
        """The values as a record holds them. `classes` is None: lists are no label."""
        lengths, items = _levels(plain(array))
        places = np.arange(self._shape[0]) < lengths[0][:, np.newaxis]
        if self._is_string:
            found = texts_of(as_text(items))
            if not self._is_padded:
                return Texts(found.data, found.lengths, math.prod(self._shape))
            sizes = np.zeros(places.shape, np.int64)
            sizes[places] = found.lengths
            return Texts(found.data, sizes.reshape(-1), self._shape[0])
        values = numbers_of(items)[0] if len(items) else np.zeros(0, np.int64)
        if self._is_padded:
            padded = np.full(places.shape, PADDING, np.int64)
            padded[places] = values
            values = padded
        stored = values.astype(np.dtype(self._dtype).newbyteorder("<"))
        return fixed(stored.reshape(len(array), -1))


def _levels(array: pa.Array) -> tuple[list[Int64s], pa.Array]:
    """The lengths of the lists by level (-1: missing), and the items of the innermost lists."""
    lengths = []
    while family_of(array.type) == LISTS:
        counts = pc.list_value_length(array).fill_null(-1)
        lengths.append(counts.to_numpy(zero_copy_only=False).astype(np.int64))
        array = plain(array.flatten())
    return lengths, array


def _dtype_of(dtype: pa.DataType, values: Array) -> str:
    if pa.types.is_boolean(dtype):
        return "uint8"
    if pa.types.is_float16(dtype):
        return "float16"
    name = values.dtype.name if values.dtype.kind == "f" else str(dtype)
    return name if name in _STORED else "int64"
