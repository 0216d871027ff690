"""`python -m data.inspect`: what is in a directory, how many ids, what is damaged, a good copy."""

import functools
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from data import id_counts, inspect
from data.id_counts import Counts, count_ids
from data.prepare.preparing import prepare, repair
from data.prepare.sources import Options
from data.system import files
from data.tfrecord import damage
from data.tfrecord import shard_names as names
from data.tfrecord import split as records
from data.tfrecord.examples import Value, example_bytes
from tests.shards import write_shards
from tests.unit.test_damage import FAULTS, examples, shard
from tests.unit.test_image_sources import png, write_folder
from tests.unit.test_prepare import ROOT, digest
from tests.unit.test_prepare import run as run_module
from tests.unit.test_split import contents

run = functools.partial(run_module, cwd=ROOT, module="data.inspect")


def test_directory_is_described_with_counts_files_and_first_examples(digits: Path) -> None:
    lines = list(inspect.describe(str(digits), ["test", "train"], num_examples=2))
    assert "  image: Tensor uint8 [8, 8, 1]" in lines
    assert "  label: ClassLabel of 10 classes" in lines
    split = records.open_split(str(digits), "train")
    assert f"train: 1,437 examples, fingerprint {split.fingerprint}" in lines
    size = os.path.getsize(split.shards[0].path)
    expected = f"  digits-train.tfrecord-00000-of-00001: 1,437 examples, {size:,} bytes"
    assert expected in lines
    (counts, _) = [line for line in lines if line.startswith("  label  0: ")]
    assert sum(int(word) for word in counts.split()[2::2]) == 360
    assert len([line for line in lines if line.startswith("  example ")]) == 4
    first = tf.train.Example.FromString(contents(records.open_split(str(digits), "test"))[0])
    label = first.features.feature["label"].int64_list.value[0]
    assert f"  example 0: image=<64 bytes>  label={label}" in lines


def test_names_of_classes_and_text_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("word,size,kind\n" + "hello,1.5,cat\nworld,2,dog\n" * 9)
    options = Options(label="kind", test_fraction=0.4)
    prepare("csv:a", str(tmp_path / "out"), str(tmp_path / "a.csv"), options)
    lines = list(inspect.describe(str(tmp_path / "out"), ["train"], num_examples=1))
    assert "  word: Text string []" in lines
    assert any(line.startswith("  kind  cat: ") for line in lines)
    assert any("  word='" in line for line in lines)
    assert not any(line.startswith("test: ") for line in lines)


def test_integers_are_shown_with_all_digits(tmp_path: Path) -> None:
    serialized = [example_bytes({"id": 1234567890123, "x": 0.1})]
    write_shards(serialized, str(tmp_path), "toy", "train", 1, 1)
    lines = list(inspect.describe(str(tmp_path), ["train"], num_examples=1))
    assert lines[-1] == "  example 0: id=1234567890123  x=0.1"


def test_records_without_features_are_described_as_they_are(tmp_path: Path) -> None:
    prepare("digits", str(tmp_path / "out"), options=Options(layout="image_raw"))
    (tmp_path / "out" / "features.json").unlink()
    said = "\n".join(inspect.describe(str(tmp_path / "out"), ["test"], num_examples=1))
    assert "no features.json" in said
    assert "depth=1  height=8  image_raw=<64 bytes>  label=" in said
    assert "  label  0: " in said


def test_records_that_are_no_examples_are_described(tmp_path: Path) -> None:
    texts = [b"plain text %d" % i for i in range(9)]
    write_shards(texts, str(tmp_path), "toy", "train", 1, 9)
    lines = list(inspect.describe(str(tmp_path), ["train"], num_examples=1))
    assert "  label  not counted: in some record it is not an integer" in lines
    assert "  example 0: 'plain text 0', not a tf.train.Example" in lines
    prepare("digits", str(tmp_path / "digits"))
    (tmp_path / "features.json").write_bytes((tmp_path / "digits/features.json").read_bytes())
    with pytest.raises(files.DataError, match="Record 0 of split 'train'"):
        inspect.image_grid(str(tmp_path), "train")


def test_label_is_counted_where_only_some_records_have_one(tmp_path: Path) -> None:
    some: list[dict[str, Value]] = [{"x": 1.5}, {"x": 2.5, "label": 3}, {"label": 3}, {"x": 0.5}]
    serialized = [example_bytes(values) for values in some]
    write_shards(serialized, str(tmp_path), "toy", "train", 1, 4)
    lines = list(inspect.describe(str(tmp_path), ["train"], num_examples=0))
    assert "  label  3: 2  without: 2" in lines
    write_shards(serialized[:1], str(tmp_path), "toy", "none", 1, 1)
    lines = list(inspect.describe(str(tmp_path), ["none"], num_examples=0))
    assert not [line for line in lines if line.startswith("  label")]


