"""CSV: a line of column names, then one line for each example; UTF-8, quotes of RFC 4180.

    SOURCE.csv, or SOURCE/train.csv and SOURCE/test.csv; also with .gz

Values are separated by commas, semicolons or tabs, whichever divide the first line into the most
values. All lines are read to find the type of each column: integers (int64), numbers (float32) or
text. A column that mixes numbers and text is refused, because the text is probably a mistake; in
the label such values are names. `missing` decides about missing values; in text an empty value is
a value. The files are read twice, line by line.

A column of `lists` becomes a tensor as long as its longest list. Shorter lists are filled up with
-1, or with empty text if the items of the column are text.
"""

import array
import csv
import functools
import gzip
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TextIO, cast

from data.prepare.sources import DROP, Options, Source
from data.prepare.sources.examples import Classes, Node, Value, scalar, strings, tensor, text
from data.prepare.sources.tables import Table, classes_of, common_columns, split_files, table_source
from data.system.files import DataError

_INTEGER = re.compile(r"[+-]?\d+")
_MOST_FLOAT32 = 3.4028234663852886e38
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_NODES = {"integer": scalar("int64"), "number": scalar("float32"), "text": text()}
_CONVERTERS: Mapping[str, Callable[[str], Value]]
_CONVERTERS = {"integer": int, "number": float, "text": str.encode}

_MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
_SEPARATORS = ",;\t"
_PADDING = -1  # It fills up lists of integers.
_GZIP_FACTOR = 4  # Of text: the size of the content, of the size of the file.

# Kind of a value -> the first such value of a column: file, line, value.
_Seen = dict[str, tuple[str, int, str]]


class _Format(NamedTuple):
    """How a file is read: its separator, and the number of the first line of data."""

    columns: tuple[str, ...]
    separator: str
    has_header: bool


