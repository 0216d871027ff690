"""CSV: a line of column names, then one line for each example; quotes of RFC 4180.

    SOURCE.csv, or SOURCE/train.csv and SOURCE/test.csv; also .tsv, and with .gz

`csv_files` finds the encoding and the separator, and `columns` the type of each column, from all of
its values: docs/data.md has the rules. The files are read some lines at a time: twice, or three
times if there is a label, or if rows are left out.

A column of `lists` becomes a tensor as long as its longest list. Shorter lists are filled up with
-1, or with empty text if the items of the column are text.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from data.numerals import CODE, INTEGER, INTEGERS, TEXT, kind_of
from data.prepare.sources import Options, Source
from data.prepare.sources.columns import (
    EMPTY,
    Column,
    First,
    ListColumn,
    Missing,
    declared_types,
    missing_of,
)
from data.prepare.sources.csv_files import SUFFIXES, Layout, layout_of, lines
from data.prepare.sources.examples import Classes
from data.prepare.sources.tables import (
    Batch,
    Chunk,
    common_columns,
    read_all,
    split_files,
    typed_source,
)
from data.system.files import DataError
from data.tfrecord.examples import PADDING, Values, fixed

_BATCH_ROWS = 256


def source(name: str, path: str, options: Options) -> Source:
    """The columns of a CSV file, or of one file for each split, as features with the same names."""
    missing = missing_of(options.missing)
    files = split_files(path, *SUFFIXES)
    layouts = {split: layout_of(file, options) for split, file in files.items()}
    headers = {split: list(layout.columns) for split, layout in layouts.items()}
    names = common_columns(path, headers, files, options)
    types, listed = declared_types(path, options, names)
    as_text = [column for column, kind in types.items() if kind == TEXT]
    columns: dict[str, Column] = {}
    for column in sorted(names, key=listed.__contains__):
        columns[column] = (Lists if column in listed else Column)(
            column,
            is_label=column == options.label,
            declared=types.get(column, ""),
            texts=as_text,
        )
    tables = {}
    for split, file in files.items():
        chunk = Chunk(file, 0, functools.partial(_batches, file, layouts[split]))
        tables[split] = read_all(file, [chunk], columns)
    notes = [layout.note for layout in layouts.values()]
    layout = next(iter(layouts.values()))
    for column in sorted({*layout.unnamed} - {*types, *listed, options.label}):
        notes.append(_without_name(path, layout, columns, column))
    if not columns:
        raise DataError(f"{path} has no column with a name. If its first line is data: --noheader")
    found, _ = typed_source(name, path, tables, columns, missing, options)
    return found._replace(notes=[*filter(None, notes), *found.notes])


def _batches(path: str, layout: Layout, columns: Sequence[str]) -> Iterator[Batch]:
    """The lines of a file: their numbers, and the text of each value, by column."""
    found = lines(path, layout)
    while batch := list(itertools.islice(found, _BATCH_ROWS)):
        numbers, rows = zip(*batch, strict=True)
        yield (
            numbers,
            {column: np.array([row[column] for row in rows], object) for column in columns},
        )


def _without_name(path: str, layout: Layout, columns: dict[str, Column], name: str) -> str:
    """Removes a column without a name if it is an index or empty; returns a note."""
    if columns[name].counts.keys() <= {EMPTY}:
        del columns[name]
        return f"{path}: {name} has no name and no values, and is left out"
    if not layout.has_header:
        return ""
    is_first = name == layout.columns[0] and len(layout.columns) > 1
    if not (is_first and columns[name].counts.keys() == {INTEGER}):
        return f"{path}: a column has no name, and is called {name}"
    del columns[name]
    return (
        f"{path}: the first column has no name, as an index of pandas, and is left out; "
        f"--text={name} or --integer={name} takes it"
    )


class Lists(ListColumn):
    """A column of lists. Finds the longest list, and the first item of each kind."""

    def __init__(self, name: str, **how: Any) -> None:
        """`how`: the other arguments of Column."""
        super().__init__(name, **how)
        # For the separators "|" and None, which stands for spaces.
        self._lengths: dict[str | None, int] = {"|": 1, None: 1}
        self._firsts: dict[str | None, dict[str, First]] = {"|": {}, None: {}}
        self._separator: str | None = None

    @override
    def _add(self, value: str, path: str, row: int) -> None:
        if "|" in value:
            self._separator = "|"
        for separator, first in self._firsts.items():
            items = _items(value, separator)
            self._lengths[separator] = max(self._lengths[separator], len(items))
            for item in items:
                kind = kind_of(item)
                if kind != CODE:
                    kind = INTEGER if kind in INTEGERS else TEXT
                if kind not in first:
                    first[kind] = First(f"{path}, {self.unit} {row}", item)
                if item == str(PADDING):
                    first.setdefault(item, First(f"{path}, {self.unit} {row}", item))

    @override
    def finish(self, missing: Missing) -> None:
        """Raises DataError for a mix of integers and text, and for an integer that is padding."""
        first = self._first = self._firsts[self._separator]
        self._shape = [self._lengths[self._separator]]
        if INTEGER in first and TEXT in first and self.declared != TEXT:
            integer, wrong = first[INTEGER], first[TEXT]
            raise DataError(
                f"{wrong.where}: column {self.name} has the item {wrong.value!r}, but "
                f"{integer.value!r} in {integer.where}. The items of a column are integers or "
                f"text: correct it, or, if all are text, add {self.as_text}."
            )
        is_text = self.declared == TEXT or bool({TEXT, CODE} & first.keys())
        self._item_type = "string" if is_text else "int64"
        self._check_padding()

    @override
    def notes(self, path: str) -> Iterator[str]:
        first = self._first
        yield from super().notes(path)
        if CODE in first and TEXT not in first and self.declared != TEXT:
            yield (
                f"{first[CODE].where}: the items of {self.name} are text, because a number would "
                f"change {first[CODE].value!r}"
            )

    @override
    def convert(self, values: Sequence[str], classes: Classes | None = None) -> Values:
        (length,) = self._shape
        fill = "" if self._item_type == "string" else str(PADDING)
        found = [_items(value, self._separator) for value in values]
        rows = [[*items, *[fill] * (length - len(items))] for items in found]
        if self._item_type == "string":
            return np.array([list(map(str.encode, row)) for row in rows], object)
        return fixed(np.array([list(map(int, row)) for row in rows], "<i8"))


def _items(value: str, separator: str | None) -> list[str]:
    return [item.strip() for item in value.split(separator) if item.strip()]
