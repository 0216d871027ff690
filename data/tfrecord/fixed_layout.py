"""Records of one layout: features are sliced out of the bytes instead of parsed.

    layout = find_layout(record, columns)               # None if there is none
    if layout.fits(records):                            # uint8 [n, length]
        values = layout.slice(records)                  # {"image": uint8 [n, 784], ...}

Records that one program wrote mostly differ in values only. The offsets that a parser finds in a
record depend only on tags and lengths, and on the top bit of each byte of a varint, which says that
another byte follows (protobuf.dev/programming-guides/encoding). So two records that are equal in
these bits have the same offsets, and a few slices cut a thousand records into features.

`tf.io.parse_example` is the definition: a layout is found only for records that it accepts, and
slices are the values that it returns.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from data.tfrecord.crc import FRAME_BYTES, Uint8s

if TYPE_CHECKING:
    import tensorflow as tf

_LENGTH_DELIMITED = 2  # A wire type.
_KINDS = {1: "bytes", 2: "float", 3: "int64"}  # By the number of the field of a list.
_MAX_VARINT_BYTES = 10
_MAX_RECORD_BYTES = 1 << 20  # Slicing larger records saves nothing.


@dataclasses.dataclass(frozen=True)
class Column:
    """A feature to take from the records, as tf.io.FixedLenFeature describes it.

    Attributes:
        shape: The shape of one example's values; () for bytes.
        num_bytes: The length of a value of bytes; None if it may vary.
    """

    kind: Literal["bytes", "int64", "float"]
    shape: tuple[int, ...] = ()
    num_bytes: int | None = None

    def on_disk(self) -> "tf.io.FixedLenFeature":
        """The argument of tf.io.parse_example."""
        import tensorflow as tf

        dtype = {"bytes": tf.string, "int64": tf.int64, "float": tf.float32}[self.kind]
        return tf.io.FixedLenFeature(self.shape, dtype)


@dataclasses.dataclass(frozen=True)
class _Values:
    """The place in a record of `count` consecutive values of `width` bytes each."""

    kind: str
    begin: int
    count: int
    width: int


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The common layout of the records of a split.

    A record fits if it equals `template` in all bits of `mask`, both uint8 [length].
    """

    template: Uint8s
    mask: Uint8s
    columns: Mapping[str, Column]
    _places: Mapping[str, _Values]
    _compared: tuple[tuple[int, int], ...]

    def fits(self, records: Uint8s) -> bool:
        """Returns True if all records, uint8 [n, length], have this layout."""
        if records.shape[1] != len(self.template):
            return False
        # Only the ranges with bits in the mask: most of a record is values.
        for begin, end in self._compared:
            different = records[:, begin:end] ^ self.template[begin:end]
            if (different & self.mask[begin:end]).any():
                return False
        return True

    @property
    def frame_bytes(self) -> int:
        """The length of a record with its framing."""
        return len(self.template) + FRAME_BYTES

    def slice(self, rows: "tf.Tensor", begin: int = 0) -> "dict[str, tf.Tensor]":
        """The columns of records that fit: uint8 [n, begin + length or more] -> [n, *shape] each.

        Records begin at byte `begin` of their rows. Bytes are uint8 [n, num_bytes], not strings.
        """
        import tensorflow as tf

        num_examples = tf.shape(rows)[0]
        values = {}
        for name, column in self.columns.items():
            place = self._places[name]
            first = begin + place.begin
            values[name] = rows[:, first : first + place.count * place.width]
            if column.kind == "bytes":
                continue
            cut = tf.reshape(values[name], [num_examples, *column.shape, place.width])
            values[name] = _integers(cut) if column.kind == "int64" else tf.bitcast(cut, tf.float32)
        return values


