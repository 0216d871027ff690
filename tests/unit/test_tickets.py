"""Tickets of cached examples give the batches that tickets of files give."""

import concurrent.futures
import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data import batch_feeds as feeds
from data import reader as pipeline
from data import tickets
from data.disk_reader import DiskReader
from data.features import image_raw_parse
from data.order import replica_lanes
from data.tfrecord import split as records
from data.tickets import CachedTickets
from tests.unit.test_fixed_layout import images_of, reader_of
from tests.unit.test_reader import (
    NUM_EXAMPLES,
    NUM_LANES,
    copy_split,
    copy_to_ram,
    make_reader,
    parse,
    write_split,
)
from tests.unit.test_split import flip

CACHE_BYTES = NUM_EXAMPLES * 12  # An example is a float32 and an int64.


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> records.Split:
    return write_split(tmp_path_factory.mktemp("split"))


def make_caching_reader(split: records.Split, **changes: Any) -> pipeline.Reader:
    return dataclasses.replace(make_reader(split), cache_bytes=CACHE_BYTES, **changes)


class Closure:
    """What runs in a worker; its graph is made before there is a ticket."""

    def __init__(self, reader: pipeline.Reader, **spec: Any) -> None:
        self.source = tickets.ticket_source(reader)
        self._parse = tf.function(
            self.source.parse_ticket, input_signature=[self.source.ticket_spec(**spec)]
        )

    def __call__(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Any:
        outputs = self._parse(self.source.ticket(first_batch, num_batches, lanes))
        return [output.numpy() for output in outputs]


def remove(split: records.Split) -> None:
    for shard in split.shards:
        Path(shard.path).unlink()


@pytest.mark.parametrize("lanes", [None, range(2, 5)])
def test_batches_are_those_of_the_order_and_nothing_is_read_again(
    split: records.Split, tmp_path: Path, lanes: range | None
) -> None:
    copied = copy_split(split, tmp_path / "copied")
    reader = make_caching_reader(copied)
    closure = Closure(reader, lanes=lanes)
    assert isinstance(closure.source, CachedTickets)
    for first_batch, num_batches in ((0, 1), (59, 4), (1234, 16)):
        inputs, labels = closure(first_batch, num_batches, lanes)
        assert np.array_equal(labels, reader.order.records(first_batch, num_batches, lanes))
        assert np.array_equal(inputs[..., 0] * 2, labels)
        if first_batch == 0:
            remove(copied)


def test_ticket_of_cached_examples_may_reach_over_windows(split: records.Split) -> None:
    reader = make_caching_reader(split)
    source = tickets.ticket_source(reader)
    _, in_window = next(tickets.DiskTickets(reader).ticket_runs(0))
    assert in_window < 100
    (first_batch, count), *others = source.ticket_runs(3)
    assert first_batch == 3
    assert count > 10**9
    assert not others
    _, labels = Closure(reader)(0, 3 * in_window)
    assert np.array_equal(labels, reader.order.records(0, 3 * in_window))


def test_bytes_are_cached_as_bytes_and_come_as_floats(tmp_path: Path) -> None:
    read = reader_of(tmp_path, images_of(200), image_raw_parse((2, 3, 2)))
    num_bytes = 200 * (12 + 8)  # 12 pixels and a label, where the floats would take 48.
    assert not dataclasses.replace(read, cache_bytes=num_bytes - 1).caches_examples
    keeps = dataclasses.replace(read, cache_bytes=num_bytes)
    assert [values.dtype for values in feeds.cached_examples(keeps)] == [tf.uint8, tf.int64]

    def augment(inputs: Any, labels: Any, seeds: Any) -> tuple[Any, Any]:
        assert inputs.dtype == tf.float32
        drawn = tf.cast(seeds[:, :1, None, None] % 7, tf.float32)
        return inputs * 0.3 + drawn, labels

    for change in (None, augment):
        one, two = (dataclasses.replace(r, augment=change) for r in (read, keeps))
        feed = feeds.open_feed(two, 7, range(5))
        assert isinstance(feed, feeds.CachedFeed)
        signature = [feed.signature, tf.TensorSpec([], tf.int64)]
        batch_of = tf.function(
            lambda taken, index, fed=feed: fed.finished(fed.batch(taken, index)),
            input_signature=signature,
            autograph=False,
        )
        taken, ticket = feed.take(15), Closure(two)(7, 15)
        for index, batch in enumerate(DiskReader(one).batches(7, range(5), 15)):
            fed = batch_of(taken, tf.constant(index, tf.int64))
            for wanted, *found in zip(batch, fed, ticket, strict=True):
                of_ticket = found[1][index]
                assert found[0].dtype == of_ticket.dtype == wanted.dtype
                assert found[0].numpy().tobytes() == wanted.numpy().tobytes()
                assert of_ticket.tobytes() == wanted.numpy().tobytes()


def test_number_of_batches_may_be_part_of_the_graph(split: records.Split) -> None:
    closure = Closure(make_caching_reader(split), num_batches=3, lanes=range(4))
    inputs, labels = closure._parse.get_concrete_function().structured_outputs
    assert inputs.shape == [3, 20, 1]
    assert labels.shape == [3, 20]


def test_what_another_run_has_cached_is_not_used(split: records.Split, tmp_path: Path) -> None:
    first = Closure(make_caching_reader(copy_split(split, tmp_path / "first")))
    first(0, 1)
    backwards = tuple(reversed(copy_split(split, tmp_path / "second").shards))
    second = Closure(make_caching_reader(dataclasses.replace(split, shards=backwards)))
    assert isinstance(first.source, CachedTickets)
    assert isinstance(second.source, CachedTickets)
    assert first.source._key == second.source._key
    _, labels = second(0, 1)
    ends = np.cumsum([shard.num_records for shard in split.shards])
    in_first = np.concatenate(np.split(np.arange(NUM_EXAMPLES), ends[:-1])[::-1])
    assert np.array_equal(labels, in_first[second.source.order.records(0, 1)])


def test_examples_that_do_not_fit_are_read(split: records.Split) -> None:
    reader = dataclasses.replace(make_reader(split), cache_bytes=CACHE_BYTES - 1)
    assert isinstance(tickets.ticket_source(reader), tickets.DiskTickets)


def test_files_of_another_file_system_are_cached_too(split: records.Split) -> None:
    remote = records.open_split(copy_to_ram(split, "cached"), "train")
    _, labels = Closure(make_caching_reader(remote))(3, 9)
    assert np.array_equal(labels, make_reader(remote).order.records(3, 9))


def test_a_file_that_has_become_shorter_is_an_error(split: records.Split, tmp_path: Path) -> None:
    copied = copy_split(split, tmp_path)
    shard = copied.shards[1]
    path = Path(shard.path)
    path.write_bytes(path.read_bytes()[: int(shard.offsets[-1])])
    closure = Closure(make_caching_reader(copied))
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="shorter"):
            closure(0, 1)


