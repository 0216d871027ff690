"""IDX: the format of MNIST and of the sets that took its place (Fashion-MNIST, KMNIST, EMNIST).

Four files: {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or with .gz. Each is a big-endian
header (two zero bytes, 8 for uint8, the number of dimensions, then each dimension's size as uint32)
and the bytes: http://yann.lecun.com/exdb/mnist, "File formats".
"""

import gzip
import os
import struct
import zlib

import numpy as np
import numpy.typing as npt

from data.records import DataError
from data.sources import Source, Uint8s, labelled_images

DOWNLOADS = {
    "mnist": "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}

_SPLITS = {"train": "train", "test": "t10k"}
_NAMES = {3: "images-idx3-ubyte", 1: "labels-idx1-ubyte"}


def source(name: str, directory: str | None) -> Source:
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
    splits: dict[str, tuple[Uint8s, npt.NDArray[np.integer]]] = {}
    for split, prefix in _SPLITS.items():
        images = read_idx(_find(directory, prefix, 3), 3)
        labels = read_idx(_find(directory, prefix, 1), 1)
        splits[split] = (images[..., np.newaxis], labels)
    num_classes = 1 + max(int(labels.max(initial=0)) for _, labels in splits.values())
    return labelled_images(name, num_classes, splits)


def read_idx(path: str, dimensions: int) -> Uint8s:
    """The array in an IDX file of unsigned bytes.

    Raises:
        DataError: the file does not hold one of that many dimensions, whole.
    """
    with open(path, "rb") as file:
        content = file.read()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(
                f"{path} is a damaged GZIP file ({error}): download it again."
            ) from None
    expected = bytes([0, 0, 8, dimensions])
    if content[:4] != expected:
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes in {dimensions} dimensions: it begins "
            f"with {content[:4].hex(' ') or 'nothing'}, needed is {expected.hex(' ')}. "
            "Were images and labels exchanged, or a web page saved in its place?"
        )
    header = 4 + 4 * dimensions
    shape = struct.unpack_from(f">{dimensions}I", content.ljust(header, b"\0"), 4)
    num_bytes = header + int(np.prod(shape, dtype=np.int64))
    if len(content) != num_bytes:
        raise DataError(
            f"{path} says it holds {' x '.join(map(str, shape))} bytes, which makes "
            f"{num_bytes:,} with its header; it has {len(content):,}. Download it again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


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
