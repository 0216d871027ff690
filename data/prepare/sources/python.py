"""Python: what a function of the user's file returns, FILE.py:FUNCTION.

    def rows(): return {"train": ..., "test": ...}      # or one container, which is divided
    def rows(shard, num_shards): ...                    # part `shard` of `num_shards`

The function is called once, or once for each part, by forked processes. So this process never
imports what the file imports, such as TensorFlow, and can fork the processes that write. The rows
are kept in files in TMPDIR, which have no name, until they are written. The parts are the same for
every number of processes: so is the result.
"""

import collections
import datetime
import functools
import importlib.util
import inspect
import itertools
import os
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.prepare.progress import progress
from data.prepare.sources import Options, Source, split_named
from data.prepare.sources.arrow_columns import NUMERIC, unit_of
from data.prepare.sources.arrow_tables import (
    BATCH_BYTES,
    BATCH_ROWS,
    arrow_chunk,
    arrow_source,
    rows_at_once,
)
from data.prepare.sources.tables import Chunk
from data.prepare.writing import in_processes
from data.system.errors import TrainerError, reason_lines
from data.system.files import DataError

# Values may be of any type that Arrow or NumPy takes.
Row: TypeAlias = Mapping[str, Any]
ColumnValues: TypeAlias = list[Any] | npt.NDArray[Any]
CONTAINERS = (
    "an iterable of dicts, a tf.data.Dataset, a keras.utils.PyDataset, a table of pandas or Arrow, "
    "or a NumPy structured array"
)
_TIMES = (datetime.datetime, datetime.date)  # Of pandas, too, which derives from them.
_PARTS = ("x", "y", "sample_weight")  # As Keras' fit calls them.
NUM_SHARDS = 16
_PARAMETERS = {"shard", "num_shards"}
Function = Callable[..., Any]  # A user's function, which may return anything.


class _Piece(NamedTuple):
    """Rows in a file of rows."""

    offset: int
    num_bytes: int
    num_rows: int
    schema: pa.Schema


_PiecesBySplit = Mapping[str, Sequence[_Piece]]  # Of each split, also of one without rows.


