"""`python -m benchmarks.input`: rate and memory of input pipelines.

    python -m benchmarks.input                                              # about 5 minutes
    python -m benchmarks.input --mnist_source=DIRECTORY_WITH_THE_IDX_FILES

Prints Markdown. Every pipeline yields shuffled batches of float32 images and int64 labels without
end, and the same loop in a graph reads them. The pipelines take turns in each round; a figure is
the median of all rounds, with minimum and maximum. Without IDX files, images of MNIST's size are
drawn at random. ImageNet-sized records are JPEGs of about 100 KB.

Memory is measured in a separate process for each pipeline: its peak resident set, less that of a
process whose pipeline reads no files. The allocator keeps freed memory, as in the trainer.
"""

import dataclasses
import functools
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks.table import machine, prepare_mnist, write_random_mnist
from data.batch_feeds import Feed, StreamedFeed, open_feed
from data.disk_reader import DiskReader
from data.example_features import read_features
from data.features import ExampleParse, default_parse
from data.order import Order
from data.reader import Reader
from data.system.compat.freed_memory import keep_freed_memory
from data.system.flags import parse_flags
from data.tfrecord.split import Split, open_split
from tests.shards import write_shards
from trainer.config import DataConfig

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds to measure.")
_MEASURE = flags.DEFINE_string(
    "measure_memory", None, "Internal: the pipeline whose memory is measured."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Directory with TFRecord files that this program has written."
)

_ROUND_SECS = 1.0
_SHUFFLE_BUFFER = 10_000
_TINY_RECORDS = 1_000_000
_AUTOTUNE = tf.data.AUTOTUNE


