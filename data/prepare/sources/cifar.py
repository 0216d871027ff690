"""CIFAR-10 and CIFAR-100: the binary version and the Python version of their authors.

https://www.cs.toronto.edu/~kriz/cifar.html. Images are 32x32 pixels of three colour planes, red
first. The binary files are records of one label byte (CIFAR-100: two, coarse then fine) and 3,072
pixel bytes. The Python files are pickles. A pickle can run any program, so only the types that
these files need are loaded. A pickle cannot be read in parts: each file (150 MB at most) is held in
memory while its images are written.
"""

import functools
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from data.prepare.sources import Options, Source, joined
from data.prepare.sources.examples import Classes, ImageSplit, array_split, labelled_images
from data.system.files import DataError

_SHAPE = (32, 32, 3)
_IMAGE_BYTES = 32 * 32 * 3
_AGAIN = "Unpack the archive again."


class _Label(NamedTuple):
    num_classes: int
    names_file: str  # Binary version: the file with the class names.
    key: bytes  # Python version: the classes in a batch.
    names_key: bytes  # Python version: the class names in `meta`.


class _Kind(NamedTuple):
    labels: Mapping[str, _Label]  # In the order of a binary record.
    batches: Mapping[str, Sequence[str]]  # Files of each split, without ".bin".
    meta: str  # Python version: the file with class names.
    archives: tuple[str, str]  # Directories to which the archives unpack, binary first.


KINDS = {
    "cifar10": _Kind(
        {"label": _Label(10, "batches.meta.txt", b"labels", b"label_names")},
        {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
        "batches.meta",
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
    ),
    "cifar100": _Kind(
        {
            "coarse_label": _Label(
                20, "coarse_label_names.txt", b"coarse_labels", b"coarse_label_names"
            ),
            "label": _Label(100, "fine_label_names.txt", b"fine_labels", b"fine_label_names"),
        },
        {"train": ["train"], "test": ["test"]},
        "meta",
        ("cifar-100-binary", "cifar-100-python"),
    ),
}


def source(name: str, path: str, options: Options) -> Source:
    """The files of cifar10 or cifar100 in directory `path`, or in its archive's directory there.

    CIFAR-100 has a `label` (100 classes) and a `coarse_label` (20).
    """
    kind = KINDS[name]
    where, is_binary = _find(name, kind, path)
    load_batch = _binary_batch if is_binary else _pickled_batch
    load = functools.partial(load_batch, list(kind.labels.values()))
    splits = {}
    for split, batches in kind.batches.items():
        paths = [os.path.join(where, batch + (".bin" if is_binary else "")) for batch in batches]
        splits[split] = _split(paths, load)
    labels = {}
    for key, label in kind.labels.items():
        names = _names(os.path.join(where, label.names_file if is_binary else kind.meta), label)
        if len(names) not in (0, label.num_classes):
            needed = f"needed are {label.num_classes}"
            raise DataError(f"{where} names {len(names)} classes of {key}; {needed}. {_AGAIN}")
        labels[key] = Classes(label.num_classes, names)
    return labelled_images(name, _SHAPE, labels, splits, options)


def _find(name: str, kind: _Kind, directory: str) -> tuple[str, bool]:
    batches = [batch for split in kind.batches.values() for batch in split]
    versions = {True: [f"{batch}.bin" for batch in batches], False: [*batches, kind.meta]}
    missing: list[str] = []
    for where in (directory, *(os.path.join(directory, below) for below in kind.archives)):
        for is_binary, files in versions.items():
            absent = [file for file in files if not os.path.isfile(os.path.join(where, file))]
            if not absent:
                return where, is_binary
            if len(absent) < len(files):
                missing.append(f"{where} has no {', '.join(absent)}")
    raise DataError(
        f"{directory} is not {name}: {'; '.join(missing) or 'none of its files is there'}. Unpack "
        f"its archive and give the directory ({' or '.join(kind.archives)}) that it makes: "
        f"python -m data.prepare {name} --source=DIR"
    )


def _split(paths: Sequence[str], load: Callable[[str], ImageSplit]) -> ImageSplit:
    counts = [load(path).num_examples for path in paths]
    rows = joined(counts, lambda number, low, high: load(paths[number]).rows(low, high))
    return ImageSplit(sum(counts), rows)


def _batch(planes: npt.NDArray[np.uint8], classes: npt.NDArray[np.integer]) -> ImageSplit:
    """The images of one file: planes of pixels [N, 3072], and classes [N, number of labels]."""
    return array_split(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), classes)


