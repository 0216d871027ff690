"""Parquet: a file, or all files below a directory; also partitioned, as Hive and Spark write them.

    SOURCE.parquet                          divided into train and test
    SOURCE/train-0.parquet, SOURCE/test/0   a word in each path says the split
    SOURCE/day=3/part-0.parquet             `day` is a column, too

Files are read by row groups, a few thousand rows at a time. The package pyarrow is needed.
"""

import functools
import itertools
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from data.numerals import INTEGERS, kind_of
from data.prepare.sources import Options, Source, check_utf8, split_named, typed_path
from data.prepare.sources.arrow_tables import (
    BATCH_BYTES,
    BATCH_ROWS,
    arrow_chunk,
    arrow_source,
    rows_at_once,
)
from data.prepare.sources.rewrite import paths_by_pattern
from data.prepare.sources.tables import Chunk
from data.system.files import DataError, files_below
from data.tfrecord.shard_names import word_of

SUFFIXES = (".parquet", ".parq", ".pq")
_OF_TEXT = (".csv", ".tsv", ".txt")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_FIRST_ROWS = 16  # Their size in memory says how many are read at a time.
_READ_ROWS = 256  # At most: later rows may be much larger than the first ones.
_READ_BYTES = 1 << 16  # At a time, of each column.
Partition = Mapping[str, str | None]


def source(name: str, path: str, options: Options) -> Source:
    """The columns of Parquet files as features with the same names."""
    splits = _files(path, options)
    check_utf8(itertools.chain.from_iterable(splits.values()))  # pyarrow opens no others.
    partitions = {file: _partition(path, file) for files in splits.values() for file in files}
    types = _partition_types(partitions)
    tables = {
        split: [chunk for file in files for chunk in _chunks(file, partitions[file], types)]
        for split, files in splits.items()
    }
    return arrow_source(name, path, tables, options)


def _files(path: str, options: Options) -> dict[str, list[str]]:
    """The files of each split; "" is the split of files that are divided row by row."""
    if options.splits and options.split_column:
        raise DataError("--splits and --split_column both say the splits. Leave one out.")
    if os.path.isfile(path):
        if options.splits:
            raise DataError(f"--splits would be ignored: {path} is one file. Leave it out.")
        return {"": [path]}
    if options.splits:
        return paths_by_pattern(path, options.splits)
    found = files_below(path, lambda each: os.path.basename(each).startswith((".", "_")))
    paths = [file for file in found if file.lower().endswith(SUFFIXES)]
    if not paths:
        raise DataError(
            f"{path} has no Parquet files: none ends with {', '.join(SUFFIXES)}. If they have "
            "other names, add --splits='train=PATTERN,test=PATTERN'."
        )
    if options.split_column:
        return {"": paths}
    splits: dict[str, list[str]] = {}
    for file in paths:
        splits.setdefault(_split_of(_parts(path, file)), []).append(file)
    if ("train" in splits and "" not in splits) or splits.keys() == {""}:
        return splits
    example = next(iter(splits.get("", splits.get("train", paths))))
    raise DataError(
        f"{path}: the splits are not clear: names of files say {', '.join(filter(None, splits))}, "
        f"and {example} is {'of no split' if '' in splits else 'not for training'}. Type "
        "--splits='train=PATTERN,test=PATTERN', --split_column=COLUMN, or one file, which is "
        f"divided: {typed_path(example)}"
    )


def _parts(directory: str, path: str) -> list[str]:
    return os.path.relpath(path, directory).split(os.sep)


def _split_of(parts: Sequence[str]) -> str:
    """The split that the first word in the names of directories and file says."""
    for part in parts:
        key, equals, value = part.partition("=")
        name = part if not equals else value if key == "split" else ""
        if word := word_of("train", name) or word_of("test", name):
            return split_named(word)
    return ""


def _partition(directory: str, file: str) -> Partition:
    """The columns that the directories of a file say: {"day": "3"} of day=3/part-0.parquet."""
    pairs = [part.partition("=") for part in _parts(directory, file)[:-1] if "=" in part]
    return {key: None if value == _NULL else urllib.parse.unquote(value) for key, _, value in pairs}


def _partition_types(partitions: Mapping[str, Partition]) -> dict[str, pa.DataType]:
    """The types of such columns: integers, if all values are; otherwise text."""
    values: dict[str, set[str]] = {}
    for partition in partitions.values():
        for key, value in partition.items():
            values.setdefault(key, set()).update([] if value is None else [value])
    return {
        key: pa.int64() if all(kind_of(x) in INTEGERS for x in found) else pa.string()
        for key, found in values.items()
    }


def _chunks(path: str, partition: Partition, types: Mapping[str, pa.DataType]) -> Iterator[Chunk]:
    """The row groups of a file."""
    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except PermissionError:
        raise
    except (pa.ArrowException, OSError) as error:
        csv = " Of text with commas, type csv:NAME." if path.lower().endswith(_OF_TEXT) else ""
        raise DataError(
            f"{path} is no Parquet file, or damaged: {_reason(error)}. Copy it again.{csv}"
        ) from None
    constants: dict[str, pa.Scalar] = {}
    for key, value in partition.items():
        if key in schema.names:
            raise DataError(
                f"{path} has column {key!r}, which its directory says, too. Rename one of them."
            )
        number = int(value) if value is not None and pa.types.is_integer(types[key]) else value
        constants[key] = pa.scalar(number, types[key])
        schema = schema.append(pa.field(key, types[key]))
    first = 0
    for group in range(metadata.num_row_groups):
        if num_rows := metadata.row_group(group).num_rows:
            read = functools.partial(_read, path, group, constants)
            yield arrow_chunk(path, first, num_rows, schema, read)
        first += num_rows


def _read(
    path: str, group: int, constants: Mapping[str, pa.Scalar], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    stored = [column for column in columns if column not in constants]
    try:
        # Threads of Arrow do not survive the fork of processes that write.
        with pq.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
            # One column at least: without one, batches have no rows.
            some = stored or file.schema_arrow.names[:1]
            read = functools.partial(
                file.iter_batches, row_groups=[group], columns=some, use_threads=False
            )
            # The metadata has the encoded size. In memory, rows may need much more.
            rows = min(_READ_ROWS, rows_at_once(next(read(_FIRST_ROWS))))
            for batch in _joined(read(rows)):
                arrays = [
                    pa.repeat(constants[column], len(batch))
                    if column in constants
                    else batch.column(column)
                    for column in columns
                ]
                yield pa.RecordBatch.from_arrays(arrays, names=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {_reason(error)}. Copy it again.") from None


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins consecutive batches: large ones are converted in half the time of small ones."""
    waiting: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        waiting.append(batch)
        num_rows, num_bytes = num_rows + len(batch), num_bytes + batch.nbytes
        if num_rows >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, num_rows, num_bytes = [], 0, 0
    if waiting:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()


def _reason(error: Exception) -> str:
    return str(error).rstrip(".")
