"""CSV: a first line of column names, then a line an example; commas, UTF-8, quotes as in RFC 4180.

    SOURCE.csv, or SOURCE/train.csv and SOURCE/test.csv

What a column holds is found out over all lines: integers (int64), numbers (float32) or text. One
that mixes numbers and text is refused, because the text is more likely a mistake; in the label such
values are names. The files are read twice, line by line.
"""

import csv
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping

from data.files import DataError
from data.sources import Options, Source, required
from data.sources.examples import Classes, Node, Value, scalar, text
from data.sources.tables import Row, Table, check_label, classes_of, split_files, table_source

_INTEGER = re.compile(r"[+-]?\d+")
_MOST_FLOAT32 = 3.4028234663852886e38
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_KINDS = ("integer", "number", "text")


def source(name: str, path: str | None, options: Options) -> Source:
    """The columns of a CSV file, or of one for each split, as features of those names.

    With `label`, that column is a ClassLabel: integers from 0, or names, which are numbered in
    their order.

    Raises:
        DataError: a file is missing, lines are of different lengths, the files have different
            columns, or a column has no one type; names the line.
    """
    path = required(path, name, "a CSV file, or a directory with train.csv and test.csv")
    files = split_files(path, ".csv")
    headers = {split: _header(file) for split, file in files.items()}
    columns = next(iter(headers.values()))
    for split, header in headers.items():
        if header != columns:
            raise DataError(
                f"{files[split]} has columns {', '.join(header)}, and {next(iter(files.values()))} "
                f"has {', '.join(columns)}: they must be the same, in the same order."
            )
    check_label(options, columns, path)
    types = _Types(columns, options.label)
    counts = {split: types.read(file) for split, file in files.items()}
    classes: dict[str, Classes] = {}
    kinds = types.kinds()
    if options.label is not None:
        if kinds[options.label] == "number":
            raise DataError(
                f"{path}: {options.label} is the label, and has numbers with fractions; needed are "
                "integers from 0, or names. Leave --label out, and `parse` the column yourself."
            )
        values: Iterator[int | str] = iter(types.label_values)
        if kinds[options.label] == "integer":
            values = (int(value) for value in types.label_values)
        classes[options.label] = classes_of(values, f"{path}: {options.label}")
    tables = {}
    for split, file in files.items():
        row_bytes = os.path.getsize(file) // max(1, counts[split]) + 30 * len(columns)
        tables[split] = _table(file, counts[split], row_bytes, kinds)
    return table_source(name, tables, _nodes(kinds), classes, options)


class _Types:
    """What each column holds, over all lines seen so far."""

    def __init__(self, columns: list[str], label: str | None) -> None:
        self._columns = columns
        self._label = label
        # Where each kind of value was first seen: (file, line, value).
        self._seen: list[dict[str, tuple[str, int, str]]] = [{} for _ in columns]
        self.label_values: set[str] = set()

    def read(self, path: str) -> int:
        """Looks at all lines of a file; returns how many examples it has.

        Raises:
            DataError: a line is wrong.
        """
        label = None if self._label is None else self._columns.index(self._label)
        count = 0
        for line, values in _lines(path):
            count += 1
            for seen, value in zip(self._seen, values, strict=True):
                kind = _kind(value)
                if kind not in seen:
                    seen[kind] = (path, line, value)
            if label is not None:
                self.label_values.add(values[label])
        return count

    def kinds(self) -> dict[str, str]:
        """The kind of each column.

        Raises:
            DataError: one mixes numbers and text, or has an empty value among numbers.
        """
        return {
            column: self._kind(column, seen)
            for column, seen in zip(self._columns, self._seen, strict=True)
        }

    def _kind(self, column: str, seen: Mapping[str, tuple[str, int, str]]) -> str:
        kinds = [kind for kind in _KINDS if kind in seen]
        if column == self._label and "empty" in seen:
            path, line, _ = seen["empty"]
            raise DataError(f"{path}, line {line}: the label {column} is empty.")
        if "text" not in seen and kinds and "empty" not in seen:
            return kinds[-1]
        if "text" in seen and (len(kinds) == 1 or column == self._label):
            return "text"
        if not kinds:
            return "text"
        path, line, value = seen.get("text") or seen["empty"]
        other_path, other_line, other = seen[kinds[0]]
        raise DataError(
            f"{path}, line {line}: column {column} has {value!r}, but {other!r} in line "
            f"{other_line} of {other_path}. A column holds numbers or text: correct it, or remove "
            "the lines or the column."
        )


def _kind(value: str) -> str:
    if _INTEGER.fullmatch(value) and -(2**63) <= int(value) < 2**63:
        return "integer"
    # Beyond what a float32 holds it would become infinite.
    if _NUMBER.fullmatch(value) and abs(float(value)) <= _MOST_FLOAT32:
        return "number"
    return "text" if value else "empty"


def _header(path: str) -> list[str]:
    columns = [column.strip() for column in next(_raw_lines(path), (0, []))[1]]
    twice = {column for column in columns if columns.count(column) > 1}
    if not columns or twice or "" in columns:
        raise DataError(
            f"{path} must begin with a line of column names, each once, separated by commas. "
            f"Received: {', '.join(map(repr, columns)) or 'nothing'}."
        )
    return columns


def _lines(path: str) -> Iterator[tuple[int, list[str]]]:
    """Number and values of each line but the first; empty lines are passed over.

    Raises:
        DataError: a line has another number of values than there are columns.
    """
    lines = _raw_lines(path)
    _, columns = next(lines)
    for line, values in lines:
        if len(values) != len(columns):
            raise DataError(
                f"{path}, line {line}: {len(values)} values, and there are {len(columns)} columns "
                f"({', '.join(columns[:5])}{', ...' if len(columns) > 5 else ''})."
            )
        yield line, [value.strip() for value in values]


def _raw_lines(path: str) -> Iterator[tuple[int, list[str]]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            for values in reader:
                if values:
                    yield reader.line_num, values
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}.") from None


def _nodes(kinds: Mapping[str, str]) -> dict[str, Node]:
    nodes = {"integer": scalar("int64"), "number": scalar("float32"), "text": text()}
    return {column: nodes[kind] for column, kind in kinds.items()}


def _table(path: str, num_rows: int, row_bytes: int, kinds: Mapping[str, str]) -> Table:
    converters: dict[str, Callable[[str], Value]]
    converters = {"integer": int, "number": float, "text": str.encode}

    def rows() -> Iterator[Row]:
        to_value = [converters[kind] for kind in kinds.values()]
        for _, values in itertools.islice(_lines(path), num_rows):
            row: dict[str, Value] = {
                column: convert(value)
                for column, convert, value in zip(kinds, to_value, values, strict=True)
            }
            yield row

    return Table(num_rows, row_bytes, rows)
