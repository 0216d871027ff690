"""CSV: a line of column names, then one line for each example; quotes of RFC 4180.

    SOURCE.csv, or SOURCE/train.csv and SOURCE/test.csv; also .tsv, and with .gz

`csv_files` finds the encoding and the separator, and `columns` the type of each column, from all of
its values: docs/data.md has the rules. The files are read twice, line by line.

A column of `lists` becomes a tensor as long as its longest list. Shorter lists are filled up with
-1, or with empty text if the items of the column are text.
"""

import functools
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from data.numerals import DOUBLE, INTEGER, NUMBER, TEXT
from data.prepare.progress import progress
from data.prepare.sources import DROP, Options, Source
from data.prepare.sources.columns import (
    MISSING_VALUES,
    Column,
    Lists,
    Missing,
    declared_types,
    label_classes,
    missing_note,
    missing_of,
    whole,
)
from data.prepare.sources.csv_files import Layout, layout_of, lines
from data.prepare.sources.examples import Classes, scalar, tensor, text
from data.prepare.sources.tables import (
    Table,
    common_columns,
    encoded,
    split_files,
    table_source,
)
from data.system.files import DataError
from data.tfrecord.examples import Value

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")

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
_integer = cast(Callable[[str], int], whole)  # All values of such columns are integers.
_GZIP_FACTOR = 4  # Of text: the size of the content, of the size of the file.


def source(name: str, path: str, options: Options) -> Source:
    """The columns of a CSV file, or of one file for each split, as features with the same names."""
    missing = missing_of(options.missing)
    files = split_files(path, *SUFFIXES)
    layouts = {split: layout_of(file, options) for split, file in files.items()}
    headers = {split: list(layout.columns) for split, layout in layouts.items()}
    names = common_columns(path, headers, files, options)
    label = options.label
    types, listed = declared_types(path, options, names)
    texts = [column for column, kind in types.items() if kind == TEXT]
    lists = {column: Lists(column, is_text=column in texts, texts=texts) for column in listed}
    columns = {
        column: Column(
            column, is_label=column == label, declared=types.get(column, ""), texts=texts
        )
        for column in names
        if column not in lists
    }
    label_values = set()
    counts = dict.fromkeys(files, 0)
    for split, file in files.items():
        with progress(f"{file}, types", None) as report:
            for line, row in lines(file, layouts[split]):
                counts[split] += 1
                for column, value in row.items():
                    (columns.get(column) or lists[column]).add(file, line, value)
                if label is not None:
                    label_values.add(row[label])
                report(counts[split])
    if empty := [split for split, count in counts.items() if not count]:
        raise DataError(f"{files[empty[0]]} has no rows.")
    for each in lists.values():
        each.check()
    notes = [each.note for each in layouts.values()]
    layout = next(iter(layouts.values()))
    unnamed = set(layout.unnamed) & columns.keys() - types.keys() - {label}
    notes += [_without_name(path, layout, columns, column) for column in sorted(unnamed)]
    for found in columns.values():
        found.finish(missing)
    num_missing = {name: found.num_missing for name, found in columns.items() if found.num_missing}
    rows_of = {
        split: functools.partial(
            _complete_rows,
            file,
            layouts[split],
            [column for column in num_missing if columns[column].kind != TEXT],
            label if label in num_missing else None,
            missing,
        )
        for split, file in files.items()
    }
    notes += [note for each in lists.values() for note in each.notes(path)]
    notes += [found.note() for found in columns.values()]
    if num_missing:
        before = sum(counts.values())
        if missing.drops:
            label_values = set()
            for split, rows in rows_of.items():
                counts[split] = 0
                for row in rows():
                    counts[split] += 1
                    label_values.update([row[label]] if label is not None else [])
        notes.append(missing_note(path, num_missing, before, sum(counts.values()), options.missing))
    for split, count in counts.items():
        if not count:
            raise DataError(
                f"{files[split]}: --missing={DROP} leaves no row: each has a missing value. Give a "
                "number, for example --missing=0, or remove the column."
            )
    classes: dict[str, Classes] = {}
    if label is not None:
        found = columns[label]
        values = map(_integer, label_values) if found.kind == INTEGER else label_values
        classes[label], gaps = label_classes(path, found, values)
        notes += gaps
    converters: dict[str, Callable[[str], Value]]
    converters = {column: each.convert for column, each in lists.items()}
    for column, found in columns.items():
        is_exact = found.kind == INTEGER and (found.is_label or found.declared)
        converters[column] = _integer if is_exact else _CONVERTERS[found.kind]
    tables = {}
    for split, file in files.items():
        num_bytes = os.path.getsize(file) * (_GZIP_FACTOR if file.endswith(".gz") else 1)
        row_bytes = num_bytes // max(1, counts[split]) + 30 * len(names)
        row_bytes += sum(each.length * each.item_bytes for each in lists.values())
        converted = functools.partial(_converted, rows_of[split], converters)
        tables[split] = Table(counts[split], row_bytes, functools.partial(encoded, converted))
    nodes = {column: _NODES[found.kind] for column, found in columns.items()}
    nodes |= {column: each.node for column, each in lists.items()}
    source = table_source(name, tables, nodes, classes, options)
    return source._replace(notes=[*filter(None, notes)])


def _without_name(path: str, layout: Layout, columns: dict[str, Column], name: str) -> str:
    """Removes a column without a name if it is an index or empty; returns a note."""
    if columns[name].is_empty:
        del columns[name]
        return f"{path}: {name} has no name and no values, and is left out"
    if not layout.has_header:
        return ""
    is_first = name == layout.columns[0] and len(layout.columns) > 1
    if not (is_first and columns[name].has_only_integers):
        return f"{path}: a column has no name, and is called {name}"
    del columns[name]
    return (
        f"{path}: the first column has no name, as an index of pandas, and is left out; "
        f"--text={name} or --integer={name} takes it"
    )


def _complete_rows(
    path: str, layout: Layout, numbers: Sequence[str], label: str | None, missing: Missing
) -> Iterator[dict[str, str]]:
    """The rows without a missing value, or with the number in place of each.

    `numbers`: the columns of numbers with missing values; `label`: if it has missing values.
    """
    for _, row in lines(path, layout):
        lacking = [column for column in numbers if row[column].lower() in MISSING_VALUES]
        if missing.drops and (lacking or (label is not None and not row[label])):
            continue
        row.update(dict.fromkeys(lacking, missing.number))
        yield row


def _converted(
    rows: Callable[[], Iterator[dict[str, str]]], converters: Mapping[str, Callable[[str], Value]]
) -> Iterator[Mapping[str, Value]]:
    for row in rows():
        yield {column: convert(row[column]) for column, convert in converters.items()}
