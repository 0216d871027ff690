"""Examples of one layout: features as byte ranges of their records, without parsing each.

    layout = find_layout(record, columns)       # of one record; None if there is none
    if layout.fits(records):                    # uint8 [n, length]
        values = layout.slice(records)          # {"image": uint8 [n, 784], "label": int64 [n]}

Records that one program wrote are mostly alike: the same features in the same order, each as long
as in the next record, so that all tags and lengths of the protocol buffer stand at the same
offsets and only the values differ. What a parser finds in such a record depends on tags and lengths
alone, and on the top bit of each byte of a varint, which says whether it goes on
(protobuf.dev/programming-guides/encoding). So where those are equal to another record's, so is
every offset, and a thousand records are cut into features by a few slices.

`tf.io.parse_example` is the definition: a layout is found only where it would accept the record,
and gives the values that it would give.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tensorflow as tf

Uint8s = npt.NDArray[np.uint8]

_LENGTH_DELIMITED = 2  # A wire type.
_MAX_VARINT_BYTES = 10
_MOST_BYTES = 1 << 20  # Records larger than this gain nothing.


@dataclasses.dataclass(frozen=True)
class Column:
    """A feature to take from the records, as tf.io.FixedLenFeature describes it.

    `kind`: of the list, "bytes", "int64" or "float". `shape`: of one example's values; () for
    bytes. `num_bytes`: of a value of bytes; None where it may vary. `default`: of every value of a
    record without the feature; None if there must be one.
    """

    kind: str
    shape: tuple[int, ...] = ()
    num_bytes: int | None = None
    default: int | None = None

    def on_disk(self) -> "tf.io.FixedLenFeature":
        """What tf.io.parse_example wants to know."""
        import tensorflow as tf

        dtype = {"bytes": tf.string, "int64": tf.int64, "float": tf.float32}[self.kind]
        return tf.io.FixedLenFeature(self.shape, dtype, self.default)

    @property
    def num_values(self) -> int:
        """How many values an example has."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(frozen=True)
class _Values:
    """Where `count` values of `width` bytes each lie in a record, side by side."""

    kind: str
    begin: int
    count: int
    width: int


class _Unlike(Exception):
    """The record is not laid out in the one way that is known here."""


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """How the records of a split lie in memory; see `find_layout`.

    `template`, `mask`: uint8 [length]. A record fits if it equals the template in all bits of the
    mask.
    """

    template: Uint8s
    mask: Uint8s
    columns: Mapping[str, Column]
    _places: Mapping[str, _Values]
    _compared: tuple[tuple[int, int], ...]

    def fits(self, records: Uint8s) -> bool:
        """Whether all records, uint8 [n, length], are laid out like the template."""
        if records.shape[1] != len(self.template):
            return False
        # Only where something is to be compared: values are most of a record.
        for begin, end in self._compared:
            unlike = records[:, begin:end] ^ self.template[begin:end]
            if (unlike & self.mask[begin:end]).any():
                return False
        return True

    def slice(self, rows: "tf.Tensor", begin: int = 0) -> "dict[str, tf.Tensor]":
        """The columns of records that fit: uint8 [n, begin + length or more] -> [n, *shape] each.

        `begin`: where the record begins in its row. Bytes are uint8 [n, num_bytes], where
        tf.io.parse_example gives strings.
        """
        import tensorflow as tf

        num_examples = tf.shape(rows)[0]
        values = {}
        for name, column in self.columns.items():
            place = self._places.get(name)
            if place is None:
                default = tf.constant(column.default, column.on_disk().dtype)
                values[name] = tf.fill([num_examples, *column.shape], default)
                continue
            first = begin + place.begin
            part = rows[:, first : first + place.count * place.width]
            if column.kind == "bytes":
                values[name] = part
                continue
            cut = tf.reshape(part, [num_examples, *column.shape, place.width])
            values[name] = _integers(cut) if column.kind == "int64" else _floats(cut)
        return values


