"""Tables, for all sources of rows with named columns, each of which becomes a feature.

    chunks = read_all("people.csv", chunks, {"age": Column("age")})
    source, classes = typed_source("people", "people.csv", {"": chunks}, columns, ...)

Columns of CSV, Parquet and Python find their types from all values. These are read, some rows at a
time, to find the types, and read again when they are written. The column `label` of the options
becomes a ClassLabel. Its values are integers from 0, or names, which are numbered in sorted order.
"""

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from data.prepare.progress import progress
from data.prepare.sources import (
    DROP,
    Options,
    Source,
    SourceSplit,
    divided,
    joined,
    refuse_fraction,
    split_paths,
    typed_path,
)
from data.prepare.sources.columns import Column, Mask, Missing, TableColumn, no_column
from data.prepare.sources.examples import Classes, feature_files
from data.system.files import DataError
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import records
from data.tfrecord.shard_names import word_of

_VALUE_BYTES = 20  # Of a value, beside its name: lengths and kinds.

# The numbers of some rows, for messages, and their values by column: arrays of NumPy or of Arrow.
Batch: TypeAlias = tuple[Sequence[int], Mapping[str, Any]]
ColumnsT = TypeVar("ColumnsT", bound=Collection[str])


class Chunk(NamedTuple):
    """Rows of file `path` that can be read without those before them.

    `batches(columns)` yields these columns of all rows, some rows at a time. `first`: the number of
    the first row in the file. `schema`: a pa.Schema, in tables of Arrow.
    """

    path: str
    num_rows: int
    batches: Callable[[Sequence[str]], Iterator[Batch]]
    first: int = 0
    schema: Any = None


def table_source(
    name: str,
    tables: Mapping[str, Sequence[Chunk]],
    columns: Mapping[str, TableColumn],
    labels: Mapping[str, Classes],
    options: Options,
    kept: Mapping[str, Mask] | None = None,
    masks: Mapping[str, Mask] | None = None,
) -> Source:
    """A source whose features are the columns of `tables`, by split.

    `kept`: the rows of each table that become examples, bool [rows]; by default all. A table with
    the name "" is divided into splits: by `masks`, bool [rows], or into train and test, row by row,
    by `test_fraction` and `seed`. `labels`: column -> classes, if there is a label; the names of
    classes are replaced by their numbers.
    """
    row_bytes = sum(len(key.encode()) + _VALUE_BYTES + c.num_bytes for key, c in columns.items())
    chosen = dict(
        kept
        or {
            key: np.ones(sum(chunk.num_rows for chunk in part), bool)
            for key, part in tables.items()
        }
    )
    if masks is not None:
        refuse_fraction(options, "--split_column says which row is of which split")
        chosen = {split: chosen[""] & mask for split, mask in masks.items()}
    elif "" in tables:
        every = chosen.pop("")
        keys = map(str, range(np.count_nonzero(every)))
        for split, mask in divided(keys, options, name).items():
            chosen[split] = every.copy()
            chosen[split][every] = mask
    else:
        refuse_fraction(options, "the source has its own splits")
    splits = {}
    for split, rows in chosen.items():
        count = int(np.count_nonzero(rows))
        chunks = tables[""] if "" in tables else tables[split]
        examples = _examples(chunks, rows, columns, labels)
        splits[split] = SourceSplit(count, count * row_bytes, examples)
    nodes = {key: column.node for key, column in columns.items()}
    return Source(name, splits, feature_files(nodes, labels))


def _examples(
    chunks: Sequence[Chunk],
    chosen: Mask,
    columns: Mapping[str, TableColumn],
    labels: Mapping[str, Classes],
) -> Callable[[int, int], Iterator[bytes]]:
    """`examples` of a SourceSplit that has the rows of `chunks` for which `chosen` is true."""
    ends = np.cumsum([chunk.num_rows for chunk in chunks])
    parts = np.split(chosen, ends[:-1])

    def rows(part: int, low: int, high: int) -> Iterator[bytes]:
        row = done = 0
        for numbers, batch in chunks[part].batches(list(columns)):
            places = np.flatnonzero(parts[part][row : row + len(numbers)])
            row += len(numbers)
            wanted = places[max(0, low - done) : max(0, high - done)]
            done += len(places)
            if len(wanted):
                yield from records(
                    {
                        name: column.convert(taken(batch[name], wanted), labels.get(name))
                        for name, column in columns.items()
                    }
                )
            if done >= high:
                return

    return joined([int(np.count_nonzero(part)) for part in parts], rows)


def taken(values: Any, places: Int64s) -> Any:
    """The values of an array of NumPy or Arrow at `places`, int64 [n]."""
    return values[places] if isinstance(values, np.ndarray) else values.take(places)


