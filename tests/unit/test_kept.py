"""Tickets of kept examples give the batches that tickets of the files give."""

import concurrent.futures
import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data import feeds, kept, pipeline, records
from data.features import image_raw_parse
from tests.unit.test_layout import images_of, reader_of
from tests.unit.test_pipeline import (
    NUM_EXAMPLES,
    copy_split,
    copy_to_ram,
    make_reader,
    parse,
    write_split,
)

KEEPS = NUM_EXAMPLES * 12  # An example is a float32 and an int64.


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> records.Split:
    return write_split(tmp_path_factory.mktemp("split"))


def make_keeper(split: records.Split, **changes: Any) -> pipeline.Reader:
    return dataclasses.replace(make_reader(split), cache_bytes=KEEPS, **changes)


class Closure:
    """What runs in a worker; its graph is made before there is a ticket."""

    def __init__(self, reader: pipeline.Reader, **spec: Any) -> None:
        self.source = kept.ticket_source(reader)
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
    reader = make_keeper(copied)
    closure = Closure(reader, lanes=lanes)
    assert isinstance(closure.source, kept.KeptTickets)
    for first_batch, num_batches in ((0, 1), (59, 4), (1234, 16)):
        inputs, labels = closure(first_batch, num_batches, lanes)
        assert np.array_equal(labels, reader.order.records(first_batch, num_batches, lanes))
        assert np.array_equal(inputs[..., 0] * 2, labels)
        if first_batch == 0:
            remove(copied)


def test_ticket_of_kept_examples_may_reach_over_windows(split: records.Split) -> None:
    reader = make_keeper(split)
    source = kept.ticket_source(reader)
    _, in_window = next(reader.ticket_runs(0))
    assert in_window < 100
    (first_batch, count), *others = source.ticket_runs(3)
    assert first_batch == 3
    assert count > 10**9
    assert not others
    _, labels = Closure(reader)(0, 3 * in_window)
    assert np.array_equal(labels, reader.order.records(0, 3 * in_window))


def test_bytes_are_kept_as_bytes_and_come_as_floats(tmp_path: Path) -> None:
    read = reader_of(tmp_path, images_of(200), image_raw_parse((2, 3, 2)))
    kept_bytes = 200 * (12 + 8)  # 12 pixels and a label, where the floats would take 48.
    assert not dataclasses.replace(read, cache_bytes=kept_bytes - 1).keeps_examples
    keeps = dataclasses.replace(read, cache_bytes=kept_bytes)
    assert [values.dtype for values in keeps.kept_examples] == [tf.uint8, tf.int64]

    def augment(inputs: Any, labels: Any, seeds: Any) -> tuple[Any, Any]:
        assert inputs.dtype == tf.float32
        return inputs * 0.3, labels

    for change in (None, augment):
        one, two = (dataclasses.replace(r, augment=change) for r in (read, keeps))
        feed = feeds.open_feed(two, 7, range(5))
        assert isinstance(feed, feeds.KeptFeed)
        signature = [feed.signature, tf.TensorSpec([], tf.int64)]
        batch_of = tf.function(feed.batch, input_signature=signature, autograph=False)
        taken, ticket = feed.take(15), Closure(two)(7, 15)
        for index, batch in enumerate(one.batches(7, range(5), 15)):
            fed = batch_of(taken, tf.constant(index, tf.int64))
            for wanted, *found in zip(batch, fed, ticket, strict=True):
                of_ticket = found[1][index]
                assert found[0].dtype == of_ticket.dtype == wanted.dtype
                assert found[0].numpy().tobytes() == wanted.numpy().tobytes()
                assert of_ticket.tobytes() == wanted.numpy().tobytes()


def test_number_of_batches_may_be_part_of_the_graph(split: records.Split) -> None:
    closure = Closure(make_keeper(split), num_batches=3, lanes=range(4))
    inputs, labels = closure._parse.get_concrete_function().structured_outputs
    assert inputs.shape == [3, 20, 1]
    assert labels.shape == [3, 20]


def test_seeds_and_augmented_examples_are_those_of_the_files(split: records.Split) -> None:
    def augment(inputs: Any, labels: Any, seeds: Any) -> tuple[Any, Any]:
        return inputs + tf.cast(seeds[:, :1], tf.float32), labels

    keeper = make_keeper(split, augment=augment, gives_seeds=True)
    reader = dataclasses.replace(keeper, cache_bytes=0)
    from_memory, from_files = Closure(keeper), Closure(reader)
    assert from_files.source is reader
    for ours, theirs in zip(from_memory(7, 4), from_files(7, 4), strict=True):
        assert np.array_equal(ours, theirs)
    assert len(from_memory(7, 4)) == 3, "inputs, labels, seeds"


