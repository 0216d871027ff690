"""`python -m benchmarks.image_input`: photographs to random crops, on one core, in turns.

    python -m benchmarks.image_input --peer_python=ENVIRONMENT/bin/python

Prints Markdown. JPEGs of 500 x 375 pixels on average, of different sizes and with the spectrum of
photographs, become shuffled batches of random resized crops, uint8 [32, 224, 224, 3], half of
them mirrored; --times_larger=4 enlarges the photographs. Each pipeline is a process of its own
on the same core; they take turns in each round, and are stopped between their turns. Rates are
those of CPU time: other programs on the machine change them little. A figure is the median of all
rounds, with minimum and maximum. The other Python may have PyTorch with torchvision, grain, or
both; what it lacks is left out.
"""

import contextlib
import functools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks.peers.image_loaders import BATCH, PEERS, SIZE, answer_turns
from benchmarks.table import machine
from data.disk_reader import DiskReader
from data.images import _TRIES, _random_boxes, random_resized_crops
from data.order import Order
from data.reader import Batch, Reader
from data.system.compat.freed_memory import keep_freed_memory
from data.system.flags import parse_flags
from data.tfrecord.split import open_split
from tests.shards import write_shards
from trainer.config import DataConfig

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds to measure.")
_TORCH = flags.DEFINE_string("peer_python", None, "A Python with torchvision, grain or both.")
_EXAMPLES = flags.DEFINE_integer("num_photographs", 400, "JPEGs to write and read.")
_TIMES_LARGER = flags.DEFINE_integer("times_larger", 1, "Enlarges the photographs.")
_PIPELINE = flags.DEFINE_string("pipeline", None, "Internal: the pipeline of this process.")
_DIRECTORY = flags.DEFINE_string("images_dir", None, "Internal: where the images are.")

_SPEC = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}
_AUTOTUNE = tf.data.AUTOTUNE


def photograph(random: np.random.Generator, height: int, width: int) -> Any:
    """Noise at all scales, most of it at the largest, as in photographs: uint8 [h, w, 3]."""
    pixels = tf.zeros([height, width, 3])
    for octave in range(9):
        shape = [max(2, height >> (8 - octave)), max(2, width >> (8 - octave)), 3]
        noise = random.normal(0, 60 / 1.25**octave, shape)
        pixels += tf.image.resize(noise, [height, width], "bicubic")
    return tf.cast(tf.clip_by_value(pixels + 128, 0, 255), tf.uint8)


def write_images(directory: Path, number: int, scale: int = 1) -> int:
    """Writes the same JPEGs as files and as TFRecord; returns their mean size in bytes."""
    random, examples, sizes = np.random.default_rng(0), [], []
    for index in range(number):
        height, width = (scale * int(side) for side in random.integers([300, 400], [450, 600]))
        if index % 4 == 0:
            height, width = width, height
        encoded = tf.io.encode_jpeg(photograph(random, height, width), quality=92).numpy()
        (directory / f"{index:05d}-{index % 10}.jpg").write_bytes(encoded)
        values = {
            "image": tf.train.Feature(bytes_list={"value": [encoded]}),
            "label": tf.train.Feature(int64_list={"value": [index % 10]}),
        }
        features = tf.train.Features(feature=values)
        examples.append(tf.train.Example(features=features).SerializeToString())
        sizes.append(len(encoded))
    write_shards(examples, str(directory / "records"), "photographs", "train", 4, number)
    return round(statistics.mean(sizes))


def ours(directory: Path) -> tf.data.Dataset:
    """This program's pipeline."""

    def parse(serialized: tf.Tensor, seeds: tf.Tensor | None = None) -> Batch:
        example = tf.io.parse_example(serialized, _SPEC)
        if seeds is None:
            seeds = tf.zeros([tf.size(serialized), 2], tf.int32)
        return random_resized_crops(example["image"], seeds, SIZE), example["label"]

    split = open_split(str(directory / "records"), "train")
    window = DataConfig().window_batches
    order = Order(
        split.shard_lengths, split.chunk_examples, BATCH, BATCH, window, seed=0, shuffle=True
    )
    return DiskReader(Reader(split, order, parse)).batches(0, range(BATCH))


def _records(directory: Path) -> tf.data.Dataset:
    paths = [str(path) for path in sorted((directory / "records").glob("*.tfrecord*"))]
    return tf.data.TFRecordDataset(paths).shuffle(256).repeat()


def _usual_crop(image: tf.Tensor) -> tf.Tensor:
    """As in programs for ImageNet: heights are uniform, and areas are 39% on average."""
    begin, sides, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(image),
        tf.zeros([1, 0, 4]),
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([begin[:2], sides[:2]], 0)
    return tf.image.decode_and_crop_jpeg(image, window, channels=3)


