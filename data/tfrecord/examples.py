"""Records of one example each: the bytes of a tf.train.Example, without TensorFlow.

record = example_bytes({"image": pixels.tobytes(), "label": 1})
"""

from collections.abc import Mapping, Sequence

import numpy as np

BYTES, FLOATS, INTEGERS = 1, 2, 3  # The kinds of a tf.train.Feature: numbers of its fields.
PADDING = -1  # Fills up short lists of integers. Empty text fills up lists of text.

Value = bytes | int | float | Sequence[int] | Sequence[float] | Sequence[bytes]


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
    return field_header(number, len(content)) + content


def field_header(number: int, length: int) -> bytes:
    """What precedes a field of `length` bytes (protobuf.dev/programming-guides/encoding)."""
    return bytes([number << 3 | 2]) + _varint(length)


def feature_header(name: bytes, kind: int, length: int) -> bytes:
    """What precedes the list of a feature in an example; `length`: the bytes of the list."""
    of_list = field_header(kind, length)
    key, of_feature = _field(1, name), field_header(2, len(of_list) + length)
    before = key + of_feature + of_list
    return field_header(1, len(before) + length) + before


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
