"""The features.json that describes the examples of a data set, and sources of images.

    nodes = {"image": tensor("uint8", (28, 28, 1))}
    files = feature_files(nodes, {"label": Classes(2, ("zero", "one"))})

The nodes have the form of tensorflow-datasets (tensorflow_datasets/core/proto/feature.proto), so
`tfds.builder_from_directory` reads the result, and `data.example_features` too.
"""

import bisect
import functools
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data.example_features import labels_file
from data.prepare.sources import Options, Source, SourceSplit, open_unpacked
from data.system.files import DataError
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import example_bytes

Node = Mapping[str, object]
# The images of a split, uint8 [N, H, W, C], and their classes, [N], or [N, L] for L labels.
ImageArrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.integer]]

# Types that tf.io.decode_raw knows, and types of scalars that int64 or float32 holds exactly.
RAW = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64")
LISTED = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "float32")
_CLASSES = "tensorflow_datasets.core.features."


class Classes(NamedTuple):
    """The classes of a label: their number, and their names if known."""

    num_classes: int
    names: tuple[str, ...] = ()

    def numbers(self, names: Iterable[str]) -> Int64s:
        """The numbers of the classes with these names, int64 [n]; for sorted `names` of classes."""
        return np.array([bisect.bisect_left(self.names, name) for name in names], np.int64)


def classes_of(
    values: Iterable[int | str], where: str, or_else: str = ""
) -> tuple[Classes, Sequence[str]]:
    """The classes of a label with these values: sorted names, or integers from 0; and notes.

    `or_else`: for messages, what may be done other than to replace negative values.
    """
    distinct = set(values)
    if names := tuple(sorted(value for value in distinct if isinstance(value, str))):
        return Classes(len(names), names), ()
    numbers = [value for value in distinct if isinstance(value, int)]
    least, most = min(numbers, default=0), max(numbers, default=-1)
    if least < 0:
        raise DataError(
            f"{where} is the label, and has {least}; needed are integers from 0. Replace such "
            f"values{or_else}."
        )
    notes = []
    if len(numbers) <= most:
        notes.append(
            f"{where} has {len(numbers):,} different values from {least:,} to {most:,}. So the "
            f"label has {most + 1:,} classes, some without examples"
        )
    return Classes(most + 1), notes


def file_bytes(path: str) -> npt.NDArray[np.uint8]:
    """The bytes of a file; those of a GZIP file are decompressed. DataError if it is damaged."""
    with open_unpacked(path) as file:
        try:
            return np.frombuffer(file.read(), np.uint8)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path} is a damaged GZIP file ({error}): download or unpack it again."
            ) from None


def labelled_images(
    name: str, splits: Mapping[str, ImageArrays], labels: Mapping[str, Classes], options: Options
) -> Source:
    """A source of images of one shape as raw pixels, which need no decoding.

    `labels`: in the order of the columns of the arrays. Layout "tfds" has `image` and the labels.
    Layout "image_raw" has `image_raw`, `pixels`, `height`, `width`, `depth` and the labels, as
    TensorFlow 1's MNIST programs wrote them.
    """
    shape = next(iter(splits.values()))[0].shape[1:]
    image_key, num_pixels = "image", math.prod(shape)
    sizes: dict[str, int] = {}
    if options.layout == "image_raw":
        image_key = "image_raw"
        sizes = dict(zip(("pixels", "height", "width", "depth"), (num_pixels, *shape), strict=True))

    def records(split_name: str, first: int, last: int) -> Iterator[bytes]:
        images, classes = splits[split_name]
        rows = classes.reshape(len(images), len(labels))[first:last].tolist()
        for number, row in enumerate(rows, first):
            named = dict(zip(labels, row, strict=True))
            for key, value in named.items():
                if not 0 <= value < labels[key].num_classes:
                    raise DataError(
                        f"Image {number} of split {split_name!r} of {name} has {key} {value}; "
                        f"needed is 0 to {labels[key].num_classes - 1}. The source is damaged, "
                        "or of another data set."
                    )
            yield example_bytes({image_key: images[number].tobytes(), **sizes, **named})

    nodes = {image_key: tensor("uint8", shape), **{key: scalar("int64") for key in sizes}}
    source_splits = {}
    for key, (images, _) in splits.items():
        num_bytes = len(images) * (num_pixels + 50)
        source_splits[key] = SourceSplit(len(images), num_bytes, functools.partial(records, key))
    return Source(name, source_splits, feature_files(nodes, labels))


def feature_files(nodes: Mapping[str, Node], labels: Mapping[str, Classes]) -> dict[str, str]:
    """features.json, and `labels_file` with the names of each label's classes in order.

    `labels` are described too: each in its place among `nodes`, or after them.
    """
    label_nodes = {
        key: _node(
            "class_label_feature.ClassLabel", classLabel={"numClasses": str(classes.num_classes)}
        )
        for key, classes in labels.items()
    }
    tree = {
        "featuresDict": {"features": {**nodes, **label_nodes}},
        "pythonClassName": f"{_CLASSES}features_dict.FeaturesDict",
    }
    files = {"features.json": json.dumps(tree, indent=4) + "\n"}
    for key, classes in labels.items():
        for class_name in classes.names:
            if class_name.splitlines() != [class_name]:
                raise DataError(
                    f"{class_name!r} cannot be the name of a class: it is not one line of text."
                )
        if classes.names:
            files[labels_file(key)] = "".join(f"{name}\n" for name in classes.names)
    return files


def tensor(dtype: str, shape: Sequence[int]) -> Node:
    """A tensor of fixed shape: numbers, stored as bytes, or strings, if `dtype` is "string"."""
    encoding = "none" if dtype == "string" else "bytes"
    body = {"dtype": dtype, "encoding": encoding, "shape": _shape(shape)}
    return _node("tensor_feature.Tensor", tensor=body)


def scalar(dtype: str) -> Node:
    """One number, stored as a list of length 1."""
    return _node("scalar.Scalar", tensor={"dtype": dtype, "encoding": "none", "shape": {}})


def image(shape: Sequence[int], encoding: str, dtype: str = "uint8") -> Node:
    """An encoded image: "png", "jpeg" or "" for both; -1 in `shape` is a size that varies."""
    body = {"dtype": dtype, "encodingFormat": encoding, "shape": _shape(shape)}
    return _node("image_feature.Image", image=body)


def text() -> Node:
    """A string in UTF-8."""
    return _node("text_feature.Text", text={})


def _node(class_name: str, **body: object) -> Node:
    return dict(sorted({"pythonClassName": _CLASSES + class_name, **body}.items()))


def _shape(shape: Sequence[int]) -> dict[str, list[str]]:
    return {"dimensions": [str(size) for size in shape]}
