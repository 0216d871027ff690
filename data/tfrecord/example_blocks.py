"""Records of many examples at once, from columns: the bytes that `example_bytes` gives for each.

    for record in records({"age": np.array([37, 41]), "name": Texts(data, lengths)}):
        print(record)               # a tf.train.Example

A record is, for each feature in the order of their names, a header and a value. The header holds
the name, and lengths that depend on the length of the value only. So one header is made for each
different length, and NumPy copies headers and values of all rows to their places.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from data.tfrecord.crc import Int64s, Uint8s
from data.tfrecord.examples import BYTES, FLOATS, INTEGERS, feature_header, field_header

Float32s: TypeAlias = npt.NDArray[np.float32]

_VARINT_BITS = 7
_MOST_VARINT_BYTES = 10


class Texts(NamedTuple):
    """Byte strings, one after the other in `data`; `per_row` of them are the value of a row."""

    data: Uint8s
    lengths: Int64s  # [n * per_row]
    per_row: int = 1


Values: TypeAlias = Int64s | Float32s | Texts  # The values of a feature; numbers are [n].


def records(columns: Mapping[str, Values]) -> Iterator[bytes]:
    """Yields the records of n examples, which have one value of each feature."""
    pieces: list[Texts] = []
    for name, column in sorted((name.encode(), column) for name, column in columns.items()):
        kind, value = _value(column)
        header = functools.partial(feature_header, name, kind)
        pieces += _by_length(value.lengths, header), value
    examples = _as_field(_joined(pieces))
    data, ends = examples.data.tobytes(), np.cumsum(examples.lengths).tolist()
    for first, last in itertools.pairwise([0, *ends]):
        yield data[first:last]


def _value(column: Values) -> tuple[int, Texts]:
    """The kind of a tf.train.Feature, and the bytes of its list for each row."""
    if isinstance(column, Texts):
        data, lengths, _ = _as_field(column)
        return BYTES, Texts(data, lengths.reshape(-1, column.per_row).sum(axis=1))
    if column.dtype == np.float32:
        return FLOATS, _as_field(fixed(column.astype("<f4")))
    return INTEGERS, _as_field(_varints(cast(Int64s, column)))


def fixed(values: npt.NDArray[np.generic]) -> Texts:
    """The bytes of each row of an array [n, ...]."""
    rows = np.ascontiguousarray(values)
    num_bytes = rows.nbytes // max(1, len(rows))
    return Texts(rows.reshape(-1).view(np.uint8), np.full(len(rows), num_bytes, np.int64))


def texts(values: Iterable[bytes], per_row: int = 1) -> Texts:
    """Byte strings as the values of rows, `per_row` in each."""
    found = list(values)
    lengths = np.array(list(map(len, found)), np.int64)
    return Texts(np.frombuffer(b"".join(found), np.uint8), lengths, per_row)


def _varints(numbers: Int64s) -> Texts:
    """Integers as protobuf writes them: 7 bits in a byte, the lowest first."""
    rest = numbers.astype(np.int64, copy=False).view(np.uint64)
    bounds = np.array([1 << _VARINT_BITS * i for i in range(1, _MOST_VARINT_BYTES)], np.uint64)
    most = int(np.searchsorted(bounds, rest.max(initial=0), side="right")) + 1
    lengths = np.ones(len(rest), np.int64)
    for bound in bounds[: most - 1]:
        lengths += rest >= bound
    shifts = np.arange(most, dtype=np.uint64) * np.uint64(_VARINT_BITS)
    digits = (rest[:, np.newaxis] >> shifts).astype(np.uint8) | np.uint8(0x80)
    digits[np.arange(len(rest)), lengths - 1] &= 0x7F
    return Texts(digits[np.arange(most) < lengths[:, np.newaxis]], lengths)


def _as_field(values: Texts) -> Texts:
    """Each of `values` as field 1 of a message."""
    return _joined([_by_length(values.lengths, functools.partial(field_header, 1)), values])


def _by_length(lengths: Int64s, header: Callable[[int], bytes]) -> Texts:
    """`header(length)` of each row."""
    if len(lengths) and (lengths == lengths[0]).all():
        once = np.frombuffer(header(int(lengths[0])), np.uint8)
        return Texts(np.tile(once, len(lengths)), np.full(len(lengths), len(once), np.int64))
    distinct, places = np.unique(lengths, return_inverse=True)
    made = list(map(header, distinct.tolist()))
    sizes = np.array(list(map(len, made)), np.int64)
    most = max(map(len, made), default=0)
    table = np.frombuffer(b"".join(each.ljust(most) for each in made), np.uint8)
    rows = table.reshape(len(made), most)[places]
    return Texts(rows[np.arange(most) < sizes[places, np.newaxis]], sizes[places])


def _joined(pieces: Sequence[Texts]) -> Texts:
    """The bytes of all pieces of row 0, then those of row 1, and so on."""
    lengths: Int64s = np.sum([piece.lengths for piece in pieces], axis=0, dtype=np.int64)
    places = np.cumsum(lengths) - lengths  # Of the first byte of each row.
    joined = np.empty(lengths.sum(), np.uint8)
    for data, sizes, _ in pieces:
        if (sizes == sizes[:1]).all():
            size = len(data) // max(1, len(sizes))
            targets = (places[:, np.newaxis] + np.arange(size)).reshape(-1)
        else:
            targets = np.repeat(places - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(data))
        joined[targets] = data
        places += sizes
    return Texts(joined, lengths)
