"""IDX: the format of MNIST and of data sets like it (Fashion-MNIST, KMNIST, EMNIST).

Four files: {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or with .gz. EMNIST has several such
sets, emnist-letters-{train,test}-... and others. Each file is a big-endian header (two zero bytes,
8 for uint8, the number of dimensions, then each dimension's size as uint32) and the bytes:
http://yann.lecun.com/exdb/mnist, "File formats". The images are held in memory while they are
written.
"""

import itertools
import math
import os
import re
import struct

import numpy as np
import numpy.typing as npt

from data.prepare.sources import Options, Source, typed_path
from data.prepare.sources.examples import Classes, file_bytes, labelled_images
from data.system.files import DataError

DOWNLOADS = {
    "mnist": "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}

_SPLITS = {"train": "train", "test": "t10k"}
_PREFIX = re.compile(r"((?:.+-)?)(?:train|test|t10k)-(?:images|labels)[-.]idx[13]-ubyte(?:\.gz)?")
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
FILES = ", ".join(f"{prefix}-{_IMAGES}.gz, {prefix}-{_LABELS}.gz" for prefix in _SPLITS.values())


def source(name: str, path: str, options: Options) -> Source:
    """The IDX files in directory `path`, as splits train and test, images uint8 [H, W, 1]."""
    splits = {}
    before = _prefix(name, path)
    for split, prefix in _SPLITS.items():
        images, labels = (_find(path, before, prefix, kind) for kind in (_IMAGES, _LABELS))
        pixels, classes = _array(images, 3)[..., np.newaxis], _array(labels, 1)
        if len(pixels) != len(classes):
            raise DataError(
                f"Split {split!r} of {name} has {len(pixels)} images and {len(classes)} labels: "
                "the two files do not belong together."
            )
        splits[split] = pixels, classes
    shapes = {split: pixels.shape[1:] for split, (pixels, _) in splits.items()}
    if shapes["train"] != shapes["test"]:
        raise DataError(f"The splits of {name} have images of different shapes: {shapes}")
    num_classes = 1 + max(int(classes.max(initial=0)) for _, classes in splits.values())
    return labelled_images(name, splits, {"label": Classes(num_classes)}, options)


def _array(path: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """The contents of a file, after checking its header and that all bytes are there."""
    content = file_bytes(path)
    header_bytes = 4 + 4 * dimensions
    header = content[:header_bytes].tobytes()
    expected = bytes([0, 0, 8, dimensions])
    if header[:4] != expected:
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes in {dimensions} dimensions: it begins "
            f"with {header[:4].hex(' ') or 'nothing'}, needed is {expected.hex(' ')}. "
            "Were images and labels exchanged, or a web page saved in its place?"
        )
    shape = struct.unpack_from(f">{dimensions}I", header.ljust(header_bytes, b"\0"), 4)
    needed = header_bytes + math.prod(shape)
    if len(content) != needed:
        raise DataError(
            f"{path} says it holds {' x '.join(map(str, shape))} bytes, which makes "
            f"{needed:,} with its header; it has {len(content):,}. Download it again."
        )
    return content[header_bytes:].reshape(shape)


def _prefix(name: str, directory: str) -> str:
    """What the names of the files of `name` begin with: "", or for example "emnist-letters-"."""
    found = filter(None, map(_PREFIX.fullmatch, sorted(os.listdir(directory))))
    prefixes = list(dict.fromkeys(match[1] for match in found))
    if f"{name}-" in prefixes:
        return f"{name}-"
    if "" in prefixes or not prefixes:
        return ""
    if len(prefixes) > 1:
        names = [prefix.rstrip("-") for prefix in prefixes]
        raise DataError(
            f"{directory} has {', '.join(names)}. NAME says which one is meant: "
            f"python -m data.prepare {names[0]} {typed_path(directory)}"
        )
    return prefixes[0]


def _find(directory: str, before: str, prefix: str, kind: str) -> str:
    prefixes = [prefix] if prefix == "train" or not before else [prefix, "test"]
    dotted = kind.replace("-idx", ".idx")
    for each, form, end in itertools.product(prefixes, (kind, dotted), ("", ".gz")):
        path = os.path.join(directory, f"{before}{each}-{form}{end}")
        if os.path.isfile(path):
            return path
    name = f"{before}{prefixes[-1]}-{kind}"
    raise DataError(f"{directory} has no {name} or {name}.gz. All four are needed: {FILES}")
