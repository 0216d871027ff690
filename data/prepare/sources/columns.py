"""The columns of a table: their types, which all their values decide, and errors for wrong values.

column = Column("age", is_label=False)
column.add(["37", "41"], "people.csv", [2, 3])  # all values, with their lines
column.finish(missing_of("drop"))               # a DataError names file and line
print(column.kind)                              # INTEGER
values = column.convert(["37", "41"])           # for data.tfrecord.examples
"""

import collections
import csv
import decimal
import difflib
import itertools
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from data.numerals import (
    CODE,
    DOUBLE,
    FOREIGN,
    GROUPED,
    INTEGER,
    INTEGERS,
    LEAST_FLOAT64,
    LONG,
    LONGEST,
    MOST_FLOAT64,
    NUMBER,
    NUMBERS,
    TEXT,
    kind_of,
)
from data.prepare.sources import DROP, Options
from data.prepare.sources.examples import Classes, Node, classes_of, scalar, tensor, text
from data.system.files import DataError
from data.tfrecord.examples import PADDING, Values, fixed

MISSING_VALUES = ("", "na", "n/a", "nan", "null", "none", "?")

MISSING, EMPTY = "missing", "empty"
WHOLE = "whole"  # An integer with a decimal point or an exponent, in a label: 1.0
WRONG = "wrong"  # Not of the type that an option says.
_NUMERALS = (*NUMBERS, CODE)
_MOST_DIGITS = 19  # Of int64.
_OPTION_OF = {INTEGER: "integer", NUMBER: "float"}
_SHOWN_COLUMNS = 30
_DTYPES = {INTEGER: "int64", NUMBER: "float32", DOUBLE: "float64"}

Array: TypeAlias = npt.NDArray[np.generic]
Mask: TypeAlias = npt.NDArray[np.bool_]


class TableColumn(NamedTuple):
    """A column of a table as a feature, which `node` describes.

    `num_bytes`: an estimate of the size of a value. `convert(values, classes)` returns values as a
    record holds them; `classes` are those of the label.
    """

    node: Node
    num_bytes: int
    convert: Callable[[Any, Classes | None], Values]


class First(NamedTuple):
    """The first value of a kind in a column; `where`: its file, and its place there."""

    where: str
    value: str


class Missing(NamedTuple):
    """What becomes of missing values: rows are left out, or `number` of a kind replaces them."""

    drops: bool
    number: str = ""
    kind: str = ""