def test_a_damaged_record_is_an_error(split: records.Split, tmp_path: Path) -> None:
    copied = copy_split(split, tmp_path)
    flip(copied.shards[2].path, 400)
    with pytest.raises(tf.errors.DataLossError):
        Closure(make_caching_reader(copied))(0, 1)


def test_two_closures_at_once_both_find_all(split: records.Split) -> None:
    """A worker that was considered lost, and is not, may have two."""

    begun, may_go_on, calls = threading.Event(), threading.Event(), []

    def wait() -> None:
        calls.append(1)
        begun.set()
        assert may_go_on.wait(20)

    def slowly(serialized: tf.Tensor) -> Any:
        waited = tf.py_function(wait, [], [])  # noqa: TID251  # In this process.
        with tf.control_dependencies([waited]):
            return parse(tf.identity(serialized))

    reader = make_caching_reader(split, parse=slowly)
    closure = Closure(reader)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(closure, 0, 40)
        assert begun.wait(20)
        second = pool.submit(closure, 0, 40)
        concurrent.futures.wait([second], timeout=0.3)
        assert not first.done()
        assert not second.done(), "it has read rows that are not there"
        may_go_on.set()
        for found in (first, second):
            assert np.array_equal(found.result()[1], reader.order.records(0, 40))
    assert len(calls) == -(-NUM_EXAMPLES // reader.group_examples(reader.narrow.parsed_specs)), (
        "one of them has filled"
    )