def find_layout(record: bytes, columns: Mapping[str, Column]) -> Layout | None:
    """The layout of a serialized tf.train.Example, if it has every column in the usual form.

    That form is what protocol buffer libraries write: lists of numbers are packed, no field stands
    twice. None also where values differ in length, as integers of one and of two bytes do.
    """
    if len(record) > _MOST_BYTES:
        return None
    mask = np.full(len(record), 0xFF, np.uint8)
    try:
        found = _features(record, mask)
    except (_Unlike, IndexError, UnicodeDecodeError):
        return None
    for name, column in columns.items():
        place = found.get(name)
        if place is not None:
            fits = (place.kind, place.count) == (column.kind, column.num_values)
            if column.kind == "bytes":
                fits = fits and not column.shape and place.width == column.num_bytes
        else:
            fits = name not in found and column.default is not None and column.kind != "bytes"
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
    # No bit is set twice, so that the sum is the union.
    return tf.reduce_sum(tf.bitwise.left_shift(sevens, shifts), axis=-1)


def _floats(fixed: "tf.Tensor") -> "tf.Tensor":
    """Little-endian: uint8 [..., 4] -> float32 [...]."""
    import tensorflow as tf

    return tf.bitcast(fixed, tf.float32)


def _features(record: bytes, mask: Uint8s) -> dict[str, _Values | None]:
    """Every feature by its name; None for one without values, or with several strings.

    In `mask` what may differ from record to record is cleared.
    """
    found: dict[str, _Values | None] = {}
    begin, end = _only(record, 0, len(record), 1)
    while begin < end:
        entry, entry_end = _delimited(record, begin, end, 1)
        key, key_end = _delimited(record, entry, entry_end, 1)
        value, value_end = _delimited(record, key_end, entry_end, 2)
        name = record[key:key_end].decode()
        if value_end != entry_end or name in found:
            raise _Unlike
        found[name] = _values(record, value, value_end, mask)
        begin = entry_end
    return found


def _values(record: bytes, begin: int, end: int, mask: Uint8s) -> _Values | None:
    """The values of a tf.train.Feature in bytes [begin, end)."""
    if begin == end:
        return None
    number = record[begin] >> 3
    kind = {1: "bytes", 2: "float", 3: "int64"}.get(number)
    if kind is None:
        raise _Unlike
    begin, end = _only(record, begin, end, number)
    if begin == end:
        return None
    # bytes_list has one value here; numbers are packed, which looks the same.
    first, first_end = _delimited(record, begin, end, 1)
    if first_end != end:
        return None
    if kind == "bytes":
        mask[first:end] = 0
        return _Values(kind, first, 1, end - first)
    if kind == "float":
        if (end - first) % 4:
            raise _Unlike
        mask[first:end] = 0
        return _Values(kind, first, (end - first) // 4, 4) if end > first else None
    widths = []
    at = first
    while at < end:
        _, after = _varint(record, at, end)
        widths.append(after - at)
        at = after
    if len(set(widths)) != 1:
        return None
    mask[first:end] = 0x80
    return _Values(kind, first, len(widths), widths[0])


def _only(record: bytes, begin: int, end: int, number: int) -> tuple[int, int]:
    """The content of a message in [begin, end) that has that field alone; or is empty."""
    if begin == end:
        return begin, end
    first, first_end = _delimited(record, begin, end, number)
    if first_end != end:
        raise _Unlike
    return first, first_end


def _delimited(record: bytes, begin: int, end: int, number: int) -> tuple[int, int]:
    """Where the content of a length-delimited field begins and ends; it must be that field."""
    if begin >= end or record[begin] != number << 3 | _LENGTH_DELIMITED:
        raise _Unlike
    length, first = _varint(record, begin + 1, end)
    if first + length > end:
        raise _Unlike
    return first, first + length


def _varint(record: bytes, begin: int, end: int) -> tuple[int, int]:
    """An unsigned varint, and where the next byte is."""
    value = 0
    for i in range(begin, min(end, begin + _MAX_VARINT_BYTES)):
        value |= (record[i] & 0x7F) << 7 * (i - begin)
        if record[i] < 0x80:
            return value, i + 1
    raise _Unlike
