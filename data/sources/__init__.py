"""Sources: one file a format, each turning what the user has into named splits of examples.

A format is a function that returns a `Source`. What it has looked at by then is counts, names and
types; the examples themselves are read only as they are written, a few at a time.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from data.files import DataError

SPLIT_NAMES = ("train", "test", "val", "valid", "validation", "extra")
LAYOUTS = ("tfds", "image_raw")
TEST_FRACTION = 0.1

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class SourceSplit:
    """One split. `examples(first, last)` yields records first..last-1, the same at every call.

    It may be called in several processes at once. `num_bytes`: about how many bytes all
    `num_examples` records are, from which the number of shards is chosen.
    """

    num_examples: int
    num_bytes: int
    examples: Callable[[int, int], Iterator[bytes]]


@dataclasses.dataclass(frozen=True)
class Source:
    """What a data set is before it is written: its splits, and the metadata files beside them.

    `name`: how shards are named. `files`: file name -> text; features.json among them, where what
    an example holds is known.
    """

    name: str
    splits: Mapping[str, SourceSplit]
    files: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Options:
    """What may be said about a source besides where it is; None is what was not said.

    Attributes:
        label: Column of a table that is the label.
        test_fraction: Part of the examples that becomes the test split, where files do not say.
        seed: Of the choice of those.
        layout: One of LAYOUTS; how an image lies in the record.
    """

    label: str | None = None
    test_fraction: float | None = None
    seed: int | None = None
    layout: str | None = None

    def given(self) -> dict[str, object]:
        """Those that were said, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def required(directory: str | None, name: str, what: str) -> str:
    """`directory`, or a DataError that says what --source must be."""
    if directory is None:
        raise DataError(
            f"{name} is made from {what}, and --source does not say where. "
            f"python -m data.prepare {name} --source=PATH"
        )
    return directory


def test_chooser(options: Options) -> Callable[[str], bool]:
    """Whether the example of some key is a test example: a function of (key, seed) alone.

    Each example is chosen for itself, so the part that is chosen is about `test_fraction`.

    Raises:
        DataError: the fraction is not between 0 and 1.
    """
    fraction = TEST_FRACTION if options.test_fraction is None else options.test_fraction
    if not 0 < fraction < 1:
        raise DataError(
            f"--test_fraction must be above 0 and below 1, Received: {fraction}. "
            f"--test_fraction={TEST_FRACTION}, for example."
        )
    bound = int(fraction * 2**64)
    seed = str(options.seed or 0).encode()

    def is_test(key: str) -> bool:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, key=seed)
        return int.from_bytes(digest.digest(), "big") < bound

    return is_test


def check_chosen(options: Options, splits: Mapping[str, int], source: str) -> None:
    """Returns if `test_chooser` has left examples in each of `splits`, name -> count.

    Raises:
        DataError: one is empty.
    """
    for split, count in splits.items():
        if not count and (total := sum(splits.values())):
            fraction = TEST_FRACTION if options.test_fraction is None else options.test_fraction
            raise DataError(
                f"--test_fraction={fraction} leaves split {split!r} without examples: {source} has "
                f"{total}, of which each is chosen with that probability. Give another "
                f"--test_fraction, or another --seed than {options.seed or 0}."
            )


def refuse_fraction(options: Options, why: str) -> None:
    """Returns if no fraction was asked for.

    Raises:
        DataError: one was, where the files are split already.
    """
    for name in ("test_fraction", "seed"):
        if name in options.given():
            raise DataError(f"--{name} would be ignored: {why}. Leave it out.")


def pieces(counts: Iterable[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Of parts with `counts` rows, one after the other, those that rows first..last-1 lie in.

    Yields the number of each part, and which of its rows: low..high-1.
    """
    begin = 0
    for part, count in enumerate(counts):
        low, high = max(first - begin, 0), min(last - begin, count)
        if low < high:
            yield part, low, high
        begin += count


def chosen_rows(
    rows: Iterable[T], is_chosen: Callable[[int], bool], first: int, last: int
) -> Iterator[T]:
    """Of the rows whose number is chosen, first..last-1."""
    chosen = (row for number, row in enumerate(rows) if is_chosen(number))
    return itertools.islice(chosen, first, last)
