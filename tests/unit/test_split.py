"""Shards on disk: what is written is found again, and what is wrong is named with file and
place."""

import gzip
import logging
import os
import re
import shlex
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.system import files
from data.tfrecord import shard_names as names
from data.tfrecord import split as records
from data.tfrecord.crc import framed
from data.tfrecord.damage import open_good, verify
from tests.shards import write_shards


def write(directory: Path, examples: list[bytes], num_shards: int = 2) -> records.Split:
    return write_shards(
        examples, str(directory), "toy", "train", num_shards, num_examples=len(examples)
    )


def contents(split: records.Split) -> list[bytes]:
    dataset = tf.data.TFRecordDataset([shard.path for shard in split.shards])
    return [record for batch in dataset.batch(1024).as_numpy_iterator() for record in batch]


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def rebuilt(directory: Path) -> records.Split:
    (directory / ".train.index.npz").unlink()
    return records.open_split(str(directory), "train")


def assert_same(a: records.Split, b: records.Split) -> None:
    assert (a.name, a.chunk_examples, a.fingerprint) == (b.name, b.chunk_examples, b.fingerprint)
    for x, y in zip(a.shards, b.shards, strict=True):
        assert (x.path, x.num_bytes, x.num_records) == (y.path, y.num_bytes, y.num_records)
        assert np.array_equal(x.offsets, y.offsets)


EXAMPLES = [bytes([i % 256]) * (i % 37) for i in range(5000)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=40),
    repeats=st.sampled_from([1, 3, 60]),
    num_shards=st.integers(1, 5),
)
def test_index_written_kept_and_rebuilt_are_the_same(
    tmp_path: Path, lengths: list[int], repeats: int, num_shards: int
) -> None:
    shutil.rmtree(tmp_path)
    examples = [os.urandom(n) for n in lengths * repeats]
    written = write(tmp_path, examples, num_shards)
    assert contents(written) == examples
    assert_same(records.open_split(str(tmp_path), "train"), written)
    assert_same(rebuilt(tmp_path), written)
    assert written.num_examples == len(examples)
    counts = written.shard_lengths
    assert max(counts) - min(counts) <= 1
    for shard in written.shards:
        data = Path(shard.path).read_bytes()
        for number, offset in enumerate(shard.offsets):
            first = sum(counts[: written.shards.index(shard)]) + number * written.chunk_examples
            assert struct.unpack_from("<Q", data, offset)[0] == len(examples[first])


def test_records_longer_than_what_is_read_at_once_are_indexed(tmp_path: Path) -> None:
    examples = [bytes(3 << 20), b"", bytes(40_000), *[bytes(70_000)] * 60, bytes(5)]
    written = write(tmp_path, examples, num_shards=1)
    assert_same(rebuilt(tmp_path), written)
    assert written.chunk_examples == 1
    assert written.shards[0].num_records == 64


def test_chunks_are_small_in_bytes_and_many() -> None:
    sizes = [(10**6, 830_000_000), (10**6, 20_000_000), (10**6, 10**11), (5000, 100_000), (3, 48)]
    assert [records.chunk_examples_for(*size) for size in sizes] == [39, 64, 1, 4, 1]


def test_kept_index_is_used_and_one_that_does_not_fit_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, EXAMPLES)
    index = tmp_path / ".train.index.npz"
    before = index.stat().st_mtime_ns
    records.open_split(str(tmp_path), "train")
    assert index.stat().st_mtime_ns == before, "a saved index that fits is left alone"
    other = tmp_path / "other"
    written = write(other, EXAMPLES[:4321], num_shards=3)
    for path in tmp_path.glob("toy-train*"):
        path.unlink()
    for shard in written.shards:
        shutil.copy(shard.path, tmp_path)
    with caplog.at_level(logging.WARNING):
        found = records.open_split(str(tmp_path), "train")
    assert "building it again" in caplog.text
    assert found.num_examples == 4321
    assert found.fingerprint == written.fingerprint, "directories do not count"
    index.write_bytes(b"PK not an index")
    assert records.open_split(str(tmp_path), "train").num_examples == 4321
    assert index.stat().st_size > 100, "and it was saved again"


def test_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "a", EXAMPLES)
    fewer = write(tmp_path / "b", EXAMPLES[1:])
    sharded = write(tmp_path / "c", EXAMPLES, num_shards=3)
    assert len({one.fingerprint, fewer.fingerprint, sharded.fingerprint}) == 3


def test_directory_that_cannot_be_written_to_is_indexed_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path, EXAMPLES)
    (tmp_path / ".train.index.npz").unlink()
    if os.geteuid() == 0:
        # Root may write anywhere, so the refusal must come from the call itself.
        def refuse(source: str, target: str) -> None:
            raise PermissionError(13, "Permission denied", target)

        monkeypatch.setattr(os, "replace", refuse)
    else:
        tmp_path.chmod(0o555)
    with caplog.at_level(logging.WARNING):
        found = records.open_split(str(tmp_path), "train")
    tmp_path.chmod(0o755)
    assert_same(found, written)
    assert "Permission denied" in caplog.text
    assert not list(tmp_path.glob("*index*")), "nothing is left behind"