class Column:
    """Counts the values of a column by kind, keeps the first of each, and finds the type.

    Values are texts here; `ArrowColumn` is the same for arrays of Arrow.
    """

    unit = "line"  # What the numbers of rows in messages are.

    def __init__(
        self, name: str, *, is_label: bool = False, declared: str = "", texts: Sequence[str] = ()
    ) -> None:
        """`declared`: TEXT, INTEGER or NUMBER, if an option says so. `texts`: columns of --text."""
        self.name, self.is_label, self.declared = name, is_label, declared
        self.as_text = typed("text", *texts, name)  # The flag that makes it text.
        self._first: dict[str, First] = {}
        self.counts: collections.Counter[str] = collections.Counter()  # Of values, by kind.
        self.missing = Missing(False)
        self.kind = ""  # INTEGER, NUMBER, DOUBLE or TEXT, after `finish`.
        self._text_bytes = self._num_rows = 0

    def add(self, values: Any, path: str, rows: Sequence[int]) -> None:
        """Adds values, which are in these `rows` (or lines) of file `path`."""
        self._num_rows += len(values)
        self._text_bytes += len("".join(values).encode())
        for value, row in zip(values, rows, strict=True):
            self._add(value, path, row)

    def _add(self, value: str, path: str, row: int) -> None:
        kind = kind_of(value)
        if kind == TEXT and value.lower() in MISSING_VALUES:
            kind = MISSING if value else EMPTY
        elif self.declared == INTEGER:
            kind = INTEGER if kind in _NUMERALS and whole(value) is not None else WRONG
        elif self.declared == NUMBER:
            kind = kind_of(repr(float(value))) if kind == CODE else kind
            kind = kind if kind in NUMBERS else WRONG
        elif self.is_label and kind in (NUMBER, DOUBLE) and whole(value) is not None:
            kind = WHOLE
        if kind in self.counts:
            self.counts[kind] += 1
        else:
            self._count(kind, 1, path, row, value)

    def _count(self, kind: str, number: int, path: str, row: int, value: str = "") -> None:
        """Adds `number` values of a kind; `value` is the first of them."""
        self.counts[kind] += number
        self._first.setdefault(kind, First(f"{path}, {self.unit} {row}", value))

    def finish(self, missing: Missing) -> None:
        """Finds the kind, after all values were added. Raises DataError for a wrong value."""
        self.missing, self.kind = missing, self._found_kind(missing)

    def _found_kind(self, missing: Missing) -> str:
        first, counts = self._first, self.counts
        if self.is_label and EMPTY in first and not missing.drops:
            where = first[EMPTY].where
            raise DataError(
                f"{where}: the label {self.name} is empty. --missing={DROP} leaves out "
                "rows without a label."
            )
        if self.declared == TEXT:
            return TEXT
        if WRONG in first:
            wrong = first[WRONG]
            option = _OPTION_OF[self.declared]
            raise DataError(
                f"{wrong.where}: column {self.name} has {wrong.value!r}, and --{option} says that "
                f"each of its values is {'an integer' if option == 'integer' else 'a number'}. "
                f"Correct it, or type {self.as_text} in place of --{option}={self.name}."
            )
        numbers = [kind for kind in (*NUMBERS, WHOLE) if kind in first]
        num_foreign = counts[FOREIGN]
        if numbers or num_foreign:
            num_foreign += counts[GROUPED]
        if num_foreign > counts[TEXT]:
            wrong = first.get(FOREIGN) or first[GROUPED]
            raise DataError(
                f"{wrong.where}: column {self.name} has {wrong.value!r}: {num_foreign:,} of "
                f"its {counts.total():,} values are numbers in another notation. Needed are "
                "the digits 0 to 9 and a decimal point, without other separators: -1234.5 or 2e-3; "
                f"from {LEAST_FLOAT64:.2g} to {MOST_FLOAT64:.2g}, or 0. Write them so, or, if they "
                f"are text, add {self.as_text}."
            )
        kinds = {*numbers, self.declared} - {""} or {self._kind_if_empty}
        if TEXT in kinds or (not self.declared and first.keys() & {TEXT, CODE}):
            return TEXT
        if self._num_missing:
            self._check_missing(missing)
            kinds |= {missing.kind} - {""}
        if kinds.issubset({*INTEGERS, WHOLE}):
            return INTEGER
        if LONGEST in first and not self.declared:
            return TEXT
        return DOUBLE if kinds & {LONG, LONGEST, DOUBLE} else NUMBER

    @property
    def _kind_if_empty(self) -> str:
        """The kind if all values are missing."""
        return TEXT

    def _check_missing(self, missing: Missing) -> None:
        """Raises DataError if `missing` does not say what becomes of missing values."""
        first = self._first
        wrong = first.get(EMPTY) or first[MISSING]
        where = f"{wrong.where}: column {self.name} has {wrong.value!r}"
        if not missing.drops and (not missing.kind or self.is_label):
            numbers = [kind for kind in (*NUMBERS, WHOLE) if kind in first]
            number = first[numbers[0]] if numbers else wrong
            but = f", but {number.value!r} in {number.where}" if numbers else ""
            replace = ", or --missing=0, for example, which replaces them"
            raise DataError(
                f"{where}{but}: {self._num_missing:,} of its numbers are missing. Add "
                f"--missing={DROP}, which leaves out such rows{'' if self.is_label else replace}."
            )
        if self.declared == INTEGER and missing.kind and missing.kind not in INTEGERS:
            raise DataError(
                f"{where}, for which --missing={missing.number} is no integer. Type --missing=0, "
                f"for example, or type --float={self.name} in place of --integer={self.name}."
            )

    @property
    def _num_missing(self) -> int:
        return self.counts[EMPTY] + self.counts[MISSING]

    @property
    def num_missing(self) -> int:
        """The number of missing values. In text, only the empty values of a label are missing."""
        if self.kind == TEXT and not (self.is_label and EMPTY in self._first):
            return 0
        return self._num_missing

    def notes(self, path: str) -> Iterator[str]:
        """What a user should know if values of the column do not look as its type does."""
        first = self._first
        if self.kind == INTEGER and WHOLE in first:
            found = first[WHOLE]
            yield f"{found.where}: the label {self.name} has {found.value!r}, taken as an integer"
        if self.kind != TEXT or self.declared:
            return
        unfit = next((kind for kind in (TEXT, CODE, LONGEST, GROUPED) if kind in first), "")
        if unfit == TEXT:
            word = first[TEXT]
            numbers = sum(self.counts[number] for number in (*NUMBERS, CODE, WHOLE))
            if self.is_label and numbers:
                yield (
                    f"{word.where}: the label {self.name} has {word.value!r}, so all its values "
                    "are names, also numbers"
                )
            elif numbers > self.counts[CODE]:
                yield (
                    f"{word.where}: column {self.name} is text, because it has {word.value!r}; "
                    f"{numbers:,} of its {self.counts.total():,} values are numbers. If all "
                    f"should be, add {typed('float', self.name)}, and correct the others"
                )
        elif unfit:
            where, value = first[unfit]
            why = f"a number {'has no separators as in' if unfit == GROUPED else 'would change'}"
            yield f"{where}: column {self.name} is text, because {why} {value!r}"

    def feature(self) -> TableColumn:
        """The column as a feature, after `finish`."""
        if self.kind == TEXT:
            num_bytes = 8 + self._text_bytes // max(1, self._num_rows)
            return TableColumn(text(), num_bytes, self.convert)
        node = tensor("float64", ()) if self.kind == DOUBLE else scalar(self._dtype)
        return TableColumn(node, 8, self.convert)

    @property
    def _dtype(self) -> str:
        return _DTYPES[self.kind]

    def lacks(self, values: Any) -> Mask:
        """A mask, bool [n]: true where a value is missing."""
        missing = ("",) if self.kind == TEXT else MISSING_VALUES
        return np.array([value.lower() in missing for value in values], bool)

    def classes(self, values: Any) -> set[int | str]:
        """The values of a label, different ones only."""
        if self.kind == TEXT:
            return set(self._names(values))
        return set(np.unique(self._numbers(values)).astype(np.int64).tolist())

    def label_classes(
        self, path: str, values: Iterable[int | str]
    ) -> tuple[Classes, Sequence[str]]:
        """The classes of the label, and notes. Raises DataError if its values are no classes."""
        advice = f"add {self.as_text}, which takes the values as names"
        fraction = self._first.get(NUMBER) or self._first.get(DOUBLE)
        if fraction and self.kind != TEXT:
            raise DataError(
                f"{fraction.where}: {self.name} is the label, and has {fraction.value!r}; needed "
                f"are integers from 0, or names: {advice}; or leave --label out, and train with "
                f"{shlex.quote(f'--config.data.label={self.name}')}."
            )
        return classes_of(values, f"{path}: {self.name}", f", or {advice}")

    def convert(self, values: Any, classes: Classes | None = None) -> Values:
        """The values as a record holds them. `classes`: of the label."""
        if self.kind == TEXT:
            return classes.numbers(self._names(values)) if classes else self._texts(values)
        numbers = self._numbers(values)
        if self.kind == INTEGER:
            return numbers.astype(np.int64)
        return numbers.astype(np.float32) if self.kind == NUMBER else fixed(numbers.astype("<f8"))

    def _names(self, values: Any) -> Iterable[str]:
        return values  # type: ignore[no-any-return]  # Texts.

    def _texts(self, values: Any) -> Values:
        return np.array(list(map(str.encode, values)), object)

    def _numbers(self, values: Any) -> Array:
        """Numbers, with the number of --missing in the place of missing ones."""
        if self._num_missing:
            number = self.missing.number
            values = [number if value.lower() in MISSING_VALUES else value for value in values]
        if self.kind != INTEGER:
            return np.array(list(map(float, values)), np.float64)
        is_exact = self.is_label or self.declared
        return np.array(list(map(whole if is_exact else int, values)), np.int64)