def test_what_another_run_has_kept_is_not_taken(split: records.Split, tmp_path: Path) -> None:
    first = Closure(make_keeper(copy_split(split, tmp_path / "first")))
    first(0, 1)
    backwards = tuple(reversed(copy_split(split, tmp_path / "second").shards))
    second = Closure(make_keeper(dataclasses.replace(split, shards=backwards)))
    assert isinstance(first.source, kept.KeptTickets)
    assert isinstance(second.source, kept.KeptTickets)
    assert first.source._key == second.source._key
    _, labels = second(0, 1)
    ends = np.cumsum([shard.num_records for shard in split.shards])
    in_first = np.concatenate(np.split(np.arange(NUM_EXAMPLES), ends[:-1])[::-1])
    assert np.array_equal(labels, in_first[second.source.order.records(0, 1)])


def test_examples_that_do_not_fit_are_read(split: records.Split) -> None:
    reader = dataclasses.replace(make_reader(split), cache_bytes=KEEPS - 1)
    assert kept.ticket_source(reader) is reader


def test_files_of_another_file_system_are_kept_too(split: records.Split) -> None:
    remote = records.open_split(copy_to_ram(split, "kept"), "train")
    _, labels = Closure(make_keeper(remote))(3, 9)
    assert np.array_equal(labels, make_reader(remote).order.records(3, 9))


def test_a_file_that_has_become_shorter_is_not_taken_for_whole(
    split: records.Split, tmp_path: Path
) -> None:
    copied = copy_split(split, tmp_path)
    shard = copied.shards[1]
    path = Path(shard.path)
    path.write_bytes(path.read_bytes()[: int(shard.offsets[-1])])
    closure = Closure(make_keeper(copied))
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="shorter"):
            closure(0, 1)


def test_a_damaged_record_is_an_error(split: records.Split, tmp_path: Path) -> None:
    copied = copy_split(split, tmp_path)
    path = Path(copied.shards[2].path)
    spoilt = bytearray(path.read_bytes())
    spoilt[400] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(tf.errors.DataLossError):
        Closure(make_keeper(copied))(0, 1)


def test_two_closures_at_once_both_find_all(split: records.Split) -> None:
    """A worker that passed for lost, and is not, may have two."""

    begun, may_go_on, calls = threading.Event(), threading.Event(), []

    def wait() -> None:
        calls.append(1)
        begun.set()
        assert may_go_on.wait(20)

    def slowly(serialized: tf.Tensor) -> Any:
        waited = tf.py_function(wait, [], [])  # noqa: TID251  # In this process.
        with tf.control_dependencies([waited]):
            return parse(tf.identity(serialized))

    reader = make_keeper(split, parse=slowly)
    closure = Closure(reader)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(closure, 0, 40)
        assert begun.wait(20)
        second = pool.submit(closure, 0, 40)
        concurrent.futures.wait([second], timeout=0.3)
        assert not first.done()
        assert not second.done(), "it has taken rows that are not there"
        may_go_on.set()
        for found in (first, second):
            assert np.array_equal(found.result()[1], reader.order.records(0, 40))
    assert len(calls) == -(-NUM_EXAMPLES // reader._kept_at_once), "one of them has filled"


def test_examples_are_on_the_cpu_whatever_else_a_worker_has(split: records.Split) -> None:
    source = Closure(make_keeper(split)).source
    graph = tf.function(source.parse_ticket, input_signature=[source.ticket_spec()])
    definition = graph.get_concrete_function().graph.as_graph_def()
    nodes = [node for function in definition.library.function for node in function.node_def]
    devices = {
        node.device for node in (*nodes, *definition.node) if node.op in ("VarHandleOp", "MutexV2")
    }
    assert devices == {"/device:CPU:0"}


def test_room_is_made_once_and_not_by_each_closure(split: records.Split) -> None:
    """A constant of that size would be kept by each graph, whether it fills or not."""
    source = Closure(make_keeper(split)).source
    graph = tf.function(source.parse_ticket, input_signature=[source.ticket_spec()])
    ops = {
        node.op
        for function in graph.get_concrete_function().graph.as_graph_def().library.function
        for node in function.node_def
        if "zeros" in node.name or node.op in ("Fill", "Empty")
    }
    assert ops == {"Empty"}
