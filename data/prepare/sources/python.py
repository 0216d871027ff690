"""Python: what a function of the user's file returns, FILE.py:FUNCTION.

    def rows(): return {"train": ..., "test": ...}      # or one container, which is divided
    def rows(shard, num_shards): ...                    # part `shard` of `num_shards`

`python_rows` says what a container may be. The function is called once, or once for each part, by
forked processes. So this process never imports what the file imports, such as TensorFlow, and can
fork the processes that write. The rows are kept in files in TMPDIR, which have no name, until they
are written. The parts are the same for every number of processes: so is the result.
"""

import collections
import functools
import importlib.util
import inspect
import os
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from data.prepare.processes import in_processes
from data.prepare.progress import progress
from data.prepare.sources import Options, Source, split_named
from data.prepare.sources.arrow_tables import ArrowChunk, arrow_source
from data.prepare.sources.python_rows import batches
from data.system.errors import TrainerError, reason_lines
from data.system.files import DataError

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
        with tempfile.TemporaryFile() as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._num_bytes = 0

    def append(self, batch: pa.RecordBatch) -> _Piece:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        content = memoryview(sink.getvalue())
        offset = self._num_bytes
        while self._num_bytes < offset + len(content):
            rest = content[self._num_bytes - offset :]
            self._num_bytes += os.pwrite(self._descriptor, rest, self._num_bytes)
        return _Piece(offset, len(content), len(batch), batch.schema)

    def read(self, piece: _Piece, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        content = bytearray()
        while rest := piece.num_bytes - len(content):  # Linux reads 2 GiB at once, at most.
            content += os.pread(self._descriptor, rest, piece.offset + len(content))
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
    cuts = [number * NUM_SHARDS // processes for number in range(processes + 1)]
    parts = list(map(range, cuts, cuts[1:]))
    row_files = {part.start: _RowFile() for part in parts}

    def work(part: range, count_one: Callable[[], None]) -> list[_PiecesBySplit]:
        return _called(target, part, row_files[part.start], count_one)

    if "tensorflow" in sys.modules:
        found = [result for part in parts for result in work(part, lambda: None)]
    else:
        with progress(target, None) as report:
            found = in_processes(work, parts, report, name=f"--source={target}")
    tables: dict[str, list[ArrowChunk]] = {}
    starts: collections.Counter[str] = collections.Counter()  # By split: the rows before.
    for number, splits in enumerate(found):
        row_file = row_files[max(start for start in row_files if start <= number)]
        for split, pieces in splits.items():
            chunks = tables.setdefault(split, [])
            for piece in pieces:
                read = functools.partial(row_file.read, piece)
                where = _where(target, split)
                chunks.append(ArrowChunk(where, starts[split], piece.num_rows, piece.schema, read))
                starts[split] += piece.num_rows
    if "" in tables and len(tables) > 1:
        raise DataError(f"{target} returns splits for some parts only. Return them for all.")
    if options.split_column and "" not in tables:
        raise DataError(f"--split_column would be ignored: {target} returns splits. Leave it out.")
    return arrow_source(name, target, tables, {}, options)


def _called(
    target: str, part: range, row_file: _RowFile, count_one: Callable[[], None]
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
                    pieces[split].append(row_file.append(batch))
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
