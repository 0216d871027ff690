"""Columns of Arrow tables whose values are lists: tensors of one shape.

Lists that all have one length, also nested lists, become a tensor. If lengths differ, short lists
are filled up to the longest: with -1, or with empty text. Lists of floats are refused then, because
no float marks what was filled up. A missing list is not an empty list: --missing=drop leaves out
its row.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from data.numerals import LONGEST, TEXT
from data.prepare.sources import DROP
from data.prepare.sources.arrow_columns import (
    LISTS,
    MOST_FLOAT64_INTEGER,
    as_text,
    family_of,
    numbers_of,
    texts_of,
)
from data.prepare.sources.columns import MISSING, Array, First, ListColumn, Mask, Missing
from data.prepare.sources.examples import RAW, Classes
from data.system.files import DataError
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import PADDING, Values, fixed


class ArrowLists(ListColumn):
    """A column of lists."""

    unit = "row"

    def __init__(self, name: str, **how: Any) -> None:
        """`how`: the other arguments of Column. The items become text if `declared` is TEXT."""
        super().__init__(name, **how)
        self._least: list[int] = []  # By level, from the outermost.
        self._most: list[int] = []
        self._dtypes: set[str] = set()
        self._where = ""  # The first row.

    @override
    def add(self, values: pa.Array, path: str, rows: Sequence[int]) -> None:
        is_missing = self.lacks(values)
        places = np.flatnonzero(~is_missing)
        if is_missing.any():
            self._count(MISSING, len(rows) - len(places), path, rows[int(is_missing.argmax())])
            values = values.drop_null()
        if not len(values):
            return
        self._where = self._where or f"{path}, row {rows[0]}"
        self._num_rows += len(values)
        lengths, items = _levels(values)
        depth = len(lengths)

        def where(item: int, level: int = depth) -> str:
            for counts in reversed(lengths[:level]):
                item = int(np.searchsorted(np.cumsum(counts), item, side="right"))
            return f"{path}, row {rows[int(places[item])]}"

        self._least += [2**62] * (depth - len(self._least))
        self._most += [0] * (depth - len(self._most))
        for level, counts in enumerate(lengths):
            if (counts < 0).any():
                raise self._no_item(where(int((counts < 0).argmax()), level))
            self._least[level] = int(counts.min(initial=self._least[level]))
            self._most[level] = int(counts.max(initial=self._most[level]))

        lacking = items.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
        if lacking.any():
            raise self._no_item(where(int(lacking.argmax())))
        if self.declared == TEXT or family_of(items.type) == TEXT:
            self._dtypes.add("string")
            self._text_bytes += pc.sum(pc.binary_length(as_text(items))).as_py() or 0
            return
        numbers, _, wrong = numbers_of(items)
        wrong |= ~np.isfinite(numbers)
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(
                f"{where(first)}: an item of {self.name} is {items[first]}. Needed are numbers, "
                "finite, and integers that int64 holds. Replace it in the source; or leave the "
                f"column out, by --columns; or add {self.as_text}."
            )
        marks = {str(PADDING): numbers == PADDING}
        if numbers.dtype == np.int64:
            most = MOST_FLOAT64_INTEGER
            marks[LONGEST] = np.greater(numbers, most) | np.less(numbers, -most)
        for kind, mark in marks.items():
            if kind not in self._first and mark.any():
                self._first[kind] = First(where(int(mark.argmax())), "")
        if not pa.types.is_null(items.type):
            self._dtypes.add(_dtype_of(items.type, numbers))

    def _no_item(self, where: str) -> DataError:
        return DataError(
            f"{where}: an item of {self.name} is missing. Replace it in the source, or leave the "
            "column out, by --columns."
        )

    @override
    def lacks(self, values: pa.Array) -> Mask:
        lacking: Mask = values.is_null().to_numpy(zero_copy_only=False)
        return lacking

    @override
    def finish(self, missing: Missing) -> None:
        """Raises DataError if the lists make no tensor of one shape, or if some are missing."""
        if MISSING in self._first and not missing.drops:
            raise DataError(
                f"{self._first[MISSING].where}: column {self.name} has 'null': "
                f"{self.num_missing:,} of its lists are missing. Add --missing={DROP}, which "
                "leaves out such rows; or replace them in the source, by empty lists for example."
            )
        if len(self._dtypes) > 1 and "string" in self._dtypes:
            raise DataError(
                f"{self._where}: the items of {self.name} are text in some rows, numbers in "
                f"others. If all are text, add {self.as_text}."
            )
        self._shape = [max(1, length) for length in self._most]
        self._is_padded = self._least != self._most or 0 in self._most
        if self.declared == TEXT or self._dtypes == {"string"}:
            self._item_type = "string"
        elif len(self._dtypes) == 1 and not self._is_padded:
            self._item_type = next(iter(self._dtypes))
        else:
            is_float = any("float" in dtype for dtype in self._dtypes)
            self._item_type = "float64" if is_float else "int64"
        if LONGEST in self._first and "float" in self._item_type:
            raise DataError(
                f"{self._first[LONGEST].where}: column {self.name} has integers above 2**53, "
                "which float64 may change, and numbers with a fraction elsewhere. Make all of them "
                f"floats in the source; or, if all are text, add {self.as_text}."
            )
        if not self._is_padded:
            return
        lengths = f"lists of {self._least[0]} to {self._most[0]} items"
        if len(self._most) > 1 or "float" in self._item_type:
            what = "nested lists" if len(self._most) > 1 else "numbers with a fraction"
            raise DataError(
                f"{self._where}: column {self.name} has {lengths}, of {what}. Needed are lists of "
                "one length: only lists of integers or of text are filled up. Fill them up in the "
                "source, or leave the column out, by --columns."
            )
        self._check_padding()

    @override
    def notes(self, path: str) -> Iterator[str]:
        return super().notes(path) if self._is_padded else iter(())

    @property
    def stored(self) -> str:
        """The type in the records."""
        return f"{'text' if self._item_type == 'string' else self._item_type} {self._shape}"

    @override
    def convert(self, values: pa.Array, classes: Classes | None = None) -> Values:
        lengths, found = _levels(values)
        is_text = self._item_type == "string"
        items = texts_of(found) if is_text else numbers_of(found)[0]
        if self._is_padded:
            places = np.arange(self._shape[0]) < lengths[0][:, np.newaxis]
            padded = np.full(places.shape, b"" if is_text else PADDING, items.dtype)
            padded[places] = items
            items = padded
        rows = items.reshape(len(values), -1)
        return rows if is_text else fixed(rows.astype(np.dtype(self._item_type).newbyteorder("<")))


def _levels(array: pa.Array) -> tuple[list[Int64s], pa.Array]:
    """The lengths of the lists by level (-1: missing), and the items of the innermost lists."""
    lengths = []
    while family_of(array.type) == LISTS:
        counts = pc.list_value_length(array).fill_null(-1)
        lengths.append(counts.to_numpy(zero_copy_only=False).astype(np.int64))
        array = array.flatten()
    return lengths, array


def _dtype_of(dtype: pa.DataType, values: Array) -> str:
    if pa.types.is_boolean(dtype):
        return "uint8"
    if pa.types.is_float16(dtype):
        return "float16"
    name = values.dtype.name if values.dtype.kind == "f" else str(dtype)
    return name if name in RAW else "int64"
