"""TFRecord shards that cannot be sought in (GZIP), written again as plain ones."""

import os
from collections.abc import Callable, Iterator

from data import records
from data.records import DataError
from data.sources import Source, SourceSplit
from data.sources.tfds import metadata_files


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
    names = records.splits_in(directory)
    if not names:
        raise DataError(f"{directory} holds no TFRecord shards, so there is nothing to rewrite.")
    splits = {}
    for split in names:
        paths = records.shard_paths(directory, split)
        count, num_bytes = 0, 0
        for example in _examples(paths)():
            count += 1
            num_bytes += len(example)
        splits[split] = SourceSplit(count, num_bytes, _examples(paths))
    first = os.path.basename(records.shard_paths(directory, names[0])[0])
    name, dash, _ = first.rpartition(f"-{names[0]}.")
    return Source(name if dash else "data", splits, metadata_files(directory))


def _examples(paths: list[str]) -> Callable[[], Iterator[bytes]]:
    def examples() -> Iterator[bytes]:
        import tensorflow as tf

        for path in paths:
            with open(path, "rb") as file:
                compression = "GZIP" if file.read(3) == b"\x1f\x8b\x08" else ""
            try:
                dataset = tf.data.TFRecordDataset(path, compression_type=compression)
                yield from dataset.as_numpy_iterator()
            except tf.errors.DataLossError as error:
                raise DataError(
                    f"{path} is damaged ({error.message.splitlines()[0]}): copy it again."
                ) from None

    return examples
