"""Images are decoded at the size that is needed; crops are functions of image and seed alone."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.images import _random_boxes, random_resized_crops, resized
from data.order import Order, replica_lanes
from data.reader import Reader
from data.system.files import DataError
from data.tickets import DiskTickets
from tests.shards import write_shards
from tests.unit.benchmark_modules import imported

NUM_EXAMPLES, BATCH, LANES, SIZE = 60, 6, 6, 16
SIDES = [(75, 100), (100, 75), (40, 40), (300, 200), (9, 200)]


def pixels_of(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth image: a gradient to the right in red, down in green, and noise in blue."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    noise = np.random.default_rng(seed).integers(0, 256)
    return np.stack([x, y, np.full_like(x, noise)], axis=2).astype(np.uint8)


def jpeg(pixels: np.ndarray) -> bytes:
    return bytes(tf.io.encode_jpeg(pixels, quality=98, chroma_downsampling=False).numpy())


def png(pixels: np.ndarray) -> bytes:
    return bytes(tf.io.encode_png(pixels).numpy())


def seeds(number: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 2**31, [number, 2], np.int32)


def drawn_boxes(sizes: np.ndarray) -> list[np.ndarray]:
    drawn = tf.random.stateless_uniform([len(sizes), 40], [1, 2])
    return [part.numpy() for part in _random_boxes(tf.constant(sizes, tf.int32), drawn)]


def test_random_boxes_are_inside_and_have_the_usual_areas_and_aspects() -> None:
    sizes = np.tile([[375, 500]], [4000, 1])
    y, x, height, width = drawn_boxes(sizes)
    assert ((y >= 0) & (x >= 0) & (y + height <= 375) & (x + width <= 500)).all()
    areas, aspects = height * width / (375 * 500), width / height
    assert 0.079 < areas.min() < 0.1
    assert 0.9 < areas.max() <= 1
    assert 0.4 < areas.mean() < 0.54, "less than the mean of 8% and 100%: large ones seldom fit"
    assert 0.745 < aspects.min() < 0.76
    assert 1.32 < aspects.max() < 1.345
    assert abs(np.log(aspects).mean()) < 0.05
    assert len({*zip(y.tolist(), x.tolist(), strict=True)}) > 3500


def test_image_into_which_no_box_fits_is_cut_to_the_nearest_aspect() -> None:
    y, x, height, width = drawn_boxes(np.array([[9, 2000], [2000, 9], [1, 1]]))
    found = list(zip(y, x, height, width, strict=True))
    assert found == [(0, 994, 9, 12), (994, 0, 12, 9), (0, 0, 1, 1)]


@pytest.mark.parametrize("encode", [jpeg, png])
def test_crops_are_parts_of_the_image_and_half_of_them_are_mirrored(encode: object) -> None:
    encoded = [encode(pixels_of(150, 200))] * 100  # type: ignore[operator]
    crops = random_resized_crops(tf.constant(encoded), tf.constant(seeds(100)), SIZE).numpy()
    assert crops.shape == (100, SIZE, SIZE, 3)
    assert crops.dtype == np.uint8
    red = crops[..., 0].mean(axis=1).astype(int)
    is_mirrored = red[:, 0] > red[:, -1]
    assert 35 < is_mirrored.sum() < 65
    red[is_mirrored] = red[is_mirrored, ::-1]
    assert (np.diff(red, axis=1) >= -1).all()
    assert (np.diff(crops[..., 1].mean(axis=2), axis=1) >= -1).all(), "never upside down"
    spans = red[:, -1] - red[:, 0]
    assert spans.min() < 90
    assert spans.max() > 200


def test_jpeg_and_png_give_the_same_image_at_each_scale() -> None:
    images = [pixels_of(height, width) for height, width in [*SIDES, (900, 800)]]

    def cropped(encoded: tf.Tensor, size: int) -> tf.Tensor:
        return random_resized_crops(encoded, tf.constant(seeds(len(images))), size)

    for size, read in itertools.product((8, SIZE, 50), (resized, cropped)):
        found = [read(tf.constant([e(i) for i in images]), size) for e in (jpeg, png)]
        ours, theirs = (np.asarray(each, np.int32) for each in found)
        assert np.abs(ours - theirs).mean() <= 0.3 * 255 / size, "less than half a pixel"


def test_evaluation_takes_the_centre() -> None:
    pixels = np.zeros([80, 120, 3], np.uint8)
    pixels[5:75, 25:95] = 200  # Seven eighths of 80.
    assert (resized(tf.constant([png(pixels)]), SIZE).numpy() == 200).all()
    pixels[4, :] = pixels[:, 95] = 0
    assert resized(tf.constant([png(pixels)]), 70).numpy().min() == 200


def test_grey_images_have_three_channels_and_a_damaged_one_is_an_error() -> None:
    grey = tf.io.encode_jpeg(pixels_of(40, 40)[..., :1]).numpy()
    assert resized(tf.constant([grey]), SIZE).shape == (1, SIZE, SIZE, 3)
    assert resized(tf.constant([], tf.string), SIZE).shape == (0, SIZE, SIZE, 3)
    for wrong in (b"", b"text", grey[:20], jpeg(pixels_of(40, 40))[:150]):
        with pytest.raises(tf.errors.InvalidArgumentError):
            resized(tf.constant([wrong]), SIZE)


# The parts of a pipeline.


def parse(serialized: tf.Tensor, seeds: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    labels = tf.cast(tf.strings.length(serialized), tf.int64)
    if seeds is None:
        return resized(serialized, SIZE), labels
    return random_resized_crops(serialized, seeds, SIZE), labels


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    directory = str(tmp_path_factory.mktemp("images"))
    sides = itertools.islice(itertools.cycle(SIDES), NUM_EXAMPLES)
    images = [pixels_of(*side, seed=i) for i, side in enumerate(sides)]
    examples = [(jpeg if i % 4 else png)(image) for i, image in enumerate(images)]
    split = write_shards(examples, directory, "toy", "train", 2, NUM_EXAMPLES)
    order = Order(split.shard_lengths, split.chunk_examples, BATCH, LANES, 4, seed=5, shuffle=True)
    return Reader(split, order, parse, num_threads=1)


def images(reader: Reader, first_batch: int, num_batches: int, lanes: range) -> np.ndarray:
    dataset = DiskReader(reader).batches(first_batch, lanes).take(num_batches)
    return np.stack([inputs for inputs, _ in dataset.as_numpy_iterator()])


def test_equal_bits_for_any_number_of_threads_and_replicas_and_in_tickets(reader: Reader) -> None:
    batches = images(reader, 3, 8, range(LANES))
    threads = dataclasses.replace(reader, num_threads=4)
    assert np.array_equal(images(threads, 0, 11, range(LANES))[3:], batches)
    lanes = [replica_lanes(LANES, replica, 3) for replica in range(3)]
    slices = [images(reader, 3, 8, of_replica) for of_replica in lanes]
    assert np.array_equal(np.concatenate(slices, 1), batches)
    source = DiskTickets(reader)
    parse_ticket = tf.function(source.parse_ticket, input_signature=[source.ticket_spec()])
    assert np.array_equal(parse_ticket(source.ticket(3, 8))[0], batches)
    narrow = dataclasses.replace(reader, gives_seeds=True)
    read = DiskReader(narrow.narrow).batches(3, range(LANES), 8)
    for batch, whole in zip(read, batches, strict=True):
        assert np.array_equal(narrow.finished(batch)[0], whole)


def test_crops_differ_between_epochs_and_evaluation_has_none(reader: Reader) -> None:
    epoch = NUM_EXAMPLES // BATCH
    records = reader.order.records(0, 2 * epoch).reshape(-1)
    drawn = images(reader, 0, 2 * epoch, range(LANES)).reshape(-1, SIZE, SIZE, 3)
    by_record = [drawn[np.flatnonzero(records == record)] for record in range(NUM_EXAMPLES)]
    same = np.mean([np.array_equal(*both) for both in by_record])
    assert same < 0.2, "half of one in five: a very wide image has one crop"
    plain = dataclasses.replace(reader, parse=lambda serialized: parse(serialized))
    evaluations = [DiskReader(r).evaluation_batches(range(LANES)) for r in (reader, plain)]
    for ours, theirs in zip(*evaluations, strict=True):
        assert np.array_equal(ours[0], theirs[0])
    assert "seeds" not in DiskTickets(reader, weights=True).ticket_spec()


def test_examples_that_change_in_each_epoch_are_not_cached(reader: Reader) -> None:
    with pytest.raises(DataError, match="cache_bytes out; or let parse take `serialized` alone"):
        dataclasses.replace(reader, cache_bytes=1 << 30)


# The pipelines that `benchmarks.image_input` compares give the same kind of batches.


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("photographs")
    imported("benchmarks.image_input").write_images(directory, 40)
    return directory


@pytest.mark.parametrize(
    "name",
    ["this program", "tf.data by hand, crops of equal area", "tf.data by hand, smaller crops"],
)
def test_pipelines_give_shuffled_crops(photographs: Path, name: str) -> None:
    batches = iter(imported("benchmarks.image_input").PIPELINES[name](photographs))
    (images, labels), (others, _) = next(batches), next(batches)
    assert images.shape == others.shape == (32, 224, 224, 3)
    assert images.dtype == tf.uint8
    assert labels.shape == (32,)
    assert len(set(labels.numpy().tolist())) > 3
    assert not np.array_equal(images, others)
