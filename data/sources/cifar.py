"""CIFAR-10 and CIFAR-100: the binary version and the Python version, as their authors packed them.

https://www.cs.toronto.edu/~kriz/cifar.html. Images are 32x32 pixels of three colour planes, red
first. The binary files are records of one label byte (CIFAR-100: two, coarse then fine) and 3,072
pixel bytes, and are read image by image. The Python files are pickles, of which only the types
that they need are loaded: a pickle may otherwise run any program. A pickle cannot be read in
parts: each file (150 MB at most) is held in memory while its images are written.
"""

import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from data.files import DataError
from data.sources import Options, Source, pieces, required
from data.sources.examples import Classes, ImageSplit, labelled_images

_SHAPE = (32, 32, 3)
_IMAGE_BYTES = 32 * 32 * 3


@dataclasses.dataclass(frozen=True)
class _Kind:
    """One of the two data sets. `labels`: number of classes by name, as binary records have them.

    `batches`: files of a split, without ".bin". `names`: the binary version's file of class names
    by label; `keys`: the Python version's keys of (classes, class names) by label; `meta`: its file
    of class names. `archives`: directories that the archives unpack to, binary first.
    """

    labels: Mapping[str, int]
    batches: Mapping[str, Sequence[str]]
    names: Mapping[str, str]
    keys: Mapping[str, tuple[bytes, bytes]]
    meta: str
    archives: tuple[str, str]