class ListColumn(Column):
    """A column of lists: tensors of one shape. `finish` sets the type and the shape."""

    _item_type: str  # As in features.json: "string", or a dtype.
    _shape: list[int]

    @override
    def feature(self) -> TableColumn:
        items = math.prod(self._shape)
        if self._item_type == "string":
            num_bytes = 2 * items + self._text_bytes // max(1, self._num_rows)
        else:
            num_bytes = items * np.dtype(self._item_type).itemsize
        return TableColumn(tensor(self._item_type, self._shape), num_bytes, self.convert)

    @override
    def notes(self, path: str) -> Iterator[str]:
        yield f"{path}: the longest list of {self.name} has {self._shape[0]:,} items"

    def _check_padding(self) -> None:
        """Raises DataError for an integer that is padding."""
        if self._item_type != "string" and str(PADDING) in self._first:
            raise DataError(
                f"{self._first[str(PADDING)].where}: column {self.name} has the item {PADDING}, "
                "with which shorter lists are filled up. Replace it by another integer, or, if all "
                f"are text, add {self.as_text}."
            )


def missing_of(option: str | None) -> Missing:
    """Returns the meaning of --missing. Raises DataError if it has none."""
    if option is None or option == DROP:
        return Missing(option == DROP)
    if (kind := kind_of(option)) not in NUMBERS:
        raise DataError(
            f"--missing must be {DROP} or a number. Received: {option!r}. Type --missing={DROP}, "
            "which leaves out rows with missing values, or --missing=0, for example."
        )
    if kind not in INTEGERS and (integer := whole(option)) is not None:
        option = str(integer)  # It replaces integers, too.
    return Missing(False, option, kind_of(option))