def _same_crop(image: tf.Tensor) -> tf.Tensor:
    """Drawn as by this program and by torchvision: areas are uniform, 43% on average."""
    sizes = tf.image.extract_jpeg_shape(image)[tf.newaxis, :2]
    boxes = _random_boxes(sizes, tf.random.uniform([1, 4 * _TRIES]))
    window = tf.concat([boxes.y, boxes.x, boxes.height, boxes.width], 0)
    return tf.image.decode_and_crop_jpeg(image, window, channels=3)


def by_hand(crop: Callable[[tf.Tensor], tf.Tensor], directory: Path) -> tf.data.Dataset:
    """tf.data as programs usually have it: only the crop is decoded."""

    def load(record: tf.Tensor) -> Batch:
        example = tf.io.parse_single_example(record, _SPEC)
        pixels = tf.image.resize(crop(example["image"]), [SIZE, SIZE])
        pixels = tf.image.random_flip_left_right(pixels)
        return tf.cast(pixels, tf.uint8), example["label"]

    examples = _records(directory).map(load, num_parallel_calls=_AUTOTUNE)
    return examples.batch(BATCH, drop_remainder=True).prefetch(_AUTOTUNE)


def decoder_alone(directory: Path) -> tf.data.Dataset:
    """Decodes crops that are drawn as by this program, and does nothing else with them."""

    def load(record: tf.Tensor) -> Batch:
        example = tf.io.parse_single_example(record, _SPEC)
        return _same_crop(example["image"])[:1, :1], example["label"]

    examples = _records(directory).map(load, num_parallel_calls=_AUTOTUNE)
    return examples.batch(BATCH, drop_remainder=True).prefetch(_AUTOTUNE)


PIPELINES: dict[str, Callable[[Path], tf.data.Dataset]] = {
    "this program": ours,
    "tf.data by hand, crops of equal area": functools.partial(by_hand, _same_crop),
    "tf.data by hand, smaller crops": functools.partial(by_hand, _usual_crop),
    "decode_and_crop_jpeg alone": decoder_alone,
}


class Loader:
    """A process with one pipeline, on one core, which reads when it is asked."""

    def __init__(self, command: Sequence[str], name: str, directory: str) -> None:
        argv = [*command, f"--pipeline={name}", f"--images_dir={directory}"]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def rate(self) -> float | None:
        """Images a second of CPU time of one turn; None if the pipeline cannot run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.send_signal(signal.SIGCONT)
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            return float(self._process.stdout.readline())
        except (OSError, ValueError):
            return None
        finally:
            self._process.send_signal(signal.SIGSTOP)  # Or it would read ahead.

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def _loaders(directory: str) -> Iterator[tuple[str, Loader]]:
    own = [sys.executable, "-m", "benchmarks.image_input"]
    for name in PIPELINES:
        yield name, Loader(own, name, directory)
    if _TORCH.value:
        for name in PEERS:
            command = [_TORCH.value, "-m", "benchmarks.peers.image_loaders"]
            yield name, Loader(command, name, directory)


def main(argv: Sequence[str]) -> None:
    """Prints the table, or runs one pipeline."""
    del argv
    if _PIPELINE.value:
        keep_freed_memory()
        batches = iter(PIPELINES[_PIPELINE.value](Path(_DIRECTORY.value)))
        answer_turns(lambda: next(batches))
        return
    with tempfile.TemporaryDirectory() as directory:
        mean_bytes = write_images(Path(directory), _EXAMPLES.value, _TIMES_LARGER.value)
        print(f"{machine()}; {_ROUNDS.value} rounds; load {os.getloadavg()[0]:.1f} of others\n")
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # Of the children, too.
        loaders = dict(_loaders(directory))
        rates: dict[str, list[float]] = {}
        for _ in range(_ROUNDS.value):
            for name, loader in loaders.items():
                rate = loader.rate()
                if rate:
                    rates.setdefault(name, []).append(rate)
        for loader in loaders.values():
            loader.close()
    base = statistics.median(rates["this program"])
    print(f"{_EXAMPLES.value} JPEGs of {mean_bytes:,} bytes, one core\n")
    print("| pipeline | images/s of CPU time, median (minimum to maximum) | of this program's |")
    print("| --- | --- | --- |")
    for name, found in rates.items():
        median = statistics.median(found)
        print(f"| {name} | {median:,.0f} ({min(found):,.0f} to {max(found):,.0f}) | ", end="")
        print(f"{median / base:.2f} |")
    if left_out := [name for name in loaders if name not in rates]:
        print(f"\nNot installed: {', '.join(left_out)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.image_input"))
