"""Augmentation is a function of seed and position: the same on any topology, from anywhere."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.reader import Reader
from data.tickets import DiskTickets
from tests.unit.test_reader import NUM_LANES, make_reader, write_split

LANES = range(NUM_LANES)


def augment(inputs: Any, labels: Any, seeds: Any) -> tuple[Any, Any]:
    return inputs + tf.cast(seeds[:, :1], tf.float32), labels


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return make_reader(write_split(tmp_path_factory.mktemp("augment")))


@pytest.fixture
def reader(plain: Reader) -> Reader:
    return dataclasses.replace(plain, augment=augment)


def batches_of(reader: Reader, first_batch: int, lanes: range, num_batches: int = 4) -> Any:
    return DiskReader(reader).batches(first_batch, lanes, num_batches).as_numpy_iterator()


# Batch 60 begins the second epoch.
@pytest.mark.parametrize(
    ("first_batch", "lanes"),
    [(0, LANES), (7, LANES), (58, LANES), (20, range(3)), (58, range(3, 7))],
)
def test_examples_are_augmented_by_the_seeds_of_the_order_from_anywhere_on_any_replica(
    first_batch: int, lanes: range, plain: Reader, reader: Reader
) -> None:
    seeds = reader.order.seeds(first_batch, 4, lanes)
    augmented, before = (batches_of(each, first_batch, lanes) for each in (reader, plain))
    for ours, theirs, of_batch in zip(augmented, before, seeds, strict=True):
        assert np.array_equal(ours[0], theirs[0] + of_batch[:, :1].astype(np.float32))
        assert np.array_equal(ours[1], theirs[1])


def test_lists_that_an_augmentation_returns_are_nests(plain: Reader) -> None:
    def augment_pair(inputs: Any, labels: Any, seeds: Any) -> Any:
        return [[inputs + 1, {"a": [inputs + 2]}], labels]

    augmented = dataclasses.replace(plain, augment=augment_pair)
    both = (batches_of(each, 7, LANES) for each in (augmented, plain))
    for ((one, two), _), (inputs, _) in zip(*both, strict=True):
        assert np.array_equal(one, inputs + 1)
        assert np.array_equal(two["a"][0], inputs + 2)


def test_tickets_and_shares_of_them_are_augmented_as_batches_are(reader: Reader) -> None:
    batches = np.stack([inputs for inputs, _ in batches_of(reader, 7, LANES)])
    source = DiskTickets(reader)
    parse_ticket = tf.function(source.parse_ticket, input_signature=[source.ticket_spec()])
    assert np.array_equal(parse_ticket(source.ticket(7, 4))[0], batches)
    ticket = source.ticket(7, 4, range(4, 8))
    records = source.read_ticket({name: tf.constant(value) for name, value in ticket.items()})
    inputs, _ = reader.parse_records(records[2], {"seeds": tf.constant(ticket["seeds"][2])})
    assert np.array_equal(inputs, batches[2, 20:40])


def test_seeds_travel_with_batches_and_tickets_that_are_trained_on(
    plain: Reader, reader: Reader
) -> None:
    lanes = range(3, 9)
    expected = reader.order.seeds(7, 4, lanes)
    for changed in (plain, reader):
        giving = dataclasses.replace(changed, gives_seeds=True)
        batches = list(batches_of(giving, 7, lanes))
        assert np.array_equal([seeds for _, _, seeds in batches], expected)
        for given, without in zip(batches, batches_of(changed, 7, lanes), strict=True):
            assert np.array_equal(given[0], without[0])
        source = DiskTickets(giving)
        parse = tf.function(source.parse_ticket, input_signature=[source.ticket_spec(lanes=lanes)])
        assert np.array_equal(parse(source.ticket(7, 4, lanes))[2], expected)
        assert len(next(iter(DiskReader(giving).evaluation_batches(lanes)))) == 3, (
            "weights, and no seeds"
        )
        specs = [DiskTickets(r, weights=True).ticket_spec() for r in (giving, plain)]
        assert specs[0] == specs[1]


def test_evaluation_does_not_augment(plain: Reader, reader: Reader) -> None:
    evaluations = [DiskReader(each).evaluation_batches(LANES) for each in (reader, plain)]
    for ours, theirs in zip(*evaluations, strict=True):
        assert np.array_equal(ours[0], theirs[0])
    specs = [DiskTickets(each, weights=True).ticket_spec().keys() for each in (reader, plain)]
    assert specs[0] == specs[1] == specs[0] - {"seeds"}