def test_examples_are_on_the_cpu_and_their_memory_is_allocated_once(split: records.Split) -> None:
    source = Closure(make_caching_reader(split)).source
    traced = tf.function(source.parse_ticket, input_signature=[source.ticket_spec()])
    graph = traced.get_concrete_function().graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    resources = [n for n in (*nodes, *graph.node) if n.op in ("VarHandleOp", "MutexV2")]
    assert {node.device for node in resources} == {"/device:CPU:0"}
    # Otherwise each graph would hold a constant of that size, even if it fills nothing.
    filled = [node for node in nodes if "zeros" in node.name or node.op in ("Fill", "Empty")]
    assert {node.op for node in filled} == {"Empty"}


class SubBatches:
    """What a worker of synchronous steps runs, on the tickets of the first two windows."""

    def __init__(self, reader: pipeline.Reader, num_sub_batches: int, cache_name: str) -> None:
        self.source = source = tickets.ticket_source(reader)
        self.lanes = [replica_lanes(NUM_LANES, i, num_sub_batches) for i in range(num_sub_batches)]
        specs = [source.ticket_spec(lanes=of_sub_batch) for of_sub_batch in self.lanes]
        windows = list(itertools.islice(reader.order.windows(0), 2))
        self._starts = tf.constant([first for first, _ in windows], tf.int64)
        packed = [tickets.pack_tickets(source, *window, self.lanes) for window in windows]
        self._tickets = tf.constant(np.array(packed))
        self.ends = [first + count for first, count in windows]

        @tf.function(autograph=False)
        def sub_batch(
            batch: tf.Tensor, index: tf.Tensor, starts: tf.Tensor, parts: tf.Tensor
        ) -> Any:
            with tf.control_dependencies([source.prepare()]):
                batch = tf.identity(batch)
            packed = tickets.PackedTickets(specs, starts, parts)
            return source.sub_batch(batch, index, packed, cache_name)

        self._sub_batch = sub_batch

    def __call__(self, batch: int, index: int) -> list[np.ndarray]:
        numbers = (tf.constant(number, tf.int64) for number in (batch, index))
        return [output.numpy() for output in self._sub_batch(*numbers, self._starts, self._tickets)]


@pytest.mark.parametrize("cache_bytes", [0, CACHE_BYTES], ids=["disk", "cached"])
@pytest.mark.parametrize("num_sub_batches", [2, 3], ids=["even", "uneven"])
def test_sub_batches_are_parts_of_the_batches_of_the_order(
    split: records.Split, num_sub_batches: int, cache_bytes: int
) -> None:
    reader = dataclasses.replace(make_reader(split), cache_bytes=cache_bytes, gives_seeds=True)
    sub_batch = SubBatches(reader, num_sub_batches, f"order-{num_sub_batches}")
    first_end, second_end = sub_batch.ends
    for batch in (0, 3, 1, first_end - 1, first_end, second_end - 1, 2):
        for index, lanes in enumerate(sub_batch.lanes):
            inputs, labels, seeds = sub_batch(batch, index)
            assert np.array_equal(labels, reader.order.records(batch, 1, lanes)[0])
            assert np.array_equal(inputs[:, 0] * 2, labels)
            assert np.array_equal(seeds, reader.order.seeds(batch, 1, lanes)[0])


def test_first_sub_batch_of_a_window_reads_the_rest_of_the_window(
    split: records.Split, tmp_path: Path
) -> None:
    copied = copy_split(split, tmp_path)
    reader = make_reader(copied)
    sub_batch = SubBatches(reader, 2, "rest of window")
    sub_batch(1, 0)
    remove(copied)
    end = sub_batch.ends[0]
    for batch in range(1, end):
        _, labels = sub_batch(batch, 0)
        assert np.array_equal(labels, reader.order.records(batch, 1, sub_batch.lanes[0])[0])
    for batch, index in ((0, 0), (1, 1), (end, 0)):
        with pytest.raises(tf.errors.NotFoundError):
            sub_batch(batch, index)
