"""What a directory of TFRecord shards holds, and whether it is whole.

    python -m data.inspect datasets/digits
    python -m data.inspect datasets/digits --grid=digits.png
    python -m data.inspect datasets/digits --verify
    python -m data.inspect datasets/digits --repair=datasets/digits-good

Without a flag: features, files, the index, how often each label occurs, and the first examples of
each split. --grid also writes the first 64 images as a PNG file. --verify reads every byte, and
names file, record and offset of what is damaged. --repair writes what can be read to a new
directory, with its index, and leaves the old one alone; it says how many records are left out. Of a
file that was cut short the records before the cut are kept; behind a damaged length those that the
index leads to.

| exit code | meaning |
| --- | --- |
| 0 | done; with --verify: everything is whole |
| 2 | bad usage, or damaged data; with --repair: nothing was written |
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from data import damage, files, frames, names, prepare, records
from data.damage import Run, ShardReport
from data.features import Feature, Features, read_features
from data.files import DataError
from data.flags import parse_flags
from data.records import Split
from data.sources import Source, SourceSplit, pieces
from data.sources.rewrite import metadata_files, name_of_shards

if TYPE_CHECKING:
    import tensorflow as tf

_BATCH = 1024
_MOST_LABELS = 100
_MOST_VALUES = 8
_GRID_COLUMNS = 8
_GRID_IMAGES = 64
_CELL_PIXELS = 96  # Of images that are not all of one size.


def describe(data_dir: str, splits: Sequence[str], num_examples: int) -> Iterator[str]:
    """Lines about features and each of `splits`, with its first `num_examples`.

    Raises:
        DataError: a split cannot be opened or read to its end.
    """
    features = _features(data_dir)
    yield data_dir
    if features is None:
        yield "  no features.json: what an example holds is known from the examples alone"
    else:
        for feature in features.values():
            yield f"  {_described(feature)}"
    for name in splits:
        split = records.open_split(data_dir, name)
        num_chunks = sum(len(shard.offsets) for shard in split.shards)
        yield f"{name}: {split.num_examples:,} examples, fingerprint {split.fingerprint}"
        yield (
            f"  index {os.path.basename(records.index_path(data_dir, name))}: {num_chunks:,} "
            f"chunks of {split.chunk_examples}"
        )
        for shard in split.shards:
            size = f"{shard.num_records:,} examples, {shard.num_bytes:,} bytes"
            yield f"  {os.path.basename(shard.path)}: {size}"
        for label in _labels(features):
            yield from _counts(data_dir, split, label)
        for number, record in enumerate(itertools.islice(_records(split), num_examples)):
            yield f"  example {number}: {_shown(record)}"


def verify(data_dir: str, splits: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Reads every byte; lines for people, each with whether it tells of damage.

    Raises:
        DataError: there is no such split, or it is compressed.
    """
    for name in splits:
        for shard in damage.examine(data_dir, name):
            for found in shard.damages:
                yield f"{found}{_also_lost(found)}", True
            if not shard.damages:
                yield f"{shard.path}: {shard.num_good:,} records, whole", False


def repair(data_dir: str, splits: Sequence[str], out: str) -> list[str]:
    """Writes the records of `splits` that can be read to `out`; says what was left out.

    Raises:
        DataError: `out` is not empty, or no record can be read.
    """
    out = files.absolute(out)
    if files.exists(out) and (not files.is_dir(out) or files.names_in(out)):
        raise DataError(f"--repair={out} is there already, and a new directory is needed.")
    reports = {name: damage.examine(data_dir, name) for name in splits}
    lines = []
    good = {}
    for name, shards in reports.items():
        num_good = sum(shard.num_good for shard in shards)
        found = [item for shard in shards for item in shard.damages]
        num_lost = sum(item.num_records or 0 for item in found)
        unknown = " and some that cannot be counted" if _has_unknown(shards) else ""
        lines.append(f"{name}: {num_good:,} records kept, {num_lost:,}{unknown} left out")
        lines += [f"  {item}{_also_lost(item)}" for item in found]
        if num_good:
            good[name] = _good_split(shards, num_good)
    if not good:
        raise DataError(f"No record in {data_dir} can be read.\n" + "\n".join(lines))
    first = reports[next(iter(good))][0].path
    source = Source(
        name_of_shards(os.path.basename(first), next(iter(good))), good, metadata_files(data_dir)
    )
    prepare.write_new(out, f"what is good of {data_dir}", lambda: source, lambda: False)
    return lines


