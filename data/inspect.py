"""Shows what a directory of TFRecord shards holds, and finds damaged records.

    python -m data.inspect --data_dir=datasets/digits
    python -m data.inspect --data_dir=datasets/digits --grid=digits.png
    python -m data.inspect --data_dir=datasets/digits --verify
    python -m data.inspect --data_dir=datasets/digits --repair=datasets/digits-repaired
    python -m data.inspect --data_dir=datasets/clicks --ids

Without another flag: features, files, the index, how often each label occurs, and the first
examples of each split. --grid also writes the first 64 images as a PNG file. --verify reads every
byte, and names file, record and offset of all damage. --repair copies the readable records to a new
directory with an index, and says how many records are left out. Of a file that was cut short, the
records before the cut are copied; behind a damaged length, those that the index leads to. --ids
counts the different ids in columns of integers and text, and says how large embedding tables for
them are.

| exit code | meaning |
| --- | --- |
| 0 | done; with --verify: no damage |
| 2 | bad usage, or damaged data; with --repair: nothing was written |
| 130 | Ctrl-C |
"""

import collections
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from data.example_features import Feature, Features, class_names, read_features
from data.id_counts import count_ids
from data.system import files
from data.system.compat.quiet import quiet_tensorflow
from data.system.errors import UsageError
from data.system.extras import of_satellite
from data.system.files import DataError
from data.system.flags import parse_flags
from data.system.pipes import ends_with_reader
from data.tfrecord import damage
from data.tfrecord import shard_names as names
from data.tfrecord import split as records

if TYPE_CHECKING:
    import tensorflow as tf

_BATCH = 1024
_MOST_LABELS = 100
_MOST_VALUES = 8
_GRID_COLUMNS = 8
_GRID_IMAGES = 64
_MOST_IDS = 10
_TABLE_WIDTH = 16
_CELL_PIXELS = 96  # If the images have different sizes.


def describe(data_dir: str, splits: Sequence[str], num_examples: int) -> Iterator[str]:
    """Yields lines about the features and about each split, with its first `num_examples`."""
    yield data_dir
    labels = ["label"]  # The likely name, if nothing tells.
    if files.exists(files.join(data_dir, "features.json")):
        features = read_features(data_dir)
        labels = features.labels
        yield from (f"  {_described(feature)}" for feature in features.values())
    else:
        yield "  no features.json: only the examples say what they hold"
    for name in splits:
        split = records.open_split(data_dir, name)
        num_chunks = sum(len(shard.offsets) for shard in split.shards)
        yield f"{name}: {split.num_examples:,} examples, fingerprint {split.fingerprint}"
        index = os.path.basename(records.index_path(data_dir, name))
        yield f"  index {index}: {num_chunks:,} chunks of {split.chunk_examples}"
        for shard in split.shards:
            size = f"{shard.num_records:,} examples, {shard.num_bytes:,} bytes"
            yield f"  {os.path.basename(shard.path)}: {size}"
        for label in labels:
            yield from _counts(data_dir, split, label)
        for number, record in enumerate(itertools.islice(_records(split), num_examples)):
            yield f"  example {number}: {_shown(record)}"


