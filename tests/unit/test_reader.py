"""Batches from disk are the batches of the order, by every way in."""

import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from data import disk_reader, order
from data import reader as pipeline
from data.disk_reader import DiskReader
from data.tfrecord import split as records
from data.tickets import DiskTickets
from tests.commands import run_python
from tests.shards import write_shards
from tests.unit.stand_ins import wait_for
from tests.unit.test_split import flip

NUM_EXAMPLES = 3011  # A prime: no batch size divides it.
NUM_LANES = 10


def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Records are their own number in decimals, with filling after it."""
    number = tf.strings.to_number(tf.strings.substr(serialized, 0, 6), tf.int64)
    return tf.cast(number, tf.float32)[:, tf.newaxis] / 2, number


def write_split(directory: Path) -> records.Split:
    """Records that `parse` knows."""
    examples = [f"{i:06d}".encode() + b"." * (700 + i % 50) for i in range(NUM_EXAMPLES)]
    return write_shards(examples, str(directory), "toy", "train", 3, NUM_EXAMPLES)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> records.Split:
    return write_split(tmp_path_factory.mktemp("split"))


@pytest.fixture(params=[True, False], ids=["shuffled", "in order"])
def reader(split: records.Split, request: pytest.FixtureRequest) -> pipeline.Reader:
    return make_reader(split, shuffle=request.param)


def make_reader(split: records.Split, shuffle: bool = True, batch: int = 50) -> pipeline.Reader:
    the_order = order.Order(
        split.shard_lengths, split.chunk_examples, batch, NUM_LANES, 8, seed=3, shuffle=shuffle
    )
    return pipeline.Reader(split, the_order, parse, num_threads=2)


def copy_split(split: records.Split, directory: Path) -> records.Split:
    """A copy whose files may be damaged."""
    directory.mkdir(exist_ok=True)
    shards = []
    for shard in split.shards:
        path = directory / Path(shard.path).name
        path.write_bytes(Path(shard.path).read_bytes())
        shards.append(dataclasses.replace(shard, path=str(path)))
    return dataclasses.replace(split, shards=tuple(shards))


def copy_to_ram(split: records.Split, name: str) -> str:
    """A copy in a file system that is not the local one; its directory."""
    directory = f"ram://{name}"
    tf.io.gfile.makedirs(directory)
    for shard in split.shards:
        tf.io.gfile.copy(shard.path, f"{directory}/{Path(shard.path).name}", overwrite=True)
    return directory


def numbers(dataset: tf.data.Dataset) -> Iterator[np.ndarray]:
    for inputs, labels in dataset.as_numpy_iterator():
        assert np.array_equal(inputs[:, 0] * 2, labels)
        yield labels


def test_batches_are_those_of_the_order_across_epochs(reader: pipeline.Reader) -> None:
    lanes = range(NUM_LANES)
    read = list(numbers(DiskReader(reader).batches(0, lanes, 130)))
    assert np.array_equal(read, reader.order.records(0, 130))
    # Two epochs and the beginning of a third, by position.
    in_order = np.concatenate(read)[np.argsort(reader.order.positions(0, 130).reshape(-1))]
    for epoch in range(2):
        of_epoch = in_order[epoch * NUM_EXAMPLES :][:NUM_EXAMPLES]
        assert sorted(of_epoch) == list(range(NUM_EXAMPLES))
    assert 2 * NUM_EXAMPLES < len(in_order) < 3 * NUM_EXAMPLES


@pytest.mark.parametrize("first_batch", [1, 7, 59, 60, 61, 123_456])
def test_reading_may_begin_anywhere(reader: pipeline.Reader, first_batch: int) -> None:
    read = list(numbers(DiskReader(reader).batches(first_batch, range(NUM_LANES), 20)))
    assert np.array_equal(read, reader.order.records(first_batch, 20))


def test_dataset_is_endless_static_in_shape_and_starts_anew_for_each_iterator(
    reader: pipeline.Reader,
) -> None:
    dataset = DiskReader(reader).batches(3, range(3, 7))
    inputs, labels = dataset.element_spec
    assert inputs.shape == [20, 1]
    assert labels.shape == [20]
    for _ in range(2):
        read = list(numbers(dataset.take(9)))
        assert np.array_equal(read, reader.order.records(3, 9, range(3, 7)))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [50, 10, 500, 5000])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_evaluation_counts_each_record_once_in_batches_of_one_shape(
    split: records.Split, batch: int, num_replicas: int
) -> None:
    reader = make_reader(split, shuffle=False, batch=batch)
    counted = np.zeros(NUM_EXAMPLES)
    for replica in range(num_replicas):
        lanes = order.replica_lanes(NUM_LANES, replica, num_replicas)
        batches = list(DiskReader(reader).evaluation_batches(lanes).as_numpy_iterator())
        assert len(batches) == reader.num_evaluation_batches == -(-NUM_EXAMPLES // batch)
        for _, labels, weights in batches:
            assert labels.shape == weights.shape == (batch // NUM_LANES * len(lanes),)
            assert weights.dtype == np.float32
            np.add.at(counted, labels, weights)
    assert (counted == 1).all()


def test_tickets_hold_the_same_batches_and_do_not_retrace(reader: pipeline.Reader) -> None:
    traces = 0
    source = DiskTickets(reader)

    @tf.function(input_signature=[source.ticket_spec(num_batches=4)])
    def batches(ticket: dict[str, tf.Tensor]) -> tuple[tf.Tensor, ...]:
        nonlocal traces
        traces += 1
        outputs = source.parse_ticket(ticket)
        assert outputs[0].shape == [4, 50, 1]
        return outputs

    num_pieces = set()
    for first_batch in (0, 58, 59, 1000):
        ticket = source.ticket(first_batch, 4)
        num_pieces.add(len(ticket["shards"]))
        inputs, labels = batches(ticket)
        assert np.array_equal(labels, reader.order.records(first_batch, 4))
        assert np.array_equal(inputs.numpy()[..., 0] * 2, labels)
    assert traces == 1
    assert len(num_pieces) > 1, "the pieces varied in number, or nothing was shown"


def test_ticket_of_some_lanes_is_read_as_unparsed_records(split: records.Split) -> None:
    reader = make_reader(split)
    lanes = range(2, 5)
    source = DiskTickets(reader)
    ticket = {name: tf.constant(value) for name, value in source.ticket(9, 2, lanes).items()}
    serialized = source.read_ticket(ticket)
    assert serialized.shape == [2, 15]
    found = [[int(record[:6]) for record in batch] for batch in serialized.numpy()]
    assert np.array_equal(found, reader.order.records(9, 2, lanes))


def test_evaluation_tickets_count_each_record_once_though_the_last_is_as_long(
    split: records.Split,
) -> None:
    reader = make_reader(split, shuffle=False)
    source = DiskTickets(reader, weights=True)
    spec = source.ticket_spec(num_batches=7)
    parse_ticket = tf.function(source.parse_ticket, input_signature=[spec])
    counted = np.zeros(NUM_EXAMPLES)
    for first_batch in range(0, reader.num_evaluation_batches, 7):
        _, labels, weights = parse_ticket(source.ticket(first_batch, 7))
        assert weights.shape == [7, 50]
        np.add.at(counted, labels.numpy(), weights.numpy())
    assert reader.num_evaluation_batches % 7, "the last ticket goes past the end"
    assert (counted == 1).all()


def test_a_ticket_function_can_be_sent_to_another_process(split: records.Split) -> None:
    # Python functions cannot: they are numbers that mean something in one process only.
    source = DiskTickets(make_reader(split))
    graph = (
        tf.function(source.parse_ticket, input_signature=[source.ticket_spec()])
        .get_concrete_function()
        .graph.as_graph_def()
    )
    ops = {node.op for node in graph.node}
    ops |= {node.op for function in graph.library.function for node in function.node_def}
    assert "TFRecordDatasetV2" in ops
    assert not [op for op in ops if "PyFunc" in op]


@pytest.mark.parametrize("where", ["last byte", "data", "length", "its CRC"])
def test_damage_in_any_part_of_a_record_is_an_error_of_tensorflow(
    split: records.Split, tmp_path: Path, where: str
) -> None:
    copied = copy_split(split, tmp_path)
    shard = copied.shards[2]
    begin, end = int(shard.offsets[5]), shard.num_bytes
    places = {"last byte": end - 1, "data": end - 800, "length": begin, "its CRC": begin + 8}
    flip(shard.path, places[where])
    with pytest.raises(tf.errors.DataLossError):
        list(numbers(DiskReader(make_reader(copied)).batches(0, range(NUM_LANES), 61)))


def test_file_that_is_cut_short_or_gone_is_an_error_of_tensorflow(
    split: records.Split, tmp_path: Path
) -> None:
    copied = copy_split(split, tmp_path)
    path = Path(copied.shards[1].path)
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(
        (tf.errors.DataLossError, tf.errors.InvalidArgumentError), match=r"truncated|is shorter"
    ):
        list(numbers(DiskReader(make_reader(copied)).batches(0, range(NUM_LANES), 61)))
    path.unlink()
    with pytest.raises(tf.errors.NotFoundError):
        list(numbers(DiskReader(make_reader(copied)).batches(0, range(NUM_LANES), 61)))


def test_evaluation_reads_files_of_another_file_system(split: records.Split) -> None:
    reader = make_reader(records.open_split(copy_to_ram(split, "toy"), "train"), shuffle=False)
    batches = DiskReader(reader).evaluation_batches(range(NUM_LANES))
    labels = [label for _, y, weights in batches for label in y[weights > 0]]
    assert sorted(map(int, labels)) == list(range(NUM_EXAMPLES))


@pytest.mark.slow
def test_process_that_ends_in_the_midst_of_reading_does_end(tmp_path: Path) -> None:
    # The tf.function and the iterator it takes from are a cycle, as in an executor.
    code = f"""