def read_all(path: str, chunks: Sequence[Chunk], columns: Mapping[str, Column]) -> list[Chunk]:
    """Adds all values of `chunks` to `columns`; returns the chunks with their numbers of rows."""
    counted, num_read = [], 0
    with progress(f"{path}, types", sum(chunk.num_rows for chunk in chunks) or None) as report:
        for chunk in chunks:
            before = num_read
            for rows, batch in chunk.batches(list(columns)):
                for column, found in columns.items():
                    found.add(batch[column], chunk.path, rows)
                num_read += len(rows)
                report(num_read)
            if num_read == before:
                raise DataError(f"{chunk.path} has no rows.")
            counted.append(chunk._replace(num_rows=num_read - before))
    return counted


def typed_source(
    name: str,
    path: str,
    tables: Mapping[str, Sequence[Chunk]],
    columns: Mapping[str, Column],
    missing: Missing,
    options: Options,
    masks: Mapping[str, Mask] | None = None,
) -> tuple[Source, Mapping[str, Classes]]:
    """The columns of `tables`, by split, as features, after `read_all`; and the label's classes.

    A table with the name "" is divided: by `masks`, bool [rows], or by `test_fraction`. `path`: for
    messages.
    """
    notes: list[str] = []
    for found in columns.values():
        found.finish(missing)
        notes += found.notes(path)
    lacking = {key: found for key, found in columns.items() if found.num_missing}
    label = columns[options.label] if options.label is not None else None
    kept, values = _kept(tables, lacking if missing.drops else {}, label)
    if lacking:
        before, after = (sum(map(count, kept.values())) for count in (len, np.count_nonzero))
        counts = ", ".join(f"{column} {found.num_missing:,}" for column, found in lacking.items())
        done = f"they are now {options.missing}"
        if missing.drops:
            done = f"{before - after:,} of {before:,} rows are left out"
        notes.append(f"{path}: missing values by column: {counts}; {done}")
    for split, mask in kept.items():
        if lacking and not mask.any():
            where = f"{path}, split {split}" if split else path
            raise DataError(
                f"{where}: --missing={DROP} leaves no row: each has a missing value. Give a number "
                "for missing numbers, for example --missing=0, or remove the column (of Parquet: "
                "by --columns)."
            )
    classes: dict[str, Classes] = {}
    if label is not None:
        classes[label.name], gaps = label.label_classes(path, values)
        notes += gaps
    shown = {key: found.feature() for key, found in columns.items()}
    source = table_source(name, tables, shown, classes, options, kept, masks)
    return source._replace(notes=notes), classes


def _kept(
    tables: Mapping[str, Sequence[Chunk]], lacking: Mapping[str, Column], label: Column | None
) -> tuple[dict[str, Mask], set[int | str]]:
    """The rows of each split that lack no value of `lacking`, and the values of their labels."""
    kept: dict[str, Mask] = {}
    values: set[int | str] = set()
    looked_at = list({**lacking, **({label.name: label} if label else {})})
    for split, chunks in tables.items():
        kept[split] = np.ones(sum(chunk.num_rows for chunk in chunks), bool)
        begin = 0
        batches = (chunk.batches(looked_at) for chunk in chunks if looked_at)
        for rows, batch in itertools.chain.from_iterable(batches):
            mask = kept[split][begin : begin + len(rows)]
            begin += len(rows)
            for column, found in lacking.items():
                mask &= ~found.lacks(batch[column])
            if label is not None:
                values |= label.classes(taken(batch[label.name], np.flatnonzero(mask)))
    return kept, values


def split_files(path: str, *suffixes: str) -> dict[str, str]:
    """Split name -> file of a directory with a file for each split, or {"": path} of a file."""
    if os.path.isfile(path):
        return {"": path}
    found = split_paths(path, *suffixes)
    if "train" not in found:
        there = [name for name in sorted(os.listdir(path)) if name.lower().endswith(suffixes)]
        example = typed_path(path, there[0] if there else f"FILE{suffixes[0]}")
        advice = f"; or one file alone, which is then divided: {example}"
        if all(any(word_of(split, name) for name in there) for split in ("train", "test")):
            advice = ": rename the files."
        raise DataError(
            f"{path} has no train{suffixes[0]}, but {', '.join(there[:5]) or 'none of that kind'}. "
            f"Needed are train{suffixes[0]} and test{suffixes[0]} (or val){advice}"
        )
    return found


def common_columns(
    path: str, splits: Mapping[str, ColumnsT], files: Mapping[str, str], options: Options
) -> ColumnsT:
    """The columns, which must be the same in all splits. `files`: of the splits, for messages."""
    (first, columns), *others = splits.items()
    for split, found in others:
        if found != columns:
            alone = typed_path(files[first]) if first in files else ""
            alone = alone and f" Or take {first!r} alone, which is then divided: {alone}"
            raise DataError(
                f"{path}: split {split!r} has columns {found}, but {first!r} has {columns}. All "
                f"splits need the same, with the label.{alone}"
            )
    if options.label is not None and options.label not in columns:
        raise no_column(path, "label", options.label, columns)
    return columns
