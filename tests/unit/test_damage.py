"""Damaged shards: each fault is found and named; skipped, it is counted, and all else is read."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.order import Order
from data.reader import Reader
from data.system.files import DataError
from data.tfrecord import damage
from data.tfrecord import split as records
from data.tfrecord.crc import framed
from data.tickets import DiskTickets
from tests.shards import write_shards
from tests.unit.test_split import flip

NUM_EXAMPLES = 6000
RECORD_BYTES = 46
CHUNK = 5  # Of 6,000 records of 46 bytes.


def examples() -> list[bytes]:
    return [f"{i:030d}".encode() for i in range(NUM_EXAMPLES)]


@pytest.fixture
def split(tmp_path: Path) -> records.Split:
    written = write_shards(examples(), str(tmp_path), "toy", "train", 3, NUM_EXAMPLES)
    assert written.chunk_examples == CHUNK
    return written


def describe(directory: Path, lengths: tuple[int, ...] = (2000, 2000, 2000)) -> None:
    described = {"name": "train", "shardLengths": [str(length) for length in lengths]}
    (directory / "dataset_info.json").write_text(json.dumps({"splits": [described]}))


def without_index(directory: Path) -> None:
    (directory / ".train.index.npz").unlink()


def shard(directory: Path, number: int) -> str:
    return str(directory / f"toy-train.tfrecord-0000{number}-of-00003")


def numbers_read(split: records.Split, num_epochs: int = 1) -> list[int]:
    """What training reads, by the ways that training reads."""
    order = Order(split.shard_lengths, split.chunk_examples, 50, 10, 8, seed=1, shuffle=True)

    def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        number = tf.strings.to_number(serialized, tf.int64)
        return number, number

    reader = Reader(split, order, parse, num_threads=2)
    num_batches = -(-num_epochs * split.num_examples // 50)
    read = [
        labels
        for _, labels in DiskReader(reader).batches(0, range(10), num_batches).as_numpy_iterator()
    ]
    source = DiskTickets(reader)
    ticket = {name: tf.constant(value) for name, value in source.ticket(0, 3).items()}
    assert np.array_equal(source.parse_ticket(ticket)[1], read[:3]), "tickets read the same"
    in_epochs = order.positions(0, num_batches) < num_epochs * split.num_examples
    numbers: list[int] = np.stack(read)[in_epochs].tolist()
    return numbers


Fault = Callable[[Path], None]


def flipped(number: int, byte_of: Mapping[int, int]) -> Fault:
    """Flips a bit in records of a shard: record -> byte of its frame."""

    def flip_all(directory: Path) -> None:
        for record, byte in byte_of.items():
            flip(shard(directory, number), record * RECORD_BYTES + byte)

    return flip_all


def cut(number: int, records: int, more_bytes: int = 0) -> Fault:
    """Leaves the first records of a shard, and some bytes of the next one."""
    size = records * RECORD_BYTES + more_bytes
    return lambda directory: os.truncate(shard(directory, number), size)


BITS = {0, 3, 4, 5, 1999}
# What is lost, where the index from before tells chunks and counts.
FAULTS: dict[str, tuple[Fault, set[int], str]] = {
    "flipped bit": (flipped(1, {7: 20}), {2007}, "record 7 at byte 322: the data does not fit"),
    "flipped bits": (flipped(0, dict.fromkeys(BITS, 20)), BITS, "record 0 at byte 0: the data"),
    "flipped length": (flipped(0, {101: 0}), {*range(101, 105)}, "record 101 at byte 4646: "),
    "flipped lengths": (
        flipped(0, {101: 1, 105: 1, 106: 1, 1998: 1, 1000: 20}),
        {*range(101, 110), 1000, 1998, 1999},
        "record 101 at byte 4646: ",
    ),
    "cut in a record": (cut(2, 1990, 3), {*range(5990, 6000)}, "record 1990 at byte 91540: "),
    "cut between records": (cut(2, 1990), {*range(5990, 6000)}, "record 1990 at byte"),
    "emptied": (cut(1, 0), {*range(2000, 4000)}, "it is empty"),
    "removed": (lambda d: os.remove(shard(d, 1)), {*range(2000, 4000)}, "it is missing"),
}
NOT_SEEN_WHEN_OPENED = ("flipped bit", "flipped bits", "flipped length", "flipped lengths")


@pytest.mark.slow
@pytest.mark.parametrize(("damaged", "lost", "named"), FAULTS.values(), ids=FAULTS)
def test_skipped_damage_is_counted_and_all_else_is_read_once_an_epoch(
    tmp_path: Path, split: records.Split, damaged: Fault, lost: set[int], named: str
) -> None:
    damaged(tmp_path)
    good = damage.open_good(str(tmp_path), "train")
    assert good.num_skipped == len(lost)
    assert good.num_examples == NUM_EXAMPLES - len(lost)
    assert named in str(good.damages[0])
    assert good.fingerprint != split.fingerprint
    expected = sorted(set(range(NUM_EXAMPLES)) - lost)
    assert sorted(numbers_read(good, num_epochs=2)) == sorted(expected * 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_fatal_by_default_before_or_at_the_first_read(
    tmp_path: Path, split: records.Split, fault: str
) -> None:
    FAULTS[fault][0](tmp_path)
    if fault in NOT_SEEN_WHEN_OPENED:
        opened = records.open_split(str(tmp_path), "train")
        assert opened.fingerprint == split.fingerprint
        with pytest.raises(tf.errors.DataLossError):
            numbers_read(opened)
        assert damage.verify(opened)[0].path in (shard(tmp_path, 0), shard(tmp_path, 1))
    else:
        with pytest.raises(DataError, match=r"toy-train\.tfrecord-0000[12]-of-00003"):
            records.open_split(str(tmp_path), "train")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut between records", "emptied", "removed", "flipped length"])
def test_without_an_index_the_count_is_that_of_dataset_info(
    tmp_path: Path, split: records.Split, fault: str
) -> None:
    damaged, lost, _ = FAULTS[fault]
    without_index(tmp_path)
    damaged(tmp_path)
    if fault not in ("cut between records", "emptied"):  # Both are valid without a count.
        with pytest.raises(DataError, match=r"cannot be counted.*data\.inspect .* --repair"):
            damage.open_good(str(tmp_path), "train")
    describe(tmp_path)
    with pytest.raises(DataError):
        records.open_split(str(tmp_path), "train")
    good = damage.open_good(str(tmp_path), "train")
    # Without the index nothing behind a damaged length can be found.
    num_lost = 1899 if fault == "flipped length" else len(lost)
    assert good.num_skipped == num_lost
    assert sorted(numbers_read(good))[0] == 0
    assert good.num_examples == NUM_EXAMPLES - num_lost


def test_whole_split_is_opened_as_if_nothing_were_skipped(
    tmp_path: Path, split: records.Split
) -> None:
    describe(tmp_path)
    good = damage.open_good(str(tmp_path), "train")
    assert (good.fingerprint, good.damages, good.num_skipped) == (split.fingerprint, (), 0)


@pytest.mark.slow
def test_verification_is_kept_until_a_file_changes(tmp_path: Path, split: records.Split) -> None:
    assert damage.open_good(str(tmp_path), "train").num_skipped == 0
    path = shard(tmp_path, 0)
    before = os.stat(path)
    flip(path, 20)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    kept = damage.open_good(str(tmp_path), "train")
    assert kept.num_skipped == 0, "what was verified is not verified again"
    with pytest.raises(tf.errors.DataLossError):
        numbers_read(kept)
    os.utime(path)
    assert damage.open_good(str(tmp_path), "train").num_skipped == 1
    again = damage.open_good(str(tmp_path), "train")
    assert again.num_skipped == 1
    assert 0 not in numbers_read(again)
    saved = tmp_path / ".train.damage.json"
    of_earlier_version = {**json.loads(saved.read_text()), "version": 1, "shards": []}
    for text in ("{", json.dumps(of_earlier_version)):
        saved.write_text(text)
        assert damage.open_good(str(tmp_path), "train").num_skipped == 1


def test_index_that_is_put_back_leads_to_what_was_lost_without_it(
    tmp_path: Path, split: records.Split
) -> None:
    describe(tmp_path)
    index = (tmp_path / ".train.index.npz").read_bytes()
    without_index(tmp_path)
    flip(shard(tmp_path, 1), 46 * 7)  # A length: what is behind it cannot be found.
    assert damage.open_good(str(tmp_path), "train").num_skipped == 2000 - 7
    (tmp_path / ".train.index.npz").write_bytes(index)
    found = damage.open_good(str(tmp_path), "train")
    assert found.num_skipped == 3, "up to the next chunk of 5"
    assert len(numbers_read(found)) == NUM_EXAMPLES - 3


@pytest.mark.slow
def test_other_damage_is_another_split(tmp_path: Path, split: records.Split) -> None:
    seen = set()
    for record in (7, 8, 1999):
        flip(shard(tmp_path, 1), record * RECORD_BYTES + 20)
        seen.add(damage.open_good(str(tmp_path), "train").fingerprint)
        flip(shard(tmp_path, 1), record * RECORD_BYTES + 20)
    assert len(seen) == 3


def test_nothing_left_is_refused(tmp_path: Path) -> None:
    write_shards([b"x" * 30], str(tmp_path), "toy", "train", 1, 1)
    flip(str(tmp_path / "toy-train.tfrecord-00000-of-00001"), 20)
    with pytest.raises(DataError, match="No record of split 'train'"):
        damage.open_good(str(tmp_path), "train")


@pytest.mark.slow
def test_index_that_does_not_fit_is_named(tmp_path: Path, split: records.Split) -> None:
    # All records are one byte longer or shorter than those that were indexed.
    other = [f"{number:0{(29, 31)[number % 2]}d}".encode() for number in range(2000)]
    Path(shard(tmp_path, 0)).write_bytes(b"".join(map(framed, other)))
    assert os.path.getsize(shard(tmp_path, 0)) == 2000 * RECORD_BYTES
    opened = records.open_split(str(tmp_path), "train")
    with pytest.raises(tf.errors.DataLossError):
        numbers_read(opened)
    (found,) = damage.verify(opened)
    assert found.path == shard(tmp_path, 0)
    assert "its index does not fit it: remove the index" in found.reason
    without_index(tmp_path)
    assert sorted(numbers_read(records.open_split(str(tmp_path), "train"))) == list(range(6000))


def test_file_of_another_size_than_its_index_says_is_refused_with_what_to_type(
    tmp_path: Path, split: records.Split
) -> None:
    Path(shard(tmp_path, 1)).write_bytes(framed(b"another"))
    with pytest.raises(DataError, match=r"cut short, or replaced.*rm .*train\.index\.npz"):
        records.open_split(str(tmp_path), "train")
    without_index(tmp_path)
    assert records.open_split(str(tmp_path), "train").shard_lengths == (2000, 1, 2000)
    describe(tmp_path)
    with pytest.raises(DataError, match=r"has 1 records, and dataset_info\.json .* says 2,000"):
        records.open_split(str(tmp_path), "train")