class _RowFile:
    """A file without a name that holds rows; forked processes write and read it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # Closed with this object.
        weakref.finalize(self, self._file.close)

    def append(self, batch: pa.RecordBatch) -> _Piece:
        offset = self._file.tell()
        with pa.ipc.new_stream(self._file, batch.schema) as writer:
            writer.write_batch(batch)
        self._file.flush()
        return _Piece(offset, self._file.tell() - offset, len(batch), batch.schema)

    def read(self, piece: _Piece, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        content = bytearray()
        while rest := piece.num_bytes - len(content):  # Linux reads 2 GiB at once, at most.
            content += os.pread(self._file.fileno(), rest, piece.offset + len(content))
        for batch in pa.ipc.open_stream(content):
            yield batch.select(list(columns))


def source(name: str, target: str, options: Options) -> Source:
    """The columns that function `target`, FILE.py:FUNCTION, returns, as features."""
    file, _, function = target.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise DataError(
            f"--source={target} must be FILE.py:FUNCTION. Type --source=rows.py:rows, for example."
        )
    if not os.path.isfile(file):
        raise DataError(f"There is no {file}, of which --source={target} names a function.")
    processes = 1 if options.processes is None else options.processes
    if not 1 <= processes <= NUM_SHARDS:
        raise DataError(
            f"--processes must be 1 to {NUM_SHARDS}. Received: {processes}. Type --processes=2."
        )
    row_files = [_RowFile() for _ in range(NUM_SHARDS)]

    def work(part: range, count_one: Callable[[], None]) -> list[_PiecesBySplit]:
        return _called(target, part, row_files, count_one)

    if "tensorflow" in sys.modules:
        found = work(range(NUM_SHARDS), lambda: None)
    else:
        with progress(target, None) as report:
            found = in_processes(work, NUM_SHARDS, processes, report, name=f"--source={target}")
    tables: dict[str, list[Chunk]] = {}
    starts: collections.Counter[str] = collections.Counter()  # By split: the rows before.
    for row_file, splits in zip(row_files, found, strict=False):  # One, if it takes no parts.
        for split, pieces in splits.items():
            chunks = tables.setdefault(split, [])
            for piece in pieces:
                read = functools.partial(row_file.read, piece)
                where = _where(target, split)
                chunks.append(arrow_chunk(where, starts[split], piece.num_rows, piece.schema, read))
                starts[split] += piece.num_rows
    if "" in tables and len(tables) > 1:
        raise DataError(f"{target} returns splits for some parts only. Return them for all.")
    if options.split_column and "" not in tables:
        raise DataError(f"--split_column would be ignored: {target} returns splits. Leave it out.")
    return arrow_source(name, target, tables, options)


def _called(
    target: str, part: range, row_files: Sequence[_RowFile], count_one: Callable[[], None]
) -> list[_PiecesBySplit]:
    """Calls the function for each shard of `part`; writes the rows; returns the pieces of each."""
    file, _, name = target.rpartition(":")
    file = os.path.abspath(file)
    sys.path.insert(0, os.path.dirname(file))
    results: list[_PiecesBySplit] = []
    function = None
    try:
        function = _function(file, name)
        takes_part = _takes_part(function, target)
        if not takes_part and len(part) < NUM_SHARDS:
            raise DataError(
                f"--processes needs a function with the parameters shard and num_shards, which "
                f"returns a part of the rows; {target} has none. Add them, or leave --processes "
                "out."
            )
        for shard in part if takes_part else range(1):
            found = function(shard=shard, num_shards=NUM_SHARDS) if takes_part else function()
            pieces: dict[str, list[_Piece]] = {}
            for split, container in _splits(found, target).items():
                pieces[split] = []
                for batch in batches(container, _where(target, split)):
                    pieces[split].append(row_files[shard].append(batch))
                    for _ in range(len(batch)):
                        count_one()
            results.append(pieces)
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:  # A user's code, which may fail in any way.
        raise DataError(f"--source={target} fails: {_explained(error, file, function)}") from error
    finally:
        sys.path.remove(os.path.dirname(file))
    return results


def _function(file: str, name: str) -> Function:
    # The file may have the name of a module of this program, so the module gets another name.
    spec = importlib.util.spec_from_file_location(f"source of {file}", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for types.
    spec.loader.exec_module(module)
    function: Function | None = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise DataError(
            f"{file} has no function {name!r}. It has: {', '.join(there) or 'none'}. Type "
            f"--source=FILE.py:{there[0] if there else 'FUNCTION'}"
        )
    return function


def _takes_part(function: Function, target: str) -> bool:
    parameters = inspect.signature(function).parameters
    needed = {name for name, each in parameters.items() if each.default is each.empty}
    if needed - _PARAMETERS or len(needed) == 1:
        raise DataError(
            f"{target} has the parameters {', '.join(parameters)}. Needed are none, or shard and "
            "num_shards."
        )
    return parameters.keys() >= _PARAMETERS


def _splits(found: object, target: str) -> Mapping[str, object]:
    """What was returned, by split; "" if it is not divided."""
    if not isinstance(found, Mapping):
        return {"": found}
    splits = {name: split_named(str(name)) for name in found}
    if not found or not all(splits.values()) or len({*splits.values()}) < len(splits):
        raise DataError(
            f"{target} returns a dict with {', '.join(map(str, splits)) or 'nothing'}. Needed are "
            "names of splits, such as train and test, each with its rows; or rows without a dict "
            "around them."
        )
    return {splits[name]: rows for name, rows in found.items()}


def _where(target: str, split: str) -> str:
    return f"{target}, split {split}" if split else target


def _explained(error: BaseException, file: str, function: Function | None) -> str:
    """The reason, and the last line of the user's file that was running.

    Without one, as of an error in a graph of tf.data: the line that begins `function`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    reason = " ".join(reason_lines(error)[:2])
    if isinstance(error, SyntaxError) and error.filename == file:
        lines, reason = [error.lineno], error.msg
    if not lines and function is not None:
        lines = [inspect.unwrap(function).__code__.co_firstlineno]
    place = f" ({file}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {reason}{place}"


