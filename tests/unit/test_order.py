"""The global order: each record once an epoch, the same on any number of replicas, anywhere."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.order import Order, replica_lanes
from data.system.errors import UsageError
from data.tfrecord.split import chunk_examples_for
from strategies.position import Position, refuse_open_sub_batches
from trainer.config import Config, DataConfig, num_lanes


@pytest.mark.parametrize("number", [1, 2, 3, 7, 19, 20])
@pytest.mark.parametrize("index", [0, -1])
def test_refused_sub_batches_name_a_number_that_fits_their_lanes(number: int, index: int) -> None:
    order = Order((100,), 10, batch_size=40, lanes=20, window_batches=2, seed=0, shuffle=False)
    lanes = [replica_lanes(20, i, number) for i in range(number)][index]
    position = Position(3, ((2, lanes.start, lanes.stop - 1),))
    with pytest.raises(UsageError, match="--replicas_to_aggregate=") as refusal:
        refuse_open_sub_batches(position, order)
    named = re.findall(r"--replicas_to_aggregate=(\d+)", str(refusal.value))
    assert lanes in [replica_lanes(20, i, int(named[0])) for i in range(int(named[0]))]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Small orders of every shape: N < B, N < V, empty shards, chunks longer than shards."""
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any))
    lanes = draw(st.integers(1, 12))
    return Order(
        shard_lengths=tuple(lengths),
        chunk_examples=draw(st.integers(1, 20)),
        batch_size=lanes * draw(st.integers(1, 5)),
        lanes=lanes,
        window_batches=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 2**63)),
        shuffle=draw(st.booleans()),
    )


def flat(order: Order, first_batch: int, num_batches: int) -> np.ndarray:
    """Records in the order of their positions."""
    positions = order.positions(first_batch, num_batches).reshape(-1)
    return order.records(first_batch, num_batches).reshape(-1)[np.argsort(positions)]


# Written from the definition in order.py's docstring, one position at a time: what the vectorised
# code must equal.
MASK = 2**64 - 1


def mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def permutation(size: int, *words: int) -> list[int]:
    key = 0
    for word in words:
        key = mix(key ^ word)
    return sorted(range(size), key=lambda i: mix(key ^ i))


def record_at(order: Order, position: int) -> int:
    num_examples, v = sum(order.shard_lengths), order.lanes
    epoch, offset = divmod(position, num_examples)
    begins = [0, *itertools.accumulate(order.shard_lengths)]
    chunks = [
        list(range(at, min(at + order.chunk_examples, end)))
        for begin, end in itertools.pairwise(begins)
        for at in range(begin, end, order.chunk_examples)
    ]
    if order.shuffle:
        chunks = [chunks[i] for i in permutation(len(chunks), 1, order.seed, epoch)]
    sequence = [record for chunk in chunks for record in chunk]
    lengths = [0] * v
    for p in range(epoch * num_examples, (epoch + 1) * num_examples):
        lengths[p % v] += 1
    lane, row = position % v, offset // v
    window_rows = order.window_batches * order.batch_size // v
    window = offset // (order.window_batches * order.batch_size)
    in_window = row - window * window_rows
    if order.shuffle:
        size = min(window_rows, lengths[lane] - window * window_rows)
        in_window = permutation(size, 2, order.seed, epoch, lane, window)[in_window]
    return sequence[sum(lengths[:lane]) + window * window_rows + in_window]


@given(order=orders(), first_batch=st.integers(0, 50), num_batches=st.integers(1, 4))
def test_records_follow_the_definition(order: Order, first_batch: int, num_batches: int) -> None:
    positions = order.positions(first_batch, num_batches)
    expected = [[record_at(order, int(p)) for p in batch] for batch in positions]
    assert order.records(first_batch, num_batches).tolist() == expected


@given(order=orders(), epoch=st.integers(0, 4))
def test_an_epoch_holds_each_record_once(order: Order, epoch: int) -> None:
    n = order.num_examples
    first_batch = epoch * n // order.batch_size
    last_batch = -(-(epoch + 1) * n // order.batch_size)
    records = flat(order, first_batch, last_batch - first_batch)
    skip = epoch * n - first_batch * order.batch_size
    assert sorted(records[skip : skip + n]) == list(range(n))


@given(
    order=orders(),
    first_batch=st.integers(0, 30),
    num_batches=st.integers(1, 5),
    num_replicas=st.sampled_from([1, 2, 3, 8]),
)
def test_replicas_shares_are_contiguous_slices_of_the_batch(
    order: Order, first_batch: int, num_batches: int, num_replicas: int
) -> None:
    num_replicas = min(num_replicas, order.lanes)
    shares = [
        order.records(first_batch, num_batches, replica_lanes(order.lanes, replica, num_replicas))
        for replica in range(num_replicas)
    ]
    assert np.array_equal(np.concatenate(shares, 1), order.records(first_batch, num_batches))


@given(
    order=orders(),
    first_batch=st.integers(0, 40),
    num_batches=st.integers(1, 6),
    read_through=st.integers(0, 30),
    data=st.data(),
)
def test_reading_list_gathers_to_the_records_and_reads_none_twice(
    order: Order, first_batch: int, num_batches: int, read_through: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, order.lanes - 1))
    lanes = range(start, data.draw(st.integers(start + 1, order.lanes)))
    reads = order.reads(first_batch, num_batches, lanes, read_through)
    begins = [0, *itertools.accumulate(order.shard_lengths)]
    pieces = []
    columns = reads.shards, reads.chunks, reads.skip, reads.take
    for shard, chunk, skip, take in zip(*columns, strict=True):
        assert 0 <= skip < order.chunk_examples
        first = chunk * order.chunk_examples + skip
        assert take >= 1
        assert first + take <= order.shard_lengths[shard], "a piece must end within its shard"
        pieces.append(begins[shard] + np.arange(first, first + take))
    read = np.concatenate(pieces)
    assert len(set(read.tolist())) == len(read)
    records = order.records(first_batch, num_batches, lanes)
    assert np.array_equal(read[reads.gather], records)
    assert {piece[0] for piece in pieces} | {piece[-1] for piece in pieces} <= set(records.flat)


