"""CIFAR-10 and CIFAR-100: the binary version of their authors.

https://www.cs.toronto.edu/~kriz/cifar.html. Images are 32x32 pixels of three colour planes, red
first. The files are records of one label byte (CIFAR-100: two, coarse then fine) and 3,072 pixel
bytes. Each file may be compressed, with .gz. The images are held in memory while they are written.
"""

import itertools
import os
import tarfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data.prepare.sources import Options, Source
from data.prepare.sources.examples import Classes, file_bytes, labelled_images
from data.system.files import DataError

_IMAGE_BYTES = 32 * 32 * 3
_AGAIN = "Unpack the archive again."
_URL = "https://www.cs.toronto.edu/~kriz/"


class _Kind(NamedTuple):
    # In the order of a record: the number of classes, and the file with their names.
    labels: Mapping[str, tuple[int, str]]
    files: Mapping[str, Sequence[str]]  # Of each split.
    archive: str
    directory: str  # To which the archive unpacks.


_KINDS = {
    "cifar10": _Kind(
        {"label": (10, "batches.meta.txt")},
        {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
    ),
    "cifar100": _Kind(
        {
            "coarse_label": (20, "coarse_label_names.txt"),
            "label": (100, "fine_label_names.txt"),
        },
        {"train": ["train.bin"], "test": ["test.bin"]},
        "cifar-100-binary.tar.gz",
        "cifar-100-binary",
    ),
}


def source(name: str, path: str, options: Options) -> Source:
    """The files of cifar10 or cifar100 in directory `path`, or in its archive's directory there.

    CIFAR-100 has a `label` (100 classes) and a `coarse_label` (20).
    """
    kind = _KINDS[name]
    is_partial = bool(options.allow_partial)
    where = _find(name, kind, path, is_partial)
    num_labels = len(kind.labels)
    splits, notes = {}, []
    for split, files in kind.files.items():
        found = {file: _file(where, file) for file in files}
        parts = [_records(path, num_labels, is_partial) for path in found.values() if path]
        records = np.concatenate(parts)
        planes = records[:, num_labels:].reshape(-1, 3, 32, 32)
        splits[split] = planes.transpose(0, 2, 3, 1), records[:, :num_labels]
        absent = [file for file, path in found.items() if not path]
        missing = f" without {', '.join(absent)}" if absent else ""
        if is_partial:
            notes.append(f"{split}: {len(records):,} images{missing}")
    labels = {}
    for key, (num_classes, names_file) in kind.labels.items():
        names = _names(_file(where, names_file))
        if len(names) not in (0, num_classes):
            needed = f"needed are {num_classes}"
            raise DataError(f"{where} names {len(names)} classes of {key}; {needed}. {_AGAIN}")
        labels[key] = Classes(num_classes, names)
    return labelled_images(name, splits, labels, options)._replace(notes=notes)


def _file(where: str, name: str) -> str:
    """The path of the file `name`, or of `name`.gz; "" if there is neither."""
    paths = (os.path.join(where, name), os.path.join(where, f"{name}.gz"))
    return next(filter(os.path.isfile, paths), "")


def _find(name: str, kind: _Kind, directory: str, is_partial: bool) -> str:
    """Returns the directory with the files."""
    if os.path.isfile(directory) and tarfile.is_tarfile(directory):
        raise DataError(
            f"--source={directory} is the archive. Unpack it, and give the directory that it "
            f"makes: tar -xf {directory} && python -m data.prepare {name} --source=DIR"
        )
    missing: list[str] = []
    for where in (directory, os.path.join(directory, kind.directory)):
        absent = {
            split: [file for file in files if not _file(where, file)]
            for split, files in kind.files.items()
        }
        is_found = {split: len(absent[split]) < len(files) for split, files in kind.files.items()}
        names = [*itertools.chain(*absent.values())]
        if not names or (is_partial and all(is_found.values())):
            return where
        if any(is_found.values()):
            missing.append(f"{where} has no {', '.join(names)}")
    partial = " --allow_partial takes one file of each split, or more." if missing else ""
    raise DataError(
        f"{directory} is not {name}: {'; '.join(missing) or 'none of its files is there'}. Unpack "
        f"{kind.archive} and give the directory ({kind.directory}) that it makes: "
        f"python -m data.prepare {name} --source={kind.directory}. {_URL}{kind.archive} is the "
        f"binary version, which has the images of the Python version.{partial}"
    )


def _records(path: str, num_labels: int, is_partial: bool) -> npt.NDArray[np.uint8]:
    """The records of a file; with `is_partial`, without the part of a record at its end."""
    record_bytes = num_labels + _IMAGE_BYTES
    content = file_bytes(path)
    num_records, num_more = divmod(len(content), record_bytes)
    if (num_more and not is_partial) or not num_records:
        partial = " Or add --allow_partial, which takes the complete records." * bool(num_records)
        raise DataError(
            f"{path} has {len(content):,} bytes, not a multiple of the {record_bytes:,} bytes of a "
            f"record. {_AGAIN}{partial}"
        )
    return content[: num_records * record_bytes].reshape(-1, record_bytes)


def _names(path: str) -> tuple[str, ...]:
    """The names of classes in the file at `path`; empty if `path` is."""
    lines = file_bytes(path).tobytes().decode().splitlines() if path else []
    return tuple(line.strip() for line in lines if line.strip())
