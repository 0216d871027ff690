"""Arrow tables in chunks -> a source, for Parquet and Python: types, missing values, label, splits.

    chunk = arrow_chunk("people.parquet", 0, 1000, schema, read)
    source = arrow_source("people", "people.parquet", {"": [chunk]}, options)

All values are read to find the types, a few rows at a time, and read again when they are written.
The result depends on the rows and their order only: not on the bounds of chunks and batches. But
Arrow may refuse values of Python in one batch that it takes in two, such as True and 1.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from data.numerals import TEXT
from data.prepare.sources import Options, Source, split_named
from data.prepare.sources.arrow_columns import (
    LISTS,
    NUMERIC,
    ArrowColumn,
    as_text,
    family_of,
    plain,
    plain_type,
    unit_of,
)
from data.prepare.sources.arrow_lists import ArrowLists
from data.prepare.sources.columns import Mask, columns_in, declared_types, missing_of, no_column
from data.prepare.sources.examples import Classes
from data.prepare.sources.tables import Batch, Chunk, read_all, typed_source
from data.system.files import DataError
from data.tfrecord.crc import Uint8s
from data.tfrecord.shard_names import SPLIT_DIRS

_INDEX = re.compile(r"__index_level_\d+__")  # Of pandas, without a name.
_SHOWN_COLUMNS = 100
BATCH_ROWS, BATCH_BYTES = 2048, 4 << 20


def rows_at_once(batch: pa.RecordBatch) -> int:
    """The number of rows for a batch of some MiB, if rows are as large as those of `batch`."""
    row_bytes: int = max(1, batch.nbytes // max(1, len(batch)))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))


def arrow_chunk(
    path: str,
    first: int,
    num_rows: int,
    schema: pa.Schema,
    read: Callable[[Sequence[str]], Iterator[pa.RecordBatch]],
) -> Chunk:
    """Rows of a file; `read` yields these columns of the rows in order, in batches of some MiB."""

    def batches(columns: Sequence[str]) -> Iterator[Batch]:
        row = first
        for batch in read(columns):
            yield range(row, row + len(batch)), dict(zip(columns, map(plain, batch), strict=True))
            row += len(batch)

    return Chunk(path, num_rows, batches, first, schema)


def arrow_source(
    name: str,
    path: str,
    tables: Mapping[str, Sequence[Chunk]],
    options: Options,
) -> Source:
    """The columns of `tables`, by split, as features with the same names.

    A table with the name "" is divided: by the column `split_column`, or by `test_fraction`.
    `path`: for messages.
    """
    missing = missing_of(options.missing)
    chunks = [chunk for part in tables.values() for chunk in part]
    if not chunks:
        raise DataError(f"{path} has no rows.")
    names, notes = _names(path, chunks, options)
    columns = _columns(path, chunks, names, options)
    masks = _masks(path, chunks, options.split_column) if options.split_column else None
    read_all(path, chunks, columns)
    source, classes = typed_source(name, path, tables, columns, missing, options, masks)
    types = _types_note(path, columns, classes)
    return source._replace(notes=[*notes, *source.notes, types])


def _masks(path: str, chunks: Sequence[Chunk], column: str) -> dict[str, Mask]:
    """The rows of each split, bool [rows], by a column with the names of splits."""
    parts: list[Uint8s] = []  # Numbers of SPLIT_DIRS.
    for _, batch in itertools.chain.from_iterable(chunk.batches([column]) for chunk in chunks):
        values = batch[column]
        if pa.types.is_nested(values.type):  # Lists, for example: no names of splits.
            found = [str(values.type)] * len(values)
        else:
            found = [value.decode(errors="replace") for value in as_text(values).to_pylist()]
        splits = list(map(split_named, found))
        if "" in splits:
            raise DataError(
                f"{path}: column {column} has {found[splits.index('')]!r}. Needed are names of "
                "splits, such as train, test and val. Rename its values, or leave --split_column "
                "out."
            )
        parts.append(np.array(list(map(SPLIT_DIRS.index, splits)), np.uint8))
    every = np.concatenate(parts)
    return {SPLIT_DIRS[number]: every == number for number in np.unique(every)}


def _names(path: str, chunks: Sequence[Chunk], options: Options) -> tuple[list[str], list[str]]:
    """The columns that are read, in the order of the first chunk; and notes."""
    there = chunks[0].schema.names
    chosen = columns_in(options.columns)
    named: dict[str, Sequence[str | None]]
    named = {"label": [options.label], "columns": chosen, "split_column": [options.split_column]}
    for flag, columns in named.items():
        for column in filter(None, columns):
            if column not in there:
                raise no_column(path, flag, column, there)
    needed = {*filter(None, itertools.chain(*named.values()))} if chosen else {*there}
    for chunk in chunks:
        found = {*chunk.schema.names}
        if len(found) < len(chunk.schema.names):
            twice = next(name for name in found if chunk.schema.names.count(name) > 1)
            raise DataError(f"{chunk.path} has two columns {twice!r}. Rename one.")
        missing, more = sorted(needed - found), [] if chosen else sorted(found - needed)
        if missing or more:
            said = [f"lacks {', '.join(missing)}"] if missing else []
            said += [f"also has {', '.join(more)}"] if more else []
            raise DataError(
                f"{chunk.path}, row {chunk.first}: other columns than in {chunks[0].path}: it "
                f"{' and '.join(said)}. All rows of all splits need the same columns, with the "
                "label: --columns has those that are taken. --source may name one file, which is "
                "then divided."
            )
    names = [
        column
        for column in there
        if column == options.label or (column in chosen if chosen else not _INDEX.fullmatch(column))
    ]
    notes = [
        f"{path}: {column} has no name, as an index of pandas, and is left out; --columns takes it"
        for column in there
        if not chosen and column not in names
    ]
    if options.split_column in names:
        if options.split_column == options.label:
            raise DataError(
                f"--label and --split_column both have {options.label!r}. Leave one out."
            )
        names.remove(options.split_column)
    if not names:
        raise DataError(
            f"{path} has no other column than {options.split_column}, which is not stored. Leave "
            "--split_column out."
        )
    return names, notes


def _columns(
    path: str, chunks: Sequence[Chunk], names: Sequence[str], options: Options
) -> dict[str, ArrowColumn | ArrowLists]:
    types, _ = declared_types(path, options, names)
    texts = [column for column, kind in types.items() if kind == TEXT]
    columns: dict[str, ArrowColumn | ArrowLists] = {}
    for name in names:
        families: dict[str, Chunk] = {}
        units: dict[str, Chunk] = {}
        for chunk in chunks:
            dtype = plain_type(chunk.schema.field(name).type)
            family = family_of(dtype)
            if not family and not pa.types.is_null(dtype):
                raise DataError(
                    f"{chunk.path}: column {name} is {dtype}, which a record cannot hold. Needed "
                    "are numbers, times, text, or lists of these. Make columns of its parts, or "
                    "leave it out: --columns has the columns that are taken."
                )
            for found, kind in ((families, family), (units, unit_of(dtype))):
                if kind:
                    found.setdefault(kind, chunk)
        if mixed := next((found for found in (families, units) if len(found) > 1), None):
            (one, at), (other, there) = list(mixed.items())[:2]
            raise DataError(
                f"{there.path}: column {name} has {other} from row {there.first} on, and "
                f"{one} in {at.path} from row {at.first} on. Convert one of them, "
                "or leave it out: --columns has the columns that are taken."
            )
        how: dict[str, Any] = {"is_label": name == options.label, "declared": types.get(name, "")}
        if LISTS not in families:
            is_number = NUMERIC in families
            columns[name] = ArrowColumn(name, is_number=is_number, texts=texts, **how)
        elif name == options.label or types.get(name, TEXT) != TEXT:
            flag = "label" if name == options.label else "integer or --float"
            raise DataError(
                f"{path}: column {name} has lists, so it cannot be in --{flag}. Leave it out of it."
            )
        else:
            columns[name] = ArrowLists(name, texts=texts, **how)
    return columns


def _types_note(
    path: str, columns: Mapping[str, ArrowColumn | ArrowLists], classes: Mapping[str, Classes]
) -> str:
    stored = {name: found.stored for name, found in columns.items()}
    stored |= {name: f"label of {found.num_classes:,} classes" for name, found in classes.items()}
    types = [f"{name} {found}" for name, found in itertools.islice(stored.items(), _SHOWN_COLUMNS)]
    more = f" and {len(columns) - _SHOWN_COLUMNS} more" if len(columns) > _SHOWN_COLUMNS else ""
    return f"{path}: columns: {', '.join(types)}{more}"
