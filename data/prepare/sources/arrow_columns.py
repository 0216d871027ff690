"""Columns of Arrow tables: what a record holds of each type, and what is refused.

    column = ArrowColumn("age", is_number=True, is_label=False)
    column.add(plain(array), "people.parquet", range(100))

docs/data.md has the rules. `columns.Column` decides about types and missing values, as for CSV.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from data.numerals import CODE, DOUBLE, INTEGER, INTEGERS, LONG, LONGEST, NUMBER, TEXT
from data.prepare.sources.columns import EMPTY, MISSING, WHOLE, WRONG, Array, Column, Mask
from data.prepare.sources.examples import LISTED
from data.system.files import DataError
from data.tfrecord.examples import Values

LISTS, NUMERIC = "lists", "numbers"
_MOST_FLOAT32_INTEGER, MOST_FLOAT64_INTEGER = 2**24, 2**53
_LEAST_FLOAT32 = np.finfo(np.float32).smallest_normal
_LIST_TYPES = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def plain_type(dtype: pa.DataType) -> pa.DataType:
    """The type of `plain` arrays."""
    if pa.types.is_dictionary(dtype):
        return plain_type(dtype.value_type)
    if isinstance(dtype, pa.BaseExtensionType):
        return plain_type(dtype.storage_type)
    if not isinstance(dtype, _LIST_TYPES):
        return _VIEWS.get(dtype, dtype)
    items = dtype.value_field.with_type(plain_type(dtype.value_type))
    if isinstance(dtype, pa.FixedSizeListType):
        return pa.list_(items, dtype.list_size)
    return pa.list_(items) if isinstance(dtype, pa.ListType) else pa.large_list(items)


def plain(array: pa.Array) -> pa.Array:
    """The array without dictionaries, types of extensions, and views, which Arrow cannot take."""
    if pa.types.is_dictionary(array.type):  # Of views, perhaps, which Arrow cannot cast.
        return plain(array.dictionary).take(array.indices)
    dtype = plain_type(array.type)
    return array if dtype == array.type else array.cast(dtype)


def family_of(dtype: pa.DataType) -> str:
    """NUMERIC, TEXT or LISTS; "" for the type of only missing values, and for refused types.

    `dtype` is a `plain_type`, here and below.
    """
    if isinstance(dtype, _LIST_TYPES):
        items = dtype.value_type
        return LISTS if family_of(items) or pa.types.is_null(items) else ""
    if dtype in _TEXTS or pa.types.is_fixed_size_binary(dtype):
        return TEXT
    is_number = pa.types.is_primitive(dtype) or pa.types.is_decimal(dtype)  # Times are primitive.
    return NUMERIC if is_number and not pa.types.is_interval(dtype) else ""


def unit_of(dtype: pa.DataType) -> str:
    """The type of times, such as timestamp[ms]; NUMERIC; or "". For lists: of their items."""
    if isinstance(dtype, _LIST_TYPES):
        return unit_of(dtype.value_type)
    if pa.types.is_timestamp(dtype) and dtype.tz:  # All are stored in UTC.
        return f"{pa.timestamp(dtype.unit)} with a time zone"
    if pa.types.is_date(dtype):
        return "date"
    if _is_time(dtype):
        return str(dtype)
    return NUMERIC if family_of(dtype) == NUMERIC else ""


def _is_time(dtype: pa.DataType) -> bool:
    return pa.types.is_temporal(dtype) and not pa.types.is_interval(dtype)


class ArrowColumn(Column):
    """A column of numbers or times, if `is_number`, otherwise of text."""

    unit = "row"

    def __init__(self, name: str, *, is_number: bool, **how: Any) -> None:
        """`how`: the other arguments of Column."""
        super().__init__(name, **how)
        self._is_number = is_number
        # The values are text, and an option says that they are numbers.
        self._has_numerals = not is_number and self.declared in (INTEGER, NUMBER)
        self._types: dict[pa.DataType, None] = {}

    @override
    def add(self, values: pa.Array, path: str, rows: Sequence[int]) -> None:
        if not pa.types.is_null(values.type):
            self._types.setdefault(values.type)
        if self._has_numerals:
            super().add(_strings(values), path, rows)
            return
        if self._is_number and self.declared != TEXT:
            kinds = self._kinds_of_numbers(values, path, rows)
        else:
            found = as_text(values)
            self._num_rows += len(values)
            self._text_bytes += pc.sum(pc.binary_length(found)).as_py() or 0
            empty = _is_empty(found) & self.is_label
            kinds = {EMPTY: empty, TEXT: ~empty}
        for kind, mask in kinds.items():
            if number := int(np.count_nonzero(mask)):
                first = int(mask.argmax())
                said = "" if kind == EMPTY else _shown(values.slice(first, 1))
                self._count(kind, number, path, rows[first], said)

    def _kinds_of_numbers(self, array: pa.Array, path: str, rows: Sequence[int]) -> dict[str, Mask]:
        values, missing, beyond = numbers_of(array)
        present = ~(missing | beyond)
        kinds = {MISSING: missing, CODE: beyond}
        sizes = np.abs(values)
        if values.dtype == np.int64:
            sizes = sizes.view(np.uint64)  # Which holds 2**63.
            small = sizes.astype(np.float32).astype(np.uint64) == sizes
            long = ~small & (sizes <= MOST_FLOAT64_INTEGER)
            longest = ~small & ~long
            kinds |= {INTEGER: present & small, LONG: present & long, LONGEST: present & longest}
            return kinds
        if (infinite := present & np.isinf(values)).any():
            where = f"{path}, row {rows[int(infinite.argmax())]}"
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
        if not self._is_number:
            return TEXT
        dtypes = {numbers_of(pa.nulls(1, dtype))[0].dtype.name for dtype in self._types}
        return DOUBLE if "float64" in dtypes else NUMBER if "float32" in dtypes else INTEGER

    @override
    def lacks(self, values: pa.Array) -> Mask:
        if self._has_numerals:
            return super().lacks(_strings(values))
        return _is_empty(as_text(values)) if self.kind == TEXT else numbers_of(values)[1]

    @property
    @override
    def _dtype(self) -> str:
        if self.kind != INTEGER:
            return super()._dtype
        (dtype,) = {str(dtype) for dtype in self._types} if len(self._types) == 1 else {""}
        is_same = dtype in LISTED and not (self.num_missing and self.missing.kind)
        return dtype if is_same else "int64"

    @property
    def stored(self) -> str:
        """The type in the records, with the type in the source if it is another."""
        kind = "text" if self.kind == TEXT else self._dtype
        names = {"float": "float32", "double": "float64"}
        types = [TEXT if family_of(each) == TEXT else str(each) for each in self._types]
        others = [each for each in types if names.get(each, each) != kind]
        return f"{kind} of {', '.join(others)}" if others else kind

    @override
    def _names(self, values: pa.Array) -> list[str]:
        try:
            return [value.decode() for value in as_text(values).to_pylist()]
        except UnicodeDecodeError as error:
            raise DataError(
                f"The label {self.name} has {error.object!r}, which is not UTF-8. Needed are "
                "integers from 0, or names."
            ) from None

    @override
    def _texts(self, values: pa.Array) -> Values:
        return texts_of(values)

    @override
    def _numbers(self, values: pa.Array) -> Array:
        if self._has_numerals:
            return super()._numbers(_strings(values))
        number = self.missing.number
        found, missing, _ = numbers_of(values)
        if number and missing.any():
            if found.dtype != np.int64 or self.missing.kind not in INTEGERS:
                found = found.astype(np.float64)
            found = np.where(missing, found.dtype.type(number), found)
        return found


def numbers_of(array: pa.Array) -> tuple[Array, Mask, Mask]:
    """Numbers as int64, float32 or float64; and masks of missing ones and of those beyond int64.

    Times are numbers of their unit.
    """
    if pa.types.is_date64(array.type):
        array = array.cast(pa.date32(), safe=False)
    if _is_time(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
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
    numbers: Array = array.fill_null(0).to_numpy(zero_copy_only=False)
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
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), None, array)
    if family_of(array.type) == NUMERIC:
        try:
            array = array.cast(pa.large_string())
        except pa.ArrowInvalid as error:  # Of times whose time zone the system does not know.
            raise DataError(
                f"{array.type} cannot become text: {error}. Install tzdata, a package of the "
                "operating system; or leave such columns out of --text."
            ) from None
    elif pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    return array.cast(pa.large_binary()).fill_null(b"")


def _is_empty(texts: pa.Array) -> Mask:
    empty: Mask = pc.equal(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    return empty


def texts_of(array: pa.Array) -> Values:
    """Text as an array of bytes, which are empty for missing values."""
    texts: Values = as_text(array).to_numpy(zero_copy_only=False)
    return texts


def _strings(texts: pa.Array) -> list[str]:
    """Text as Python's, in which bytes that are not UTF-8 are replaced."""
    return [text.decode(errors="replace").strip() for text in as_text(texts).to_pylist()]


def _shown(array: pa.Array) -> str:
    """The only value of an array, for messages."""
    if not array[0].is_valid:
        return "null"
    if family_of(array.type) == TEXT:
        return _strings(array)[0] or "null"
    # Times as they are stored: Python holds fewer, and needs other packages for some.
    return str(numbers_of(array)[0][0] if _is_time(array.type) else array[0].as_py())
