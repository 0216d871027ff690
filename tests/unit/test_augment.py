"""Augmentation is a function of seed and position: the same on any topology, from anywhere."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.order import Order, replica_lanes
from data.prepare.writing import write_shards
from data.reader import Reader
from data.tickets import DiskTickets
from tests.cluster.configs.augmented import augment

NUM_EXAMPLES, BATCH, LANES = 300, 12, 12
SIDE = 8


def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    pixels = tf.reshape(tf.io.decode_raw(serialized, tf.uint8), [-1, SIDE, SIDE, 1])
    return tf.cast(pixels, tf.float32), tf.cast(pixels[:, 0, 0, 0], tf.int64)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    random = np.random.default_rng(0)
    images = random.integers(1, 256, [NUM_EXAMPLES, SIDE * SIDE], np.uint8)
    directory = str(tmp_path_factory.mktemp("augment"))
    examples = [image.tobytes() for image in images]
    split = write_shards(examples, directory, "toy", "train", 2, NUM_EXAMPLES)
    order = Order(split.shard_lengths, split.chunk_examples, BATCH, LANES, 4, seed=5, shuffle=True)
    return Reader(split, order, parse, num_threads=2)


@pytest.fixture
def reader(plain: Reader) -> Reader:
    return dataclasses.replace(plain, augment=augment)


def images(reader: Reader, first_batch: int, num_batches: int, lanes: range) -> np.ndarray:
    dataset = DiskReader(reader).batches(first_batch, lanes).take(num_batches)
    return np.stack([inputs for inputs, _ in dataset.as_numpy_iterator()])


@pytest.mark.slow
def test_images_are_mirrored_and_shifted_and_labels_stay(plain: Reader, reader: Reader) -> None:
    all_lanes = range(LANES)
    before, after = images(plain, 0, 25, all_lanes), images(reader, 0, 25, all_lanes)
    changed = np.any(before != after, axis=(2, 3, 4))
    assert 0.8 < np.mean(changed) < 1, "one in 18 is drawn to stay as it is"
    mirrored = np.all(before[..., ::-1, :] == after, axis=(2, 3, 4))
    assert 0 < np.mean(mirrored) < 0.2
    labels = [y for _, y in DiskReader(reader).batches(0, all_lanes, 25).as_numpy_iterator()]
    assert np.array_equal(
        labels, [y for _, y in DiskReader(plain).batches(0, all_lanes, 25).as_numpy_iterator()]
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_augment_their_slices_as_one_does(reader: Reader, num_replicas: int) -> None:
    lanes = [replica_lanes(LANES, replica, num_replicas) for replica in range(num_replicas)]
    slices = [images(reader, 20, 10, of_replica) for of_replica in lanes]
    assert np.array_equal(np.concatenate(slices, 1), images(reader, 20, 10, range(LANES)))


def test_tickets_and_shares_of_them_are_augmented_as_batches_are(reader: Reader) -> None:
    batches = images(reader, 7, 4, range(LANES))
    source = DiskTickets(reader)
    parse_ticket = tf.function(source.parse_ticket, input_signature=[source.ticket_spec()])
    assert np.array_equal(parse_ticket(source.ticket(7, 4))[0], batches)
    lanes = range(4, 8)
    ticket = source.ticket(7, 4, lanes)
    records = source.read_ticket({name: tf.constant(value) for name, value in ticket.items()})
    inputs, _ = reader.parse_records(records[2], {"seeds": tf.constant(ticket["seeds"][2])})
    assert np.array_equal(inputs, batches[2, 4:8])


def test_starting_at_a_batch_augments_it_as_reading_up_to_it_does(reader: Reader) -> None:
    all_lanes = range(LANES)
    assert np.array_equal(images(reader, 30, 5, all_lanes), images(reader, 0, 35, all_lanes)[30:])


def test_an_example_is_augmented_in_another_way_in_another_epoch(reader: Reader) -> None:
    epoch = NUM_EXAMPLES // BATCH
    records = reader.order.records(0, 2 * epoch).reshape(-1)
    drawn = images(reader, 0, 2 * epoch, range(LANES)).reshape(-1, SIDE, SIDE)
    by_record = [drawn[np.flatnonzero(records == record)] for record in range(NUM_EXAMPLES)]
    assert all(len(both) == 2 for both in by_record)
    same = np.mean([np.array_equal(*both) for both in by_record])
    assert same < 0.15, "one in 18 by chance"


def test_seeds_travel_with_batches_and_tickets_that_are_trained_on(
    plain: Reader, reader: Reader
) -> None:
    lanes = range(3, 9)
    expected = reader.order.seeds(7, 4, lanes)
    for changed in (plain, reader):
        giving = dataclasses.replace(changed, gives_seeds=True)
        batches = list(DiskReader(giving).batches(7, lanes).take(4).as_numpy_iterator())
        without = DiskReader(changed).batches(7, lanes).take(4).as_numpy_iterator()
        assert np.array_equal([seeds for _, _, seeds in batches], expected)
        assert all(np.array_equal(b[0], w[0]) for b, w in zip(batches, without, strict=True))
        source = DiskTickets(giving)
        parse = tf.function(source.parse_ticket, input_signature=[source.ticket_spec(lanes=lanes)])
        assert np.array_equal(parse(source.ticket(7, 4, lanes))[2], expected)
        assert len(next(iter(DiskReader(giving).evaluation_batches(lanes)))) == 3, (
            "weights, and no seeds"
        )
        specs = [DiskTickets(r, weights=True).ticket_spec() for r in (giving, plain)]
        assert specs[0] == specs[1]


def test_evaluation_does_not_augment(plain: Reader, reader: Reader) -> None:
    lanes = range(LANES)
    for ours, theirs in zip(
        DiskReader(reader).evaluation_batches(lanes),
        DiskReader(plain).evaluation_batches(lanes),
        strict=True,
    ):
        assert np.array_equal(ours[0], theirs[0])
    spec = DiskTickets(reader, weights=True).ticket_spec()
    assert (
        spec.keys()
        == DiskTickets(plain, weights=True).ticket_spec().keys()
        == spec.keys() - {"seeds"}
    )
