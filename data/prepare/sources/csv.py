"""CSV: a line of column names, then one line for each example; UTF-8, quotes of RFC 4180.

    SOURCE.csv, or SOURCE/train.csv and SOURCE/test.csv; also with .gz

Values are separated by commas, semicolons or tabs, whichever divide the first line into the most
values. All lines are read to find the type of each column: integers (int64), numbers (float32; or
float64, if float32 would change the whole part of one, or if one is below its normal range) or
text. `data.numerals` says what a number is. A column that mixes numbers and text is
refused, because the text is probably a mistake; in the label such values are names. `text` names
columns that are text in any case. `missing` decides about missing values; in text an empty value is
a value. The files are read twice, line by line.

A column of `lists` becomes a tensor as long as its longest list. Shorter lists are filled up with
-1, or with empty text if the items of the column are text.
"""

import array
import csv
import functools
import gzip
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TextIO, cast

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
from data.prepare.sources import DROP, Options, Source
from data.prepare.sources.examples import Classes, Node, Value, scalar, strings, tensor, text
from data.prepare.sources.tables import Table, classes_of, common_columns, split_files, table_source
from data.system.files import DataError

_MISSING, _EMPTY = "missing", "empty"
_NODES = {
    INTEGER: scalar("int64"),
    NUMBER: scalar("float32"),
    DOUBLE: tensor("float64", ()),
    TEXT: text(),
}
_FLOAT64 = struct.Struct("<d")
_CONVERTERS: Mapping[str, Callable[[str], Value]]
_CONVERTERS = {
    INTEGER: int,
    NUMBER: float,
    DOUBLE: lambda value: _FLOAT64.pack(float(value)),
    TEXT: str.encode,
}
_MISSING_VALUES = ("", "na", "n/a", "nan", "null", "none", "?")
_SEPARATORS = ",;\t"
_PADDING = -1  # It fills up lists of integers.
_GZIP_FACTOR = 4  # Of text: the size of the content, of the size of the file.


class _First(NamedTuple):
    """The first value of a kind in a column."""

    path: str
    line: int
    value: str


class _Missing(NamedTuple):
    """What becomes of missing values: rows are left out, or `number` of a kind replaces them."""

    drops: bool
    number: str = ""
    kind: str = ""


