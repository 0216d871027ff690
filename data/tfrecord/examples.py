"""The bytes of tf.train.Examples without TensorFlow: of one, or of many at once from columns.

    record = example_bytes({"image": pixels.tobytes(), "label": 1})
    for record in records({"age": np.array([37, 41]), "name": Texts(data, lengths)}):
        ...                         # the bytes that `example_bytes` gives for each

A record is, for each feature in the order of their names, a header and a value. The header holds
the name, and lengths that depend on the length of the value only. So for many records one header is
made for each different length, and NumPy copies headers and values of all rows to their places.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from data.tfrecord.crc import Int64s, Uint8s

BYTES, FLOATS, INTEGERS = 1, 2, 3  # The kinds of a tf.train.Feature: numbers of its fields.
PADDING = -1  # Fills up short lists of integers. Empty text fills up lists of text.
_VARINT_BITS = 7
_MOST_VARINT_BYTES = 10

Value: TypeAlias = bytes | int | float | Sequence[int] | Sequence[float] | Sequence[bytes]
Float32s: TypeAlias = npt.NDArray[np.float32]


def example_bytes(values: Mapping[str, Value]) -> bytes:
    """A serialized tf.train.Example; equal values give equal bytes.

    A float, or a sequence with a float, is stored as float32, other numbers as int64. The fields
    are sorted by name. TensorFlow is not imported: that takes longer than to write 100,000 small
    examples.

    Raises:
        ValueError: an integer does not fit into 64 bits.
    """
    entries = [
        _field(1, _field(1, name) + _field(2, _feature_bytes(value)))
        for name, value in sorted((name.encode(), value) for name, value in values.items())
    ]
    return _field(1, b"".join(entries)) if entries else b""


def _feature_bytes(value: Value) -> bytes:
    """A tf.train.Feature: bytes_list, or a packed float_list or int64_list."""
    if isinstance(value, bytes):
        return _field(BYTES, _field(1, value))
    listed = [value] if isinstance(value, (int, float)) else value
    texts = [item for item in listed if isinstance(item, bytes)]
    if texts:
        return _field(BYTES, b"".join(_field(1, item) for item in texts))
    numbers = [item for item in listed if not isinstance(item, bytes)]
    if any(isinstance(item, float) for item in numbers):
        with np.errstate(over="ignore"):  # A value too large for float32 becomes infinite, as in C.
            packed = np.array(numbers, "<f4").tobytes()
        return _field(FLOATS, _field(1, packed))
    packed = b"".join(map(_varint, numbers))
    return _field(INTEGERS, _field(1, packed) if packed else b"")


def _field(number: int, content: bytes) -> bytes:
    return _field_header(number, len(content)) + content


def _field_header(number: int, length: int) -> bytes:
    """What precedes a field of `length` bytes (protobuf.dev/programming-guides/encoding)."""
    return bytes([number << 3 | 2]) + _varint(length)


def _feature_header(name: bytes, kind: int, length: int) -> bytes:
    """What precedes the list of a feature in an example; `length`: the bytes of the list."""
    of_list = _field_header(kind, length)
    key, of_feature = _field(1, name), _field_header(2, len(of_list) + length)
    before = key + of_feature + of_list
    return _field_header(1, len(before) + length) + before


def _varint(value: int | float) -> bytes:
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{number} does not fit into 64 bits")
    number &= 2**64 - 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


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
        header = functools.partial(_feature_header, name, kind)
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
    return _joined([_by_length(values.lengths, functools.partial(_field_header, 1)), values])


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