def test_many_records_are_indexed_and_opened_fast(tmp_path: Path) -> None:
    # A loose bound, ten times what it takes: only a scan that reads each record for itself, or an
    # index that is not used, would miss it.
    (tmp_path / "train.tfrecord").write_bytes(framed(b"x" * 20) * 200_000)
    begin = time.perf_counter()
    split = records.open_split(str(tmp_path), "train")
    scanned = time.perf_counter()
    assert split.num_examples == 200_000
    records.open_split(str(tmp_path), "train")
    opened = time.perf_counter()
    assert scanned - begin < 2.0
    assert opened - scanned < 0.5


@pytest.mark.parametrize(
    "shards",
    [
        ["mnist-train.tfrecord-00000-of-00002", "mnist-train.tfrecord-00001-of-00002"],
        ["train.tfrecord"],
        ["train.tfrecords"],
        ["train.tfrecord-00000-of-00001"],
        ["train-00000-of-00002", "train-00001-of-00002"],
        ["train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord"],
        ["train-0.tfrecord", "train-1.tfrecord"],
        ["train_0.tfrecord", "train_1.tfrecord"],
        ["my-set-train.tfrecord-00000-of-00001"],
    ],
)
def test_usual_names_of_shards_are_found_in_order(tmp_path: Path, shards: list[str]) -> None:
    others = ["toy-test.tfrecord-00000-of-00001", "pretrain.tfrecord"]
    for name in [*shards, *others, *(name.replace("train", "val") for name in shards)]:
        (tmp_path / name).write_bytes(framed(b"abc"))
    (tmp_path / "dataset_info.json").write_text("{}")
    split = records.open_split(str(tmp_path), "train")
    assert [os.path.basename(shard.path) for shard in split.shards] == shards
    assert records.open_split(str(tmp_path), "val").num_examples == len(shards)
    assert names.splits_in(str(tmp_path)) == ["pretrain", "test", "train", "val"]


@pytest.mark.parametrize(
    ("split", "others"),
    [
        (["train-0"], ["trainval-0", "trainall"]),
        (["train0", "train1"], ["trainval0"]),
        (["test-0", "test-1"], ["testing_1"]),
        (["val-0"], ["validation-0"]),
        # What follows after a sign may be the name of a shard.
        (["train_1", "train_2", "train_final"], []),
        (["train-3", "train-us-1"], []),
        (["train_5000", "train_5c0e", "train_abcd"], []),
        (["train_a", "train_b-0"], []),
        (["train/train-0", "train/a-train", "train/b"], []),
    ],
)
def test_split_has_no_shards_of_another_whose_name_begins_with_its_name(
    split: list[str], others: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    for name in [*split, *others]:
        (tmp_path / f"{name}.tfrecord").write_bytes(framed(b"abc"))
    found = names.shard_paths(str(tmp_path), re.split(r"[-_/\d]", split[0])[0])
    assert found == [f"{tmp_path}/{name}.tfrecord" for name in sorted(split)]


def fail(directory: Path | str, split: str = "train") -> str:
    with pytest.raises(files.DataError) as caught:
        records.open_split(str(directory), split)
    return str(caught.value)


def assert_refused(directory: Path, *said: str, split: str = "train") -> None:
    message = fail(directory, split)
    assert all(part in message for part in said), message


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, EXAMPLES, num_shards=4)
    (tmp_path / "toy-train.tfrecord-00002-of-00004").unlink()
    name = "toy-train.tfrecord-00002-of-00004"
    assert_refused(tmp_path, name, "3 of the 4", "python -m data.prepare")


def test_two_sets_of_shards_in_one_directory_are_refused(tmp_path: Path) -> None:
    write(tmp_path, EXAMPLES, num_shards=2)
    write(tmp_path, EXAMPLES, num_shards=3)
    assert_refused(tmp_path, "of-00002", "of-00003")


def test_missing_empty_and_wrong_directories_say_what_to_type(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "python -m data.prepare")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "is empty", "python -m data.prepare")
    (tmp_path / "file").touch()
    assert_refused(tmp_path / "file", f"--data_dir={tmp_path}")
    version = tmp_path / "mnist" / "3.0.1"
    write(version, EXAMPLES)
    assert_refused(tmp_path, f"--data_dir={version}")
    assert_refused(version, "only train", split="test")


def stale(directory: Path) -> None:
    shard = write(directory, EXAMPLES).shards[0]
    Path(shard.path).write_bytes(framed(b"another"))


def uncounted(directory: Path) -> None:
    split = write(directory, EXAMPLES)
    (directory / ".train.index.npz").unlink()
    flip(split.shards[0].path, 0)


