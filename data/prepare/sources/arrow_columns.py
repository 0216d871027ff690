"""Columns of Arrow tables: what a record holds of each type, and what is refused.

    column = ArrowColumn("age", is_number=True, is_label=False, declared="", texts=())
    column.add_array(array, "people.parquet", 0)    # each array; row 0 is its first
    column.finish(missing_of("drop"))               # a DataError names file and row
    values = column.convert(array)                  # for data.tfrecord.examples

docs/data.md has the rules. `columns.Column` decides about types and missing values, as for CSV.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from data.numerals import CODE, DOUBLE, INTEGER, INTEGERS, LONG, LONGEST, NUMBER, TEXT
from data.prepare.sources.columns import (
    EMPTY,
    MISSING,
    MISSING_VALUES,
    WHOLE,
    WRONG,
    Column,
    First,
    whole,
)
from data.prepare.sources.examples import Classes, Node, scalar, tensor, text
from data.system.files import DataError
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import Texts, Values, fixed

Array = npt.NDArray[np.generic]
Mask = npt.NDArray[np.bool_]

LISTS = "lists"
_MOST_FLOAT32_INTEGER, MOST_FLOAT64_INTEGER = 2**24, 2**53
_LEAST_FLOAT32 = np.finfo(np.float32).smallest_normal
_STORED = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32")  # Others become int64.
_LIST_TYPES = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), *_VIEWS)


def family_of(dtype: pa.DataType) -> str:
    """NUMBER, TEXT or LISTS; "" for the type of only missing values, and for refused types."""
    if pa.types.is_dictionary(dtype):
        return family_of(dtype.value_type)
    if isinstance(dtype, pa.BaseExtensionType):
        return family_of(dtype.storage_type)
    if isinstance(dtype, _LIST_TYPES):
        items = dtype.value_type
        return LISTS if family_of(items) or pa.types.is_null(items) else ""
    if dtype in _TEXTS or pa.types.is_fixed_size_binary(dtype):
        return TEXT
    is_number = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal
    return NUMBER if any(is_one(dtype) for is_one in is_number) or _is_time(dtype) else ""


def unit_of(dtype: pa.DataType) -> str:
    """The type of times, such as timestamp[ms]; NUMBER; or "". For lists: of their items."""
    if pa.types.is_dictionary(dtype) or isinstance(dtype, _LIST_TYPES):
        return unit_of(dtype.value_type)
    if isinstance(dtype, pa.BaseExtensionType):
        return unit_of(dtype.storage_type)
    if pa.types.is_timestamp(dtype) and dtype.tz:  # All are stored in UTC.
        return f"{pa.timestamp(dtype.unit)} with a time zone"
    if pa.types.is_date(dtype):
        return "date"
    if _is_time(dtype):
        return str(dtype)
    return NUMBER if family_of(dtype) == NUMBER else ""


def without_views(array: pa.Array) -> pa.Array:
    """The array with other types of text in place of views, which Arrow cannot take or filter."""
    if pa.types.is_dictionary(array.type) and array.type.value_type in _VIEWS:
        return without_views(array.dictionary).take(array.indices)
    dtype = _type_without_views(array.type)
    return array if dtype == array.type else array.cast(dtype)


def _type_without_views(dtype: pa.DataType) -> pa.DataType:
    if not isinstance(dtype, _LIST_TYPES):
        return _VIEWS.get(dtype, dtype)
    items = dtype.value_field.with_type(_type_without_views(dtype.value_type))
    if isinstance(dtype, pa.FixedSizeListType):
        return pa.list_(items, dtype.list_size)
    return pa.list_(items) if isinstance(dtype, pa.ListType) else pa.large_list(items)


def plain(array: pa.Array) -> pa.Array:
    """The array without dictionaries and types of extensions; times as integers of their unit."""
    if pa.types.is_dictionary(array.type):
        return plain(array.dictionary_decode())
    if isinstance(array.type, pa.BaseExtensionType):
        return plain(array.storage)
    if pa.types.is_date64(array.type):
        array = array.cast(pa.date32(), safe=False)
    if _is_time(array.type):
        integer = pa.int32() if array.type.bit_width == 32 else pa.int64()
        return array.view(integer).cast(pa.int64())
    return array


def _is_time(dtype: pa.DataType) -> bool:
    return pa.types.is_temporal(dtype) and not pa.types.is_interval(dtype)


class ArrowColumn(Column):
    """A column of numbers or times, if `is_number`, otherwise of text."""

    unit = "row"

    def __init__(
        self, name: str, *, is_number: bool, is_label: bool, declared: str, texts: Sequence[str]
    ) -> None:
        super().__init__(name, is_label=is_label, declared=declared, texts=texts)
        self._is_number = is_number
        self._types: dict[pa.DataType, None] = {}
        self._text_bytes = self._num_rows = 0

    def add_array(self, array: pa.Array, path: str, row: int) -> None:
        """Adds values; the first is in `row` of file `path`."""
        if not pa.types.is_null(dtype := array.type):
            self._types.setdefault(dtype.value_type if pa.types.is_dictionary(dtype) else dtype)
        self._num_rows += len(array)
        if self._is_number:
            if self.declared == TEXT:
                self._text_bytes += pc.sum(pc.binary_length(as_text(array))).as_py() or 0
            kinds = self._kinds_of_numbers(plain(array), path, row)
        elif self.declared in (INTEGER, NUMBER):
            for number, value in enumerate(map(_str, array.to_pylist()), row):
                self.add(path, number, value)
            return
        else:
            found = as_text(array)
            self._text_bytes += pc.sum(pc.binary_length(found)).as_py() or 0
            empty = _is_empty(found) & self.is_label
            kinds = {EMPTY: empty, TEXT: ~empty}
        for kind, mask in kinds.items():
            if number := int(np.count_nonzero(mask)):
                first = int(mask.argmax())
                said = "" if kind == EMPTY else _str(array[first].as_py()) or "null"
                self.count(kind, number, First(path, row + first, said, "row"))

    def _kinds_of_numbers(self, array: pa.Array, path: str, row: int) -> dict[str, Mask]:
        values, missing, beyond = numbers_of(array)
        if self.declared == TEXT:
            return {MISSING if not self.is_label else EMPTY: missing, TEXT: ~missing}
        present = ~(missing | beyond)
        kinds = {MISSING: missing, CODE: beyond}
        sizes = np.abs(values)
        if values.dtype == np.int64:
            # The absolute value of -2**63 is negative in int64.
            small = (sizes <= _MOST_FLOAT32_INTEGER) & (sizes >= 0)
            if not small.all():
                small |= (sizes >= 0) & (sizes.astype(np.float32).astype(np.float64) == sizes)
            long = ~small & (sizes <= MOST_FLOAT64_INTEGER) & (sizes >= 0)
            return {
                **kinds,
                INTEGER: present & small,
                LONG: present & long,
                LONGEST: present & ~small & ~long,
            }
        if (infinite := present & np.isinf(values)).any():
            where = First(path, row + int(infinite.argmax()), "", "row").where
            raise DataError(
                f"{where}: column {self.name} has an infinite value. Needed are finite numbers. "
                f"Replace it in the source, by null for example, for which --missing says what is "
                f"done; or leave the column out, by --columns."
            )
        if self.is_label or self.declared == INTEGER:
            is_whole = (values == np.rint(values)) & (sizes < 2.0**63)
            kind, other = (WHOLE, NUMBER) if not self.declared else (INTEGER, WRONG)
            return {**kinds, kind: present & is_whole, other: present & ~is_whole}
        if values.dtype == np.float64 and not self.declared:
            return {**kinds, DOUBLE: present}
        with np.errstate(over="ignore"):
            changes = (sizes > _MOST_FLOAT32_INTEGER) & (values.astype(np.float32) != values)
        double = changes | ((sizes < _LEAST_FLOAT32) & (sizes > 0) & (values.dtype == np.float64))
        return {**kinds, NUMBER: present & ~double, DOUBLE: present & double}

    @property
    @override
    def _kind_if_empty(self) -> str:
        floats = {dtype for dtype in self._types if pa.types.is_floating(dtype)}
        decimals = filter(pa.types.is_decimal, self._types)
        reals = {*floats, *(dtype for dtype in decimals if dtype.scale > 0)}
        if not reals:
            return INTEGER if self._is_number else TEXT
        return NUMBER if reals <= {pa.float16(), pa.float32()} else DOUBLE

    def notes(self, path: str) -> Iterator[str]:
        """What a user should know of the column."""
        yield self.note()

    def lacks(self, array: pa.Array) -> Mask:
        """A mask, bool [n]: true where a value is missing."""
        if self.kind == TEXT:
            return _is_empty(as_text(array))
        if not self._is_number:
            return np.array([_str(v).lower() in MISSING_VALUES for v in array.to_pylist()], bool)
        return numbers_of(plain(array))[1]

    @property
    def node(self) -> Node:
        """The feature that describes the column."""
        if self.kind == TEXT:
            return text()
        return tensor("float64", ()) if self.kind == DOUBLE else scalar(self._dtype)

    @property
    def _dtype(self) -> str:
        if self.kind != INTEGER:
            return "float64" if self.kind == DOUBLE else "float32"
        (dtype,) = {str(dtype) for dtype in self._types} if len(self._types) == 1 else {""}
        is_same = dtype in _STORED and not (self.num_missing and self.missing.kind)
        return dtype if is_same else "int64"

    @property
    def stored(self) -> str:
        """The type in the records, with the type in the source if it is another."""
        kind = "text" if self.kind == TEXT else self._dtype
        others = ["text" if family_of(dtype) == TEXT else str(dtype) for dtype in self._types]
        others = [each for each in others if each.replace("double", "float64") != kind]
        others = [each for each in others if (each, kind) != ("float", "float32")]
        return f"{kind} of {', '.join(others)}" if others else kind

    @property
    def num_bytes(self) -> int:
        """The bytes of a value, on average."""
        return 8 + self._text_bytes // max(1, self._num_rows)

    def classes(self, array: pa.Array) -> set[int | str]:
        """The values of a label, different ones only."""
        if self.kind == TEXT:
            found = pc.unique(as_text(array)).to_pylist()
            try:
                return {value.decode() for value in found}
            except UnicodeDecodeError as error:
                raise DataError(
                    f"The label {self.name} has {error.object!r}, which is not UTF-8. Needed are "
                    "integers from 0, or names."
                ) from None
        return set(np.unique(self._values(array)).astype(np.int64).tolist())

    def convert(self, array: pa.Array, classes: Classes | None = None) -> Values:
        """The values as a record holds them. `classes`: of the label."""
        if self.kind == TEXT:
            found = as_text(array)
            if classes is None:
                return texts_of(found)
            names = pa.array([name.encode() for name in classes.names], found.type)
            places: Int64s = pc.index_in(found, names).to_numpy(zero_copy_only=False)
            return places.astype(np.int64)
        values = self._values(array)
        if self.kind == INTEGER:
            return values.astype(np.int64)
        return values.astype(np.float32) if self.kind == NUMBER else fixed(values.astype("<f8"))

    def _values(self, array: pa.Array) -> Array:
        """Numbers, with the number of --missing in the place of missing ones."""
        number = self.missing.number
        if not self._is_number:
            found = [
                number if value.lower() in MISSING_VALUES else value
                for value in map(_str, array.to_pylist())
            ]
            if self.kind == INTEGER:
                return np.array(list(map(whole, found)), np.int64)
            return np.array(list(map(float, found)), np.float64)
        values, missing, _ = numbers_of(plain(array))
        if number and missing.any():
            if values.dtype != np.int64 or self.missing.kind not in INTEGERS:
                values = values.astype(np.float64)
            values = np.where(missing, values.dtype.type(number), values)
        return values


def numbers_of(array: pa.Array) -> tuple[Array, Mask, Mask]:
    """Numbers as int64, float32 or float64; and masks of missing ones and of those beyond int64."""
    missing: Mask = array.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    beyond = np.zeros(len(array), bool)
    if pa.types.is_decimal(array.type):
        if array.type.scale > 0:  # From its digits: the nearest float64.
            array = array.cast(pa.string()).cast(pa.float64())
        else:
            integers = [0 if value is None else int(value) for value in array.to_pylist()]
            beyond = np.array([not -(2**63) <= value < 2**63 for value in integers], bool)
            return np.where(beyond, 0, np.array(integers, object)).astype(np.int64), missing, beyond
    if pa.types.is_boolean(array.type) or pa.types.is_null(array.type):
        array = array.cast(pa.int8())
    if array.null_count:
        array = array.fill_null(0)
    numbers: Array = array.to_numpy(zero_copy_only=False)
    if numbers.dtype == np.float16:
        numbers = numbers.astype(np.float32)
    if numbers.dtype.kind == "f":
        return numbers, missing, beyond
    if numbers.dtype == np.uint64:
        beyond = np.greater_equal(numbers, np.uint64(2**63))
        numbers = np.where(beyond, np.uint64(0), numbers)
    return numbers.astype(np.int64, copy=False), missing, beyond


def as_text(array: pa.Array) -> pa.Array:
    """Text, as large binary; missing values are empty."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), None, array)
    if family_of(array.type) == NUMBER:
        array = array.cast(pa.large_string())
    elif pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    found = array.cast(pa.large_binary())
    return found.fill_null(b"") if found.null_count else found


def _is_empty(texts: pa.Array) -> Mask:
    empty: Mask = pc.equal(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    return empty


def texts_of(array: pa.Array) -> Texts:
    """The bytes of large binary without nulls."""
    _, offsets, content = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(content or b"", np.uint8)[ends[0] : ends[-1]]
    return Texts(data, np.diff(ends))


def _str(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace").strip()
    return "" if value is None else str(value).strip()
