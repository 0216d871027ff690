"""What a user's function returns -> Arrow batches of some MiB.

    for batch in batches([{"age": 37, "name": "Ada"}], "people.py:rows"): ...

| returned | a row is |
| --- | --- |
| an iterable of dicts | a dict |
| a tf.data.Dataset | an element: a dict, or (x, y), or (x, y, sample_weight) |
| a keras.utils.PyDataset | a row of a batch: of a dict, or of (x, y), or of (x, y, sample_weight) |
| a table of pandas or Arrow: what has __arrow_c_stream__ | a row |
| a NumPy structured array | an item, with a column for each field |
"""

import datetime
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.numerals import NUMBER
from data.prepare.sources.arrow_columns import unit_of
from data.system.files import DataError

# Values may be of any type that Arrow or NumPy takes.
Row: TypeAlias = Mapping[str, Any]
Column: TypeAlias = list[Any] | npt.NDArray[Any]
CONTAINERS = (
    "an iterable of dicts, a tf.data.Dataset, a keras.utils.PyDataset, a table of pandas or Arrow, "
    "or a NumPy structured array"
)
_TIMES = (datetime.datetime, datetime.date)  # Of pandas, too, which derives from them.
_PARTS = ("x", "y", "sample_weight")  # As Keras' fit calls them.
_BATCH_ROWS, _BATCH_BYTES = 2048, 4 << 20


def batches(found: object, where: str) -> Iterator[pa.RecordBatch]:
    """The rows of one split. `where`: the function and the split, for messages."""
    tf, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
    if isinstance(found, np.ndarray) and found.dtype.names:
        tables: Iterable[Row] = [{name: found[name] for name in found.dtype.names}]
    elif hasattr(found, "__arrow_c_stream__") or hasattr(found, "__arrow_c_array__"):
        stream = found if hasattr(found, "__arrow_c_stream__") else pa.table(found)
        for batch in pa.RecordBatchReader.from_stream(stream):
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
        if len(waiting) == _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield _batch_of(waiting, where)
            waiting, num_bytes = [], 0
    if waiting:
        yield _batch_of(waiting, where)


def _batch_of(rows: Sequence[Row], where: str) -> pa.RecordBatch:
    return _batch({name: [row[name] for row in rows] for name in rows[0]}, where)


def _batch(columns: Mapping[str, Column], where: str) -> pa.RecordBatch:
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = _array(values)
        except OverflowError:
            raise DataError(
                f"{where}: column {name} has an integer that 64 bits do not hold. Return it as str."
            ) from None
        except (pa.ArrowException, ValueError, TypeError) as error:
            kinds = sorted({type(value).__name__ for value in values})
            raise DataError(
                f"{where}: column {name} has values of {', '.join(kinds)}, which are no column of "
                f"one type ({str(error).splitlines()[0]}). Needed are numbers, times, text, or "
                "lists and arrays of one shape."
            ) from None
    return pa.RecordBatch.from_pydict(arrays)


def _array(values: Column) -> pa.Array:
    if not isinstance(values, np.ndarray):
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        kinds = {(array.shape, array.dtype) for array in arrays}
        if len(kinds) != 1 or len(arrays) < len(values):
            try:
                array = pa.array(values)
            except OverflowError:
                return pa.array(values, pa.uint64())
            # Arrow would take the hour from a time among dates, and make times of integers.
            if unit_of(array.type) not in ("", NUMBER) and len({*_units(values)}) > 1:
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
    row_bytes = max(1, batch.nbytes // max(1, len(batch)))
    rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
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