import tensorflow as tf
from tests.shards import write_shards
from data.disk_reader import DiskReader
from tests.unit.test_reader import NUM_LANES, make_reader

def main():
    examples = [b"%06d" % i + bytes(2000) for i in range(3000)]
    split = write_shards(examples, {str(tmp_path)!r}, "toy", "train", 1, 3000)
    batches = iter(DiskReader(make_reader(split)).batches(0, range(NUM_LANES)))
    take = tf.function(lambda: next(batches)[1])
    for _ in range(50):
        take()

main()
"""
    run_python("-c", code, check=True)


def test_large_records_are_read_in_parts_that_fit_memory(tmp_path: Path) -> None:
    num_bytes = 1 << 20
    examples = [f"{i:06d}".encode() + bytes(num_bytes) for i in range(45)]
    split = write_shards(examples, str(tmp_path), "big", "train", 1, 45)
    reader = make_reader(split, batch=10)
    source = DiskTickets(reader)
    tickets = [len(source.ticket(*run)["shards"]) for run in reader.runs(0, 9)]
    assert len(tickets) >= 3, "a window of 45 MiB was cut"
    read = list(numbers(DiskReader(reader).batches(0, range(NUM_LANES), 9)))
    assert np.array_equal(read, reader.order.records(0, 9))


@pytest.mark.parametrize("prefetch_batches", [2, 20])
def test_batches_are_made_ahead_as_many_as_asked_for(
    split: records.Split, prefetch_batches: int
) -> None:
    parsed = tf.Variable(0)

    def count_and_parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([parsed.assign_add(1)]):
            return parse(tf.identity(serialized))

    # Larger than what is parsed at once, so that each call of `parse` is one batch.
    reader = make_reader(split, batch=1100)
    reader = dataclasses.replace(
        reader, parse=count_and_parse, num_threads=2, prefetch_batches=prefetch_batches
    )
    batches = iter(DiskReader(reader).batches(0, range(NUM_LANES)))
    next(batches)
    least, most = 1 + prefetch_batches, 1 + prefetch_batches + 6  # In threads, and between stages.
    wait_for(lambda: int(parsed) >= least)
    time.sleep(0.5)
    assert int(parsed) <= most


def test_blocks_hold_all_batches_in_groups_of_one_size() -> None:
    for num_batches, most, groups_of_block in itertools.product(
        range(1, 200), range(1, 40), (1, 2, 5)
    ):
        blocks = list(disk_reader._cut(num_batches, most, groups_of_block * most))
        ends = [first + num_groups * size for first, num_groups, size in blocks]
        assert [first for first, _, _ in blocks] == [0, *ends[:-1]]
        assert ends[-1] == num_batches
        assert len({size for _, _, size in blocks[:-1]}) <= 1
        assert all(1 <= size <= most for _, _, size in blocks)
        assert all(1 <= num_groups <= groups_of_block for _, num_groups, _ in blocks)
        fewest = -(-num_batches // most)
        assert sum(num_groups for _, num_groups, _ in blocks) <= 2 * fewest + 1
    assert list(disk_reader._cut(32, 10, 50)) == [(0, 4, 8)]
    assert list(disk_reader._cut(30, 10, 50)) == [(0, 3, 10)]


@pytest.mark.parametrize(("window", "first"), [(9, 0), (15, 0), (20, 11)])
def test_windows_of_large_records_are_read_whatever_their_number_of_batches(
    tmp_path: Path, window: int, first: int
) -> None:
    # Of 6 batches in a group, which is a block of its own.
    examples = [f"{i:06d}".encode() + bytes(60 << 10) for i in range(300)]
    split = write_shards(examples, str(tmp_path), "big", "train", 1, 300)
    reader = make_reader(split, batch=10)
    windows = dataclasses.replace(reader.order, window_batches=window)
    reader = dataclasses.replace(reader, order=windows)
    lanes = range(NUM_LANES)
    disk = DiskReader(reader)
    assert disk._block_batches(lanes) == disk._group_batches(lanes) == 6
    read = list(numbers(DiskReader(reader).batches(first, lanes, 20)))
    assert np.array_equal(read, reader.order.records(first, 20))


# Groups of one batch; and of 8, a window, of which an epoch has 7 whole ones.
@pytest.mark.parametrize(("batch", "of_group"), [(1100, 1), (50, 8)])
def test_what_one_thread_has_parsed_is_there_while_it_parses_the_next(
    split: records.Split, batch: int, of_group: int
) -> None:
    may_parse, parsed = threading.Semaphore(0), threading.Semaphore(0)

    def wait(serialized: tf.Tensor) -> tf.Tensor:
        may_parse.acquire()
        parsed.release()
        return serialized

    def parse_if_allowed(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        waited = tf.numpy_function(wait, [serialized], tf.string)  # noqa: TID251  # In this process.
        return parse(tf.ensure_shape(waited, serialized.shape))

    reader = make_reader(split, batch=batch)
    reader = dataclasses.replace(reader, parse=parse_if_allowed, num_threads=1)
    assert min(DiskReader(reader)._group_batches(range(NUM_LANES)), 8) == of_group
    batches = iter(DiskReader(reader).batches(0, range(NUM_LANES)))
    with concurrent.futures.ThreadPoolExecutor(1) as taker:
        try:
            first = taker.submit(next, batches)
            for group in range(7):
                may_parse.release()
                assert parsed.acquire(timeout=60)
                # It is parsed, and what is to be parsed after it does not end now.
                of_this = [taker.submit(next, batches) for _ in range(of_group - (group == 0))]
                for taken in [first, *of_this]:
                    taken.result(timeout=60)
        finally:
            may_parse.release(1000)
