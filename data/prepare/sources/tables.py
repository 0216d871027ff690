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
from typing import NamedTuple, TypeAlias, TypeVar

from data.prepare.sources import (
    Options,
    Source,
    SourceSplit,
    divided,
    refuse_fraction,
    split_paths,
    typed_path,
)
from data.prepare.sources.examples import Classes, Node, feature_files
from data.system.files import DataError
from data.tfrecord.examples import Value, example_bytes
from data.tfrecord.shard_names import word_of

_SHOWN_COLUMNS = 30

Examples: TypeAlias = Callable[[int, int], Iterator[bytes]]  # Of a SourceSplit.
ColumnsT = TypeVar("ColumnsT", bound=Collection[str])


class Table(NamedTuple):
    """Rows with named columns, each of which becomes an example.

    `examples(mask, labels)` returns the `examples` of a SourceSplit that has the rows for which
    `mask` is 1, with the classes of the columns that are `labels`.
    """

    num_rows: int
    row_bytes: int  # An estimate of the size of an example.
    examples: Callable[[bytes, Mapping[str, Classes]], Examples]


def encoded(
    rows: Callable[[], Iterator[Mapping[str, Value]]], mask: bytes, labels: Mapping[str, Classes]
) -> Examples:
    """`Table.examples` of a table that is read row by row: each call of `rows` yields all rows."""
    numbers = {
        key: {class_name.encode(): number for number, class_name in enumerate(classes.names)}
        for key, classes in labels.items()
        if classes.names
    }

    def examples(first: int, last: int) -> Iterator[bytes]:
        chosen = itertools.compress(rows(), mask)
        for row in itertools.islice(chosen, first, last):
            classes = {key: known[row[key]] for key, known in numbers.items()}  # type: ignore[index]  # Names are bytes.
            yield example_bytes({**row, **classes})

    return examples


def table_source(
    name: str,
    tables: Mapping[str, Table],
    nodes: Mapping[str, Node],
    labels: Mapping[str, Classes],
    options: Options,
    masks: Mapping[str, bytes] | None = None,
) -> Source:
    """A source whose features are the columns, described by `nodes`.

    `tables`: by split. A table with the name "" is divided into splits: by `masks`, or into train
    and test, row by row, by `test_fraction` and `seed`. `labels`: column -> classes, if there is a
    label; the names of classes are replaced by their numbers.
    """

    def split_of(table: Table, mask: bytes) -> SourceSplit:
        examples = table.examples(mask, labels)
        return SourceSplit(sum(mask), sum(mask) * table.row_bytes, examples)

    if masks is not None:
        refuse_fraction(options, "--split_column says which row is of which split")
    elif "" in tables:
        masks = divided(map(str, range(tables[""].num_rows)), options, name)
    if masks is not None:
        splits = {split: split_of(tables[""], mask) for split, mask in masks.items()}
    else:
        refuse_fraction(options, "the source has its own splits")
        splits = {key: split_of(table, b"\1" * table.num_rows) for key, table in tables.items()}
    return Source(name, splits, feature_files(nodes, labels))


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
