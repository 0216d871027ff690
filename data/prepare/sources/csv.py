"""CSV: a line of column names, then one line for each example; commas, UTF-8, quotes of RFC 4180.

    SOURCE.csv, or SOURCE/train.csv and SOURCE/test.csv

All lines are read to find the type of each column: integers (int64), numbers (float32) or text. A
column that mixes numbers and text is refused, because the text is probably a mistake; in the label
such values are names. The files are read twice, line by line.
"""

import csv
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping

from data.prepare.sources import Options, Source
from data.prepare.sources.examples import Classes, Value, scalar, text
from data.prepare.sources.tables import Table, classes_of, common_columns, split_files, table_source
from data.system.files import DataError

_INTEGER = re.compile(r"[+-]?\d+")
_MOST_FLOAT32 = 3.4028234663852886e38
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_NODES = {"integer": scalar("int64"), "number": scalar("float32"), "text": text()}
_CONVERTERS: Mapping[str, Callable[[str], Value]]
_CONVERTERS = {"integer": int, "number": float, "text": str.encode}

# Kind of a value -> the first such value of a column: file, line, value.
_Seen = dict[str, tuple[str, int, str]]


def source(name: str, path: str, options: Options) -> Source:
    """The columns of a CSV file, or of one file for each split, as features with the same names.

    The column `label` is a ClassLabel: integers from 0, or names, which are numbered in sorted
    order.
    """
    files = split_files(path, ".csv")
    headers = {split: _header(file) for split, file in files.items()}
    columns = common_columns(path, headers, options)
    label = options.label
    seen: dict[str, _Seen] = {column: {} for column in columns}
    label_values = set()
    counts = dict.fromkeys(files, 0)
    for split, file in files.items():
        for line, row in _lines(file):
            counts[split] += 1
            for column, value in row.items():
                seen[column].setdefault(_kind(value), (file, line, value))
            if label is not None:
                label_values.add(row[label])
    kinds = {key: _column_kind(key, found, key == label) for key, found in seen.items()}
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
    tables = {}
    for split, file in files.items():
        row_bytes = os.path.getsize(file) // max(1, counts[split]) + 30 * len(columns)
        tables[split] = Table(counts[split], row_bytes, functools.partial(_rows, file, kinds))
    nodes = {column: _NODES[kind] for column, kind in kinds.items()}
    return table_source(name, tables, nodes, classes, options)


def _kind(value: str) -> str:
    if _INTEGER.fullmatch(value) and -(2**63) <= int(value) < 2**63:
        return "integer"
    # A larger number would become infinite in float32.
    if _NUMBER.fullmatch(value) and abs(float(value)) <= _MOST_FLOAT32:
        return "number"
    return "text" if value else "empty"


def _column_kind(column: str, seen: _Seen, is_label: bool) -> str:
    if is_label and "empty" in seen:
        path, line, _ = seen["empty"]
        raise DataError(f"{path}, line {line}: the label {column} is empty.")
    numbers = [kind for kind in ("integer", "number") if kind in seen]
    others = [kind for kind in ("text", "empty") if kind in seen]
    if not numbers or (others and is_label):
        return "text"
    if not others:
        return numbers[-1]
    path, line, value = seen[others[0]]
    other_path, other_line, other = seen[numbers[0]]
    raise DataError(
        f"{path}, line {line}: column {column} has {value!r}, but {other!r} in line {other_line} "
        f"of {other_path}. A column holds numbers or text: correct it, or remove the lines or the "
        "column."
    )


def _header(path: str) -> list[str]:
    columns = [column.strip() for column in next(_raw_lines(path), (0, []))[1]]
    if not columns or len(set(columns)) < len(columns) or "" in columns:
        raise DataError(
            f"{path} must begin with a line of column names, each once, separated by commas. "
            f"Received: {', '.join(map(repr, columns)) or 'nothing'}."
        )
    return columns


def _lines(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    columns = _header(path)
    lines = _raw_lines(path)
    next(lines)
    for line, values in lines:
        if len(values) != len(columns):
            raise DataError(
                f"{path}, line {line}: {len(values)} values, and there are {len(columns)} columns "
                f"({', '.join(columns[:5])}{', ...' if len(columns) > 5 else ''})."
            )
        yield line, dict(zip(columns, map(str.strip, values), strict=True))


def _raw_lines(path: str) -> Iterator[tuple[int, list[str]]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            for values in filter(None, reader):
                yield reader.line_num, values
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}.") from None


def _rows(path: str, kinds: Mapping[str, str]) -> Iterator[Mapping[str, Value]]:
    converters = [_CONVERTERS[kind] for kind in kinds.values()]
    for _, row in _lines(path):
        values = zip(row.items(), converters, strict=True)
        yield {column: convert(value) for (column, value), convert in values}
