"""CIFAR-10 and CIFAR-100: the binary version and the Python version of their authors.

https://www.cs.toronto.edu/~kriz/cifar.html. Images are 32x32 pixels of three colour planes, red
first. The binary files are records of one label byte (CIFAR-100: two, coarse then fine) and 3,072
pixel bytes. The Python files are pickles. A pickle can run any program, so only the types that
these files need are loaded. A pickle cannot be read in parts: each file (150 MB at most) is held in
memory while its images are written. So is a file with .gz, in which each file may be compressed.
"""

import functools
import gzip
import io
import itertools
import os
import pickle
import tarfile
import zlib
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
    is_partial = bool(options.allow_partial)
    where, is_binary = _find(name, kind, path, is_partial)
    load: Callable[[str], ImageSplit]
    if is_binary:
        labels_read = list(kind.labels.values())
        load = functools.partial(_binary_batch, labels_read, is_partial)
    else:
        load = functools.partial(_pickled_batch, list(kind.labels.values()))
    splits, notes = {}, []
    for split, batches in kind.batches.items():
        found = {
            file: _file(where, file)
            for file in (batch + (".bin" if is_binary else "") for batch in batches)
        }
        splits[split] = _split([path for path in found.values() if path], load)
        absent = [file for file, path in found.items() if not path]
        missing = f" without {', '.join(absent)}" if absent else ""
        if is_partial:
            notes.append(f"{split}: {splits[split].num_examples:,} images{missing}")
    labels = {}
    for key, label in kind.labels.items():
        names_file = label.names_file if is_binary else kind.meta
        names = _names(_file(where, names_file), names_file, label)
        if len(names) not in (0, label.num_classes):
            needed = f"needed are {label.num_classes}"
            raise DataError(f"{where} names {len(names)} classes of {key}; {needed}. {_AGAIN}")
        labels[key] = Classes(label.num_classes, names)
    return labelled_images(name, _SHAPE, labels, splits, options)._replace(notes=notes)


def _file(where: str, name: str) -> str:
    """The path of the file `name`, or of `name`.gz; "" if there is neither."""
    paths = (os.path.join(where, name), os.path.join(where, f"{name}.gz"))
    return next(filter(os.path.isfile, paths), "")


def _find(name: str, kind: _Kind, directory: str, is_partial: bool) -> tuple[str, bool]:
    """The directory with the files, and True if they are of the binary version."""
    if os.path.isfile(directory) and tarfile.is_tarfile(directory):
        raise DataError(
            f"--source={directory} is the archive. Unpack it, and give the directory that it "
            f"makes: tar -xf {directory} && python -m data.prepare {name} --source=DIR"
        )
    suffixes = {True: ".bin", False: ""}
    missing: list[str] = []
    for where in (directory, *(os.path.join(directory, below) for below in kind.archives)):
        for is_binary, suffix in suffixes.items():
            absent = {
                split: [name + suffix for name in batches if not _file(where, name + suffix)]
                for split, batches in kind.batches.items()
            }
            others = [] if is_binary or _file(where, kind.meta) else [kind.meta]
            is_found = {split: len(absent[split]) < len(kind.batches[split]) for split in absent}
            names = [*itertools.chain(*absent.values()), *others]
            if not names or (is_partial and all(is_found.values())):
                return where, is_binary
            if any(is_found.values()):
                missing.append(f"{where} has no {', '.join(names)}")
    partial = " --allow_partial takes one file of each split, or more." if missing else ""
    raise DataError(
        f"{directory} is not {name}: {'; '.join(missing) or 'none of its files is there'}. Unpack "
        f"its archive and give the directory ({' or '.join(kind.archives)}) that it makes: "
        f"python -m data.prepare {name} --source=DIR.{partial}"
    )


def _split(paths: Sequence[str], load: Callable[[str], ImageSplit]) -> ImageSplit:
    counts = [load(path).num_examples for path in paths]
    rows = joined(counts, lambda number, low, high: load(paths[number]).rows(low, high))
    return ImageSplit(sum(counts), rows)


def _batch(planes: npt.NDArray[np.uint8], classes: npt.NDArray[np.integer]) -> ImageSplit:
    """The images of one file: planes of pixels [N, 3072], and classes [N, number of labels]."""
    return array_split(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), classes)


def _binary_batch(labels: Sequence[_Label], is_partial: bool, path: str) -> ImageSplit:
    """The records of a file; with `is_partial`, without the part of a record at its end."""
    record_bytes = len(labels) + _IMAGE_BYTES
    content: npt.NDArray[np.uint8]
    if path.endswith(".gz"):
        content = np.frombuffer(_read(path), np.uint8)
    else:
        content = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.zeros(0, np.uint8)
    num_records, num_more = divmod(len(content), record_bytes)
    if (num_more and not is_partial) or not num_records:
        raise DataError(
            f"{path} has {len(content):,} bytes, not a multiple of the {record_bytes:,} bytes of a "
            f"record. {_AGAIN} Or add --allow_partial, which takes the complete records."
        )
    records = content[: num_records * record_bytes].reshape(-1, record_bytes)
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


def _read(path: str) -> bytes:
    """The content of a file, which .gz compresses."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}. {_AGAIN}") from None


def _names(path: str, file_name: str, label: _Label) -> tuple[str, ...]:
    """The names of classes in the file `file_name` at `path`; empty if `path` is."""
    if not path:
        return ()
    if file_name == label.names_file:
        lines = _read(path).decode().splitlines()
        return tuple(line.strip() for line in lines if line.strip())
    names = load_pickle(path).get(label.names_key)
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise DataError(f"{path} has no list of names {label.names_key!r}. {_AGAIN}")
    return tuple(name.decode() for name in names)


def load_pickle(path: str) -> dict[bytes, object]:
    """The dictionary of bytes, lists and NumPy arrays of bytes in a pickle file.

    Python 2 wrote the files. Its strings are returned as bytes.
    """
    try:
        loaded = _Unpickler(io.BytesIO(_read(path)), encoding="bytes").load()
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
