"""The columns of a table: their types, which all their values decide, and errors for wrong values.

column = Column("age", is_label=False)
column.add("people.csv", 2, "37")               # each value
column.finish(missing_of("drop"))               # a DataError names file and line
print(column.kind)                              # INTEGER
"""

import array
import collections
import decimal
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
from data.prepare.sources.examples import Classes, Node, tensor
from data.prepare.sources.tables import classes_of, columns_in, no_column, typed
from data.system.files import DataError
from data.tfrecord.examples import PADDING, Value

MISSING_VALUES = ("", "na", "n/a", "nan", "null", "none", "?")

MISSING, EMPTY = "missing", "empty"
WHOLE = "whole"  # An integer with a decimal point or an exponent, in a label: 1.0
WRONG = "wrong"  # Not of the type that an option says.
_NUMERALS = (*NUMBERS, CODE)
_MOST_DIGITS = 19  # Of int64.
_OPTION_OF = {INTEGER: "integer", NUMBER: "float"}


class First(NamedTuple):
    """The first value of a kind in a column."""

    path: str
    line: int
    value: str
    unit: str = "line"  # Or "row", from 0.

    @property
    def where(self) -> str:
        """Its file, and its place there."""
        return f"{self.path}, {self.unit} {self.line}"


class Missing(NamedTuple):
    """What becomes of missing values: rows are left out, or `number` of a kind replaces them."""

    drops: bool
    number: str = ""
    kind: str = ""


class Column:
    """Counts the values of a column by kind, keeps the first of each, and finds the type."""

    unit = "line"  # What `First.line` counts.

    def __init__(
        self, name: str, *, is_label: bool, declared: str = "", texts: Sequence[str] = ()
    ) -> None:
        """`declared`: TEXT, INTEGER or NUMBER, if an option says so. `texts`: columns of --text."""
        self.name, self.is_label, self.declared = name, is_label, declared
        self.as_text = typed("text", *texts, name)  # The flag that makes it text.
        self._first: dict[str, First] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self.missing = Missing(False)
        self.kind = ""  # INTEGER, NUMBER, DOUBLE or TEXT, after `finish`.

    def add(self, path: str, line: int, value: str) -> None:
        """Adds a value, which is in `line` of file `path`."""
        kind = kind_of(value)
        if kind == TEXT and value.lower() in MISSING_VALUES:
            kind = MISSING if value else EMPTY
        elif self.declared == INTEGER:
            kind = INTEGER if kind in _NUMERALS and whole(value) is not None else WRONG
        elif self.declared == NUMBER:
            if kind == CODE:
                is_long = abs(float(value)) > 2**24  # Float32 may change its whole part.
                kind = DOUBLE if is_long else kind_of(repr(float(value)))
            kind = kind if kind in NUMBERS else WRONG
        elif self.is_label and kind in (NUMBER, DOUBLE) and whole(value) is not None:
            kind = WHOLE
        if kind in self._counts:
            self._counts[kind] += 1
        else:
            self.count(kind, 1, First(path, line, value, self.unit))

    def count(self, kind: str, number: int, first: First) -> None:
        """Adds `number` values of a kind; `first` is the first of them."""
        self._counts[kind] += number
        self._first.setdefault(kind, first)

    def finish(self, missing: Missing) -> None:
        """Finds the kind, after all values were added. Raises DataError for a wrong value."""
        self.missing, self.kind = missing, self._found_kind(missing)

    def _found_kind(self, missing: Missing) -> str:
        first, counts = self._first, self._counts
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
            if {*numbers} <= {*INTEGERS, WHOLE}:  # Only the given number is no integer.
                wrong = first[LONGEST]
                raise DataError(
                    f"{wrong.where}: column {self.name} has {wrong.value!r}, which no float holds, "
                    f"and --missing={missing.number} is no integer. Type --missing=0, for example, "
                    f"or {typed('float', self.name)}, which rounds it, or {self.as_text}."
                )
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
    def num_missing(self) -> int:
        """The number of missing values. In text, only the empty values of a label are missing."""
        if self.kind == TEXT and not (self.is_label and EMPTY in self._first):
            return 0
        return self._num_missing

    def note(self) -> str:
        """What a user should know if values of the column do not look as its type does."""
        first = self._first
        if self.kind == INTEGER and WHOLE in first:
            found = first[WHOLE]
            return f"{found.where}: the label {self.name} has {found.value!r}, taken as an integer"
        if self.kind != TEXT or self.declared:
            return ""
        numbers = sum(self._counts[number] for number in (*NUMBERS, CODE, WHOLE))
        if TEXT in first:
            word = first[TEXT]
            if not numbers:
                return ""
            if self.is_label:
                return (
                    f"{word.where}: the label {self.name} has {word.value!r}, so all its values "
                    "are names, also numbers"
                )
            if numbers == self._counts[CODE]:
                return ""
            return (
                f"{word.where}: column {self.name} is text, because it has {word.value!r}; "
                f"{numbers:,} of its {self._counts.total():,} values are numbers. If all "
                f"should be, add {typed('float', self.name)}, and correct the others"
            )
        unfit = next((kind for kind in (CODE, LONGEST, GROUPED) if kind in first), "")
        if not unfit:
            return ""
        why = "a number has no separators as in" if unfit == GROUPED else "a number would change"
        where, value = first[unfit].where, first[unfit].value
        return f"{where}: column {self.name} is text, because {why} {value!r}"

    def fraction(self) -> First | None:
        """The first value that is no integer."""
        return self._first.get(NUMBER) or self._first.get(DOUBLE)

    @property
    def is_empty(self) -> bool:
        """True if the column has no value."""
        return self._counts.keys() <= {EMPTY}

    @property
    def has_only_integers(self) -> bool:
        """True if all values are whole numbers."""
        return self._counts.keys() == {INTEGER}

    @property
    def _num_missing(self) -> int:
        return self._counts[EMPTY] + self._counts[MISSING]


