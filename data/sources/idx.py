"""IDX: the format of MNIST and of the sets that took its place (Fashion-MNIST, KMNIST, EMNIST).

Four files: {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or with .gz. Each is a big-endian
header (two zero bytes, 8 for uint8, the number of dimensions, then each dimension's size as uint32)
and the bytes: http://yann.lecun.com/exdb/mnist, "File formats". Labels are held in memory, one byte
an example; images are read one by one.
"""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, cast

from data.files import DataError
from data.sources import Options, Source
from data.sources.examples import Classes, ImageSplit, labelled_images

DOWNLOADS = {
    "mnist": "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}

_SPLITS = {"train": "train", "test": "t10k"}
_NAMES = {3: "images-idx3-ubyte", 1: "labels-idx1-ubyte"}
_BLOCK_BYTES = 1 << 20


def source(name: str, directory: str | None, options: Options) -> Source:
    """The IDX files in `directory`, as splits train and test, images uint8 [H, W, 1].

    Raises:
        DataError: a file is missing, is not IDX, is cut short, or does not fit its partner.
    """
    if directory is None:
        files = ", ".join(
            f"{prefix}-{name}.gz" for prefix in _SPLITS.values() for name in _NAMES.values()
        )
        where = f" from {DOWNLOADS[name]}" if name in DOWNLOADS else ""
        raise DataError(
            f"{name} is made from IDX files, and --source does not say where they are. Bring "
            f"{files}{where}, then: python -m data.prepare {name} --source=DIR"
        )
    splits: dict[str, ImageSplit] = {}
    shapes = {}
    num_classes = 1
    for split, prefix in _SPLITS.items():
        images, labels = _find(directory, prefix, 3), _find(directory, prefix, 1)
        num_images, *size = _checked_shape(images, 3)
        (num_labels,) = _checked_shape(labels, 1)
        if num_images != num_labels:
            raise DataError(
                f"Split {split!r} of {name} has {num_images} images and {num_labels} labels: "
                "the two files do not belong together."
            )
        with _open(labels) as file:
            file.seek(_header_bytes(1))
            classes = file.read()
        shapes[split] = (*size, 1)
        num_classes = max(num_classes, 1 + max(classes, default=0))
        splits[split] = _image_split(images, math.prod(size), classes)
    if len(set(shapes.values())) != 1:
        raise DataError(f"The splits of {name} have images of different shapes: {shapes}")
    height, width, depth = shapes["train"]
    return labelled_images(
        name, (height, width, depth), {"label": Classes(num_classes)}, splits, options
    )


def _image_split(path: str, image_bytes: int, classes: bytes) -> ImageSplit:
    def rows(first: int, last: int) -> Iterator[tuple[bytes, Sequence[int]]]:
        with _open(path) as file:
            file.seek(_header_bytes(3) + first * image_bytes)
            for number in range(first, last):
                yield file.read(image_bytes), (classes[number],)

    return ImageSplit(len(classes), rows)


def _header_bytes(dimensions: int) -> int:
    return 4 + 4 * dimensions


def _checked_shape(path: str, dimensions: int) -> tuple[int, ...]:
    """The sizes that the file's header names, all of whose bytes are there.

    Raises:
        DataError: the file does not hold an array of that many dimensions, whole.
    """
    header_bytes = _header_bytes(dimensions)
    try:
        with _open(path) as file:
            header = file.read(header_bytes)
            num_bytes = len(header)
            while block := file.read(_BLOCK_BYTES):
                num_bytes += len(block)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged GZIP file ({error}): download it again.") from None
    expected = bytes([0, 0, 8, dimensions])
    if header[:4] != expected:
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes in {dimensions} dimensions: it begins "
            f"with {header[:4].hex(' ') or 'nothing'}, needed is {expected.hex(' ')}. "
            "Were images and labels exchanged, or a web page saved in its place?"
        )
    shape = struct.unpack_from(f">{dimensions}I", header.ljust(header_bytes, b"\0"), 4)
    needed = header_bytes + math.prod(shape)
    if num_bytes != needed:
        raise DataError(
            f"{path} says it holds {' x '.join(map(str, shape))} bytes, which makes "
            f"{needed:,} with its header; it has {num_bytes:,}. Download it again."
        )
    return shape


def _open(path: str) -> BinaryIO:
    """The file, unpacked if it is packed, whatever its name says."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if packed else open(path, "rb")


def _find(directory: str, prefix: str, dimensions: int) -> str:
    """The file, by any of the names in which it is passed around."""
    name = f"{prefix}-{_NAMES[dimensions]}"
    dotted = name.replace("-idx", ".idx")
    for candidate in (name, f"{name}.gz", dotted, f"{dotted}.gz"):
        path = os.path.join(directory, candidate)
        if os.path.isfile(path):
            return path
    if not os.path.isdir(directory):
        raise DataError(f"--source={directory} is not a directory. Give the one with {name}[.gz].")
    raise DataError(
        f"{directory} has no {name} or {name}.gz. All four files are needed: "
        f"{{train,t10k}}-{{{','.join(_NAMES.values())}}}[.gz]"
    )