@given(order=orders(), first_batch=st.integers(0, 1000))
def test_windows_have_no_gaps_and_fixed_ends(order: Order, first_batch: int) -> None:
    runs = list(itertools.islice(order.windows(first_batch), 8))
    expected = first_batch
    for first, count in runs:
        assert first == expected
        assert 1 <= count <= order.window_batches + 1
        expected = first + count
    if runs[0][1] > 1:
        later = list(itertools.islice(order.windows(first_batch + 1), 7))
        assert later == [(first_batch + 1, runs[0][1] - 1), *runs[1:7]]


def test_reading_by_windows_reads_nearly_every_record_once() -> None:
    order = Order((3000, 3000), 16, 100, 20, 8, seed=1, shuffle=True)
    read = 0
    for first, count in itertools.islice(order.windows(0), 8):
        read += int(np.sum((reads := order.reads(first, count)).take + reads.skip))
    assert sum(count for _, count in itertools.islice(order.windows(0), 8)) * 100 == 6000
    assert read < 6000 * 1.25
    # Where reading on is cheaper than seeking, neighbours become one piece: here, whole shards.
    assert len(order.reads(0, 8).take) > 40
    assert len(order.reads(0, 8, read_through=3000).take) == 2


_NEAR = 32


def mixing(batches: np.ndarray) -> tuple[float, float]:
    """How well the full batches of an epoch, [number of batches, B], mix N records.

    Returns which part of the neighbours in the file share a batch, and which part of the records of
    a batch has another one within 32 places. By chance, (B - 1) / (N - 1) and 64 (B - 1) / N.
    """
    records = batches.reshape(-1)
    batch_of = np.full(int(records.max()) + 1, -1)
    batch_of[records] = np.repeat(np.arange(len(batches)), batches.shape[1])
    read = (batch_of[1:] >= 0) & (batch_of[:-1] >= 0)
    together = (batch_of[1:] == batch_of[:-1]) & read
    gaps = np.diff(np.sort(batches, axis=1), prepend=-_NEAR, append=np.iinfo(np.int64).max)
    near = np.minimum(gaps[:, 1:], gaps[:, :-1]) < _NEAR
    return float(together.sum() / read.sum()), float(np.mean(near))


@pytest.mark.parametrize("batch_size", [32, 100, 256])
@pytest.mark.parametrize("record_bytes", [100, 838, 100_000])
def test_defaults_mix_nearly_as_a_uniform_shuffle(batch_size: int, record_bytes: int) -> None:
    num_examples = 60_000
    num_batches = num_examples // batch_size
    chunk_examples = chunk_examples_for(num_examples, num_examples * record_bytes)
    lanes, window = num_lanes(Config(batch_size=batch_size)), DataConfig().window_batches
    order = Order((num_examples,), chunk_examples, batch_size, lanes, window, seed=1, shuffle=True)
    records = order.records(0, num_batches)
    shuffled = np.random.default_rng(0).permutation(num_examples)[: records.size]
    neighbours, near = mixing(records)
    fair_neighbours, fair_near = mixing(shuffled.reshape(records.shape))
    # A lane gives a batch one record, so those of a batch are rather farther apart than by chance.
    assert neighbours <= fair_neighbours
    assert near <= fair_near + 0.01
    # Chunks are permuted, so there are only as many draws as chunks.
    assert abs(np.corrcoef(np.arange(records.size), records.reshape(-1))[0, 1]) < 0.08


@given(order=orders(), first_batch=st.integers(0, 10**6), num_replicas=st.integers(1, 4))
def test_seeds_follow_the_definition(order: Order, first_batch: int, num_replicas: int) -> None:
    num_replicas = min(num_replicas, order.lanes)
    key = mix(mix(3) ^ order.seed)
    expected = [
        [[(drawn := mix(key ^ int(p))) >> 32, drawn & 0xFFFFFFFF] for p in batch]
        for batch in order.positions(first_batch, 2)
    ]
    shares = [replica_lanes(order.lanes, replica, num_replicas) for replica in range(num_replicas)]
    seeds = np.concatenate([order.seeds(first_batch, 2, lanes) for lanes in shares], 1)
    assert seeds.dtype == np.int32
    assert seeds.view(np.uint32).tolist() == expected


def test_the_order_of_a_released_version_stays() -> None:
    # A change here breaks every run that is resumed: the rest of its epoch would not be the rest.
    order = Order((100, 37), 8, 10, 5, 3, seed=7, shuffle=True)
    assert order.records(1234, 1).tolist() == [[121, 120, 130, 131, 84, 80, 30, 28, 109, 110]]


def test_a_far_position_costs_no_more_than_a_near_one() -> None:
    order = Order((1000,), 8, 10, 5, 3, seed=7, shuffle=True)
    records = order.records(10**12, 100)
    assert sorted(records.flat) == list(range(1000))


def test_more_replicas_than_lanes_are_told_to_set_lanes() -> None:
    with pytest.raises(ValueError, match=r"--config\.data\.lanes"):
        replica_lanes(4, 0, 5)
