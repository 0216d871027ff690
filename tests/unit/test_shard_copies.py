"""Data at s3:// is read as local data is: fetched once, bounded, and never damaged."""

import gc
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks.slow_link import SlowLink
from data.disk_reader import DiskReader
from data.reader import Reader
from data.system import object_store
from data.system.files import DataError
from data.tfrecord import split as records
from data.tfrecord.damage import examine
from data.tfrecord.shard_copies import with_copies
from tests.s3 import link, needs_s3, url
from tests.unit.stand_ins import wait_for
from tests.unit.test_reader import NUM_LANES, make_reader, numbers, write_split
from trainer.inputs import Inputs, data_errors_explained

__all__ = ["link", "url"]  # Fixtures.
pytestmark = [pytest.mark.quick, needs_s3]

PLENTY = 1 << 30


def upload(url: str, tmp_path: Path) -> records.Split:
    local = write_split(tmp_path / "split")
    object_store.upload_tree(str(tmp_path / "split"), url)
    opened = records.open_split(url, "train")
    assert opened.fingerprint == local.fingerprint
    return opened


def copied(split: records.Split, tmp_path: Path, max_bytes: int = PLENTY) -> records.Split:
    return with_copies(split, str(tmp_path / "copies"), max_bytes)


def complete(split: records.Split) -> None:
    assert split.copies is not None
    split.copies.complete(split)


def read(reader: Reader, first_batch: int = 0, num_batches: int = 70) -> None:
    """Reads more than an epoch, which must be as in the order."""
    found = list(numbers(DiskReader(reader).batches(first_batch, range(NUM_LANES), num_batches)))
    assert np.array_equal(found, reader.order.records(first_batch, num_batches))


def copies_in(tmp_path: Path) -> list[Path]:
    names = (tmp_path / "copies").iterdir()
    copies = [path for path in names if path.name != "lock" and path.suffix != ".blocks"]
    return sorted(copies, key=lambda path: path.name.partition("-")[2])


def test_batches_are_those_of_the_order_and_fetched_once(
    url: str, link: SlowLink, tmp_path: Path
) -> None:
    split = upload(url, tmp_path)
    read(make_reader(copied(split, tmp_path)))
    originals = sorted((tmp_path / "split").glob("*.tfrecord-*"))
    copies = copies_in(tmp_path)
    assert [path.read_bytes() for path in copies] == [path.read_bytes() for path in originals]
    # Another process of this machine finds everything: nothing is requested but the list.
    again = copied(split, tmp_path)
    link.is_open = False
    read(make_reader(again), first_batch=31)


def test_files_without_room_for_a_copy_are_read_without_one(url: str, tmp_path: Path) -> None:
    split = upload(url, tmp_path)
    largest = max(shard.num_bytes for shard in split.shards)
    few = copied(split, tmp_path, largest)
    read(make_reader(few))
    assert len(copies_in(tmp_path)) == 1
    with pytest.raises(DataError, match="--data_cache_bytes="):
        complete(few)
    read(make_reader(with_copies(split, str(tmp_path / "none"), 0)))
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["lock"]


def test_copies_that_nobody_uses_make_room_for_others(url: str, tmp_path: Path) -> None:
    split = upload(url, tmp_path)
    num_bytes = sum(shard.num_bytes for shard in split.shards)
    first = copied(split, tmp_path, num_bytes)
    complete(first)
    before = copies_in(tmp_path)
    object_store.upload_tree(str(tmp_path / "split"), f"{url}/other")
    other = records.open_split(f"{url}/other", "train")
    read(make_reader(copied(other, tmp_path, num_bytes)))
    assert copies_in(tmp_path) == before, "copies in use were removed"
    del first
    gc.collect()
    read(make_reader(copied(other, tmp_path, num_bytes)))
    assert len(copies_in(tmp_path)) == len(before)
    assert not set(copies_in(tmp_path)) & set(before)


@pytest.mark.parametrize("is_whole", [False, True])
def test_damaged_and_partial_copies_are_fetched_again(
    url: str, tmp_path: Path, is_whole: bool
) -> None:
    split = upload(url, tmp_path)
    read(make_reader(copied(split, tmp_path)))
    flipped, cut, unmapped = copies_in(tmp_path)
    original = flipped.read_bytes()
    flipped.write_bytes(original[:5000] + bytes([original[5000] ^ 1]) + original[5001:])
    cut.write_bytes(cut.read_bytes()[:1000])
    Path(f"{unmapped}.blocks").unlink()
    if is_whole:
        complete(copied(split, tmp_path))
    else:
        read(make_reader(copied(split, tmp_path)))
    assert flipped.read_bytes() == original


def test_damaged_object_is_named_as_a_local_file_is(url: str, tmp_path: Path) -> None:
    split = upload(url, tmp_path)
    shard = split.shards[1]
    content = bytearray(object_store.open_object(shard.path).read())
    content[int(shard.offsets[0]) + 40] ^= 1
    object_store.put(shard.path, bytes(content))
    reader = make_reader(copied(records.open_split(url, "train"), tmp_path))
    with (
        pytest.raises(DataError, match=f"{shard.path}: record 0 at byte 0: the data does not fit"),
        data_errors_explained(Inputs(reader, reader)),
    ):
        read(reader)
    (damage,) = [damage for report in examine(url, "train") for damage in report.damages]
    assert (damage.path, damage.record) == (shard.path, 0)


def test_object_that_disappears_ends_the_reading(url: str, tmp_path: Path) -> None:
    split = upload(url, tmp_path)
    reader = make_reader(copied(split, tmp_path))
    object_store.remove(split.shards[1].path)
    with (
        pytest.raises(DataError, match="cannot be read any more"),
        data_errors_explained(Inputs(reader, reader)),
    ):
        read(reader)


@pytest.mark.slow
def test_reading_waits_while_the_store_does_not_answer(
    url: str, link: SlowLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = upload(url, tmp_path)
    with_copy = make_reader(copied(split, tmp_path))
    without = make_reader(with_copies(split, str(tmp_path / "none"), 0))

    def open_when_warned() -> None:
        wait_for(lambda: "Trying again" in caplog.text, 100)
        link.is_open = True

    for reader in (with_copy, without):
        link.is_open = False
        caplog.clear()
        opened = threading.Thread(target=open_when_warned)
        with caplog.at_level(logging.WARNING):
            opened.start()
            read(reader)
        opened.join()
        assert "Trying again" in caplog.text


@pytest.mark.slow
def test_full_disk_is_reported_once_and_reading_continues(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(copied(upload(url, tmp_path), tmp_path))

    def refuse(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with caplog.at_level(logging.WARNING):
        read(reader)
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 3
