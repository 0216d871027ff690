"""Sources: one file for each input format, which turns the user's files into splits of examples.

Each has `source(name, path, options)`, which returns a `Source`. It reads counts, names and types
only. The examples are read while they are written, a few at a time. Wrong or damaged input is a
DataError, which says what to do.
"""

import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from data.system.files import DataError
from data.tfrecord.shard_names import SPLIT_DIRS, SPLIT_NAMES

_OTHER_NAMES = {"training": "train", "testing": "test"}
LAYOUTS = ("tfds", "image_raw")
TEST_FRACTION = 0.1
DROP = "drop"

T = TypeVar("T")
Real: TypeAlias = float  # In Options, `float` is an option.


class SourceSplit(NamedTuple):
    """One split. `examples(first, last)` yields records first..last-1, equal at every call.

    Several processes may call `examples` at once. `num_bytes`: an estimate of the size of all
    `num_examples` records, from which the number of shards is chosen.
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

    Attributes:
        label: Column of a table that is the label.
        test_fraction: Part of the examples for the test split, if the files have no splits.
        seed: Seed that chooses the test examples.
        layout: One of LAYOUTS; how a record holds an image.
        length: The number of bytes of a sequence of text.
        missing: What replaces missing values of a table: DROP leaves out the row, or a number.
        header: True if a table begins with a line of column names; None refuses a line of numbers.
        num_clicks: The number of training examples that are generated.
        id_scale: The part of Criteo's numbers of ids that is generated.
        lists: Columns of a table whose values are lists, separated by commas.
        text: Columns of a table that are text, also if all values are numbers; by commas.
        integer: Columns of a table that are integers; by commas.
        float: Columns of a table that are numbers with a fraction; by commas.
        delimiter: What separates the values of a table.
        encoding: Of the text of a table.
        allow_partial: Take the files that are there, if some of a data set are missing or cut off.
        splits: Which files are which split: SPLIT=PATTERN, separated by commas.
        columns: Columns of a table that are taken; by commas. None takes all.
        split_column: Column of a table that says of which split a row is.
        processes: The number of processes that call a function. It does not change the data set.
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
        """All options that change the data set, with the defaults of those that were not given."""
        defaults = Options(None, TEST_FRACTION, 0, LAYOUTS[0])
        complete = {**defaults._asdict(), **self.given()}
        del complete["processes"]
        return complete


def test_fraction(options: Options) -> float:
    """Returns the part of the examples for the test split. Raises DataError if it is none."""
    fraction = TEST_FRACTION if options.test_fraction is None else options.test_fraction
    if not 0 < fraction < 1:
        raise DataError(
            f"--test_fraction must be above 0 and below 1. Received: {fraction}. "
            f"--test_fraction={TEST_FRACTION}, for example."
        )
    return fraction


def divided(keys: Iterable[str], options: Options, where: str) -> dict[str, bytes]:
    """Chooses the test examples; returns a mask for train and test: 1 if the split has the example.

    The choice depends on an example's key and the seed only, not on the other examples, so the
    test split has about `test_fraction` of the examples.
    """
    fraction = test_fraction(options)
    bound = int(fraction * 2**64)
    seed = str(options.seed or 0).encode()
    least, most = 2**64, -1

    def is_test(key: str) -> bool:
        nonlocal least, most
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, key=seed)
        place = int.from_bytes(digest.digest(), "big")
        least, most = min(least, place), max(most, place)
        return place < bound

    test = bytes(map(is_test, keys))
    masks = {"train": bytes(not chosen for chosen in test), "test": test}
    for split, mask in masks.items():
        if mask and not any(mask):
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
    """Split -> path in `directory`. The name is that of a split in any case: train, Test, Training.

    Args:
        directory: Where to look.
        *suffixes: Those of files, the preferred one first; none for directories.
    """
    found: dict[str, str] = {}
    for suffix in suffixes or ("",):
        of_suffix: dict[str, str] = {}
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            stem = name.lower().removesuffix(suffix)
            split = _OTHER_NAMES.get(stem, stem)
            is_wanted = os.path.isdir(path) != bool(suffixes)
            if name.lower().endswith(suffix) and split in SPLIT_NAMES and is_wanted:
                if split in of_suffix:
                    raise DataError(
                        f"{of_suffix[split]} and {path} are both split {split!r}. Move one away."
                    )
                of_suffix[split] = path
        found = {**of_suffix, **found}
    return {split: found[split] for split in SPLIT_NAMES if split in found}


def split_named(name: str) -> str:
    """The split with this name, in any case: train of Training; "" if it is the name of none."""
    split = name.lower()
    return _OTHER_NAMES.get(split, split) if split in SPLIT_DIRS else ""


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