class _Column:
    """How many values of each kind a column has, and the first of each."""

    def __init__(self, name: str, *, is_label: bool, is_text: bool) -> None:
        self.name, self._is_label, self._is_text = name, is_label, is_text
        self._first: dict[str, _First] = {}
        self._counts: dict[str, int] = {}

    def add(self, path: str, line: int, value: str) -> None:
        """Adds a value, which is in `line` of file `path`."""
        kind = kind_of(value)
        if kind == TEXT and value.lower() in _MISSING_VALUES:
            kind = _MISSING if value else _EMPTY
        if kind in self._counts:
            self._counts[kind] += 1
        else:
            self._counts[kind] = 1
            self._first[kind] = _First(path, line, value)

    def kind(self, missing: _Missing) -> str:
        """INTEGER, NUMBER, DOUBLE or TEXT. Raises DataError if the values do not fit each other."""
        first, counts = self._first, self._counts
        if self._is_label and _EMPTY in first and not missing.drops:
            path, line, _ = first[_EMPTY]
            raise DataError(
                f"{path}, line {line}: the label {self.name} is empty. --missing={DROP} leaves out "
                "rows without a label."
            )
        if self._is_text:
            return TEXT
        numbers = [kind for kind in NUMBERS if kind in first]
        num_foreign = counts.get(FOREIGN, 0)
        if numbers or num_foreign:
            num_foreign += counts.get(GROUPED, 0)
        if num_foreign > counts.get(TEXT, 0):
            path, line, value = first.get(FOREIGN) or first[GROUPED]
            raise DataError(
                f"{path}, line {line}: column {self.name} has {value!r}: {num_foreign:,} of "
                f"its {sum(counts.values()):,} values are numbers in another notation. Needed are "
                "the digits 0 to 9 and a decimal point, without other separators: -1234.5 or 2e-3; "
                f"from {LEAST_FLOAT64:.2g} to {MOST_FLOAT64:.2g}, or 0. Write them so, or, if they "
                f"are text, add --text={self.name}."
            )
        if not numbers or (TEXT in first and self._is_label):
            return TEXT
        path, line, value = first[numbers[0]]
        if TEXT in first:
            wrong = first[TEXT]
            raise DataError(
                f"{wrong.path}, line {wrong.line}: column {self.name} has {wrong.value!r}, but "
                f"{value!r} in line {line} of {path}. A column holds numbers or text: correct it, "
                f"or, if it is text, add --text={self.name}."
            )
        if CODE in first:
            return TEXT
        kinds = set(numbers)
        if num_missing := self._num_missing:
            if not missing.drops and (not missing.kind or self._is_label):
                wrong = first.get(_EMPTY) or first[_MISSING]
                number = ", or --missing=0, for example, which replaces them"
                raise DataError(
                    f"{wrong.path}, line {wrong.line}: column {self.name} has {wrong.value!r}, but "
                    f"{value!r} in line {line} of {path}: {num_missing:,} of its numbers are "
                    f"missing. Add --missing={DROP}, which leaves out such rows"
                    f"{'' if self._is_label else number}."
                )
            kinds |= {missing.kind} - {""}
        if kinds.issubset(INTEGERS):
            return INTEGER
        if LONGEST in first:
            return TEXT
        return DOUBLE if kinds & {LONG, LONGEST, DOUBLE} else NUMBER

    def num_missing(self, kind: str) -> int:
        """The missing values of a column of this kind. In text, only a label's empty values are."""
        if kind == TEXT and not (self._is_label and _EMPTY in self._first):
            return 0
        return self._num_missing

    def note(self, kind: str) -> str:
        """What a user should know if a column of this kind is text, but not all of it looks so."""
        numbers = self._first.keys() & set(NUMBERS)
        if kind != TEXT or self._is_text:
            return ""
        if self._is_label and TEXT in self._first and (numbers or CODE in self._first):
            path, line, value = self._first[TEXT]
            return (
                f"{path}, line {line}: the label {self.name} has {value!r}, so all its values are "
                "names, also numbers"
            )
        found = next((kind for kind in (CODE, LONGEST, GROUPED) if kind in self._first), TEXT)
        if found == TEXT or TEXT in self._first:
            return ""
        path, line, value = self._first[found]
        why = "a number has no separators as in" if found == GROUPED else "a number would change"
        return f"{path}, line {line}: column {self.name} is text, because {why} {value!r}"

    def fraction(self) -> _First | None:
        """The first value that is no integer."""
        return self._first.get(NUMBER) or self._first.get(DOUBLE)

    @property
    def _num_missing(self) -> int:
        return self._counts.get(_EMPTY, 0) + self._counts.get(_MISSING, 0)


class _Format(NamedTuple):
    """How a file is read: its separator, and the number of the first line of data."""

    columns: tuple[str, ...]
    separator: str
    has_header: bool


