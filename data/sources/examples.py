"""What an example holds, as it is written: tf.train.Example bytes, and features.json beside them.

    node = {"image": tensor("uint8", (28, 28, 1), "bytes"), "label": label(10)}
    files = feature_files(node, {"label": ["zero", "one", ...]})
    record = example_bytes({"image": pixels.tobytes(), "label": 7})

The nodes are those of tensorflow-datasets (tensorflow_datasets/core/proto/feature.proto), so that
`tfds.builder_from_directory` reads the result, and `data.features` too.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from data.files import DataError
from data.sources import LAYOUTS, Options, Source, SourceSplit

Value = bytes | int | float | Sequence[int] | Sequence[float]
Node = Mapping[str, object]

_CLASSES = "tensorflow_datasets.core.features."
_IMAGE_RAW_SIZES = ("height", "width", "depth")


@dataclasses.dataclass(frozen=True)
class ImageSplit:
    """Images of one shape and their labels, in the order in which they will be written.

    `rows(first, last)` yields, for images first..last-1, the pixels (uint8 [H, W, C] as bytes) and
    a class for each label.
    """

    num_examples: int
    rows: Callable[[int, int], Iterator[tuple[bytes, Sequence[int]]]]


@dataclasses.dataclass(frozen=True)
class Classes:
    """How many classes a label has, and what they are called, if that is known."""

    num_classes: int
    names: tuple[str, ...] = ()


def labelled_images(
    name: str,
    shape: tuple[int, int, int],
    labels: Mapping[str, Classes],
    splits: Mapping[str, ImageSplit],
    options: Options,
) -> Source:
    """A source of images of one shape, as raw pixels: decoding is a copy.

    `labels`: in the order of the classes in a row. Layout "tfds" is `image` and the labels;
    "image_raw" is `image_raw`, `pixels`, `height`, `width`, `depth` and the labels, as TensorFlow
    1's MNIST programs wrote them.

    Raises:
        DataError: there is no such layout; from the split's `examples`, a class is out of range.
    """
    layout = options.layout or LAYOUTS[0]
    if layout not in LAYOUTS:
        raise DataError(
            f"There is no layout {layout!r}. Known: {', '.join(f'--layout={x}' for x in LAYOUTS)}"
        )
    pixels = tensor("uint8", shape, "bytes")
    nodes: dict[str, Node] = {}
    sizes: dict[str, int] = {}
    if layout == "image_raw":
        nodes["image_raw"] = pixels
        sizes = {"pixels": shape[0] * shape[1] * shape[2]}
        sizes |= dict(zip(_IMAGE_RAW_SIZES, shape, strict=True))
        nodes |= {key: scalar("int64") for key in sizes}
    else:
        nodes["image"] = pixels
    nodes |= {key: label(classes.num_classes) for key, classes in labels.items()}
    image_key = next(iter(nodes))

    def records(split_name: str, split: ImageSplit, first: int, last: int) -> Iterator[bytes]:
        for number, (image, row_classes) in enumerate(split.rows(first, last), first):
            for (key, classes), value in zip(labels.items(), row_classes, strict=True):
                if not 0 <= value < classes.num_classes:
                    raise DataError(
                        f"Image {number} of split {split_name!r} of {name} has {key} {value}; "
                        f"needed is 0 to {classes.num_classes - 1}. The source is damaged, or of "
                        "another data set."
                    )
            named = dict(zip(labels, row_classes, strict=True))
            yield example_bytes({image_key: image, **sizes, **named})

    def source_split(split_name: str, split: ImageSplit) -> SourceSplit:
        num_bytes = (shape[0] * shape[1] * shape[2] + 50) * split.num_examples
        return SourceSplit(
            split.num_examples,
            num_bytes,
            lambda first, last: records(split_name, split, first, last),
        )

    names = {key: classes.names for key, classes in labels.items() if classes.names}
    return Source(
        name,
        {key: source_split(key, split) for key, split in splits.items()},
        feature_files(nodes, names),
    )


def example_bytes(values: Mapping[str, Value]) -> bytes:
    """A serialized tf.train.Example; equal values give equal bytes.

    A float, or a sequence with one, is kept as float32; other numbers as int64. The fields are in
    the order of their names. TensorFlow is not needed: to import it would take longer than to write
    100,000 small examples.

    Raises:
        ValueError: an integer does not fit into 64 bits.
    """
    named = sorted((name.encode(), value) for name, value in values.items())
    entries = [
        _field(1, _field(1, name) + _field(2, _feature_bytes(value))) for name, value in named
    ]
    return _field(1, b"".join(entries)) if entries else b""


def _feature_bytes(value: Value) -> bytes:
    """A tf.train.Feature: bytes_list, float_list or int64_list, the numbers packed."""
    if isinstance(value, bytes):
        return _field(1, _field(1, value))
    listed = [value] if isinstance(value, (int, float)) else value
    if any(isinstance(item, float) for item in listed):
        with np.errstate(over="ignore"):  # Too large for float32 is infinite, as it is in C.
            packed = np.array(listed, "<f4").tobytes()
        return _field(2, _field(1, packed))
    packed = b"".join(map(_varint, listed))
    return _field(3, _field(1, packed) if packed else b"")


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field (protobuf.dev/programming-guides/encoding)."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


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


def feature_files(nodes: Mapping[str, Node], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """features.json, and LABEL.labels.txt with the names of each label's classes in order.

    Raises:
        DataError: a class has a name that does not fit on a line.
    """
    tree = {
        "featuresDict": {"features": nodes},
        "pythonClassName": f"{_CLASSES}features_dict.FeaturesDict",
    }
    files = {"features.json": json.dumps(tree, indent=4) + "\n"}
    for key, class_names in names.items():
        for class_name in class_names:
            if class_name.splitlines() != [class_name]:
                raise DataError(f"{class_name!r} cannot be the name of a class: it is no line.")
        files[f"{key}.labels.txt"] = "".join(f"{class_name}\n" for class_name in class_names)
    return files


def tensor(dtype: str, shape: Sequence[int], encoding: str) -> Node:
    """Numbers of one shape; `encoding`: "bytes" or "none" (a list of numbers)."""
    body = {"dtype": dtype, "encoding": encoding, "shape": _shape(shape)}
    return {"pythonClassName": f"{_CLASSES}tensor_feature.Tensor", "tensor": body}


def scalar(dtype: str) -> Node:
    """One number, in a list of one."""
    body = {"dtype": dtype, "encoding": "none", "shape": {}}
    return {"pythonClassName": f"{_CLASSES}scalar.Scalar", "tensor": body}


def label(num_classes: int) -> Node:
    """A class from 0 to num_classes - 1."""
    body = {"numClasses": str(num_classes)}
    return {"classLabel": body, "pythonClassName": f"{_CLASSES}class_label_feature.ClassLabel"}


def image(shape: Sequence[int], encoding: str) -> Node:
    """An encoded image, "png", "jpeg" or "" for either; -1 in `shape` is a size that varies."""
    body = {"dtype": "uint8", "encodingFormat": encoding, "shape": _shape(shape)}
    return {"image": body, "pythonClassName": f"{_CLASSES}image_feature.Image"}


def text() -> Node:
    """A string in UTF-8."""
    return {"pythonClassName": f"{_CLASSES}text_feature.Text", "text": {}}


def _shape(shape: Sequence[int]) -> dict[str, list[str]]:
    return {"dimensions": [str(size) for size in shape]}