class _Lists:
    """What is known of a column of lists after all its values were added."""

    def __init__(self) -> None:
        # For the separators "|" and None, which stands for spaces.
        self._lengths: dict[str | None, int] = {"|": 1, None: 1}
        self._seen: dict[str | None, _Seen] = {"|": {}, None: {}}
        self._separator: str | None = None

    def add(self, file: str, line: int, value: str) -> None:
        """Adds a value of the column, which is in `line` of `file`."""
        if "|" in value:
            self._separator = "|"
        for separator in self._lengths:
            items = _items(value, separator)
            self._lengths[separator] = max(self._lengths[separator], len(items))
            for item in items:
                kind = "integer" if _kind(item) == "integer" else "text"
                self._seen[separator].setdefault(kind, (file, line, item))
                if kind == "integer" and int(item) == _PADDING:
                    self._seen[separator].setdefault("padding", (file, line, item))

    def check(self, column: str) -> None:
        """Raises DataError for a mix of integers and text, and for an integer that is padding."""
        seen = self._seen[self._separator]
        if "integer" in seen and "text" in seen:
            path, line, item = seen["integer"]
            wrong_path, wrong_line, wrong = seen["text"]
            raise DataError(
                f"{wrong_path}, line {wrong_line}: column {column} has the item {wrong!r}, but "
                f"{item!r} in line {line} of {path}. The items of a column are integers or text: "
                "correct it, or remove the lines or the column."
            )
        if "padding" in seen:
            path, line, _ = seen["padding"]
            raise DataError(
                f"{path}, line {line}: column {column} has the item {_PADDING}, with which shorter "
                "lists are filled up. Replace it by another integer."
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
        return "text" not in self._seen[self._separator]

    def convert(self, value: str) -> Value:
        """The items of a value, filled up to the longest list."""
        items = _items(value, self._separator)
        missing = self.length - len(items)
        if self._has_integers:
            return array.array("q", [*map(int, items), *[_PADDING] * missing]).tobytes()
        return [*map(str.encode, items), *[b""] * missing]


class _Missing(NamedTuple):
    """What becomes of missing values: rows are left out, or `number` replaces the values."""

    drops: bool
    number: float | None


def source(name: str, path: str, options: Options) -> Source:
    """The columns of a CSV file, or of one file for each split, as features with the same names.

    The column `label` is a ClassLabel: integers from 0, or names, which are numbered in sorted
    order.
    """
    missing = _missing(options.missing)
    files = split_files(path, ".csv", ".csv.gz")
    formats = {split: _format(file, options.header) for split, file in files.items()}
    headers = {split: list(found.columns) for split, found in formats.items()}
    columns = common_columns(path, headers, options)
    lists = {column: _Lists() for column in _list_columns(path, columns, options)}
    label = options.label
    seen: dict[str, _Seen] = {column: {} for column in columns if column not in lists}
    num_missing: Counter[str] = Counter()
    label_values = set()
    counts = dict.fromkeys(files, 0)
    for split, file in files.items():
        for line, row in _lines(file, formats[split]):
            counts[split] += 1
            for column, value in row.items():
                if column in lists:
                    lists[column].add(file, line, value)
                    continue
                kind = _kind(value)
                seen[column].setdefault(kind, (file, line, value))
                num_missing[column] += kind in ("missing", "empty")
            if label is not None:
                label_values.add(row[label])
    for column, found_lists in lists.items():
        found_lists.check(column)
    kinds = {
        key: _column_kind(key, found, key == label, missing, num_missing[key])
        for key, found in seen.items()
    }
    kinds |= dict.fromkeys(lists, "text")  # Any value is right.
    # In a column of text, only the label's empty values are missing.
    num_missing = Counter(
        {
            column: number
            for column, number in num_missing.items()
            if number and (kinds[column] != "text" or (column == label and "empty" in seen[column]))
        }
    )
    rows_of = {
        split: functools.partial(_complete_rows, file, formats[split], kinds, label, missing)
        for split, file in files.items()
    }
    notes = [
        f"{path}: the longest list of {key} has {x.length:,} items" for key, x in lists.items()
    ]
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
        if kinds[label] == "number":
            raise DataError(
                f"{path}: {label} is the label, and has numbers with fractions; needed are "
                "integers from 0, or names. Leave --label out, and train with "
                f"--config.data.label={label}."
            )
        convert = int if kinds[label] == "integer" else str
        classes[label] = classes_of(map(convert, label_values), f"{path}: {label}")
    converters = {column: _CONVERTERS[kinds[column]] for column in columns}
    converters |= {column: found.convert for column, found in lists.items()}
    tables = {}
    for split, file in files.items():
        num_bytes = os.path.getsize(file) * (_GZIP_FACTOR if file.endswith(".gz") else 1)
        row_bytes = num_bytes // max(1, counts[split]) + 30 * len(columns)
        row_bytes += sum(found.length * found.item_bytes for found in lists.values())
        tables[split] = Table(
            counts[split], row_bytes, functools.partial(_rows, rows_of[split], converters)
        )
    nodes = {column: _NODES[kinds[column]] for column in columns}
    nodes |= {column: found.node for column, found in lists.items()}
    return table_source(name, tables, nodes, classes, options)._replace(notes=notes)


def _missing(option: str | None) -> _Missing:
    if option is None or option == DROP:
        return _Missing(option == DROP, None)
    if not _NUMBER.fullmatch(option) or abs(float(option)) > _MOST_FLOAT32:
        raise DataError(
            f"--missing must be {DROP} or a number. Received: {option!r}. Type --missing={DROP}, "
            "which leaves out rows with missing values, or --missing=0, for example."
        )
    return _Missing(False, float(option))


def _note(path: str, counts: Counter[str], before: int, after: int, option: str | None) -> str:
    columns = ", ".join(f"{column} {number:,}" for column, number in counts.items())
    if option == DROP:
        done = f"{before - after:,} of {before:,} rows are left out"
    else:
        done = f"they are now {option}"
    return f"{path}: missing values by column: {columns}; {done}"


def _kind(value: str) -> str:
    if _INTEGER.fullmatch(value) and -(2**63) <= int(value) < 2**63:
        return "integer"
    # A larger number would become infinite in float32.
    if _NUMBER.fullmatch(value) and abs(float(value)) <= _MOST_FLOAT32:
        return "number"
    if not value:
        return "empty"
    return "missing" if value.lower() in _MISSING else "text"


def _column_kind(
    column: str, seen: _Seen, is_label: bool, missing: _Missing, num_missing: int
) -> str:
    if is_label and "empty" in seen and not missing.drops:
        path, line, _ = seen["empty"]
        raise DataError(
            f"{path}, line {line}: the label {column} is empty. --missing={DROP} leaves out rows "
            "without a label."
        )
    numbers = [kind for kind in ("integer", "number") if kind in seen]
    if not numbers or ("text" in seen and is_label):
        return "text"
    path, line, value = seen[numbers[0]]
    if "text" in seen:
        wrong_path, wrong_line, wrong = seen["text"]
        raise DataError(
            f"{wrong_path}, line {wrong_line}: column {column} has {wrong!r}, but {value!r} in "
            f"line {line} of {path}. A column holds numbers or text: correct it, or remove the "
            "lines or the column."
        )
    if not num_missing:
        return numbers[-1]
    if not missing.drops and (missing.number is None or is_label):
        wrong_path, wrong_line, wrong = seen.get("empty") or seen["missing"]
        number = "" if is_label else ", or --missing=0, for example, which replaces them"
        raise DataError(
            f"{wrong_path}, line {wrong_line}: column {column} has {wrong!r}, but {value!r} in "
            f"line {line} of {path}: {num_missing:,} of its numbers are missing. Add "
            f"--missing={DROP}, which leaves out such rows{number}."
        )
    is_integer = missing.drops or missing.number == math.floor(missing.number or 0)
    return numbers[-1] if is_integer else "number"


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
    if has_header is None and all(_kind(column) in ("integer", "number") for column in columns):
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
    """The rows without a missing value, or with the number in place of each."""
    numbers = [column for column, kind in kinds.items() if kind != "text"]
    replacement = "" if missing.number is None else repr(missing.number)
    for _, row in _lines(path, layout):
        lacking = [column for column in numbers if row[column].lower() in _MISSING]
        if missing.drops and (lacking or (label is not None and not row[label])):
            continue
        for column in lacking:
            is_integer = kinds[column] == "integer"
            row[column] = str(int(missing.number or 0)) if is_integer else replacement
        yield row


def _rows(
    rows: Callable[[], Iterator[dict[str, str]]], converters: Mapping[str, Callable[[str], Value]]
) -> Iterator[Mapping[str, Value]]:
    for row in rows():
        values = zip(row.items(), converters.values(), strict=True)
        yield {column: convert(value) for (column, value), convert in values}


def _list_columns(path: str, columns: Collection[str], options: Options) -> list[str]:
    """The columns of --lists. Raises DataError if there is none of a name, or it is the label."""
    found = [column.strip() for column in (options.lists or "").split(",") if column.strip()]
    for column in found:
        if column not in columns or column == options.label:
            raise DataError(
                f"{path}: --lists has {column!r}. It may have these columns, but not the label: "
                f"{', '.join(columns)}. Type --lists=COLUMN, or --lists=COLUMN,COLUMN."
            )
    return found


def _items(value: str, separator: str | None) -> list[str]:
    return [item.strip() for item in value.split(separator) if item.strip()]