def image_grid(data_dir: str, split_name: str) -> bytes:
    """The first images of a split side by side, as a PNG file.

    Raises:
        DataError: there is no features.json, it has no image, or a record has none.
    """
    import tensorflow as tf

    features = read_features(data_dir)
    name = next((key for key, feature in features.items() if _is_image(feature)), None)
    if name is None:
        raise DataError(f"{features.source} has no image, so --grid has nothing to show.")
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
    sizes = {tuple(image.shape[:2]) for image in images}
    if len(sizes) > 1:
        images = [
            tf.cast(tf.image.resize_with_pad(image, _CELL_PIXELS, _CELL_PIXELS), tf.uint8)
            for image in images
        ]
    height, width, channels = images[0].shape
    rows = -(-len(images) // _GRID_COLUMNS)
    images += [tf.zeros_like(images[0])] * (rows * _GRID_COLUMNS - len(images))
    cells = tf.reshape(tf.stack(images), [rows, _GRID_COLUMNS, height, width, channels])
    picture = tf.reshape(
        tf.transpose(cells, [0, 2, 1, 3, 4]), [rows * height, _GRID_COLUMNS * width, channels]
    )
    return bytes(tf.io.encode_png(picture).numpy())


def _features(data_dir: str) -> Features | None:
    if not files.exists(files.join(data_dir, "features.json")):
        return None
    return read_features(data_dir)


def _described(feature: Feature) -> str:
    if feature.kind == "label":
        return f"{feature.name}: {feature.type_name} of {feature.num_classes} classes"
    shape = ", ".join("?" if size is None else str(size) for size in feature.shape)
    return f"{feature.name}: {feature.type_name} {feature.dtype} [{shape}]"


def _labels(features: Features | None) -> list[str]:
    """Names of the labels; without features.json, what may be one."""
    if features is not None:
        return [name for name in features if features[name].kind == "label"]
    return ["label"]


def _counts(data_dir: str, split: Split, label: str) -> Iterator[str]:
    """How often each class occurs, over all records; nothing where none has the label."""
    import tensorflow as tf

    counts: dict[int, int] = {}
    num_without = 0
    spec = {label: tf.io.RaggedFeature(tf.int64)}
    dataset = tf.data.TFRecordDataset([shard.path for shard in split.shards]).batch(_BATCH)
    classes_of = dataset.map(lambda serialized: tf.io.parse_example(serialized, spec)[label])
    try:
        for batch in damage.readable(classes_of):
            classes, _, times = tf.unique_with_counts(batch.values)
            for number, count in zip(classes.numpy().tolist(), times.numpy().tolist(), strict=True):
                counts[number] = counts.get(number, 0) + count
            num_without += int(tf.math.count_nonzero(batch.row_lengths() == 0))
    except tf.errors.InvalidArgumentError:
        yield f"  {label}  not counted: some record has none that is an integer"
        return
    if not counts:
        return
    class_names = _class_names(data_dir, label)
    shown = [
        f"{class_names[number] if 0 <= number < len(class_names) else number}: {counts[number]:,}"
        for number in sorted(counts)[:_MOST_LABELS]
    ]
    more = f", and {len(counts) - _MOST_LABELS} more" if len(counts) > _MOST_LABELS else ""
    without = f"  without: {num_without:,}" if num_without else ""
    yield f"  {label}  {'  '.join(shown)}{more}{without}"


def _class_names(data_dir: str, label: str) -> list[str]:
    path = files.join(data_dir, f"{label}.labels.txt")
    if not files.exists(path):
        return []
    return files.read_text(path).splitlines()


def _records(split: Split) -> Iterator[bytes]:
    import tensorflow as tf

    paths = [shard.path for shard in split.shards]
    yield from damage.readable(tf.data.TFRecordDataset(paths).as_numpy_iterator())


def _shown(record: bytes) -> str:
    """The values of an example, long ones by their size."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # No stubs.

    try:
        example = tf.train.Example.FromString(record)
    except DecodeError:
        return f"{_shown_bytes(record)}, no tf.train.Example"
    shown = []
    for name, feature in sorted(example.features.feature.items()):
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        if kind == "bytes_list":
            text = ", ".join(map(_shown_bytes, values[:_MOST_VALUES]))
        else:
            text = ", ".join(f"{value:g}" for value in values[:_MOST_VALUES])
        more = f", ... ({len(values):,})" if len(values) > _MOST_VALUES else ""
        shown.append(f"{name}={text}{more}")
    return "  ".join(shown)


def _shown_bytes(value: bytes) -> str:
    is_text = len(value) <= 60 and value.isascii() and value.decode().isprintable()
    return repr(value.decode()) if is_text else f"<{len(value):,} bytes>"


def _is_image(feature: Feature) -> bool:
    if feature.kind == "image":
        return feature.dtype == "uint8"
    is_picture = len(feature.shape) == 3 and feature.shape[-1] in (1, 3, 4)
    return feature.kind == "tensor" and feature.dtype == "uint8" and is_picture


def _image(features: Features, feature: Feature, record: bytes) -> "tf.Tensor":
    import tensorflow as tf

    if None not in feature.shape:
        return features.parse_example(tf.constant([record]), [feature.name])[feature.name][0]
    encoded = tf.io.parse_single_example(
        record, {feature.name: tf.io.FixedLenFeature([], tf.string)}
    )[feature.name]
    return tf.io.decode_image(encoded, channels=feature.shape[-1] or 3, expand_animations=False)


def _also_lost(found: frames.Damage) -> str:
    if found.num_records is None:
        return "; an unknown number of records is lost"
    return f"; {found.num_records:,} records are lost" if found.num_records > 1 else ""


def _has_unknown(shards: Sequence[ShardReport]) -> bool:
    return any(found.num_records is None for shard in shards for found in shard.damages)


def _good_split(shards: Sequence[ShardReport], num_good: int) -> SourceSplit:
    runs = [(shard.path, run) for shard in shards for run in shard.runs]
    return SourceSplit(num_good, sum(run.end - run.begin for _, run in runs), _reader_of(runs))


def _reader_of(runs: Sequence[tuple[str, Run]]) -> Callable[[int, int], Iterator[bytes]]:
    def examples(first: int, last: int) -> Iterator[bytes]:
        for number, low, high in pieces((run.num_records for _, run in runs), first, last):
            path, run = runs[number]
            dataset = frames.records_from(path, run.begin).skip(low).take(high - low)
            yield from damage.readable(dataset.as_numpy_iterator())

    return examples


def _main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    chosen = [name for name in ("grid", "verify", "repair") if values[name].value]
    if len(argv) != 2 or len(chosen) > 1:
        what = " ".join(argv[1:]) if len(argv) != 2 else " ".join(f"--{name}" for name in chosen)
        print(
            "One directory is needed, and at most one of --grid, --verify and --repair. Received: "
            f"{what or 'nothing'}.\n\n{__doc__}",
            file=sys.stderr,
        )
        return 2
    try:
        return _run(argv[1])
    except (DataError, OSError) as error:
        print(f"data.inspect: {error}", file=sys.stderr)
        return 2


def _run(data_dir: str) -> int:
    values = flags.FLAGS
    found = names.splits_in(data_dir)
    splits = [values.split] if values.split else found
    if not splits:
        raise DataError(f"{data_dir} holds no TFRecord shards.")
    if values.verify:
        is_damaged = False
        for line, tells_of_damage in verify(data_dir, splits):
            print(line)
            is_damaged |= tells_of_damage
        return 2 if is_damaged else 0
    if values.repair:
        print("\n".join(repair(data_dir, splits, values.repair)))
        return 0
    for line in describe(data_dir, splits, values.num_examples):
        print(line)
    if values.grid:
        picture = image_grid(data_dir, "train" if "train" in splits else splits[0])
        files.replace_file(values.grid, picture)
        print(f"{values.grid}: the first {_GRID_IMAGES} images or fewer")
    return 0


if __name__ == "__main__":
    # Here, so that who imports this module does not get the flags.
    flags.DEFINE_string("split", None, "Look at this split alone.")
    flags.DEFINE_integer("num_examples", 3, "Examples of each split to show.", lower_bound=0)
    flags.DEFINE_string("grid", None, "PNG file to write, with the first images.")
    flags.DEFINE_boolean("verify", False, "Read every byte, and name what is damaged.")
    flags.DEFINE_string("repair", None, "New directory to write what can be read to.")
    app.run(_main, flags_parser=parse_flags("data.inspect"))
