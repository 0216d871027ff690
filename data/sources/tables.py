"""What CSV and NPZ share: rows with named columns, of which one may be the label."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from data.files import DataError
from data.sources import (
    SPLIT_NAMES,
    Options,
    Source,
    SourceSplit,
    check_chosen,
    chosen_rows,
    refuse_fraction,
    test_chooser,
)
from data.sources.examples import Classes, Node, Value, example_bytes, feature_files, label

Row = Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class Table:
    """`num_rows` examples of about `row_bytes`; `rows()` yields them in order, one at a time."""

    num_rows: int
    row_bytes: int
    rows: Callable[[], Iterator[Row]]


def table_source(
    name: str,
    tables: Mapping[str, Table],
    nodes: Mapping[str, Node],
    label_classes: Mapping[str, Classes],
    options: Options,
) -> Source:
    """A source whose features are the columns, described by `nodes`.

    `tables`: by split; one under the name "" is split here, row by row, by `test_fraction` and
    `seed`. `label_classes`: of the label, if there is one; its names become their numbers.

    Raises:
        DataError: a fraction was asked for where there are splits.
    """
    nodes = {**nodes, **{key: label(classes.num_classes) for key, classes in label_classes.items()}}
    numbers = {
        key: {class_name.encode(): number for number, class_name in enumerate(classes.names)}
        for key, classes in label_classes.items()
        if classes.names
    }

    def split_of(table: Table, is_chosen: Callable[[int], bool], count: int) -> SourceSplit:
        def examples(first: int, last: int) -> Iterator[bytes]:
            for row in chosen_rows(table.rows(), is_chosen, first, last):
                classes = {key: known[row[key]] for key, known in numbers.items()}  # type: ignore[index]  # Names are bytes.
                yield example_bytes({**row, **classes})

        return SourceSplit(count, count * table.row_bytes, examples)

    if "" in tables:
        table, is_test = tables[""], test_chooser(options)
        num_test = sum(is_test(str(row)) for row in range(table.num_rows))
        num_train = table.num_rows - num_test
        check_chosen(options, {"train": num_train, "test": num_test}, name)
        splits = {
            "train": split_of(table, lambda row: not is_test(str(row)), num_train),
            "test": split_of(table, lambda row: is_test(str(row)), num_test),
        }
    else:
        refuse_fraction(options, "the source has its own splits")
        splits = {
            split: split_of(table, lambda row: True, table.num_rows)
            for split, table in tables.items()
        }
    names = {key: classes.names for key, classes in label_classes.items() if classes.names}
    return Source(name, splits, feature_files(nodes, names))


def split_files(path: str, suffix: str) -> dict[str, str]:
    """Split name -> file of a directory with a file for each split, or {"": path} of a file.

    Raises:
        DataError: there is no such file, or none of train.
    """
    if os.path.isfile(path):
        return {"": path}
    if not os.path.isdir(path):
        raise DataError(f"There is no --source={path}.")
    files = {name: os.path.join(path, name + suffix) for name in SPLIT_NAMES}
    found = {name: file for name, file in files.items() if os.path.isfile(file)}
    if "train" not in found:
        raise DataError(
            f"{path} has no train{suffix}. Needed are train{suffix} and test{suffix}, or a file: "
            f"--source={os.path.join(path, 'FILE' + suffix)}"
        )
    return found


def check_label(options: Options, columns: Iterable[str], path: str) -> None:
    """Returns if the label is a column, or none is wanted.

    Raises:
        DataError: it is no column.
    """
    if options.label is not None and options.label not in columns:
        raise DataError(
            f"{path} has no column {options.label!r}. --label may be {', '.join(columns)}."
        )


def classes_of(values: Iterable[int | str], where: str) -> Classes:
    """The classes among all values of a label: names in order, or integers from 0.

    Raises:
        DataError: one is negative.
    """
    highest = -1
    names = set()
    for value in values:
        if isinstance(value, str):
            names.add(value)
        elif value < 0:
            raise DataError(f"{where} is the label, and has {value}; needed are integers from 0.")
        else:
            highest = max(highest, value)
    return Classes(len(names), tuple(sorted(names))) if names else Classes(highest + 1)