@dataclasses.dataclass(frozen=True)
class Data:
    """A directory with a split "train", with its batch size and shuffle buffer."""

    directory: str
    batch_size: int
    shuffle_buffer: int

    @functools.cached_property
    def split(self) -> Split:
        """The opened split."""
        return open_split(self.directory, "train")

    @property
    def epoch_batches(self) -> int:
        """Batches that hold every record at least once."""
        return -(-self.split.num_examples // self.batch_size)

    @functools.cached_property
    def paths(self) -> list[str]:
        """The files of the split."""
        return [shard.path for shard in self.split.shards]

    @functools.cached_property
    def parse(self) -> ExampleParse:
        """This program's parse function."""
        return default_parse(read_features(self.directory))

    def classic_parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The same, but bytes become floats as other programs do it."""
        return classic_widen(*self.parse.narrow(records))

    def order(self, seed: int = 0) -> Order:
        """The order with the default settings of a config."""
        return Order(
            self.split.shard_lengths,
            self.split.chunk_examples,
            self.batch_size,
            self.batch_size,
            DataConfig().window_batches,
            seed,
            shuffle=True,
        )


def small(directory: str) -> Data:
    """MNIST-sized records."""
    return Data(directory, batch_size=100, shuffle_buffer=_SHUFFLE_BUFFER)


def large(directory: str) -> Data:
    """ImageNet-sized records; a shuffle buffer of 10,000 would be a gigabyte."""
    return Data(directory, batch_size=32, shuffle_buffer=256)


def classic_widen(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Converts bytes to floats, as other programs do it."""
    return tf.cast(images, tf.float32) / 255.0, labels


def ours(data: Data) -> tf.data.Dataset:
    """This program's pipeline."""
    order = data.order()
    return DiskReader(Reader(data.split, order, data.parse)).batches(0, range(order.lanes))


def ours_cached(data: Data) -> Reader:
    """This program's pipeline with all examples cached in memory."""
    return Reader(data.split, data.order(), data.parse, cache_bytes=1 << 40)


def classic(data: Data) -> tf.data.Dataset:
    """The pipeline of most programs."""
    records = tf.data.TFRecordDataset(data.paths).shuffle(data.shuffle_buffer).repeat()
    return records.batch(data.batch_size, drop_remainder=True).map(data.classic_parse).prefetch(2)


def classic_tuned(data: Data) -> tf.data.Dataset:
    """The classic pipeline with parallel parsing, tuned by tf.data."""
    records = tf.data.TFRecordDataset(data.paths).shuffle(data.shuffle_buffer).repeat()
    batches = records.batch(data.batch_size, drop_remainder=True)
    return batches.map(data.classic_parse, num_parallel_calls=_AUTOTUNE).prefetch(_AUTOTUNE)


def classic_by_example(data: Data) -> tf.data.Dataset:
    """Decodes JPEGs one by one in parallel, as programs for ImageNet do."""
    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(record, spec)
        return tf.io.decode_jpeg(example["image"], channels=3), example["label"]

    records = tf.data.TFRecordDataset(data.paths).shuffle(data.shuffle_buffer).repeat()
    examples = records.map(decode, num_parallel_calls=_AUTOTUNE)
    batches = examples.batch(data.batch_size, drop_remainder=True)
    # Batches of bytes, not floats: a quarter of the bytes to copy.
    return batches.map(classic_widen, num_parallel_calls=_AUTOTUNE).prefetch(_AUTOTUNE)


def classic_cached(data: Data) -> tf.data.Dataset:
    """`.cache()` after parsing, where it helps most."""
    parsed = tf.data.TFRecordDataset(data.paths).batch(1000).map(data.classic_parse, _AUTOTUNE)
    examples = parsed.unbatch().cache().shuffle(data.shuffle_buffer).repeat()
    return examples.batch(data.batch_size, drop_remainder=True).prefetch(_AUTOTUNE)


def tfds_reader(data: Data) -> tf.data.Dataset:
    """tensorflow-datasets, with its decoders."""
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(data.directory)
    examples = builder.as_dataset(split="train", shuffle_files=True)

    def finish(example: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(example["image"], tf.float32) / 255.0, example["label"]

    batches = examples.shuffle(data.shuffle_buffer).repeat().batch(data.batch_size, True)
    return batches.map(finish, num_parallel_calls=_AUTOTUNE).prefetch(_AUTOTUNE)


def nothing_read(data: Data) -> tf.data.Dataset:
    """The same batch repeatedly: the time of the loop itself."""
    records = tf.data.TFRecordDataset(data.paths).take(data.batch_size)
    batch = next(iter(records.batch(data.batch_size).map(data.parse)))
    return tf.data.Dataset.from_tensors(batch).repeat()


Pipeline = Callable[[Data], tf.data.Dataset | Reader]

SMALL: Mapping[str, Pipeline] = {
    "this pipeline": ours,
    "this pipeline, examples cached": ours_cached,
    "classic": classic,
    "classic, tuned": classic_tuned,
    "classic, parsed examples in .cache()": classic_cached,
    "tensorflow-datasets": tfds_reader,
    "nothing read: the loop alone": nothing_read,
}
LARGE = {
    "this pipeline": ours,
    "classic": classic,
    "classic, tuned": classic_tuned,
    "classic, decoded one by one in parallel": classic_by_example,
    "tensorflow-datasets": tfds_reader,
}


class Drain:
    """Reads batches in a graph, as training does, and measures examples a second.

    Each round opens a new feed. A feed that waits for its turn would read ahead, and slow down the
    others.
    """

    def __init__(
        self, source: tf.data.Dataset | Reader, batch_size: int, epoch_batches: int
    ) -> None:
        self._source, self._batch_size = source, batch_size
        feed = self._open()

        @tf.function(input_signature=[feed.signature, tf.TensorSpec([], tf.int64)])
        def take(taken: Any, num_batches: tf.Tensor) -> tf.Tensor:
            total = 0.0
            for index in tf.range(num_batches):
                images, _ = feed.batch(taken, index)
                total += images[0, 0, 0, 0]
            return total

        self._take = take
        # One epoch first: these calls trace, and fill the caches.
        self._timed(feed, 8)
        secs = self._timed(feed, epoch_batches)
        self._num_batches = max(8, int(_ROUND_SECS / secs * epoch_batches))

    def rate(self) -> float:
        """Examples a second of one round."""
        feed = self._open()
        self._timed(feed, max(4, self._num_batches // 8))
        return self._num_batches * self._batch_size / self._timed(feed, self._num_batches)

    def _open(self) -> Feed:
        if isinstance(self._source, Reader):
            return open_feed(self._source, 0, range(self._source.order.lanes))
        return StreamedFeed(self._source)

    def _timed(self, feed: Feed, num_batches: int) -> float:
        started = time.perf_counter()
        self._take(feed.take(num_batches), tf.constant(num_batches, tf.int64)).numpy()
        return time.perf_counter() - started


def bare_rate(data: Data) -> float:
    """Records a second if the same bytes are read in sequence and not parsed."""
    started = time.perf_counter()
    block = bytearray(1 << 20)
    for path in data.paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return data.split.num_examples / (time.perf_counter() - started)


def rates(data: Data, pipelines: Mapping[str, Pipeline]) -> dict[str, list[float]]:
    """Examples a second of each pipeline in each round."""
    turns = {
        name: Drain(make(data), data.batch_size, data.epoch_batches).rate
        for name, make in pipelines.items()
    } | {"bare sequential read": functools.partial(bare_rate, data)}
    measured: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(_ROUNDS.value):
        for name, turn in turns.items():
            measured[name].append(turn())
    return measured


def memory_bytes(data: Data, kind: str, pipeline: str) -> int:
    """The peak resident set of a process that runs only `pipeline`."""
    argv = [sys.executable, "-m", "benchmarks.input", f"--data_dir={data.directory}"]
    argv.append(f"--measure_memory={kind}:{pipeline}")
    child = subprocess.run(argv, check=True, capture_output=True, text=True)
    return int(json.loads(child.stdout.splitlines()[-1]))


def measure_memory(kind: str, pipeline: str, directory: str) -> None:
    """Runs in the child: reads the pipeline, and prints the peak resident set."""
    data, pipelines = (small(directory), SMALL) if kind == "small" else (large(directory), LARGE)
    make = {**pipelines, "nothing": nothing_read}[pipeline]
    drain = Drain(make(data), data.batch_size, data.epoch_batches)
    drain.rate()
    # getrusage would include the memory of the parent before exec.
    (peak,) = [
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    print(int(peak) << 10)


def print_rates(title: str, kind: str, data: Data, pipelines: Mapping[str, Pipeline]) -> None:
    """Prints a table of rates and memory."""
    measured = rates(data, pipelines)
    baseline = statistics.median(measured["classic"])
    without = memory_bytes(data, kind, "nothing")
    print(f"\n{title}: {data.split.num_examples:,} records of {data.split.mean_record_bytes:,} ")
    print(f"bytes, batches of {data.batch_size}\n")
    print("| pipeline | examples/s, median (minimum to maximum) | of classic | memory, MB |")
    print("| --- | --- | --- | --- |")
    for name, of_rounds in measured.items():
        median = statistics.median(of_rounds)
        memory = ""
        if name in pipelines and pipelines[name] is not nothing_read:
            memory = f"{(memory_bytes(data, kind, name) - without) / 1e6:,.0f}"
        print(
            f"| {name} | {median:,.0f} ({min(of_rounds):,.0f} to {max(of_rounds):,.0f}) | "
            f"{median / baseline:.2f} | {memory} |",
            flush=True,
        )


def print_start(directory: Path) -> None:
    """Prints a table of start-up times, with a million tiny records."""
    examples = (b"%08d" % i for i in range(_TINY_RECORDS))
    split = write_shards(examples, str(directory), "tiny", "train", 1, _TINY_RECORDS)
    data = Data(str(directory), batch_size=100, shuffle_buffer=0)
    built, opened = [], []
    for _ in range(_ROUNDS.value):
        (directory / ".train.index.npz").unlink()
        built.append(_secs(lambda: open_split(data.directory, "train")))
        opened.append(_secs(lambda: open_split(data.directory, "train")))

    def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        numbers = tf.strings.to_number(serialized, tf.int64)
        return numbers, numbers

    def first_batch(position: int) -> None:
        order = dataclasses.replace(data.order())  # A new object, without cached epochs.
        reader = Reader(split, order, parse)
        next(iter(DiskReader(reader).batches(position // order.batch_size, range(order.lanes))))

    positions = (0, 10 * _TINY_RECORDS)
    first: dict[int, list[float]] = {position: [] for position in positions}
    for _ in range(1 + _ROUNDS.value):
        for position in positions:
            first[position].append(_secs(lambda position=position: first_batch(position)))  # type: ignore[misc]
    print(f"\nStart: {_TINY_RECORDS:,} records of {split.mean_record_bytes} bytes\n")
    print("| what | seconds, median (minimum to maximum) |\n| --- | --- |")
    rows = {"index built": built, "index opened": opened}
    for position in positions:
        rows[f"first batch from position {position:,}"] = first[position][1:]
    for name, secs in rows.items():
        print(f"| {name} | {statistics.median(secs):.3f} ({min(secs):.3f} to {max(secs):.3f}) |")


def _secs(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def write_jpegs(directory: Path, num_examples: int = 320) -> None:
    """Smooth random images as JPEGs of about 100 KB, in the format of tensorflow-datasets."""
    import tensorflow_datasets as tfds

    height, width = 384, 512
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(height, width, 3), encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
    )

    def examples() -> Iterator[bytes]:
        random = np.random.default_rng(0)
        for i in range(num_examples):
            coarse = random.uniform(0, 255, (height // 4, width // 4, 3))
            pixels = tf.cast(tf.image.resize(coarse, (height, width), "bicubic"), tf.uint8)
            image = tf.io.encode_jpeg(pixels, quality=90).numpy()
            yield features.serialize_example({"image": image, "label": i % 10})

    split = write_shards(examples(), str(directory), "jpegs", "train", 4, num_examples)
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    info = tfds.core.SplitInfo(
        name="train",
        shard_lengths=list(split.shard_lengths),
        num_bytes=sum(shard.num_bytes for shard in split.shards),
        filename_template=tfds.core.ShardedFileTemplate(
            dataset_name="jpegs", template=template, data_dir=str(directory),
            split="train", filetype_suffix="tfrecord",
        ),
    )  # fmt: skip
    tfds.folder_dataset.write_metadata(
        data_dir=str(directory), features=features, split_infos=[info]
    )


def main(argv: Sequence[str]) -> None:
    """Prints the tables."""
    del argv
    # As `python -m trainer` does; all pipelines are faster with it.
    keep_freed_memory()
    gc.freeze()
    if _MEASURE.value:
        kind, _, pipeline = _MEASURE.value.partition(":")
        measure_memory(kind, pipeline, _DATA_DIR.value)
        return
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("tensorflow", "tensorflow-datasets", "numpy", "google-crc32c")
    )
    print(f"{machine()}; {versions}; {_ROUNDS.value} rounds")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = flags.FLAGS.mnist_source
        if not source:
            source = str(directory / "idx")
            write_random_mnist(Path(source), 60_000, 1_000)
        prepare_mnist(source, directory / "small")
        data = small(str(directory / "small"))
        print_rates("Small records", "small", data, SMALL)
        write_jpegs(directory / "large")
        print_rates("Large records", "large", large(str(directory / "large")), LARGE)
        print_start(directory / "tiny")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.input"))