def find_layout(record: bytes, columns: Mapping[str, Column]) -> Layout | None:
    """The layout of a serialized tf.train.Example, or None.

    The example must have every column as protocol buffer libraries write it: lists of numbers are
    packed, and no field comes twice. All values of a list must have one length, which integers of
    one and of two bytes do not have.
    """
    if len(record) > _MAX_RECORD_BYTES:
        return None
    mask = np.full(len(record), 0xFF, np.uint8)
    try:
        found = _features(record, mask)
    except ValueError:  # Another form: a field that is not delimited, or more fields than one.
        return None
    for name, column in columns.items():
        place = found.get(name)
        if place is None:
            return None
        if column.kind == "bytes":
            expected = ("bytes", (), column.num_bytes)
            fits = (place.kind, column.shape, place.width) == expected
        else:
            fits = (place.kind, place.count) == (column.kind, math.prod(column.shape))
        if not fits:
            return None
    places = {name: place for name, place in found.items() if place is not None}
    bounds = np.flatnonzero(np.diff(mask != 0, prepend=False, append=False)).tolist()
    compared = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    return Layout(np.frombuffer(record, np.uint8), mask, dict(columns), places, compared)


def _integers(varints: "tf.Tensor") -> "tf.Tensor":
    """Varints of one width: uint8 [..., width] -> int64 [...]."""
    import tensorflow as tf

    width = varints.shape[-1]
    if width == 1:
        return tf.cast(varints[..., 0], tf.int64)
    sevens = tf.bitwise.bitwise_and(tf.cast(varints, tf.int64), 0x7F)
    shifts = tf.broadcast_to(tf.range(0, 7 * width, 7, dtype=tf.int64), tf.shape(sevens))
    # No bit is set twice, so the sum is the bitwise or.
    return tf.reduce_sum(tf.bitwise.left_shift(sevens, shifts), axis=-1)


def _features(record: bytes, mask: Uint8s) -> dict[str, _Values | None]:
    """Every feature by name; None for a feature without values, or with several strings.

    Clears the bits of `mask` that may differ from record to record.
    """
    found: dict[str, _Values | None] = {}
    for _, begin, end in _fields(record, 0, len(record), [1], most=1):
        for _, entry, entry_end in _fields(record, begin, end, [1]):
            (one, key, key_end), (two, value, value_end) = _fields(record, entry, entry_end, [1, 2])
            name = record[key:key_end].decode()
            if (one, two) != (1, 2) or name in found:
                raise ValueError
            found[name] = _values(record, value, value_end, mask)
    return found


def _values(record: bytes, begin: int, end: int, mask: Uint8s) -> _Values | None:
    """The place of the values of a tf.train.Feature; None if there are none, or several strings."""
    for number, list_begin, list_end in _fields(record, begin, end, _KINDS, most=1):
        # A bytes_list of one value; packed numbers have the same form.
        lists = _fields(record, list_begin, list_end, [1])
        if len(lists) != 1:
            return None
        _, first, end = lists[0]
        kind = _KINDS[number]
        if kind == "int64":
            widths, at = [], first
            while at < end:
                _, after = _varint(record, at, end)
                widths.append(after - at)
                at = after
            if len(set(widths)) != 1:
                return None
            mask[first:end] = 0x80
            return _Values(kind, first, len(widths), widths[0])
        mask[first:end] = 0
        if kind == "bytes":
            return _Values(kind, first, 1, end - first)
        if (end - first) % 4:
            raise ValueError
        return _Values(kind, first, (end - first) // 4, 4) if end > first else None
    return None


def _fields(
    record: bytes, begin: int, end: int, numbers: Collection[int], most: int | None = None
) -> list[tuple[int, int, int]]:
    """The fields of a message in [begin, end): the number, begin and end of each.

    Raises ValueError for fields of other `numbers` or types, or more than `most` fields.
    """
    found = []
    while begin < end:
        number, wire_type = divmod(record[begin], 8)
        length, first = _varint(record, begin + 1, end)
        begin = first + length
        if wire_type != _LENGTH_DELIMITED or number not in numbers or begin > end:
            raise ValueError
        found.append((number, first, begin))
    if most is not None and len(found) > most:
        raise ValueError
    return found


def _varint(record: bytes, begin: int, end: int) -> tuple[int, int]:
    value = 0
    for i in range(begin, min(end, begin + _MAX_VARINT_BYTES)):
        value |= (record[i] & 0x7F) << 7 * (i - begin)
        if record[i] < 0x80:
            return value, i + 1
    raise ValueError
