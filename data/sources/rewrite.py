"""TFRecord shards that cannot be sought in (GZIP), written again as plain ones."""

import os
from collections.abc import Callable, Iterator, Sequence

from data import files, names
from data.files import DataError
from data.sources import Source, SourceSplit, pieces


def source(directory: str | None) -> Source:
    """Every split in `directory`, compressed or not, record by record as it is.

    The files are read once more than they are written, to count the records.

    Raises:
        DataError: there is no such directory, or it has no shards, or not all of them.
    """
    if directory is None:
        raise DataError(
            "rewrite needs the directory to read: "
            "python -m data.prepare rewrite --source=DIR --out=OTHER_DIR"
        )
    found = names.splits_in(directory)
    if not found:
        raise DataError(f"{directory} holds no TFRecord shards, so there is nothing to rewrite.")
    splits = {}
    for split in found:
        paths = names.shard_paths(directory, split)
        counts, num_bytes = [], 0
        for path in paths:
            counts.append(0)
            for example in _records_of(path):
                counts[-1] += 1
                num_bytes += len(example)
        announced = names.shard_lengths_announced(directory, split)
        for path, count in zip(paths, counts, strict=True):
            if not count:
                raise DataError(f"{path} has no record: copy it again, or remove it on purpose.")
        if announced is not None and announced != counts:
            raise DataError(
                f"The shards of {split!r} in {directory} hold {counts} records, but its "
                f"dataset_info.json says {announced}: some were cut short. Copy them again."
            )
        splits[split] = SourceSplit(sum(counts), num_bytes, copied(paths, counts))
    first = os.path.basename(names.shard_paths(directory, found[0])[0])
    return Source(name_of_shards(first, found[0]), splits, metadata_files(directory))


def name_of_shards(file_name: str, split: str) -> str:
    """NAME of NAME-SPLIT.tfrecord..., or "data" of shards that are named otherwise."""
    name, dash, _ = file_name.rpartition(f"-{split}.")
    return name if dash else "data"


def metadata_files(directory: str) -> dict[str, str]:
    """features.json and the names of labels, where there are some."""
    return {
        name: files.read_text(files.join(directory, name))
        for name in sorted(files.names_in(directory))
        if name == "features.json" or name.endswith(".labels.txt")
    }


def copied(paths: Sequence[str], counts: Sequence[int]) -> Callable[[int, int], Iterator[bytes]]:
    """`examples` of a SourceSplit: the records of some files, which hold `counts` of them."""

    def examples(first: int, last: int) -> Iterator[bytes]:
        for number, low, high in pieces(counts, first, last):
            yield from _records_of(paths[number], low, high - low)

    return examples


def _records_of(path: str, skip: int = 0, take: int = -1) -> Iterator[bytes]:
    """The records of a file, compressed or not; all by default.

    Raises:
        DataError: it is damaged.
    """
    import tensorflow as tf

    with tf.io.gfile.GFile(path, "rb") as file:
        compression = "GZIP" if file.read(3) == b"\x1f\x8b\x08" else ""
    try:
        dataset = tf.data.TFRecordDataset(path, compression_type=compression)
        yield from dataset.skip(skip).take(take).as_numpy_iterator()
    except tf.errors.DataLossError as error:
        raise DataError(
            f"{path} is damaged ({error.message.splitlines()[0]}): copy it again."
        ) from None
