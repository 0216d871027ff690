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

import csv
import functools
import gzip
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TextIO, cast

from data.numerals import DOUBLE, INTEGER, NUMBER, TEXT, kind_of
from data.prepare.sources import DROP, Options, Source
from data.prepare.sources.csv_columns import MISSING_VALUES, Column, Lists, Missing, missing_of
from data.prepare.sources.examples import Classes, scalar, tensor, text
from data.prepare.sources.tables import Table, classes_of, common_columns, split_files, table_source
from data.system.files import DataError
from data.tfrecord.examples import Value

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
_SEPARATORS = ",;\t"
_GZIP_FACTOR = 4  # Of text: the size of the content, of the size of the file.


class _Format(NamedTuple):
    """How a file is read: its separator, and the number of the first line of data."""

    columns: tuple[str, ...]
    separator: str
    has_header: bool


def source(name: str, path: str, options: Options) -> Source:
    """The columns of a CSV file, or of one file for each split, as features with the same names.

    The column `label` is a ClassLabel: integers from 0, or names, which are numbered in sorted
    order.
    """
    missing = missing_of(options.missing)
    files = split_files(path, ".csv", ".csv.gz")
    formats = {split: _format(file, options.header) for split, file in files.items()}
    headers = {split: list(found.columns) for split, found in formats.items()}
    names = common_columns(path, headers, options)
    label = options.label
    texts = _named(path, "text", options.text, names)
    lists = {
        column: Lists(column, is_text=column in texts)
        for column in _named(path, "lists", options.lists, names, label)
    }
    columns = {
        column: Column(column, is_label=column == label, is_text=column in texts)
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
    path: str, layout: _Format, kinds: Mapping[str, str], label: str | None, missing: Missing
) -> Iterator[dict[str, str]]:
    """The rows without a missing value, or with the number in place of each.

    `kinds`: the columns of numbers with missing values; `label`: if it has missing values.
    """
    for _, row in _lines(path, layout):
        lacking = [column for column in kinds if row[column].lower() in MISSING_VALUES]
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
