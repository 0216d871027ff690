"""The bytes of tf.train.Examples without TensorFlow: of one, or of many at once from columns.

    record = example_bytes({"image": pixels.tobytes(), "label": 1})
    for record in records({"age": np.array([37, 41]), "name": np.array([b"Ann", b"Bo"], object)}):
        ...                         # the bytes that `example_bytes` gives for each

The messages of protobuf are declared here: an import of TensorFlow's takes seconds.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

PADDING = -1  # Fills up short lists of integers. Empty text fills up lists of text.

Value: TypeAlias = bytes | int | float | Sequence[int] | Sequence[float] | Sequence[bytes]
# The values of a feature, [n], or [n, m] for lists of m: int64, float32, or bytes as objects.
Values: TypeAlias = npt.NDArray[np.generic]

_LISTS = {"O": "bytes_list", "f": "float_list", "i": "int64_list"}  # By the kind of a dtype.
# As tensorflow/core/example/example.proto. But the map of features is a list of its entries, which
# has the same bytes: protobuf's implementations do not sort a map alike.
_MESSAGES = """
    name: "example.proto"
    message_type {
      name: "BytesList"
      field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
    }
    message_type {
      name: "FloatList"
      field {
        name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT options { packed: true }
      }
    }
    message_type {
      name: "Int64List"
      field {
        name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 options { packed: true }
      }
    }
    message_type {
      name: "Feature"
      field { name: "bytes_list" number: 1 type_name: "BytesList" }
      field { name: "float_list" number: 2 type_name: "FloatList" }
      field { name: "int64_list" number: 3 type_name: "Int64List" }
    }
    message_type {
      name: "Entry"
      field { name: "key" number: 1 type: TYPE_STRING }
      field { name: "value" number: 2 type_name: "Feature" }
    }
    message_type {
      name: "Features"
      field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "Entry" }
    }
    message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }
"""


def example_bytes(values: Mapping[str, Value]) -> bytes:
    """A serialized tf.train.Example; equal values give equal bytes.

    A float, or a sequence with a float, is stored as float32, other numbers as int64. The fields
    are sorted by name.

    Raises:
        ValueError: an integer does not fit into 64 bits.
    """
    example = _example_class()()
    for name, value in sorted(values.items()):
        listed = [value] if isinstance(value, (bytes, int, float)) else value
        if any(isinstance(item, bytes) for item in listed):
            _values(example, name, "bytes_list").extend(listed)
        elif any(isinstance(item, float) for item in listed):
            _values(example, name, "float_list").extend(listed)
        else:
            _values(example, name, "int64_list").extend(map(int, listed))
    return bytes(example.SerializeToString())


def records(columns: Mapping[str, Values]) -> Iterator[bytes]:
    """Yields the records of n examples, which have these values of each feature."""
    example = _example_class()()
    fields: list[tuple[Any, int | slice]] = []
    lists: list[list[Any]] = []
    for name in sorted(columns):
        column = columns[name]
        field = _values(example, name, _LISTS[column.dtype.kind])
        field.extend(column[:1].ravel().tolist())
        fields.append((field, 0 if column.ndim == 1 else slice(None)))
        lists.append(column.tolist())
    for row in zip(*lists, strict=True):
        for (field, place), value in zip(fields, row, strict=True):
            field[place] = value
        yield example.SerializeToString()


def fixed(values: npt.NDArray[np.generic]) -> Values:
    """The bytes of each row of an array [n, ...]."""
    return np.array([row.tobytes() for row in values], object)


def _values(example: Any, name: str, kind: str) -> Any:
    """The list of values of a new feature."""
    found = getattr(example.features.feature.add(key=name).value, kind)
    found.SetInParent()  # Written also if it is empty.
    return found.value


@functools.cache
def _example_class() -> Any:
    messages = text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(messages.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))
