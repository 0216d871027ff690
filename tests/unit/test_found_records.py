"""TFRecord files as people find them: other names, compressed, with headers that claim too much."""

import contextlib
import dataclasses
import gzip
import itertools
import pickle
import re
import shlex
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import pytest

from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.system.files import DataError
from data.tfrecord import shard_names as names
from data.tfrecord import split as records
from data.tfrecord.crc import framed, stored
from data.tfrecord.damage import verify
from data.tfrecord.framing import BadRecord, compression_of, read_records
from tests.unit.test_image_sources import write_folder
from tests.unit.test_split import contents as contents_of
from tests.unit.test_split import fail
from trainer.predict.records import is_records

RECORDS = [bytes([i]) * (i % 7) for i in range(40)]
PLAIN = b"".join(map(framed, RECORDS))


def raw_deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(content) + packer.flush()


def contents(directory: Path | str, split: str) -> list[bytes]:
    return contents_of(records.open_split(str(directory), split))


def typed_options(message: str) -> dict[str, str]:
    """The options of the command in a refusal."""
    name, *words = shlex.split(message.partition("python -m data.prepare ")[2])
    assert name == "rewrite"
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def rewrite(given: dict[str, str], **how: bool) -> None:
    splits = Options(splits=given.get("splits", ""))
    prepare("rewrite", given["data_dir"], given["source"], splits, **how)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.tfrec", "test.tfrec"),
        ("train00-1024.tfrec", "test00-1024.tfrec"),
        ("x-train.tfrecords-00000-of-00001", "x-test.tfrecords-00000-of-00001"),
        ("train/part-r-00000", "test/part-r-00000"),
        ("train/part-00000-c0.d1.tfrecord", "test/a.tfrec"),
        ("train/data-00000-of-00001", "test/x.tfrecords"),
    ],
)
def test_files_of_splits_are_read_in_place(train: str, test: str, tmp_path: Path) -> None:
    others = dict.fromkeys(("a.json", "train/a.json", "train/_SUCCESS", "train/.part.crc"), b"{}")
    write_folder(tmp_path, {**others, train: PLAIN, test: PLAIN + framed(b"more")})
    assert names.splits_in(str(tmp_path)) == ["test", "train"]
    for _ in ("reads the headers", "reads the index"):
        assert contents(tmp_path, "train") == RECORDS
        assert contents(tmp_path, "test") == [*RECORDS, b"more"]
    made = {path.name for path in tmp_path.rglob("*index*")}
    assert made == {".train.index.npz", ".test.index.npz"}
    said = fail(tmp_path, "trian")
    assert "--split=train, or in training " in said
    assert "--config.data.eval_split=test" in said


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["train/x-00000-of-00002"], "the first is train/x-00001-of-00002"),
        (["2020/train/a.tfrecord", "2020/test/a.tfrecord"], "--data_dir={}/2020$"),
        (["train.tfrecord-00001-of-00002"], "python -m data.prepare NAME --data_dir=OTHER_DIR"),
    ],
)
def test_refusal_says_what_to_do(files: list[str], said: str, tmp_path: Path) -> None:
    write_folder(tmp_path, dict.fromkeys(files, PLAIN))
    assert re.search(said.format(tmp_path), fail(tmp_path))


