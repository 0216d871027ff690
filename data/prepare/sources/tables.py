"""Tables, for all sources of rows with named columns, each of which becomes a feature.

The column `label` of the options becomes a ClassLabel. Its values are integers from 0, or names,
which are numbered in sorted order.
"""

import csv
import difflib
import itertools
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from data.prepare.sources import (
    Options,
    Source,
    SourceSplit,
    divided,
    joined,
    refuse_fraction,
    split_paths,
    typed_path,
)
from data.prepare.sources.examples import Classes, Node, feature_files
from data.system.files import DataError
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import Values, records
from data.tfrecord.shard_names import word_of

_SHOWN_COLUMNS = 30
_VALUE_BYTES = 20  # Of a value, beside its name: lengths and kinds.

Array: TypeAlias = npt.NDArray[np.generic]
Mask: TypeAlias = npt.NDArray[np.bool_]
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


class TableColumn(NamedTuple):
    """A column of a table as a feature, which `node` describes.

    `num_bytes`: an estimate of the size of a value. `convert(values, classes)` returns values as a
    record holds them; `classes` are those of the label.
    """

    node: Node
    num_bytes: int
    convert: Callable[[Any, Classes | None], Values]


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
            chosen[split][every] = np.frombuffer(mask, bool)
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
    """The values at `places`, int64 [n]: all of an array of NumPy or Arrow if n is its length."""
    if len(places) == len(values):
        return values
    return values[places] if isinstance(values, np.ndarray) else values.take(places)


def split_files(path: str, *suffixes: str) -> dict[str, str]:
    """Split name -> file of a directory with a file for each split, or {"": path} of a file."""
    if os.path.isfile(path):
        return {"": path}
    if not os.path.isdir(path):
        raise DataError(f"There is no --source={path}. Give a file or directory that exists.")
    found = split_paths(path, *suffixes)
    if "train" not in found:
        there = [name for name in sorted(os.listdir(path)) if name.lower().endswith(suffixes)]
        needed = (
            f"{path} has no train{suffixes[0]}, but {', '.join(there[:5]) or 'none of that kind'}. "
            f"Needed are train{suffixes[0]} and test{suffixes[0]} (or val)"
        )
        if all(any(word_of(split, name) for name in there) for split in ("train", "test")):
            raise DataError(f"{needed}: rename the files.")
        if len(there) > 1:
            raise DataError(
                f"{needed}; or one file with all rows, which is divided; or one of these files "
                f"alone: {typed_path(path, there[0])}"
            )
        example = there[0] if there else f"FILE{suffixes[0]}"
        raise DataError(f"{needed}; or a file, which is divided: {typed_path(path, example)}")
    return found


def typed(option: str, *columns: str) -> str:
    """The flag with these columns, as it is typed in a shell."""
    names = (
        '"{}"'.format(name.replace('"', '""')) if set(name) & set(',"') else name
        for name in columns
    )
    return shlex.quote(f"--{option}={','.join(names)}")


def columns_in(option: str | None) -> list[str]:
    """The columns in the value of a flag: separated by commas, in double quotes if needed."""
    found = next(csv.reader([option or ""], skipinitialspace=True), [])
    return [column.strip() for column in found if column.strip()]


def no_column(path: str, flag: str, name: str, columns: Collection[str]) -> DataError:
    """The error for a flag that names a column which is not there."""
    lower = {column.lower(): column for column in columns}
    similar = difflib.get_close_matches(name.lower(), lower, n=3)
    near = [lower[found] for found in similar or [x for x in lower if name.lower() in x][:3]]
    hint = f"Did you mean {' or '.join(typed(flag, column) for column in near)}? " if near else ""
    for mark in "|:; " if len(columns) == 1 else "":
        if mark in next(iter(columns)):
            hint = f"If these are several columns, add {shlex.quote(f'--delimiter={mark}')}. "
            break
    more = ", ..." if len(columns) > _SHOWN_COLUMNS else ""
    return DataError(
        f"{path} has no column {name!r}. {hint}--{flag} may be "
        f"{', '.join(itertools.islice(columns, _SHOWN_COLUMNS))}{more}."
    )


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


def classes_of(
    values: Iterable[int | str], where: str, or_else: str = ""
) -> tuple[Classes, Sequence[str]]:
    """The classes of a label with these values: sorted names, or integers from 0; and notes.

    `or_else`: for messages, what may be done other than to replace negative values.
    """
    distinct = set(values)
    if names := tuple(sorted(value for value in distinct if isinstance(value, str))):
        return Classes(len(names), names), ()
    numbers = [value for value in distinct if isinstance(value, int)]
    least, most = min(numbers, default=0), max(numbers, default=-1)
    if least < 0:
        raise DataError(
            f"{where} is the label, and has {least}; needed are integers from 0. Replace such "
            f"values{or_else}."
        )
    notes = []
    if len(numbers) <= most:
        notes.append(
            f"{where} has {len(numbers):,} different values from {least:,} to {most:,}. So the "
            f"label has {most + 1:,} classes, some without examples"
        )
    return Classes(most + 1), notes
