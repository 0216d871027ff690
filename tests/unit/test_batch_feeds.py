"""Feeds give a loop in a graph the batches of the order, from memory and from disk."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data import batch_feeds as feeds
from data import order
from data import reader as pipeline
from data.disk_reader import DiskReader
from data.tfrecord import split as records
from tests.unit.test_augment import augment
from tests.unit.test_reader import (
    NUM_EXAMPLES,
    NUM_LANES,
    copy_split,
    copy_to_ram,
    make_reader,
    write_split,
)

CACHE_BYTES = NUM_EXAMPLES * 12  # An example is a float32 and an int64.
CALLS = (1, 2, 40, 7, 20)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> records.Split:
    return write_split(tmp_path_factory.mktemp("split"))


@pytest.fixture(params=[0, CACHE_BYTES], ids=["read", "cached"])
def cache_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class Fed:
    """What a graph is given, call after call."""

    def __init__(self, reader: pipeline.Reader, first_batch: int, lanes: range) -> None:
        self.feed = feeds.open_feed(reader, first_batch, lanes)
        spec = DiskReader(reader).batches(first_batch, lanes).element_spec

        @tf.function(input_signature=[self.feed.signature, tf.TensorSpec([], tf.int64)])
        def run(taken: Any, num_batches: Any) -> Any:
            return tf.map_fn(
                lambda index: self.feed.finished(self.feed.batch(taken, index)),
                tf.range(num_batches),
                fn_output_signature=spec,
                parallel_iterations=1,
            )

        self._run = run

    def take(self, calls: Sequence[int]) -> list[np.ndarray]:
        """Inputs [sum(calls), n, ...], labels, and what follows."""
        parts = [self._run(self.feed.take(n), tf.constant(n, tf.int64)) for n in calls]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def take_parts(self, parts: Sequence[pipeline.Part]) -> list[np.ndarray]:
        """As `take`, of one call."""
        num_batches = sum(count or 0 for _, count, _ in parts)
        return list(self._run(self.feed.take_parts(parts), tf.constant(num_batches, tf.int64)))


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_those_of_the_order_from_anywhere(
    split: records.Split, cache_bytes: int, shuffle: bool
) -> None:
    reader = dataclasses.replace(make_reader(split, shuffle=shuffle), cache_bytes=cache_bytes)
    assert reader.caches_examples == (cache_bytes > 0)
    for replica, num_replicas, first_batch in ((0, 1, 0), (0, 3, 59), (2, 3, 1234)):
        lanes = order.replica_lanes(NUM_LANES, replica, num_replicas)
        inputs, labels = Fed(reader, first_batch, lanes).take(CALLS)
        assert np.array_equal(labels, reader.order.records(first_batch, sum(CALLS), lanes))
        assert np.array_equal(inputs[..., 0] * 2, labels)


@pytest.mark.parametrize("is_remote", [False, True])
def test_parts_have_other_lanes_and_may_leave_batches_out(
    split: records.Split, cache_bytes: int, is_remote: bool
) -> None:
    if is_remote:
        split = records.open_split(copy_to_ram(split, f"parts{cache_bytes}"), "train")
    reader = dataclasses.replace(make_reader(split), cache_bytes=cache_bytes)
    own, other, third = range(2), range(2, 4), range(4, 6)
    fed = Fed(reader, 58, own)
    for parts in (
        [(58, 3, own)],  # Continues.
        [(61, 4, own)],
        [(65, 2, own), (66, 1, other), (65, 2, third)],
        [(67, 5, own)],
        [(80, 1, own), (81, 70, other)],
    ):
        labels = fed.take_parts([pipeline.Part(*part) for part in parts])[1]
        expected = [reader.order.records(*part) for part in parts]
        assert np.array_equal(labels, np.concatenate(expected))


def test_seeds_and_augmented_examples_are_the_same_from_memory(split: records.Split) -> None:
    reader = dataclasses.replace(make_reader(split), augment=augment, gives_seeds=True)
    caching = dataclasses.replace(reader, cache_bytes=CACHE_BYTES)
    read, cached = [Fed(r, 58, range(3, 7)).take(CALLS) for r in (reader, caching)]
    assert len(cached) == 3, "inputs, labels, seeds"
    assert all(np.array_equal(*both) for both in zip(read, cached, strict=True))
    assert np.array_equal(cached[2], reader.order.seeds(58, sum(CALLS), range(3, 7)))


def test_weights_that_parse_returns_are_cached_too(split: records.Split) -> None:
    def parse_weighted(serialized: Any) -> Any:
        inputs, labels = make_reader(split).parse(serialized)
        return inputs, labels, inputs[:, 0] * 3

    reader = dataclasses.replace(make_reader(split), parse=parse_weighted, augment=augment)
    caching = dataclasses.replace(reader, cache_bytes=CACHE_BYTES + 4 * NUM_EXAMPLES)
    assert caching.caches_examples
    read, cached = [Fed(r, 58, range(3, 7)).take(CALLS) for r in (reader, caching)]
    assert len(cached) == 3, "inputs, labels, weights"
    assert all(np.array_equal(*both) for both in zip(read, cached, strict=True))


def test_examples_are_cached_for_all_feeds_only_if_they_fit(
    split: records.Split, tmp_path: Path
) -> None:
    for cache_bytes, is_cached in ((CACHE_BYTES, True), (CACHE_BYTES - 1, False)):
        copied = copy_split(split, tmp_path / str(cache_bytes))
        reader = dataclasses.replace(make_reader(copied), cache_bytes=cache_bytes)
        fed = Fed(reader, 0, range(NUM_LANES))
        fed.take([1])
        for shard in copied.shards:
            Path(shard.path).unlink()
        if is_cached:
            assert len(fed.take([200])[0]) == 200
            other = feeds.open_feed(reader, 7, range(NUM_LANES))
            _, labels = other.batch(other.take(1), tf.constant(0, tf.int64))
            assert np.array_equal(labels, reader.order.records(7, 1)[0])
        else:
            with pytest.raises(tf.errors.NotFoundError):
                fed.take([200])
