"""Sources: one file for each input format, which turns the user's files into splits of examples.

`data/prepare/catalog.py` lists the sources; the other files here are what several of them share.
For arrays npz.py is an example, for rows of text csv.py, for rows with types parquet.py. Each has
`source(name, path, options)`, which returns a `Source`. It reads counts, names and types only. The
examples are read while they are written, a few at a time; sets of small images, such as MNIST, are
held in memory.
"""

import gzip
import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from data.system.files import DataError
from data.tfrecord.shard_names import SPLIT_DIRS, SPLIT_NAMES

_OTHER_NAMES = {"training": "train", "testing": "test"}
_IGNORED = ("Thumbs.db", "desktop.ini")  # Written by programs that only show a directory.
LAYOUTS = ("tfds", "image_raw")
TEST_FRACTION = 0.1
DROP = "drop"

T = TypeVar("T")
Real: TypeAlias = float  # In Options, `float` is an option.


class SourceSplit(NamedTuple):
    """One split. `examples(first, last)` yields records first..last-1, equal at every call.

    Several processes may call `examples` at once. `num_bytes`: an estimate of the size of all
    records, from which the number of shards is chosen.
    """

    num_examples: int
    num_bytes: int
    examples: Callable[[int, int], Iterator[bytes]]


class Source(NamedTuple):
    """A data set before it is written: its splits and its metadata files.

    `name`: the first part of the shards' names. `files`: file name -> text, with features.json if
    the features are known. `notes`: what a user should know about the files that were read.
    """

    name: str
    splits: Mapping[str, SourceSplit]
    files: Mapping[str, str]
    notes: Sequence[str] = ()


class Options(NamedTuple):
    """Options of a source; None if an option was not given.

    Each is the value of the flag with the same name: `data/prepare/__main__.py` says what it means.
    Values that are several columns are separated by commas.
    """

    label: str | None = None
    test_fraction: Real | None = None
    seed: int | None = None
    layout: str | None = None
    length: int | None = None
    missing: str | None = None
    header: bool | None = None
    allow_partial: bool | None = None
    num_clicks: int | None = None
    id_scale: Real | None = None
    lists: str | None = None
    text: str | None = None
    integer: str | None = None
    float: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    splits: str | None = None
    columns: str | None = None
    split_column: str | None = None
    processes: int | None = None

    def given(self) -> dict[str, object]:
        """Options that were given, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def complete(self) -> dict[str, object]:
        """All options that change the data set; the default of an option that was not given."""
        defaults = Options(test_fraction=TEST_FRACTION, seed=0, layout=LAYOUTS[0])
        complete = {**defaults._asdict(), **self.given()}
        del complete["processes"]  # It does not change the data set.
        return complete


def test_fraction(options: Options) -> float:
    """The part of the examples that becomes the test split."""
    fraction = TEST_FRACTION if options.test_fraction is None else options.test_fraction
    if not 0 < fraction < 1:
        raise DataError(
            f"--test_fraction must be above 0 and below 1. Received: {fraction}. "
            f"--test_fraction={TEST_FRACTION}, for example."
        )
    return fraction


def divided(keys: Iterable[str], options: Options, where: str) -> dict[str, npt.NDArray[np.bool_]]:
    """Chooses the test examples; returns masks for train and test: True if the split has it.

    The choice depends on an example's key and the seed only, not on the other examples, so the
    test split has about `test_fraction` of the examples.
    """
    fraction = test_fraction(options)
    seed = str(options.seed or 0).encode()

    def place(key: str) -> int:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, key=seed)
        return int.from_bytes(digest.digest(), "big")

    places = np.fromiter(map(place, keys), np.uint64)
    test = places < np.uint64(fraction * 2**64)
    masks = {"train": ~test, "test": test}
    for split, mask in masks.items():
        if len(mask) and not mask.any():
            least, most = int(places.min()), int(places.max())
            if least == most:
                raise DataError(f"{where} has one example, and two splits need two. Give more.")
            middles = (round((least + most) / 2**65, digits) for digits in range(1, 20))
            example = next((x for x in middles if least < x * 2**64 <= most), TEST_FRACTION)
            raise DataError(
                f"--test_fraction={fraction} leaves split {split!r} without examples: {where} has "
                f"{len(test)}, each a test example with that probability. Give another "
                f"--test_fraction, such as --test_fraction={example}, or another --seed than "
                f"{options.seed or 0}."
            )
    return masks


def split_paths(directory: str, *suffixes: str) -> dict[str, str]:
    """Split -> path, of the files or directories in `directory` that are named after a split.

    Case does not matter: train, Test, Training. `suffixes`: the suffixes of files, the preferred
    one first. Without suffixes, directories are found.
    """
    found: dict[str, str] = {}
    for suffix in suffixes or ("",):
        of_suffix: dict[str, str] = {}
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            split = split_named(name.lower().removesuffix(suffix))
            is_wanted = name.lower().endswith(suffix) and os.path.isdir(path) != bool(suffixes)
            if is_wanted and split in SPLIT_NAMES:
                if split in of_suffix:
                    raise DataError(
                        f"{of_suffix[split]} and {path} are both split {split!r}. Move one away."
                    )
                of_suffix[split] = path
        found = {**of_suffix, **found}
    return {split: found[split] for split in SPLIT_NAMES if split in found}


def split_named(name: str) -> str:
    """The split with this name, in any case: "train" for "Training"; "" for any other name."""
    split = name.lower()
    return _OTHER_NAMES.get(split, split) if split in SPLIT_DIRS else ""


def is_ignored(name: str) -> bool:
    """Returns True for hidden files, and for the files that file managers leave in directories."""
    return name.startswith(".") or name in _IGNORED


def check_utf8(paths: Iterable[str]) -> None:
    """Raises DataError for a path that is not UTF-8, so that it can be no text of a data set."""
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{path!r} is not UTF-8, as names in some old ZIP archives. Rename the file or "
                "directory."
            ) from None


def open_unpacked(path: str) -> BinaryIO:
    """Opens a file to read its bytes. A GZIP file is decompressed while it is read."""
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if is_packed else open(path, "rb")


def typed_path(*parts: str) -> str:
    """--source=PATH, as it is typed in a shell."""
    return shlex.quote(f"--source={os.path.join(*parts)}")


def refuse_fraction(options: Options, why: str) -> None:
    """Raises a DataError if a test fraction or a seed was given; for files that have splits."""
    for name in ("test_fraction", "seed"):
        if name in options.given():
            raise DataError(f"--{name} would be ignored: {why}. Leave it out.")


def joined(
    counts: Sequence[int], rows_of: Callable[[int, int, int], Iterator[T]]
) -> Callable[[int, int], Iterator[T]]:
    """A function that yields rows first..last-1 of consecutive parts that have `counts` rows.

    `rows_of(part, low, high)` yields rows low..high-1 of one part.
    """

    def rows(first: int, last: int) -> Iterator[T]:
        begin = 0
        for part, count in enumerate(counts):
            low, high = max(first - begin, 0), min(last - begin, count)
            if low < high:
                yield from rows_of(part, low, high)
            begin += count

    return rows