def verify(data_dir: str, splits: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Reads every byte; yields (a line for people, True if the line reports damage)."""
    lost = {*names.splits_in(data_dir, lost_too=True)} - {*names.splits_in(data_dir)}
    for name in splits:
        if name in lost:
            index = os.path.basename(records.index_path(data_dir, name))
            yield (
                f"{name}: all files of this split are missing, but {index} or dataset_info.json "
                "names them. Copy the files again",
                True,
            )
            continue
        for shard in damage.examine(data_dir, name):
            for found in shard.damages:
                yield str(found), True
            if not shard.damages:
                yield f"{shard.path}: {shard.num_good:,} records, complete", False


def table_sizes(data_dir: str, splits: Sequence[str]) -> Iterator[str]:
    """Yields lines about the ids of each column, and the sizes of tables for them."""
    header = ("column", "different", "once", "largest", f"{_MOST_IDS} most frequent", "MiB")
    for name in splits:
        split = records.open_split(data_dir, name)
        yield f"{name}: {split.num_examples:,} examples"
        rows = [header]
        for counts in count_ids(data_dir, split):
            different = counts.num_different
            rows.append(
                (
                    counts.name,
                    f"{different:,}",
                    f"{different - counts.num_used(2):,}",
                    f"{counts.ids[-1]:,}" if different and not counts.is_text else "",
                    f"{counts.share_of_most_frequent(_MOST_IDS):.1%}",
                    f"{different * _TABLE_WIDTH * 4 / 2**20:,.2f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for first, *others in rows:
            cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
            yield f"  {first.ljust(widths[0])}  {'  '.join(cells)}"
    yield (
        f"MiB: of a ShardedEmbedding of width {_TABLE_WIDTH} with a row for each different id, "
        "without optimizer slots. A table with a fixed number of rows needs the largest id + 1. "
        "With admit_after=2, ids that occur once get a row in the second epoch only. "
        "In lists, -1 is not counted."
    )


def image_grid(data_dir: str, split_name: str) -> bytes:
    """The first images of a split in rows of eight, as the bytes of a PNG file."""
    import tensorflow as tf

    features = read_features(data_dir)
    name = next((key for key, feature in features.items() if _is_image(feature)), None)
    if name is None:
        raise DataError(f"{features.source} has no image. Leave --grid out.")
    images = []
    first = itertools.islice(_records(records.open_split(data_dir, split_name)), _GRID_IMAGES)
    for number, record in enumerate(first):
        try:
            images.append(_image(features, features[name], record))
        except tf.errors.InvalidArgumentError as error:
            raise DataError(
                f"Record {number} of split {split_name!r} in {data_dir} has no {name} that can be "
                f"decoded: {error.message.splitlines()[0]}"
            ) from None
    if len({tuple(image.shape[:2]) for image in images}) > 1:
        images = [
            tf.cast(tf.image.resize_with_pad(image, _CELL_PIXELS, _CELL_PIXELS), tf.uint8)
            for image in images
        ]
    images += [tf.zeros_like(images[0])] * (-len(images) % _GRID_COLUMNS)
    rows = [
        tf.concat(images[i : i + _GRID_COLUMNS], axis=1)
        for i in range(0, len(images), _GRID_COLUMNS)
    ]
    return bytes(tf.io.encode_png(tf.concat(rows, axis=0)).numpy())


def _described(feature: Feature) -> str:
    if feature.kind == "label":
        return f"{feature.name}: {feature.type_name} of {feature.num_classes} classes"
    shape = ", ".join("?" if size is None else str(size) for size in feature.shape)
    return f"{feature.name}: {feature.type_name} {feature.dtype} [{shape}]"


def _counts(data_dir: str, split: records.Split, label: str) -> Iterator[str]:
    import tensorflow as tf

    counts: collections.Counter[int] = collections.Counter()
    num_without = 0
    spec = {label: tf.io.RaggedFeature(tf.int64)}
    batches = records.batched_records(split, _BATCH)
    classes_of = (tf.io.parse_example(tf.constant(batch), spec)[label] for batch in batches)
    try:
        for batch in classes_of:
            counts.update(batch.values.numpy().tolist())
            num_without += int(tf.math.count_nonzero(batch.row_lengths() == 0))
    except tf.errors.InvalidArgumentError:
        yield f"  {label}  not counted: in some record it is not an integer"
        return
    if not counts:
        return
    names_by_number = dict(enumerate(class_names(data_dir, label)))
    shown = [
        f"{names_by_number.get(number, number)}: {counts[number]:,}"
        for number in sorted(counts)[:_MOST_LABELS]
    ]
    more = f", and {len(counts) - _MOST_LABELS} more" if len(counts) > _MOST_LABELS else ""
    without = f"  without: {num_without:,}" if num_without else ""
    yield f"  {label}  {'  '.join(shown)}{more}{without}"


def _records(split: records.Split) -> Iterator[bytes]:
    yield from itertools.chain.from_iterable(records.batched_records(split, 1))


def _shown(record: bytes) -> str:
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        example = tf.train.Example.FromString(record)
    except DecodeError:
        return f"{_shown_bytes(record)}, not a tf.train.Example"
    shown = []
    for name, feature in sorted(example.features.feature.items()):
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        show: Callable[..., str] = str
        if kind != "int64_list":
            show = _shown_bytes if kind == "bytes_list" else "{:g}".format
        text = ", ".join(map(show, values[:_MOST_VALUES]))
        more = f", ... ({len(values):,})" if len(values) > _MOST_VALUES else ""
        shown.append(f"{name}={text}{more}")
    return "  ".join(shown)


def _shown_bytes(value: bytes) -> str:
    is_text = len(value) <= 60 and value.isascii() and value.decode().isprintable()
    return repr(value.decode()) if is_text else f"<{len(value):,} bytes>"


def _is_image(feature: Feature) -> bool:
    has_channels = len(feature.shape) == 3 and feature.shape[-1] in (1, 3, 4)
    is_picture = feature.kind == "image" or (feature.kind == "tensor" and has_channels)
    return is_picture and feature.dtype == "uint8"


def _image(features: Features, feature: Feature, record: bytes) -> "tf.Tensor":
    import tensorflow as tf

    if None not in feature.shape:
        return features.parse_example(tf.constant([record]), [feature.name])[feature.name][0]
    encoded = tf.io.parse_single_example(
        record, {feature.name: tf.io.FixedLenFeature([], tf.string)}
    )[feature.name]
    return tf.io.decode_image(encoded, channels=feature.shape[-1] or 3, expand_animations=False)


def _main(argv: Sequence[str]) -> int:
    quiet_tensorflow()
    try:
        return _run(argv[1:])
    except BrokenPipeError:  # ends_with_reader explains it.
        raise
    except (UsageError, OSError) as error:
        print(f"data.inspect: {error}", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    values = flags.FLAGS
    data_dir = values.data_dir
    chosen = [f"--{name}" for name in ("grid", "verify", "repair", "ids") if values[name].value]
    if arguments:
        raise DataError(f"Received: {' '.join(arguments)}. Write --data_dir={arguments[0]}")
    if not data_dir:
        raise DataError("A directory is needed: --data_dir=DIR. --help lists the flags.")
    if len(chosen) > 1:
        raise DataError(f"Received: {' '.join(chosen)}. Leave one of them.")
    if chosen not in ([], ["--grid"]) and flags.FLAGS["num_examples"].present:
        raise DataError(f"{chosen[0]} shows no examples. Leave --num_examples out.")
    if values.grid:
        files.check_writable(values.grid, "grid")
    found = names.splits_in(data_dir, lost_too=values.verify)
    if not found:
        raise DataError(names.nothing_found(data_dir, "train"))
    splits = [values.split] if values.split else found
    if values.split and values.split not in found:
        names.shard_paths(data_dir, values.split)  # Raises DataError, unless names are unusual.
    if values.verify:
        is_damaged = False
        for line, reports_damage in verify(data_dir, splits):
            print(line)
            is_damaged |= reports_damage
        return 2 if is_damaged else 0
    lines: Iterable[str] = describe(data_dir, splits, values.num_examples)
    if values.ids:
        lines = table_sizes(data_dir, splits)
    if values.repair:
        lines = of_satellite("data.prepare.preparing", "repair")(data_dir, splits, values.repair)
    for line in lines:
        print(line)
    if values.grid:
        picture = image_grid(data_dir, "train" if "train" in splits else splits[0])
        files.replace_file(values.grid, picture)
        print(f"{values.grid}: the first {_GRID_IMAGES} images or fewer")
    return 0


if __name__ == "__main__":
    # Defined here, so that a program that imports this module does not get the flags.
    flags.DEFINE_string("data_dir", None, "Directory with TFRecord files, to read.")
    flags.DEFINE_string("split", None, "Split to read; by default all splits.")
    flags.DEFINE_integer(
        "num_examples", 3, "Examples to show, from the first of each split.", lower_bound=0
    )
    flags.DEFINE_string("grid", None, "PNG file to write, with the first images.")
    flags.DEFINE_boolean("verify", False, "Read every byte, and name what is damaged.")
    flags.DEFINE_boolean("ids", False, "Count ids, and print the sizes of embedding tables.")
    flags.DEFINE_string("repair", None, "New directory for a copy of the readable records.")
    with ends_with_reader():
        app.run(_main, flags_parser=parse_flags("data.inspect"))