class Lists:
    """Finds the length of the longest list of a column, and the first item of each kind."""

    def __init__(self, name: str, *, is_text: bool, texts: Sequence[str] = ()) -> None:
        self.name, self._is_text = name, is_text
        self._as_text = typed("text", *texts, name)
        # For the separators "|" and None, which stands for spaces.
        self._lengths: dict[str | None, int] = {"|": 1, None: 1}
        self._first: dict[str | None, dict[str, First]] = {"|": {}, None: {}}
        self._separator: str | None = None

    def add(self, path: str, line: int, value: str) -> None:
        """Adds a value of the column, which is in `line` of file `path`."""
        if "|" in value:
            self._separator = "|"
        for separator, first in self._first.items():
            items = _items(value, separator)
            self._lengths[separator] = max(self._lengths[separator], len(items))
            for item in items:
                kind = kind_of(item)
                if kind != CODE:
                    kind = INTEGER if kind in INTEGERS else TEXT
                first.setdefault(kind, First(path, line, item))
                if item == str(PADDING):
                    first.setdefault(item, First(path, line, item))

    def check(self) -> None:
        """Raises DataError for a mix of integers and text, and for an integer that is padding."""
        first = self._first[self._separator]
        if INTEGER in first and TEXT in first and not self._is_text:
            integer, wrong = first[INTEGER], first[TEXT]
            raise DataError(
                f"{wrong.where}: column {self.name} has the item {wrong.value!r}, but "
                f"{integer.value!r} in line {integer.line} of {integer.path}. The items of a "
                "column are integers or text: correct it, or, if all are text, add "
                f"{self._as_text}."
            )
        if self._has_integers and str(PADDING) in first:
            raise padding_error(first[str(PADDING)], self.name, self._as_text)

    def notes(self, path: str) -> Iterator[str]:
        """What a user should know of the column."""
        first = self._first[self._separator]
        yield f"{path}: the longest list of {self.name} has {self.length:,} items"
        if CODE in first and TEXT not in first and not self._is_text:
            yield (
                f"{first[CODE].where}: the items of {self.name} are text, because a number would "
                f"change {first[CODE].value!r}"
            )

    @property
    def length(self) -> int:
        """The number of items of the longest list, at least 1."""
        return self._lengths[self._separator]

    @property
    def item_bytes(self) -> int:
        """The bytes in an example for each place of a list, without the text of the items."""
        return 8 if self._has_integers else 2

    @property
    def node(self) -> Node:
        """The feature that describes the column."""
        return tensor("int64" if self._has_integers else "string", [self.length])

    @property
    def _has_integers(self) -> bool:
        return not self._is_text and not {TEXT, CODE} & self._first[self._separator].keys()

    def convert(self, value: str) -> Value:
        """The items of a value, filled up to the longest list."""
        items = _items(value, self._separator)
        missing = self.length - len(items)
        if self._has_integers:
            return array.array("q", [*map(int, items), *[PADDING] * missing]).tobytes()
        return [*map(str.encode, items), *[b""] * missing]


def padding_error(first: First, name: str, as_text: str) -> DataError:
    """The error for a column of lists that are filled up, and have the value of that already."""
    return DataError(
        f"{first.where}: column {name} has the item {PADDING}, with which shorter lists are filled "
        f"up. Replace it by another integer, or, if all are text, add {as_text}."
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


def label_classes(
    path: str, column: Column, values: Iterable[int | str]
) -> tuple[Classes, Sequence[str]]:
    """The classes of the label, and notes. Raises DataError if its values are no classes."""
    advice = f"add {column.as_text}, which takes the values as names"
    if (fraction := column.fraction()) and column.kind != TEXT:
        raise DataError(
            f"{fraction.where}: {column.name} is the label, and has "
            f"{fraction.value!r}; needed are integers from 0, or names: {advice}; or leave "
            "--label out, and train with "
            f"{shlex.quote(f'--config.data.label={column.name}')}."
        )
    return classes_of(values, f"{path}: {column.name}", f", or {advice}")


def missing_note(
    path: str, counts: Mapping[str, int], before: int, after: int, option: str | None
) -> str:
    """A note that says what was done about missing values. `counts`: their number by column."""
    columns = ", ".join(f"{column} {number:,}" for column, number in counts.items())
    if option == DROP:
        done = f"{before - after:,} of {before:,} rows are left out"
    else:
        done = f"they are now {option}"
    return f"{path}: missing values by column: {columns}; {done}"


def whole(value: str) -> int | None:
    """The integer of a numeral: 3 for "3", "3.0", "3e0" and "03". None if int64 cannot hold it."""
    number = decimal.Decimal(value)
    if number.adjusted() >= _MOST_DIGITS or number != number.to_integral_value():
        return None
    return int(number) if -(2**63) <= number < 2**63 else None


def _items(value: str, separator: str | None) -> list[str]:
    return [item.strip() for item in value.split(separator) if item.strip()]