class _Lists:
    """What is known of a column of lists after all its values were added."""

    def __init__(self, name: str, *, is_text: bool) -> None:
        self.name, self._is_text = name, is_text
        # For the separators "|" and None, which stands for spaces.
        self._lengths: dict[str | None, int] = {"|": 1, None: 1}
        self._first: dict[str | None, dict[str, _First]] = {"|": {}, None: {}}
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
                first.setdefault(kind, _First(path, line, item))
                if item == str(_PADDING):
                    first.setdefault(item, _First(path, line, item))

    def check(self) -> None:
        """Raises DataError for a mix of integers and text, and for an integer that is padding."""
        first = self._first[self._separator]
        if INTEGER in first and TEXT in first and not self._is_text:
            path, line, item = first[INTEGER]
            wrong = first[TEXT]
            raise DataError(
                f"{wrong.path}, line {wrong.line}: column {self.name} has the item "
                f"{wrong.value!r}, but {item!r} in line {line} of {path}. The items of a column "
                f"are integers or text: correct it, or, if all are text, add --text={self.name}."
            )
        if self._has_integers and str(_PADDING) in first:
            path, line, _ = first[str(_PADDING)]
            raise DataError(
                f"{path}, line {line}: column {self.name} has the item {_PADDING}, with which "
                "shorter lists are filled up. Replace it by another integer, or, if all are text, "
                f"add --text={self.name}."
            )

    def notes(self, path: str) -> Iterator[str]:
        """What a user should know of the column."""
        first = self._first[self._separator]
        yield f"{path}: the longest list of {self.name} has {self.length:,} items"
        if CODE in first and TEXT not in first and not self._is_text:
            path, line, item = first[CODE]
            yield (
                f"{path}, line {line}: the items of {self.name} are text, because a number would "
                f"change {item!r}"
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
        return tensor("int64", [self.length]) if self._has_integers else strings(self.length)

    @property
    def _has_integers(self) -> bool:
        return not self._is_text and not {TEXT, CODE} & self._first[self._separator].keys()

    def convert(self, value: str) -> Value:
        """The items of a value, filled up to the longest list."""
        items = _items(value, self._separator)
        missing = self.length - len(items)
        if self._has_integers:
            return array.array("q", [*map(int, items), *[_PADDING] * missing]).tobytes()
        return [*map(str.encode, items), *[b""] * missing]


def source(name: str, path: str, options: Options) -> Source:
    """The columns of a CSV file, or of one file for each split, as features with the same names.

    The column `label` is a ClassLabel: integers from 0, or names, which are numbered in sorted
    order.
    """
    missing = _missing(options.missing)
    files = split_files(path, ".csv", ".csv.gz")
    formats = {split: _format(file, options.header) for split, file in files.items()}
    headers = {split: list(found.columns) for split, found in formats.items()}
    names = common_columns(path, headers, options)
    label = options.label
    texts = _named(path, "text", options.text, names)
    lists = {
        column: _Lists(column, is_text=column in texts)
        for column in _named(path, "lists", options.lists, names, label)
    }
    columns = {
        column: _Column(column, is_label=column == label, is_text=column in texts)
        for column in names
        if column not in lists
    }
    label_values = set()
    counts = dict.fromkeys(files, 0)
    for split, file in files.items():
        for line, row in _lines(file, formats[split]):
            counts[split] += 1
            for column, value in row.items():
                (columns.get(column) or lists[column]).add(file, line, value)
            if label is not None:
                label_values.add(row[label])
    for found_lists in lists.values():
        found_lists.check()
    kinds = {column: found.kind(missing) for column, found in columns.items()}
    num_missing = {
        column: number
        for column, found in columns.items()
        if (number := found.num_missing(kinds[column]))
    }
    rows_of = {
        split: functools.partial(
            _complete_rows,
            file,
            formats[split],
            {column: kinds[column] for column in num_missing if kinds[column] != TEXT},
            label if label in num_missing else None,
            missing,
        )
        for split, file in files.items()
    }
    notes = [note for found in lists.values() for note in found.notes(path)]
    notes += filter(None, (found.note(kinds[column]) for column, found in columns.items()))
    if num_missing:
        before = sum(counts.values())
        if missing.drops:
            label_values = set()
            for split, rows in rows_of.items():
                counts[split] = 0
                for row in rows():
                    counts[split] += 1
                    label_values.update([row[label]] if label is not None else [])
        notes.append(_note(path, num_missing, before, sum(counts.values()), options.missing))
    for split, count in counts.items():
        if not count and num_missing:
            raise DataError(
                f"{files[split]}: --missing={DROP} leaves no row: each has a missing value. Give a "
                "number, for example --missing=0, or remove the column."
            )
    classes: dict[str, Classes] = {}
    if label is not None:
        if (fraction := columns[label].fraction()) and kinds[label] != TEXT:
            raise DataError(
                f"{fraction.path}, line {fraction.line}: {label} is the label, and has "
                f"{fraction.value!r}; needed are integers from 0, or names. Add --text={label}, "
                "which takes the values as names; or leave --label out, and train with "
                f"--config.data.label={label}."
            )
        convert = int if kinds[label] == INTEGER else str
        classes[label], gaps = classes_of(
            map(convert, label_values),
            f"{path}: {label}",
            f", or add --text={label}, which takes the values as names",
        )
        notes += gaps
    converters = {
        column: lists[column].convert if column in lists else _CONVERTERS[kinds[column]]
        for column in names
    }
    tables = {}
    for split, file in files.items():
        num_bytes = os.path.getsize(file) * (_GZIP_FACTOR if file.endswith(".gz") else 1)
        row_bytes = num_bytes // max(1, counts[split]) + 30 * len(names)
        row_bytes += sum(found.length * found.item_bytes for found in lists.values())
        tables[split] = Table(
            counts[split], row_bytes, functools.partial(_rows, rows_of[split], converters)
        )
    nodes = {column: _NODES[kinds[column]] for column in columns}
    nodes |= {column: found.node for column, found in lists.items()}
    return table_source(name, tables, nodes, classes, options)._replace(notes=notes)


def _missing(option: str | None) -> _Missing:
    if option is None or option == DROP:
        return _Missing(option == DROP)
    if (kind := kind_of(option)) not in NUMBERS:
        raise DataError(
            f"--missing must be {DROP} or a number. Received: {option!r}. Type --missing={DROP}, "
            "which leaves out rows with missing values, or --missing=0, for example."
        )
    if kind not in INTEGERS and float(option).is_integer():
        whole = str(int(float(option)))
        if kind_of(whole) in INTEGERS:
            option = whole  # It replaces integers, too.
    return _Missing(False, option, kind_of(option))


def _note(path: str, counts: Mapping[str, int], before: int, after: int, option: str | None) -> str:
    columns = ", ".join(f"{column} {number:,}" for column, number in counts.items())
    if option == DROP:
        done = f"{before - after:,} of {before:,} rows are left out"
    else:
        done = f"they are now {option}"
    return f"{path}: missing values by column: {columns}; {done}"


def _format(path: str, has_header: bool | None) -> _Format:
    """The separator and the columns of a file, from its first line."""
    with _open(path) as file:
        try:
            first = next((line for line in file if line.strip()), "")
        except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: {error}.") from None
    separator = max(_SEPARATORS, key=lambda each: len(next(csv.reader([first], delimiter=each))))
    layout = _Format((), separator, has_header is not False)
    columns = [column.strip() for column in next(_raw_lines(path, layout), (0, []))[1]]
    if columns and has_header is False:
        names = tuple(f"column_{number}" for number in range(len(columns)))
        return layout._replace(columns=names)
    if not columns or len(set(columns)) < len(columns) or "" in columns:
        raise DataError(
            f"{path} must begin with a line of column names, each once, separated by commas, "
            f"semicolons or tabs. Received: {', '.join(map(repr, columns)) or 'nothing'}. If it "
            "has no such line, add --noheader."
        )
    if has_header is None and TEXT not in map(kind_of, columns):
        raise DataError(
            f"{path} begins with numbers, {', '.join(columns[:5])}, and not with a line of column "
            "names. Add --noheader: the columns are then column_0, column_1, ... If these are "
            "names, add --header."
        )
    return layout._replace(columns=tuple(columns))


def _lines(path: str, layout: _Format) -> Iterator[tuple[int, dict[str, str]]]:
    columns = layout.columns
    lines = _raw_lines(path, layout)
    if layout.has_header:
        next(lines)
    for line, values in lines:
        if len(values) != len(columns):
            raise DataError(
                f"{path}, line {line}: {len(values)} values, and there are {len(columns)} columns "
                f"({', '.join(columns[:5])}{', ...' if len(columns) > 5 else ''})."
            )
        yield line, dict(zip(columns, map(str.strip, values), strict=True))


def _raw_lines(path: str, layout: _Format) -> Iterator[tuple[int, list[str]]]:
    with _open(path) as file:
        reader = csv.reader(file, strict=True, delimiter=layout.separator)
        try:
            for values in filter(None, reader):
                yield reader.line_num, values
        # OSError: gzip's, of a file that is none.
        except (csv.Error, UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}.") from None


def _open(path: str) -> TextIO:
    if not path.endswith(".gz"):
        return open(path, newline="", encoding="utf-8-sig")
    return cast(TextIO, gzip.open(path, "rt", newline="", encoding="utf-8-sig"))


def _complete_rows(
    path: str, layout: _Format, kinds: Mapping[str, str], label: str | None, missing: _Missing
) -> Iterator[dict[str, str]]:
    """The rows without a missing value, or with the number in place of each.

    `kinds`: the columns of numbers with missing values; `label`: if it has missing values.
    """
    for _, row in _lines(path, layout):
        lacking = [column for column in kinds if row[column].lower() in _MISSING_VALUES]
        if missing.drops and (lacking or (label is not None and not row[label])):
            continue
        row.update(dict.fromkeys(lacking, missing.number))
        yield row


def _rows(
    rows: Callable[[], Iterator[dict[str, str]]], converters: Mapping[str, Callable[[str], Value]]
) -> Iterator[Mapping[str, Value]]:
    for row in rows():
        values = zip(row.items(), converters.values(), strict=True)
        yield {column: convert(value) for (column, value), convert in values}


def _named(
    path: str, flag: str, value: str | None, columns: Collection[str], label: str | None = None
) -> list[str]:
    """The columns in the value of a flag. Raises DataError if there is none of a name.

    `label`: a column that may not be among them.
    """
    found = [column.strip() for column in (value or "").split(",") if column.strip()]
    for column in found:
        if column not in columns or column == label:
            but = "" if label is None else ", but not the label"
            raise DataError(
                f"{path}: --{flag} has {column!r}. It may have these columns{but}: "
                f"{', '.join(columns)}. Type --{flag}=COLUMN, or --{flag}=COLUMN,COLUMN."
            )
    return found


def _items(value: str, separator: str | None) -> list[str]:
    return [item.strip() for item in value.split(separator) if item.strip()]