def compressed(directory: Path) -> None:
    directory.mkdir()
    with gzip.open(directory / "train.tfrecord", "wb") as file:
        file.write(framed(b"record"))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda directory: None, "--data_dir={}"),
        (lambda directory: directory.touch(), "--data_dir={parent}"),
        (lambda directory: write(directory / "3.0.1", EXAMPLES), "--data_dir={}/3.0.1"),
        (stale, "{}/.train.index.npz"),
        (uncounted, "--data_dir={}"),
        (compressed, "--source={}"),
        (compressed, "--data_dir={}-plain"),
    ],
)
def test_a_command_in_a_message_takes_a_directory_with_spaces(
    make: Callable[[Path], object], word: str, tmp_path: Path
) -> None:
    directory = tmp_path / "my data" / "of today"
    directory.parent.mkdir()
    make(directory)
    with pytest.raises(files.DataError) as refused:
        (open_good if make is uncounted else records.open_split)(str(directory), "train")
    assert word.format(directory, parent=directory.parent) in shlex.split(str(refused.value))


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_unreadable_directory_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    assert_refused(tmp_path, "permission denied")
    tmp_path.chmod(0o755)


@pytest.mark.parametrize("opened", [records.open_split, open_good])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_files_that_were_written_empty_are_valid(
    opened: Callable[[str, str], records.Split], empty: int, tmp_path: Path
) -> None:
    examples = EXAMPLES[:500]
    expected = write(tmp_path, examples, num_shards=2)
    (tmp_path / ".train.index.npz").unlink()
    names = ["toy-train.tfrecord-00000-of-00002", "toy-train.tfrecord-00001-of-00002"]
    names.insert(empty, "")
    for number, name in reversed(list(enumerate(names))):
        path = tmp_path / f"toy-train.tfrecord-0000{number}-of-00003"
        if name:
            (tmp_path / name).rename(path)
        else:
            path.touch()
    for _ in ("reads the headers", "reads the index"):
        split = opened(str(tmp_path), "train")
        assert split.shard_lengths == expected.shard_lengths
        assert contents(split) == examples
        assert verify(split) == []
    os.truncate(split.shards[1].path, 0)
    assert_refused(tmp_path, f"{split.shards[1].path} has 0 bytes, and had")


def test_split_of_empty_files_alone_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "train.tfrecord").touch()
    assert_refused(tmp_path, "Split 'train' in", "has no records")
    with pytest.raises(files.DataError, match="has no records"):
        open_good(str(tmp_path), "train")


@pytest.mark.parametrize("cut", [1, 5, 20, 40])
def test_truncated_shard_is_named_with_record_and_offset(tmp_path: Path, cut: int) -> None:
    split = write(tmp_path, [b"x" * 30] * 4000)
    shard = split.shards[1]
    os.truncate(shard.path, shard.num_bytes - cut)
    # Records are 46 bytes: a cut of 40 leaves 6 bytes of the last record, less than a header.
    assert_refused(tmp_path, shard.path, "record 1999 at byte 91954", "cut short")
    [damage] = verify(split)
    assert (damage.path, damage.offset) == (shard.path, shard.num_bytes - cut)


def test_file_that_is_no_tfrecord_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.tfrecord").write_bytes(b"This is no TFRecord file at all." * 10)
    assert_refused(tmp_path, "not a TFRecord")


def test_flipped_bits_in_data_are_found_with_file_record_and_offset(tmp_path: Path) -> None:
    split = write(tmp_path, [b"x" * 30] * 6000)
    shard = split.shards[1]
    for record in (0, 7, 8, 1500, 2999):
        flip(shard.path, record * 46 + 12 + 3)
    found = verify(split)
    assert [(d.path, d.record, d.offset) for d in found] == [
        (shard.path, record, record * 46) for record in (0, 7, 8, 1500, 2999)
    ]
    assert f"{shard.path}: record 7 at byte 322: " in str(found[1])


def test_flipped_bit_in_a_length_is_found_and_what_follows_is_still_checked(
    tmp_path: Path,
) -> None:
    split = write(tmp_path, [b"x" * 30] * 6000)
    assert split.chunk_examples == 5
    shard = split.shards[0]
    flip(shard.path, 101 * 46)
    flip(shard.path, 104 * 46 + 20)  # Same chunk: cannot be told apart from the damaged length.
    flip(shard.path, 106 * 46 + 20)
    found = verify(split)
    assert [(d.record, d.offset) for d in found] == [(101, 101 * 46), (106, 106 * 46)]
    assert "length" in found[0].reason
    (tmp_path / ".train.index.npz").unlink()
    assert_refused(tmp_path, "record 101 at byte 4646")


def test_writing_fewer_or_more_examples_than_announced_leaves_nothing(tmp_path: Path) -> None:
    for announced in (4, 6):
        with pytest.raises(files.DataError, match=f"{announced}"):
            write_shards([b"x"] * 5, str(tmp_path), "toy", "train", 2, announced)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(files.DataError, match="no examples"):
        write_shards([], str(tmp_path), "toy", "train", 2, 0)
