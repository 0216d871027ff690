"""The features.json that describes the examples of a data set, and sources of images.

    nodes = {"image": tensor("uint8", (28, 28, 1))}
    files = feature_files(nodes, {"label": Classes(2, ("zero", "one"))})

The nodes have the form of tensorflow-datasets (tensorflow_datasets/core/proto/feature.proto), so
`tfds.builder_from_directory` reads the result, and `data.example_features` too.
"""

import bisect
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data.prepare.sources import Options, Source, SourceSplit
from data.system.files import DataError
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import example_bytes

Node = Mapping[str, object]
# The pixels of an image, uint8 [H, W, C], and a class for each label.
ImageRow = tuple[bytes, Sequence[int]]

_CLASSES = "tensorflow_datasets.core.features."


class ImageSplit(NamedTuple):
    """Images of one shape. `rows(first, last)` yields images first..last-1 with their labels."""

    num_examples: int
    rows: Callable[[int, int], Iterator[ImageRow]]


class Classes(NamedTuple):
    """The classes of a label: their number, and their names if known."""

    num_classes: int
    names: tuple[str, ...] = ()

    def numbers(self, names: Iterable[str]) -> Int64s:
        """The numbers of the classes with these names, int64 [n]; for sorted `names` of classes."""
        return np.array([bisect.bisect_left(self.names, name) for name in names], np.int64)


def array_split(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.integer]) -> ImageSplit:
    """The split of `images` [N, H, W, C] with `labels` [N], or [N, L] for L labels of an image."""

    def rows(first: int, last: int) -> Iterator[ImageRow]:
        classes = labels.reshape(len(labels), -1)
        for pixels, row_classes in zip(images[first:last], classes[first:last], strict=True):
            yield pixels.tobytes(), row_classes.tolist()

    return ImageSplit(len(images), rows)


def labelled_images(
    name: str,
    shape: tuple[int, int, int],
    labels: Mapping[str, Classes],
    splits: Mapping[str, ImageSplit],
    options: Options,
) -> Source:
    """A source of images of one shape as raw pixels, which need no decoding.

    `labels`: in the order of the classes in a row. Layout "tfds" has `image` and the labels. Layout
    "image_raw" has `image_raw`, `pixels`, `height`, `width`, `depth` and the labels, as TensorFlow
    1's MNIST programs wrote them.
    """
    image_key, num_pixels = "image", math.prod(shape)
    sizes: dict[str, int] = {}
    if options.layout == "image_raw":
        image_key = "image_raw"
        sizes = dict(zip(("pixels", "height", "width", "depth"), (num_pixels, *shape), strict=True))

    def records(split_name: str, first: int, last: int) -> Iterator[bytes]:
        rows = splits[split_name].rows(first, last)
        for number, (pixels, row_classes) in enumerate(rows, first):
            named = dict(zip(labels, row_classes, strict=True))
            for key, value in named.items():
                if not 0 <= value < labels[key].num_classes:
                    raise DataError(
                        f"Image {number} of split {split_name!r} of {name} has {key} {value}; "
                        f"needed is 0 to {labels[key].num_classes - 1}. The source is damaged, "
                        "or of another data set."
                    )
            yield example_bytes({image_key: pixels, **sizes, **named})

    nodes = {image_key: tensor("uint8", shape), **{key: scalar("int64") for key in sizes}}
    source_splits = {}
    for key, split in splits.items():
        num_bytes = split.num_examples * (num_pixels + 50)
        examples = functools.partial(records, key)
        source_splits[key] = SourceSplit(split.num_examples, num_bytes, examples)
    return Source(name, source_splits, feature_files(nodes, labels))


def feature_files(nodes: Mapping[str, Node], labels: Mapping[str, Classes]) -> dict[str, str]:
    """features.json, and LABEL.labels.txt with the names of each label's classes in order.

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
            files[f"{key}.labels.txt"] = "".join(f"{name}\n" for name in classes.names)
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