KINDS = {
    "cifar10": _Kind(
        {"label": 10},
        {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
        {"label": "batches.meta.txt"},
        {"label": (b"labels", b"label_names")},
        "batches.meta",
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
    ),
    "cifar100": _Kind(
        {"coarse_label": 20, "label": 100},
        {"train": ["train"], "test": ["test"]},
        {"coarse_label": "coarse_label_names.txt", "label": "fine_label_names.txt"},
        {
            "coarse_label": (b"coarse_labels", b"coarse_label_names"),
            "label": (b"fine_labels", b"fine_label_names"),
        },
        "meta",
        ("cifar-100-binary", "cifar-100-python"),
    ),
}


def source(name: str, directory: str | None, options: Options) -> Source:
    """The files of cifar10 or cifar100 in `directory`, or in what its archive unpacked to there.

    CIFAR-100 has a `label` (100 classes) and a `coarse_label` (20).

    Raises:
        DataError: files are missing, cut short, or not CIFAR's.
    """
    kind = KINDS[name]
    directory = required(directory, name, "its binary or its Python version, unpacked")
    where, is_binary = _find(name, kind, directory)
    splits = {}
    for split, batches in kind.batches.items():
        if is_binary:
            paths = [os.path.join(where, f"{batch}.bin") for batch in batches]
            splits[split] = _binary_split(name, paths, len(kind.labels))
        else:
            paths = [os.path.join(where, batch) for batch in batches]
            splits[split] = _pickled_split(paths, [key for key, _ in kind.keys.values()])
    names = _binary_names(where, kind) if is_binary else _pickled_names(where, kind)
    labels = {key: Classes(count, names.get(key, ())) for key, count in kind.labels.items()}
    for key, classes in labels.items():
        if len(classes.names) not in (0, classes.num_classes):
            raise DataError(
                f"{where} names {len(classes.names)} classes of {key}, and {name} has "
                f"{classes.num_classes}: unpack the archive again."
            )
    return labelled_images(name, _SHAPE, labels, splits, options)


def _find(name: str, kind: _Kind, directory: str) -> tuple[str, bool]:
    """Where the files are, and whether they are the binary version.

    Raises:
        DataError: not all of one version are there.
    """
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


def _binary_split(name: str, paths: Sequence[str], num_labels: int) -> ImageSplit:
    record_bytes = num_labels + _IMAGE_BYTES
    counts = []
    for path in paths:
        count, rest = divmod(os.path.getsize(path), record_bytes)
        if rest or not count:
            raise DataError(
                f"{path} has {os.path.getsize(path):,} bytes, which is no whole number of "
                f"{record_bytes:,}-byte records of {name}: unpack its archive again."
            )
        counts.append(count)

    def rows_of(file_number: int, first: int, last: int) -> Iterator[tuple[bytes, Sequence[int]]]:
        with open(paths[file_number], "rb") as file:
            file.seek(first * record_bytes)
            for _ in range(first, last):
                record = file.read(record_bytes)
                yield _pixels(record[num_labels:]), tuple(record[:num_labels])

    return _files_split(counts, rows_of)


def _binary_names(where: str, kind: _Kind) -> dict[str, tuple[str, ...]]:
    found = {}
    for key, file_name in kind.names.items():
        path = os.path.join(where, file_name)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                found[key] = tuple(line.strip() for line in file if line.strip())
    return found


def _pickled_split(paths: Sequence[str], label_keys: Sequence[bytes]) -> ImageSplit:
    def load(path: str) -> tuple[npt.NDArray[np.uint8], list[Sequence[int]]]:
        batch = load_pickle(path)
        data = batch.get(b"data")
        labels = [batch.get(key) for key in label_keys]
        if (
            not isinstance(data, np.ndarray)
            or data.dtype != np.uint8
            or data.shape[1:] != (_IMAGE_BYTES,)
            or any(not isinstance(x, list) or len(x) != len(data) for x in labels)
        ):
            raise DataError(
                f"{path} is not a batch of CIFAR's Python version: needed are b'data', uint8 "
                f"[N, {_IMAGE_BYTES}], and lists of N as {label_keys}. Unpack the archive again."
            )
        return data, [[int(x) for x in row] for row in zip(*labels, strict=True)]

    counts = [len(load(path)[0]) for path in paths]

    def rows_of(file_number: int, first: int, last: int) -> Iterator[tuple[bytes, Sequence[int]]]:
        data, labels = load(paths[file_number])
        for number in range(first, last):
            yield _pixels(data[number].tobytes()), labels[number]

    return _files_split(counts, rows_of)


def _pickled_names(where: str, kind: _Kind) -> dict[str, tuple[str, ...]]:
    path = os.path.join(where, kind.meta)
    meta = load_pickle(path)
    found = {}
    for label, (_, key) in kind.keys.items():
        names = meta.get(key)
        if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
            raise DataError(f"{path} has no list of names {key!r}: unpack the archive again.")
        found[label] = tuple(name.decode() for name in names)
    return found


def _files_split(
    counts: Sequence[int],
    rows_of: Callable[[int, int, int], Iterator[tuple[bytes, Sequence[int]]]],
) -> ImageSplit:
    """The rows of some files one after the other; `rows_of(file, first, last)` of one of them."""

    def rows(first: int, last: int) -> Iterator[tuple[bytes, Sequence[int]]]:
        for file_number, low, high in pieces(counts, first, last):
            yield from rows_of(file_number, low, high)

    return ImageSplit(sum(counts), rows)


def _pixels(planes: bytes) -> bytes:
    """Three planes of 32x32 -> 32x32 pixels of three."""
    return np.frombuffer(planes, np.uint8).reshape(3, 32, 32).transpose(1, 2, 0).tobytes()


def load_pickle(path: str) -> dict[bytes, object]:
    """The dictionary of bytes, lists and numpy arrays that is pickled in the file.

    Strings of Python 2, in which the files were written, come as bytes.

    Raises:
        DataError: it is no such pickle, or asks for anything else.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    # A damaged pickle can fail in any way, but cannot do anything.
    except Exception as error:
        raise DataError(
            f"{path} is not a pickle of CIFAR's Python version ({type(error).__name__}: {error}). "
            "Unpack the archive again."
        ) from None
    if not isinstance(loaded, dict):
        raise DataError(
            f"{path} holds a {type(loaded).__name__}, and needed is a dictionary: unpack the "
            "archive again."
        )
    # Python 3 writes the keys as str.
    return {
        key.encode() if isinstance(key, str) else key: (
            value.value if isinstance(value, _Array) else value
        )
        for key, value in loaded.items()
    }


class _Dtype:
    """Stands for numpy's dtype of bytes: numpy's own can be told by a pickle to hold pointers."""

    def __init__(self, name: object, *_: object) -> None:
        if name not in ("u1", b"u1", "uint8", b"uint8"):
            raise pickle.UnpicklingError(f"an array of {name!r}")

    def __setstate__(self, state: object) -> None:
        pass  # Byte order and the like, which bytes do not have.


class _Array:
    """Stands for a numpy array while its pickle is loaded; `value` is the array."""

    value: npt.NDArray[np.uint8]

    def __init__(self, *_: object) -> None:
        pass  # What comes first is an empty array, always.

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array of objects")
        flat = np.frombuffer(content, np.uint8)
        self.value = flat.reshape(shape, order="F" if is_fortran else "C")


def _bytes_of(string: str, encoding: str) -> bytes:
    """How Python 3 pickles bytes in the protocols of Python 2."""
    return string.encode(encoding)


class _Unpickler(pickle.Unpickler):
    """Loads built-in containers, bytes and arrays of bytes; everything else is refused."""

    _ALLOWED: Mapping[tuple[str, str], object] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): None,  # An argument alone, and not called.
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _bytes_of,
    }

    def find_class(self, module: str, name: str) -> object:
        """The object of that name, if it is one that the files need."""
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which is not loaded"
            ) from None
