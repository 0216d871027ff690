"""Tables, for CSV and NPZ: rows with named columns, one of which may be the label."""

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from data.prepare.sources import Options, Source, SourceSplit, divided, refuse_fraction
from data.prepare.sources.examples import Classes, Node, feature_files
from data.system.files import DataError
from data.tfrecord.examples import Value, example_bytes
from data.tfrecord.shard_names import SPLIT_NAMES

ColumnsT = TypeVar("ColumnsT", bound=Collection[str])


class Table(NamedTuple):
    """`num_rows` examples of about `row_bytes` bytes; `rows()` yields them in order."""

    num_rows: int
    row_bytes: int
    rows: Callable[[], Iterator[Mapping[str, Value]]]


def table_source(
    name: str,
    tables: Mapping[str, Table],
    nodes: Mapping[str, Node],
    labels: Mapping[str, Classes],
    options: Options,
) -> Source:
    """A source whose features are the columns, described by `nodes`.

    `tables`: by split. A table with the name "" is divided into train and test, row by row, by
    `test_fraction` and `seed`. `labels`: column -> classes, if there is a label; the names of
    classes are replaced by their numbers.
    """
    numbers = {
        key: {class_name.encode(): number for number, class_name in enumerate(classes.names)}
        for key, classes in labels.items()
        if classes.names
    }

    def split_of(table: Table, mask: bytes) -> SourceSplit:
        def examples(first: int, last: int) -> Iterator[bytes]:
            chosen = itertools.compress(table.rows(), mask)
            for row in itertools.islice(chosen, first, last):
                classes = {key: known[row[key]] for key, known in numbers.items()}  # type: ignore[index]  # Names are bytes.
                yield example_bytes({**row, **classes})

        return SourceSplit(sum(mask), sum(mask) * table.row_bytes, examples)

    if "" in tables:
        masks = divided(map(str, range(tables[""].num_rows)), options, name)
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
        raise DataError(f"There is no --source={path}.")
    found: dict[str, str] = {}
    for name in SPLIT_NAMES:
        for suffix in suffixes:
            file = os.path.join(path, name + suffix)
            if os.path.isfile(file):
                found.setdefault(name, file)
    suffix = suffixes[0]
    if "train" not in found:
        raise DataError(
            f"{path} has no train{suffix}. Needed are train{suffix} and test{suffix}, or a file: "
            f"--source={os.path.join(path, 'FILE' + suffix)}"
        )
    return found


def common_columns(path: str, splits: Mapping[str, ColumnsT], options: Options) -> ColumnsT:
    """The columns of every split."""
    (first, columns), *others = splits.items()
    for split, found in others:
        if found != columns:
            raise DataError(
                f"{path}: split {split!r} has columns {found}, but {first!r} has {columns}."
            )
    if options.label is not None and options.label not in columns:
        raise DataError(
            f"{path} has no column {options.label!r}. --label may be {', '.join(columns)}."
        )
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
