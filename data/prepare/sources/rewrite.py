"""Rewrites GZIP shards, in which a reader cannot seek, as uncompressed shards."""

import os
from collections.abc import Callable, Iterator, Sequence

from data.prepare.sources import Options, Source, SourceSplit, joined
from data.system import files
from data.system.files import DataError
from data.tfrecord import shard_names as names


def source(name: str, path: str, options: Options) -> Source:
    """Every split in directory `path`, compressed or not, with unchanged records.

    The files are read twice: the first time to count the records.
    """
    data_set, splits = name_in(path), {}
    for split in names.splits_in(path):
        shards = names.shard_paths(path, split)
        counts, num_bytes = [], 0
        for shard in shards:
            lengths = list(map(len, _records_of(shard)))
            if not lengths:
                raise DataError(f"{shard} has no record: copy it again, or remove it on purpose.")
            counts.append(len(lengths))
            num_bytes += sum(lengths)
        announced = names.shard_lengths_announced(path, split)
        if announced is not None and announced != counts:
            raise DataError(
                f"The shards of {split!r} in {path} hold {counts} records, but its "
                f"dataset_info.json says {announced}: some were cut short. Copy them again."
            )
        splits[split] = SourceSplit(sum(counts), num_bytes, copied(shards, counts))
    return Source(data_set, splits, metadata_files(path))


def name_in(directory: str, split: str = "") -> str:
    """The name of the data set in a directory: NAME of NAME-SPLIT.tfrecord..., otherwise "data".

    Of its first split, or of `split`.
    """
    splits = [split] if split else names.splits_in(directory)
    if not splits:
        raise DataError(f"{directory} holds no TFRecord shards, so there is nothing to rewrite.")
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

    with files.open_file(path) as file:
        compression = "GZIP" if file.read(3) == b"\x1f\x8b\x08" else ""
    try:
        dataset = tf.data.TFRecordDataset(path, compression_type=compression)
        yield from dataset.skip(skip).take(take).as_numpy_iterator()
    except tf.errors.DataLossError as error:
        raise DataError(
            f"{path} is damaged ({error.message.splitlines()[0]}): copy it again."
        ) from None