@pytest.mark.slow
def test_good_copy_is_written_from_url_to_url(tmp_path: Path) -> None:
    source, target = "ram://repair/damaged", "ram://repair/good"
    write_shards(examples(), source, "toy", "train", 3, 6000)
    prepare("digits", str(tmp_path / "digits"))
    path = names.shard_paths(source, "train")[1]
    with tf.io.gfile.GFile(path, "rb") as file:
        content = bytearray(file.read())
    content[46 * 9 + 20] ^= 1
    files.replace_file(path, bytes(content))
    files.replace_file(f"{source}/features.json", b"{}")
    lines = repair(source, ["train"], target)
    assert lines[0] == "train: 5,999 records copied, 1 left out"
    copied = contents(records.open_split(target, "train"))
    assert copied == [*examples()[:2009], *examples()[2010:]]
    assert files.read_text(f"{target}/features.json") == "{}"
    with pytest.raises(files.DataError, match="is there already"):
        repair(source, ["train"], target)


@pytest.mark.slow
def test_grid_has_the_first_images_in_their_order(digits: Path, tmp_path: Path) -> None:
    done = run(f"--data_dir={digits}", f"--grid={tmp_path / 'grid.png'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n  example ") == 6, "three of each split"
    picture = tf.io.decode_png((tmp_path / "grid.png").read_bytes()).numpy()
    assert picture.shape == (64, 64, 1)
    stored = contents(records.open_split(str(digits), "train"))
    for number in (0, 7, 8, 63):
        feature = tf.train.Example.FromString(stored[number]).features.feature
        expected = np.frombuffer(feature["image"].bytes_list.value[0], np.uint8).reshape(8, 8)
        row, column = divmod(number, 8)
        cell = picture[8 * row : 8 * row + 8, 8 * column : 8 * column + 8, 0]
        assert np.array_equal(cell, expected)


def test_grid_of_images_of_many_sizes_and_of_none(tmp_path: Path) -> None:
    images = {f"{s}/a/{i}.png": png(4 + i, 9) for s in ("train", "test") for i in range(3)}
    source = write_folder(tmp_path / "source", images)
    prepare("folder:x", str(tmp_path / "out"), str(source))
    picture = tf.io.decode_png(inspect.image_grid(str(tmp_path / "out"), "train"))
    assert picture.shape == (96, 8 * 96, 3)
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n" * 90)
    prepare("csv:a", str(tmp_path / "table"), str(tmp_path / "a.csv"))
    with pytest.raises(files.DataError, match="has no image"):
        inspect.image_grid(str(tmp_path / "table"), "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "number"), [("flipped lengths", 0), ("cut in a record", 2), ("removed", 1)]
)
def test_damage_is_named_and_a_good_copy_written(tmp_path: Path, fault: str, number: int) -> None:
    damaged, lost, named = FAULTS[fault]
    source, out = tmp_path / "source", tmp_path / "good"
    write_shards(examples(), str(source), "toy", "train", 3, 6000)
    (source / "label.labels.txt").write_text("a\nb\n")
    damaged(source)
    before = digest(source)

    of_damage = [line for line, tells in inspect.verify(str(source), ["train"]) if tells]
    assert any(named in line for line in of_damage)
    assert any(shard(source, number) in line for line in of_damage)
    said = repair(str(source), ["train"], str(out))
    assert said[0] == f"train: {6000 - len(lost):,} records copied, {len(lost):,} left out"

    assert digest(source) == before, "the original is left alone"
    kept = [example for i, example in enumerate(examples()) if i not in lost]
    assert contents(records.open_split(str(out), "train")) == kept
    assert damage.open_good(str(out), "train").num_skipped == 0
    assert (out / ".train.index.npz").exists()
    assert (out / "label.labels.txt").read_text() == "a\nb\n"
    assert not any(tells_of_damage for _, tells_of_damage in inspect.verify(str(out), ["train"]))


@pytest.mark.slow
def test_damage_ends_the_command_with_2_and_repair_with_0(tmp_path: Path) -> None:
    write_shards(examples(), str(tmp_path / "a"), "toy", "train", 3, 6000)
    FAULTS["flipped bit"][0](tmp_path / "a")
    verified = run(f"--data_dir={tmp_path / 'a'}", "--verify")
    assert verified.returncode == 2
    assert FAULTS["flipped bit"][2] in verified.stdout
    repaired = run(f"--data_dir={tmp_path / 'a'}", f"--repair={tmp_path / 'b'}")
    assert repaired.returncode == 0, repaired.stderr
    assert "train: 5,999 records copied, 1 left out" in repaired.stdout


