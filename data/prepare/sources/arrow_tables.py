"""Arrow tables in chunks -> a source, for Parquet and Python: types, missing values, label, splits.

    chunk = Chunk("people.parquet", 0, 1000, schema, read)
    source = arrow_source("people", "people.parquet", {"": [chunk]}, {}, options)

All values are read to find the types, a few rows at a time, and read again when they are written.
The result depends on the rows and their order only: not on the bounds of chunks and batches. But
Arrow may refuse values of Python in one batch that it takes in two, such as True and 1.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data.numerals import NUMBER, TEXT
from data.prepare.progress import progress
from data.prepare.sources import DROP, Options, Source, joined, split_named
from data.prepare.sources.arrow_columns import (
    LISTS,
    ArrowColumn,
    Mask,
    as_text,
    family_of,
    unit_of,
    without_views,
)
from data.prepare.sources.arrow_lists import ArrowLists
from data.prepare.sources.columns import (
    declared_types,
    label_classes,
    missing_note,
    missing_of,
)
from data.prepare.sources.examples import Classes
from data.prepare.sources.tables import (
    Examples,
    Table,
    columns_in,
    common_columns,
    no_column,
    table_source,
)
from data.system.files import DataError
from data.tfrecord.examples import records

_INDEX = re.compile(r"__index_level_\d+__")  # Of pandas, without a name.
_FRAME_BYTES = 20  # Of a value, beside its name: lengths and kinds.
_SHOWN_COLUMNS = 100
Batches = Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
Columns = Mapping[str, ArrowColumn | ArrowLists]


class Chunk(NamedTuple):
    """Rows that can be read without those before them.

    Attributes:
        path: The file, for messages.
        first: The number of its first row in the file, from 0.
        read: Yields these columns of the rows in order, in batches of some MiB.
    """

    path: str
    first: int
    num_rows: int
    schema: pa.Schema
    read: Batches

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """As `read`, but without views."""
        for batch in self.read(columns):
            arrays = list(map(without_views, batch.columns))
            yield pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _examples(
    chunks: Sequence[Chunk],
    columns: Columns,
    is_kept: Mask,
    mask: bytes,
    labels: Mapping[str, Classes],
) -> Examples:
    """`Table.examples` of the rows of `chunks` for which `is_kept`, bool [rows], is true."""
    chosen = is_kept.copy()
    chosen[is_kept] = np.frombuffer(mask, bool)
    ends = np.cumsum([chunk.num_rows for chunk in chunks])
    parts = np.split(chosen, ends[:-1])

    def rows(part: int, low: int, high: int) -> Iterator[bytes]:
        row = done = 0
        for batch in chunks[part].batches(list(columns)):
            places = np.flatnonzero(parts[part][row : row + len(batch)])
            row += len(batch)
            wanted = places[max(0, low - done) : max(0, high - done)]
            done += len(places)
            if len(wanted):
                taken = batch if len(wanted) == len(batch) else batch.take(pa.array(wanted))
                yield from records(
                    {
                        name: column.convert(taken.column(name), labels.get(name))
                        for name, column in columns.items()
                    }
                )
            if done >= high:
                return

    return joined([int(np.count_nonzero(part)) for part in parts], rows)


def arrow_source(
    name: str,
    path: str,
    tables: Mapping[str, Sequence[Chunk]],
    files: Mapping[str, str],
    options: Options,
) -> Source:
    """The columns of `tables`, by split, as features with the same names.

    A table with the name "" is divided: by the column `split_column`, or by `test_fraction`.
    `path`, and `files` of the splits: for messages.
    """
    missing = missing_of(options.missing)
    chunks = [chunk for part in tables.values() for chunk in part]
    if not chunks:
        raise DataError(f"{path} has no rows.")
    names, notes = _names(path, tables, files, options)
    columns = _columns(path, chunks, names, options)
    masks = _read_all(path, chunks, columns, options.split_column)
    for found in columns.values():
        found.finish(missing)
        notes += found.notes(path)
    lacking = {key: found for key, found in columns.items() if found.num_missing}
    label = columns[options.label] if options.label is not None else None
    assert not isinstance(label, ArrowLists)
    kept, values = _kept(tables, lacking if missing.drops else {}, label)
    if lacking:
        before, after = (sum(map(count, kept.values())) for count in (len, np.count_nonzero))
        counts = {column: found.num_missing for column, found in lacking.items()}
        notes.append(missing_note(path, counts, before, int(after), options.missing))
    for split, mask in kept.items():
        if lacking and not mask.any():
            raise DataError(
                f"{files.get(split, path)}: --missing={DROP} leaves no row: each has a missing "
                "value. Give a number for missing numbers, for example --missing=0, or leave the "
                "column out, by --columns."
            )
    classes: dict[str, Classes] = {}
    if label is not None:
        classes[label.name], gaps = label_classes(path, label, values)
        notes += gaps
    notes.append(_types_note(path, columns, classes))
    row_bytes = sum(len(key.encode()) + _FRAME_BYTES + c.num_bytes for key, c in columns.items())
    rows = {}
    for split, part in tables.items():
        num_rows = int(np.count_nonzero(kept[split]))
        examples = functools.partial(_examples, part, columns, kept[split])
        rows[split] = Table(num_rows, row_bytes, examples)
    by_column = {split: mask[kept[""]].tobytes() for split, mask in masks.items()} or None
    nodes = {column: found.node for column, found in columns.items()}
    source = table_source(name, rows, nodes, classes, options, by_column)
    return source._replace(notes=[*filter(None, notes)])


def _read_all(
    path: str, chunks: Sequence[Chunk], columns: Columns, split_column: str | None
) -> dict[str, Mask]:
    """Adds all values to `columns`. Returns a mask of the rows of each split in `split_column`."""
    masks: dict[str, list[Mask]] = {}
    num_read = 0
    with progress(f"{path}, types", sum(chunk.num_rows for chunk in chunks)) as report:
        for chunk, row, batch in _batches(chunks, [*columns, *filter(None, [split_column])]):
            for column, found in columns.items():
                found.add_array(batch.column(column), chunk.path, row)
            if split_column is not None:
                where = f"{chunk.path}: column {split_column}"
                _add_splits(masks, as_text(batch.column(split_column)), where)
            num_read += len(batch)
            report(num_read)
    return {split: np.concatenate(parts) for split, parts in masks.items()}


def _kept(
    tables: Mapping[str, Sequence[Chunk]],
    lacking: Columns,
    label: ArrowColumn | None,
) -> tuple[dict[str, Mask], set[int | str]]:
    """The rows of each split that lack no value of `lacking`, and the values of their labels."""
    kept: dict[str, Mask] = {}
    values: set[int | str] = set()
    looked_at = [*lacking, *([label.name] if label and label.name not in lacking else [])]
    for split, part in tables.items():
        kept[split] = np.ones(sum(chunk.num_rows for chunk in part), bool)
        begin = 0
        for _, _, batch in _batches(part, looked_at) if looked_at else ():
            mask = kept[split][begin : begin + len(batch)]
            begin += len(batch)
            for column, found in lacking.items():
                mask &= ~found.lacks(batch.column(column))
            if label is not None:
                values |= label.classes(batch.column(label.name).filter(pa.array(mask)))
    return kept, values


def _names(
    path: str,
    tables: Mapping[str, Sequence[Chunk]],
    files: Mapping[str, str],
    options: Options,
) -> tuple[list[str], list[str]]:
    """The columns that are read, in the order of the first chunk; and notes."""
    headers: dict[str, list[str]] = {}
    first = next(part[0] for part in tables.values() if part)
    chosen = columns_in(options.columns)
    needed = {*chosen, options.label, options.split_column} if chosen else None
    wanted = {name for name in first.schema.names if needed is None or name in needed}
    for split, part in tables.items():
        for chunk in part:
            found = chunk.schema.names
            if repeated := [name for name in found if found.count(name) > 1]:
                raise DataError(f"{chunk.path} has two columns {repeated[0]!r}. Rename one.")
            here = {name for name in found if needed is None or name in needed}
            if here == wanted:
                found = first.schema.names
            elif split in headers:
                missing, more = wanted - here, here - wanted
                said = [f"lacks {', '.join(sorted(missing))}"] if missing else []
                said += [f"also has {', '.join(sorted(more))}"] if more else []
                raise DataError(
                    f"{chunk.path}, row {chunk.first}: other columns than in {first.path}: it "
                    f"{' and '.join(said)}. All rows need the same columns: --columns has those "
                    "that are taken."
                )
            headers[split] = found
    there = common_columns(path, headers, files, options)
    for flag, named in (("columns", chosen), ("split_column", [options.split_column])):
        for column in filter(None, named):
            if column not in there:
                raise no_column(path, flag, column, there)
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
            dtype = chunk.schema.field(name).type
            family = family_of(dtype)
            if not family and not pa.types.is_null(dtype):
                raise DataError(
                    f"{chunk.path}: column {name} is {dtype}, which a record cannot hold. Needed "
                    "are numbers, times, text, or lists of these. Make columns of its parts, or "
                    "leave it out: --columns has the columns that are taken."
                )
            if family:
                families.setdefault(family, chunk)
            if unit := unit_of(dtype):
                units.setdefault(unit, chunk)
        if mixed := next((found for found in (families, units) if len(found) > 1), None):
            (one, at), (other, there) = list(mixed.items())[:2]
            raise DataError(
                f"{there.path}: column {name} has {_plural(other)} from row {there.first} on, and "
                f"{_plural(one)} in {at.path} from row {at.first} on. Convert one of them, "
                "or leave it out: --columns has the columns that are taken."
            )
        if LISTS not in families:
            columns[name] = ArrowColumn(
                name,
                is_number=NUMBER in families,
                is_label=name == options.label,
                declared=types.get(name, ""),
                texts=texts,
            )
        elif name == options.label or types.get(name, TEXT) != TEXT:
            flag = "label" if name == options.label else "integer or --float"
            raise DataError(
                f"{path}: column {name} has lists, so it cannot be in --{flag}. Leave it out of it."
            )
        else:
            columns[name] = ArrowLists(name, is_text=name in types)
    return columns


def _plural(family: str) -> str:
    return f"{family}s" if family == "number" else family


def _batches(
    chunks: Sequence[Chunk], columns: Sequence[str]
) -> Iterator[tuple[Chunk, int, pa.RecordBatch]]:
    """The batches of all chunks, with the number of the first row of each in its file."""
    for chunk in chunks:
        row = chunk.first
        for batch in chunk.batches(columns):
            yield chunk, row, batch
            row += len(batch)


def _add_splits(masks: dict[str, list[Mask]], values: pa.Array, where: str) -> None:
    """Adds to `masks` the rows of each split. `values`: the split of each row."""
    # A split that is found later has none of the rows before.
    before = [len(mask) for mask in next(iter(masks.values()), [])]
    found = np.array([value.decode(errors="replace") for value in values.to_pylist()], object)
    splits = {value: split_named(value) for value in sorted(set(found))}
    if unknown := [value for value, split in splits.items() if not split]:
        raise DataError(
            f"{where} has {unknown[0]!r}. Needed are names of splits, such as train, test and val. "
            "Rename its values, or leave --split_column out."
        )
    for split in {*splits.values(), *masks}:
        parts = masks.setdefault(split, [np.zeros(length, bool) for length in before])
        parts.append(np.array([splits[value] == split for value in found], bool))


def _types_note(path: str, columns: Columns, classes: Mapping[str, Classes]) -> str:
    stored = {name: found.stored for name, found in columns.items()}
    stored |= {name: f"label of {found.num_classes:,} classes" for name, found in classes.items()}
    types = [f"{name} {found}" for name, found in itertools.islice(stored.items(), _SHOWN_COLUMNS)]
    more = f" and {len(columns) - _SHOWN_COLUMNS} more" if len(columns) > _SHOWN_COLUMNS else ""
    return f"{path}: columns: {', '.join(types)}{more}"
