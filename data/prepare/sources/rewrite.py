"""Rewrites TFRecord files: compressed ones, which are not seekable, and files of any name.

source = source("rewrite", "in", Options(splits="train=part-*,test=more/part-*"))
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence

from data.prepare.sources import Options, Source, SourceSplit, check_utf8, joined
from data.system import files
from data.system.files import DataError
from data.tfrecord import shard_names as names
from data.tfrecord.framing import compression_of


def source(name: str, path: str, options: Options) -> Source:
    """Every split in directory `path`, compressed or not, with unchanged records.

    The files are read twice: the first time to count the records. Empty files are left out, unless
    dataset_info.json says that they had records.
    """
    data_set, splits = name_in(path, options=options), {}
    if options.splits:
        files_of = paths_by_pattern(path, options.splits)
    else:
        files_of = {split: names.shard_paths(path, split) for split in names.splits_in(path)}
    check_utf8(itertools.chain.from_iterable(files_of.values()))  # TensorFlow opens no others.
    for split, shards in files_of.items():
        counts, num_bytes = [], 0
        announced = None if options.splits else names.shard_lengths_announced(path, split)
        for shard in shards:
            lengths = list(map(len, _records_of(shard)))
            if not lengths and (announced or len(shards) == 1):
                raise DataError(f"{shard} has no record: copy it again, or remove it on purpose.")
            counts.append(len(lengths))
            num_bytes += sum(lengths)
        if announced is not None and announced != counts:
            raise DataError(
                f"The shards of {split!r} in {path} hold {counts} records, but its "
                f"dataset_info.json says {announced}: some were cut short. Copy them again."
            )
        splits[split] = SourceSplit(sum(counts), num_bytes, copied(shards, counts))
    return Source(data_set, splits, metadata_files(path))


def paths_by_pattern(directory: str, splits: str) -> dict[str, list[str]]:
    """The files of each split, by the option --splits. Raises DataError if it is wrong."""
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for part in splits.split(","):
        split, _, pattern = part.partition("=")
        if not re.fullmatch(r"\w+", split) or not pattern:
            raise DataError(
                f"--splits={splits!r} must be SPLIT=PATTERN,... Received: {part!r}. "
                "--splits='train=part-*,test=test/*', for example."
            )
        # Spark writes _SUCCESS.
        paths = [p for p in files.glob(directory, pattern) if os.path.basename(p)[0] != "_"]
        if not set(paths) - taken:
            raise DataError(
                f"--splits: {pattern!r} fits no file in {directory}"
                f"{' that an earlier pattern does not fit' if paths else ''}. Patterns begin in "
                "that directory."
            )
        found.setdefault(split, []).extend(path for path in paths if path not in taken)
        taken.update(paths)
    return found


def name_in(directory: str, split: str = "", options: Options | None = None) -> str:
    """The name of the data set in a directory: NAME of NAME-SPLIT.tfrecord..., otherwise "data".

    It is read from the first shard of `split`, or of the first split there is.
    """
    if options and options.splits:
        return "data"
    splits = [split] if split else names.splits_in(directory)
    if not splits:
        raise DataError(names.nothing_found(directory, "train"))
    first = names.shard_paths(directory, splits[0], missing_too=True)[0]
    name, dash, _ = os.path.basename(first).rpartition(f"-{splits[0]}.")
    return name if dash else "data"


def metadata_files(directory: str) -> dict[str, str]:
    """features.json and the files with names of classes, if they exist."""
    return {
        name: files.read_text(files.join(directory, name))
        for name in sorted(files.names_in(directory))
        if name == "features.json" or name.endswith(".labels.txt")
    }


def copied(paths: Sequence[str], counts: Sequence[int]) -> Callable[[int, int], Iterator[bytes]]:
    """`examples` of a SourceSplit: the records of files that hold `counts` records."""
    return joined(counts, lambda shard, low, high: _records_of(paths[shard], low, high - low))


def _records_of(path: str, skip: int = 0, take: int = -1) -> Iterator[bytes]:
    import tensorflow as tf

    if (compression := compression_of(path)) is None:
        raise DataError(
            f"{path} is no TFRecord file, or damaged from its first record on: copy it again, or "
            "give patterns that leave it out: --splits='train=PATTERN,test=PATTERN'."
        )
    try:
        dataset = tf.data.TFRecordDataset(path, compression_type=compression)
        yield from dataset.skip(skip).take(take).as_numpy_iterator()
    except tf.errors.DataLossError as error:
        raise DataError(
            f"{path} is damaged ({error.message.splitlines()[0]}): copy it again."
        ) from None