@pytest.mark.parametrize(
    "files",
    [
        {f"part-r-0000{i}": RECORDS[i * 10 : i * 10 + 10] for i in range(4)},
        {"a.tfrec": RECORDS[:30], "b.tfrec": RECORDS[30:]},
        {"x.0.bin.tfrec": RECORDS[:9], "x.1.tfrec": RECORDS[9:20], "x.2.tfrec": RECORDS[20:]},
        {"a": RECORDS[:9], "b": RECORDS[9:30], "c": [], "d": RECORDS[30:]},
    ],
)
def test_files_without_a_split_are_rewritten_by_the_command_in_the_refusal(
    files: dict[str, list[bytes]], tmp_path: Path
) -> None:
    made = {name: b"".join(map(framed, part)) for name, part in files.items()}
    write_folder(tmp_path / "in", {**made, "_SUCCESS": b"", "deeper/x": b""})
    given = typed_options(fail(tmp_path / "in"))
    for _ in ("writes", "is done already"):
        rewrite(given)
    assert contents(given["data_dir"], "train") + contents(given["data_dir"], "test") == RECORDS
    assert names.splits_in(given["data_dir"]) == ["test", "train"]
    write_folder(tmp_path / "in", {next(iter(made)): PLAIN})
    with pytest.raises(DataError, match=r"is now .* Add --overwrite"):
        rewrite(given)
    write_folder(Path(given["data_dir"]), {".train.damage.json": b"{}"})  # Of a run.
    rewrite(given, overwrite=True)
    found = contents(given["data_dir"], "train") + contents(given["data_dir"], "test")
    others = itertools.chain.from_iterable([*files.values()][1:])
    assert sorted(found) == sorted([*RECORDS, *others])


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("mnist.train.tfrecord", "mnist.test.tfrecord"),
        ("my_training_data-000", "my_eval_data-000"),
        ("x-training-a", "x-holdout-a"),
        ("x-a", "x-VALID-a"),
    ],
)
def test_refusal_takes_the_words_in_the_names(train: str, test: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {train: PLAIN, test: framed(b"test")})
    message = fail(tmp_path / "in")
    given = typed_options(message)
    rewrite(given)
    assert contents(given["data_dir"], "train") == RECORDS
    assert contents(given["data_dir"], "test") == [b"test"]
    for option, name in (("train_split", train), ("eval_split", test)):
        if found := re.search(rf"--config.data.{option}=([^,.]+)", message):
            assert name.startswith(found[1])


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ("part-*", "must be SPLIT=PATTERN.*Received: 'part-\\*'"),
        ("my-train=part-*", "must be SPLIT=PATTERN"),
        ("train=data-*", "'data-\\*' fits no file in"),
        ("train=*,test=part-1", "fits no file in .* that an earlier pattern does not fit"),
        ("train=part-*,test=*.txt", "a.txt is no TFRecord file.*--splits="),
    ],
)
def test_patterns_that_cannot_be_are_refused(splits: str, message: str, tmp_path: Path) -> None:
    write_folder(
        tmp_path / "in", {"part-0": PLAIN, "part-1": PLAIN, "a.txt": b"This is some text."}
    )
    with pytest.raises(DataError, match=message):
        prepare("rewrite", str(tmp_path / "out"), str(tmp_path / "in"), Options(splits=splits))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (PLAIN, ""),
        (b"", ""),
        (gzip.compress(PLAIN, mtime=0), "GZIP"),
        (zlib.compress(PLAIN), "ZLIB"),
        (zlib.compress(PLAIN, 0), "ZLIB"),
        (gzip.compress(b"", mtime=0), "GZIP"),
        (gzip.compress(b"a,b\n1,2\n" * 9, mtime=0), None),
        (raw_deflate(PLAIN), None),
        (b"a,b\n1,2\n", None),
        (PLAIN[:11], None),
        (framed(b"x" * 0x9C78), ""),  # Begins as ZLIB does.
        (b"\x78\x9c" + PLAIN[2:], None),
    ],
)
def test_first_bytes_tell_compression(content: bytes, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    assert compression_of(str(tmp_path / "a")) == expected


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("where", ["{}.tfrecord", "{}/part-r-00000"])
def test_compressed_files_are_rewritten_by_the_command_in_the_refusal(
    compress: Callable[[bytes], bytes], where: str, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    write_folder(source, {where.format(split): compress(PLAIN) for split in ("train", "test")})
    message = fail(source)
    assert "is compressed (" in message
    given = typed_options(message)
    assert given == {"source": str(source), "data_dir": f"{source}-plain"}
    rewrite(given)
    for split in ("train", "test"):
        assert contents(given["data_dir"], split) == RECORDS


def test_index_without_a_dot_of_an_earlier_version_is_read_and_left(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train.tfrecord": PLAIN})
    first = records.open_split(str(tmp_path), "train")
    (hidden,) = tmp_path.glob(".train.index.npz")
    former = hidden.rename(tmp_path / "train.index.npz")
    assert list(tmp_path.glob("train*")) == [former, tmp_path / "train.tfrecord"]
    before = former.stat().st_mtime_ns
    # The headers are not read again: a wrong one is not found.
    (tmp_path / "train.tfrecord").write_bytes(b"\1" + PLAIN[1:])
    found = records.open_split(str(tmp_path), "train")
    assert found.fingerprint == first.fingerprint
    assert not hidden.exists()
    # Of other files, it is neither used nor removed.
    (tmp_path / "train.tfrecord").rename(tmp_path / "train.tfrec")
    write_folder(tmp_path, {"train.tfrec": PLAIN + PLAIN})
    for _ in ("writes a new one", "reads it"):
        assert records.open_split(str(tmp_path), "train").num_examples == 2 * len(RECORDS)
    assert names.saved_path(str(tmp_path), "train", names.INDEX) == str(hidden)
    assert former.stat().st_mtime_ns == before
    assert names.splits_in(str(tmp_path), lost_too=True) == ["train"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("part-r-00000", PLAIN, True),
        ("part-r-00000.gz", gzip.compress(PLAIN, mtime=0), True),
        ("x.tfrec", b"", True),
        ("x.csv", b"", False),
        ("x.png", b"\x89PNG", False),
        ("folder/x.png", b"\x89PNG", False),
    ],
)
def test_first_bytes_tell_records(
    name: str, content: bytes, expected: bool, tmp_path: Path
) -> None:
    write_folder(tmp_path, {name: content})
    assert is_records(str(tmp_path / name.partition("/")[0])) == expected


def sparse_file(directory: Path, before: int, num_bytes: int, after: int = 0) -> None:
    """Records, one whose header claims `num_bytes`, all of them a hole in the file, and more."""
    length = num_bytes.to_bytes(8, "little")
    with open(directory / "train.tfrecord", "wb") as file:
        file.write(b"".join(map(framed, RECORDS[:before])))
        file.write(length + stored(google_crc32c.value(length)))
        file.seek(file.tell() + num_bytes + 4)
        file.truncate()
        file.write(b"".join(map(framed, RECORDS[:after])))


@contextlib.contextmanager
def memory_below(num_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("before", "after"), [(0, 0), (13, 0), (13, 7)])
def test_record_that_claims_4_gb_takes_no_memory(before: int, after: int, tmp_path: Path) -> None:
    sparse_file(tmp_path, before, 4 << 30, after)
    with memory_below(8 << 20):
        split = records.open_split(str(tmp_path), "train")
        (shard,) = split.shards
        many = records.shard_of(shard.path, shard.num_bytes, shard.offsets, 8)
        for opened in (split, dataclasses.replace(split, shards=(many,), chunk_examples=8)):
            with pytest.raises(DataError) as caught:
                records.check_record_bytes(opened, 1 << 30)
            message = str(caught.value)
            assert f"train.tfrecord: record {before} at byte {shard.offsets[before]} " in message
            typed = message.partition("--config.data.max_record_bytes=")[2].partition(".")[0]
            records.check_record_bytes(opened, int(typed))


def test_long_record_is_verified_without_memory_for_it(tmp_path: Path) -> None:
    sparse_file(tmp_path, 5, 64 << 20, 9)
    split = records.open_split(str(tmp_path), "train")
    with memory_below(8 << 20):
        [found] = verify(split)
    assert (found.record, found.reason) == (5, "the data does not fit its CRC")


def test_header_that_claims_more_than_its_file_has_is_named(tmp_path: Path) -> None:
    sparse_file(tmp_path, 13, 1 << 10)
    split = records.open_split(str(tmp_path), "train")
    offset = sum(len(record) + 16 for record in RECORDS[:13])
    length = (4 << 30).to_bytes(8, "little")
    with open(split.shards[0].path, "r+b") as file:
        file.seek(offset)
        file.write(length + stored(google_crc32c.value(length)))
    with pytest.raises(BadRecord, match=f"record 13 at byte {offset}") as refused:
        list(read_records(split.shards[0].path, 0, split.shards[0].num_bytes, 0))
    # As data.prepare sends it from one process to another.
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    [found] = verify(split)
    assert (found.record, found.offset) == (13, offset)
    assert "inside this record" in found.reason
