"""Tables whose columns find their types from all values: CSV, Parquet and Python.

    counts = read_all("people.csv", chunks, {"age": Column("age", is_label=False)})
    source, classes = typed_source("people", "people.csv", {"": chunks}, columns, ...)

All values are read to find the types, some rows at a time, and read again when they are written.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from data.prepare.progress import progress
from data.prepare.sources import DROP, Options, Source
from data.prepare.sources.columns import Column, Missing
from data.prepare.sources.examples import Classes
from data.prepare.sources.tables import Chunk, Mask, table_source, taken
from data.system.files import DataError


def read_all(path: str, chunks: Sequence[Chunk], columns: Mapping[str, Column]) -> list[int]:
    """Adds all values of `chunks` to `columns`; returns the number of rows of each chunk."""
    counts, num_read = [], 0
    with progress(f"{path}, types", sum(chunk.num_rows for chunk in chunks) or None) as report:
        for chunk in chunks:
            before = num_read
            for rows, batch in chunk.batches(list(columns)):
                for column, found in columns.items():
                    found.add(batch[column], chunk.path, rows)
                num_read += len(rows)
                report(num_read)
            counts.append(num_read - before)
    return counts


def typed_source(
    name: str,
    path: str,
    tables: Mapping[str, Sequence[Chunk]],
    columns: Mapping[str, Column],
    missing: Missing,
    options: Options,
    files: Mapping[str, str],
    masks: Mapping[str, Mask] | None = None,
) -> tuple[Source, Mapping[str, Classes]]:
    """The columns of `tables`, by split, as features, after `read_all`; and the label's classes.

    A table with the name "" is divided: by `masks`, bool [rows], or by `test_fraction`. `path`, and
    `files` of the splits: for messages.
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
            raise DataError(
                f"{files.get(split, path)}: --missing={DROP} leaves no row: each has a missing "
                "value. Give a number for missing numbers, for example --missing=0, or remove the "
                "column (of Parquet: by --columns)."
            )
    classes: dict[str, Classes] = {}
    if label is not None:
        classes[label.name], gaps = label.label_classes(path, values)
        notes += gaps
    shown = {key: found.feature() for key, found in columns.items()}
    source = table_source(name, tables, shown, classes, options, kept, masks)
    return source._replace(notes=[*filter(None, notes)]), classes


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