def _binary_batch(labels: Sequence[_Label], path: str) -> ImageSplit:
    record_bytes = len(labels) + _IMAGE_BYTES
    num_bytes = os.path.getsize(path)
    if num_bytes % record_bytes or not num_bytes:
        raise DataError(
            f"{path} has {num_bytes:,} bytes, not a multiple of the {record_bytes:,} bytes of a "
            f"record. {_AGAIN}"
        )
    records = np.memmap(path, np.uint8, "r").reshape(-1, record_bytes)
    return _batch(records[:, len(labels) :], records[:, : len(labels)])


def _pickled_batch(labels: Sequence[_Label], path: str) -> ImageSplit:
    batch = load_pickle(path)
    planes = batch.get(b"data")
    classes = [batch.get(label.key) for label in labels]
    if (
        not isinstance(planes, np.ndarray)
        or planes.shape[1:] != (_IMAGE_BYTES,)
        or any(not isinstance(x, list) or len(x) != len(planes) for x in classes)
        or (numbers := np.array(classes)).dtype.kind != "i"
    ):
        raise DataError(
            f"{path} is not a batch of CIFAR's Python version: needed are b'data', uint8 "
            f"[N, {_IMAGE_BYTES}], and lists of N as {[label.key for label in labels]}. {_AGAIN}"
        )
    return _batch(planes, numbers.T)


def _names(path: str, label: _Label) -> tuple[str, ...]:
    if os.path.basename(path) == label.names_file:
        if not os.path.isfile(path):
            return ()
        with open(path, encoding="utf-8") as file:
            return tuple(line.strip() for line in file if line.strip())
    names = load_pickle(path).get(label.names_key)
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise DataError(f"{path} has no list of names {label.names_key!r}. {_AGAIN}")
    return tuple(name.decode() for name in names)


def load_pickle(path: str) -> dict[bytes, object]:
    """The dictionary of bytes, lists and NumPy arrays of bytes in a pickle file.

    Python 2 wrote the files. Its strings are returned as bytes.
    """
    try:
        with open(path, "rb") as file:
            loaded = _Unpickler(file, encoding="bytes").load()
    # A damaged pickle can raise any error, but cannot run anything.
    except Exception as error:
        raise DataError(
            f"{path} is not a pickle of CIFAR's Python version ({type(error).__name__}: {error}). "
            f"{_AGAIN}"
        ) from None
    if not isinstance(loaded, dict):
        raise DataError(f"{path} holds a {type(loaded).__name__}; needed is a dictionary. {_AGAIN}")
    # Python 3 writes the keys as str.
    return {
        key.encode() if isinstance(key, str) else key: (
            value.value if isinstance(value, _Array) else value
        )
        for key, value in loaded.items()
    }


class _Dtype:
    """Replaces NumPy's dtype, which a pickle could set to a type that holds pointers."""

    def __init__(self, name: object, *_: object) -> None:
        if name not in ("u1", b"u1", "uint8", b"uint8"):
            raise pickle.UnpicklingError(f"an array of {name!r}")

    def __setstate__(self, state: object) -> None:
        pass  # Byte order and the like, which do not apply to bytes.


class _Array:
    """Replaces a NumPy array while its pickle is loaded; `value` is the array."""

    value: npt.NDArray[np.uint8]

    def __init__(self, *_: object) -> None:
        pass  # The pickle first makes an empty array, always.

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array of objects")
        flat = np.frombuffer(content, np.uint8)
        self.value = flat.reshape(shape, order="F" if is_fortran else "C")


class _Unpickler(pickle.Unpickler):
    """Loads built-in containers, bytes and arrays of bytes; refuses all other types."""

    _ALLOWED: Mapping[tuple[str, str], object] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): None,  # Only an argument; never called.
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): str.encode,  # Python 3 pickles bytes so in Python 2's protocols.
    }

    @override
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not loaded")
        return self._ALLOWED[module, name]