def batches(found: object, where: str) -> Iterator[pa.RecordBatch]:
    """The rows of one split, in batches of some MiB; docs/data.md says what a row is of each.

    `where`: for messages.
    """
    tf, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
    if isinstance(found, np.ndarray) and found.dtype.names:
        tables: Iterable[Row] = [{name: found[name] for name in found.dtype.names}]
    elif hasattr(found, "__arrow_c_stream__"):
        for batch in pa.RecordBatchReader.from_stream(found):
            yield from _cut(batch)
        return
    elif keras and isinstance(found, keras.utils.PyDataset):
        if found.num_batches is None:
            raise DataError(f"{where}: the PyDataset has no end: num_batches is None.")
        tables = (_named(found[number], where) for number in range(found.num_batches))
    else:
        if tf and isinstance(found, tf.data.Dataset):
            _check_dataset(found, where)
            found = found.as_numpy_iterator()
        if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping, np.ndarray)):
            raise DataError(
                f"{where} is {_type_of(found)}. Needed is {CONTAINERS}; or a dict of these with "
                "the names of splits: {'train': ..., 'test': ...}."
            )
        yield from _batches_of_rows((_named(row, where) for row in found), where)
        return
    for table in tables:
        columns = {name: np.asarray(values) for name, values in table.items()}
        lengths = {name: len(values) if values.ndim else 0 for name, values in columns.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{where}: the columns of a batch differ in their rows: {lengths}.")
        yield from _cut(_batch(columns, where))


def _check_dataset(dataset: Any, where: str) -> None:  # Any: TensorFlow has no types.
    import tensorflow as tf

    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise DataError(f"{where}: the tf.data.Dataset has no end. Leave out its repeat().")
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    if all(shape.rank and shape[0] is None for shape in shapes):
        raise DataError(
            f"{where}: the tf.data.Dataset has batches. Needed is one example in an element: "
            "return dataset.unbatch()."
        )


def _named(element: object, where: str) -> dict[str, Any]:
    """The values of an element by name; a value in a nested dict is named outer/inner."""
    if isinstance(element, (tuple, list)) and 2 <= len(element) <= len(_PARTS):
        pairs = list(zip(_PARTS, element, strict=False))
        named = [part if isinstance(part, Mapping) else {name: part} for name, part in pairs]
    elif isinstance(element, Mapping) and element:
        named = [element]
    else:
        raise DataError(
            f"{where} has an element that is {_type_of(element)}. Needed is a dict with a value "
            "for each column, such as {'x': 1.5, 'label': 0}; or, of a tf.data.Dataset or "
            "PyDataset, (x, y)."
        )
    found: dict[str, Any] = {}
    for part in named:
        for key, value in part.items():
            inner = {key: value}
            if isinstance(value, Mapping):
                inner = {f"{key}/{name}": x for name, x in _named(value, where).items()}
            if not isinstance(key, str) or found.keys() & inner.keys():
                raise DataError(
                    f"{where}: {key!r} is the name of two columns, or no text. Rename it."
                )
            found |= inner
    return found


def _batches_of_rows(rows: Iterable[Row], where: str) -> Iterator[pa.RecordBatch]:
    waiting: list[Row] = []
    num_bytes = 0
    for number, row in enumerate(rows):
        if waiting and row.keys() != waiting[0].keys():
            raise DataError(
                f"{where}, row {number}: its columns are {', '.join(row)}, but those of the rows "
                f"before are {', '.join(waiting[0])}. All rows need the same: a missing value is "
                "None."
            )
        waiting.append({name: _plain(value) for name, value in row.items()})
        num_bytes += sum(map(_num_bytes, waiting[-1].values()))
        if len(waiting) == BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield _batch_of(waiting, where)
            waiting, num_bytes = [], 0
    if waiting:
        yield _batch_of(waiting, where)


def _batch_of(rows: Sequence[Row], where: str) -> pa.RecordBatch:
    return _batch({name: [row[name] for row in rows] for name in rows[0]}, where)


def _batch(columns: Mapping[str, ColumnValues], where: str) -> pa.RecordBatch:
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = _array(values)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            kinds = sorted({type(value).__name__ for value in values})
            raise DataError(
                f"{where}: column {name} has values of {', '.join(kinds)}, which are no column of "
                f"one type ({str(error).splitlines()[0]}). Needed are numbers of 64 bits, times, "
                "text, or lists and arrays of one shape."
            ) from None
    return pa.RecordBatch.from_pydict(arrays)


def _array(values: ColumnValues) -> pa.Array:
    if not isinstance(values, np.ndarray):
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        kinds = {(array.shape, array.dtype) for array in arrays}
        if len(kinds) != 1 or len(arrays) < len(values):
            try:
                array = pa.array(values)
            except OverflowError:
                return pa.array(values, pa.uint64())
            # Arrow would take the hour from a time among dates, and make times of integers.
            if unit_of(array.type) not in ("", NUMERIC) and len({*_units(values)}) > 1:
                raise TypeError("their units differ")
            return array
        values = np.stack(arrays)
    if values.dtype.kind == "O" and values.ndim == 1:
        return _array(list(map(_plain, values.tolist())))
    return _of_numpy(values)


def _units(values: Iterable[object]) -> Iterator[tuple[type, bool]]:
    """The type of each value and item, and True if it has a time zone."""
    for value in values:
        if isinstance(value, (list, tuple, np.ndarray)):
            yield from _units(value)
        elif value is not None and str(value) != "NaT":
            kind = next((each for each in _TIMES if isinstance(value, each)), type(value))
            yield kind, getattr(value, "tzinfo", None) is not None


def _of_numpy(values: npt.NDArray[Any]) -> pa.Array:
    """An array [n, ...]: numbers, or lists of fixed size for each dimension after the first."""
    flat = np.ascontiguousarray(values).reshape(-1)
    is_text = flat.dtype.kind in "USO"
    array = pa.array(flat.tolist() if is_text else flat.astype(flat.dtype.newbyteorder("=")))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = rows_at_once(batch)
    for first in range(0, len(batch), rows):
        yield batch.slice(first, rows)


def _plain(value: Any) -> Any:
    """A tensor as an array; an array without dimensions as its number."""
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        value = np.asarray(value)
        return value if value.ndim else value[()]
    return value


def _num_bytes(value: object) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) * 8 if isinstance(value, (list, tuple, str, bytes)) else 8


def _type_of(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, itertools.islice(value, 5))) or 'nothing'}"
    return f"of type {type(value).__name__}"
