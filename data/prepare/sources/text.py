"""Text files as sequences of bytes of one length, for language models.

The documents are the files, in the order of their paths. Each is followed by byte 0, which no text
has. So a split is one long stream of bytes; a sequence may begin and end inside a document, and may
hold several. Sequence i is the `length + 1` bytes of the stream from i * length on: a model that
predicts each byte from those before it predicts each byte of the stream once. What is left at the
end of the stream, fewer than `length` bytes, is left out.

Memory holds the paths and sizes of the files, and one block of a file.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data.prepare.sources import (
    Options,
    Source,
    SourceSplit,
    joined,
    refuse_fraction,
    split_paths,
    test_fraction,
)
from data.prepare.sources.examples import feature_files, tensor
from data.system.files import DataError, files_below
from data.tfrecord.examples import example_bytes

LENGTH = 256
FEATURE = "bytes"
END = b"\0"  # Of a document.

_BLOCK_BYTES = 1 << 20
_RECORD_BYTES = 40  # Of a record, in addition to its sequence.


class _Document(NamedTuple):
    """The bytes begin..end-1 of a file. The end of the document, a byte more, follows."""

    path: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin + len(END)


def source(name: str, path: str, options: Options) -> Source:
    """A file, or all files below a directory; hidden files and directories are left out.

    Split by train/, test/ (and val/, ...) where there is train/; otherwise the last `test_fraction`
    of the bytes of each file are a test document.
    """
    length = LENGTH if options.length is None else options.length
    if length < 1:
        raise DataError(f"--length must be at least 1. Received: {length}. --length={LENGTH}.")
    directories = split_paths(path) if os.path.isdir(path) else {}
    if "train" in directories:
        refuse_fraction(options, f"{path} has train/, so its directories are the splits")
        splits = {
            split: [_Document(file, 0, size) for file, size in _files(found)]
            for split, found in directories.items()
        }
    else:
        fraction = test_fraction(options)
        splits = {"train": [], "test": []}
        for file, size in _files(path):
            cut = size - int(size * fraction)
            splits["train"].append(_Document(file, 0, cut))
            splits["test"].append(_Document(file, cut, size))
    sizes = {split: sum(item.size for item in documents) for split, documents in splits.items()}
    smallest = min(sizes.values())
    shorter = f", or --length={max(1, smallest // 10)}" if smallest > 1 else ""
    made = {}
    for split, documents in splits.items():
        if sizes[split] <= length:
            raise DataError(
                f"Split {split!r} of {path} has {sizes[split]:,} bytes, and a sequence needs "
                f"{length + 1:,}. Give more text{shorter}."
            )
        num_sequences = (sizes[split] - 1) // length
        examples = functools.partial(_examples, documents, length)
        size = num_sequences * (length + 1 + _RECORD_BYTES)
        made[split] = SourceSplit(num_sequences, size, examples)
    return Source(name, made, feature_files({FEATURE: tensor("uint8", (length + 1,))}, {}))


def _files(path: str) -> list[tuple[str, int]]:
    if os.path.isfile(path):
        return [(path, os.path.getsize(path))]
    found = files_below(path, lambda each: os.path.basename(each).startswith("."))
    if not found:
        raise DataError(f"{path} has no files: give a text file, or a directory of text files.")
    return [(file, os.path.getsize(file)) for file in found]


def _examples(
    documents: Sequence[_Document], length: int, first: int, last: int
) -> Iterator[bytes]:
    sizes = [document.size for document in documents]
    stream = joined(sizes, lambda number, low, high: _blocks(documents[number], low, high))
    blocks = stream(first * length, last * length + 1)
    held = b""
    for _ in range(first, last):
        while len(held) <= length:
            held += next(blocks)
        yield example_bytes({FEATURE: held[: length + 1]})
        held = held[length:]


def _blocks(document: _Document, low: int, high: int) -> Iterator[bytes]:
    """The bytes low..high-1 of a document, in blocks; the last byte of a document is its end."""
    left = min(high, document.end - document.begin) - low
    with open(document.path, "rb") as file:
        file.seek(document.begin + low)
        while left > 0:
            block = file.read(min(_BLOCK_BYTES, left))
            if not block:
                raise DataError(f"{document.path} became shorter while it was read. Start again.")
            if (at := block.find(END)) >= 0:
                at += file.tell() - len(block)
                raise DataError(
                    f"{document.path} has byte 0 at offset {at:,}, which ends a document here: it "
                    "is no text, or text in UTF-16. Convert it to UTF-8, or remove it."
                )
            left -= len(block)
            yield block
    if high == document.size:
        yield END