def declared_types(
    path: str, options: Options, names: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The types that --text, --integer and --float declare, and the columns of --lists."""
    types: dict[str, str] = {}
    option_of: dict[str, str] = {}
    for option, kind in (("text", TEXT), ("integer", INTEGER), ("float", NUMBER), ("lists", "")):
        for column in columns_in(getattr(options, option)):
            if column not in names:
                raise no_column(path, option, column, names)
            before = option_of.get(column, "")
            if before and (before, option) != ("text", "lists"):
                raise DataError(
                    f"--{before} and --{option} both have column {column!r}. Leave it out of one."
                )
            option_of[column] = option
            if kind:
                types[column] = kind
    if option_of.get(options.label or "") in ("float", "lists"):
        option = option_of[options.label or ""]
        raise DataError(
            f"--{option} has {options.label!r}, which is the label: integers from 0, or names. "
            f"Leave it out of --{option}; or, if it is no class, leave --label out, and train with "
            f"{shlex.quote(f'--config.data.label={options.label}')}."
        )
    return types, [column for column, option in option_of.items() if option == "lists"]


def typed(option: str, *columns: str) -> str:
    """The flag with these columns, as it is typed in a shell."""
    names = (
        '"{}"'.format(name.replace('"', '""')) if set(name) & set(',"') else name
        for name in columns
    )
    return shlex.quote(f"--{option}={','.join(names)}")


def columns_in(option: str | None) -> list[str]:
    """The columns in the value of a flag: separated by commas, in double quotes if needed."""
    found = next(csv.reader([option or ""], skipinitialspace=True), [])
    return [column.strip() for column in found if column.strip()]


def no_column(path: str, flag: str, name: str, columns: Collection[str]) -> DataError:
    """The error for a flag that names a column which is not there."""
    lower = {column.lower(): column for column in columns}
    similar = difflib.get_close_matches(name.lower(), lower, n=3)
    near = [lower[found] for found in similar or [x for x in lower if name.lower() in x][:3]]
    hint = f"Did you mean {' or '.join(typed(flag, column) for column in near)}? " if near else ""
    for mark in "|:; " if len(columns) == 1 else "":
        if mark in next(iter(columns)):
            hint = f"If these are several columns, add {shlex.quote(f'--delimiter={mark}')}. "
            break
    more = ", ..." if len(columns) > _SHOWN_COLUMNS else ""
    return DataError(
        f"{path} has no column {name!r}. {hint}--{flag} may be "
        f"{', '.join(itertools.islice(columns, _SHOWN_COLUMNS))}{more}."
    )


def whole(value: str) -> int | None:
    """The integer of a numeral: 3 for "3", "3.0", "3e0" and "03". None if int64 cannot hold it."""
    number = decimal.Decimal(value)
    if number.adjusted() >= _MOST_DIGITS or number != number.to_integral_value():
        return None
    return int(number) if -(2**63) <= number < 2**63 else None