@pytest.mark.slow
@pytest.mark.parametrize("known_by", ["the index", "dataset_info.json"])
def test_split_whose_files_are_all_missing_is_damage(known_by: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_shards(examples(), str(tmp_path), "toy", split, 1, 6000)
    next(tmp_path.glob("toy-test.tfrecord*")).unlink()
    if known_by != "the index":
        (tmp_path / ".test.index.npz").unlink()
        described = [{"name": "test", "shardLengths": ["6000"]}, {"name": "train"}]
        (tmp_path / "dataset_info.json").write_text(json.dumps({"splits": described}))
    verified = run(f"--data_dir={tmp_path}", "--verify")
    assert verified.returncode == 2
    assert "test: all files of this split are missing" in verified.stdout
    assert "toy-train.tfrecord-00000-of-00001: 6,000 records, complete" in verified.stdout


@pytest.mark.slow
def test_what_cannot_be_counted_is_said_and_the_other_records_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_shards(examples(), str(source), "toy", "train", 3, 6000)
    (source / ".train.index.npz").unlink()
    FAULTS["flipped length"][0](source)
    said = repair(str(source), ["train"], str(tmp_path / "good"))
    assert "4,101 records copied, 0 and some that cannot be counted left out" in said[0]
    kept = contents(records.open_split(str(tmp_path / "good"), "train"))
    assert kept == [e for i, e in enumerate(examples()) if not 101 <= i < 2000]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "A directory is needed: --data_dir=DIR"),
        (("a",), "Received: a. Write --data_dir=a"),
        (("a", "b"), "Received: a b. Write --data_dir=a"),
        (("--data_dir={tmp}", "--verify", "--repair=x"), "--verify --repair. Leave one of them"),
        (("--data_dir={tmp}/nowhere",), "There is no directory"),
        (("--data_dir={tmp}",), "holds no TFRecord shards"),
        (
            ("--data_dir={digits}", "--split=tset"),
            "only test, train. Add the shards, or name one of these: --split=test,",
        ),
        (
            ("--data_dir={digits}", "--split=trian", "--verify"),
            "no split 'trian', only test, train",
        ),
        (
            ("--data_dir={digits}", "--ids", "--num_examples=5"),
            "--ids shows no examples. Leave --num",
        ),
        (("--data_dir={digits}", "--repair={digits}"), "is there already"),
        (("--data_dir={digits}", "--verfy"), "--help lists the flags"),
        (("--data_dir={digits}", "--grid={tmp}/missing/x.png"), "x.png cannot be written: No such"),
    ],
)
def test_wrong_command_lines_end_with_2_and_a_hint(
    digits: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = digest(digits)
    done = run(*(argument.format(tmp=tmp_path, digits=digits) for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert digest(digits) == before
    assert list(tmp_path.iterdir()) == []


def counted(data_dir: Path) -> dict[str, Counts]:
    split = records.open_split(str(data_dir), "train")
    return {counts.name: counts for counts in count_ids(str(data_dir), split)}


@pytest.mark.parametrize("most_pending", [1, 50, 1 << 20])
def test_merges_count_each_id(most_pending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_counts, "_MOST_PENDING", most_pending)
    random, expected = np.random.default_rng(1), Counter[int]()
    counter, of_list = Counts("x"), Counts("y", is_list=True)
    for _ in range(30):
        ids = random.zipf(1.3, (7, 5)).astype(np.int64)
        counter.add(ids)
        expected.update(ids.ravel().tolist())
    for each in (counter, of_list):
        each.add(np.array([-1, -1, -5]))
        each.merge()
    expected.update([-1, -1, -5])
    assert dict(zip(counter.ids.tolist(), counter.times.tolist(), strict=True)) == expected
    assert counter.num_ids == 30 * 35 + 3
    assert of_list.ids.tolist() == [-5], "-1 fills up lists"
    assert counter.num_used(2) == sum(times > 1 for times in expected.values())
    most = sum(times for _, times in expected.most_common(3))
    assert counter.share_of_most_frequent(3) == pytest.approx(most / (30 * 35 + 3))


def test_columns_of_clicks_are_counted(tmp_path: Path) -> None:
    prepare("clicks", str(tmp_path), options=Options(num_clicks=5000, id_scale=0.001))
    expected = Counter[int]()
    for record in contents(records.open_split(str(tmp_path), "train")):
        feature = tf.train.Example.FromString(record).features.feature["categorical"]
        ids = np.frombuffer(feature.bytes_list.value[0], "<i4")
        expected.update([int(ids[3])])
    found = counted(tmp_path)
    assert len(found) == 26 + 1
    column = found["categorical[3]"]
    assert dict(zip(column.ids.tolist(), column.times.tolist(), strict=True)) == expected
    assert found["categorical, all"].num_ids == 26 * 5000
    lines = list(inspect.table_sizes(str(tmp_path), ["train"]))
    assert lines[0] == "train: 5,000 examples"
    (line,) = [line for line in lines if line.startswith("  categorical[3] ")]
    counts = len(expected), sum(times == 1 for times in expected.values()), max(expected)
    assert line.split()[1:4] == [f"{count:,}" for count in counts]


def test_lists_are_counted_without_what_fills_them_up(tmp_path: Path) -> None:
    source = tmp_path / "films.csv"
    rows = ["3|17|5,Drama|Comedy,0", "-2,Drama,1", "17,,1"] * 20
    source.write_text("\n".join(["tags,genres,clicked", *rows]))
    out = tmp_path / "out"
    prepare("csv:films", str(out), str(source), Options(label="clicked", lists="tags,genres"))
    found = counted(out)
    assert found["tags, all"].ids.tolist() == [-2, 3, 5, 17]
    assert found["genres, all"].num_different == 2
    assert found["genres[1]"].num_different == 1


def test_data_without_ids_is_refused(digits: Path) -> None:
    with pytest.raises(files.DataError, match="no feature of integers or text"):
        counted(digits)
