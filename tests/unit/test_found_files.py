"""Tables and pictures as people find them: gaps, other separators, no header, compressed, cut."""

import functools
import gzip
import os
import tarfile
from csv import field_size_limit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data.example_features import Feature, class_names, read_features
from data.prepare.preparing import prepare
from data.prepare.sources import Options, csv, folder, idx
from data.system.files import DataError, files_below, shown
from tests.unit.test_image_sources import images_of, write_cifar10, write_folder
from tests.unit.test_prepare import digest, parsed, run, write_idx
from tests.unit.test_prepare_advice import PNG
from trainer.predict.records import rows_of


def write_splits(directory: Path, train: str, test: str) -> Path:
    directory.mkdir()
    (directory / "train.csv").write_text(train)
    (directory / "test.csv").write_text(test)
    return directory


NONE, NO_HEADER = Options(), Options(header=False)
GAPS = "age,height,name,label\n1,1.5,x,a\nNA,2.5,,b\n3,,NA,a\n4,?,y,\n5,5.5,z,b\n"


@pytest.mark.parametrize(
    ("missing", "age", "height", "labels"),
    [
        ("drop", [1, 5], [1.5, 5.5], [0, 1]),
        ("-1", [1, -1, 3, 5], [1.5, 2.5, -1, 5.5], [0, 1, 0, 1]),
    ],
)
def test_missing_values_are_counted_and_dropped_or_replaced(
    missing: str, age: list[int], height: list[float], labels: list[int], tmp_path: Path
) -> None:
    # A label cannot be replaced.
    train = GAPS if missing == "drop" else GAPS.replace("4,?,y,\n", "")
    write_splits(tmp_path / "in", train, "age,height,name,label\n1,1,x,a\n")
    flags = ("--source=in", "--label=label", f"--missing={missing}", "--data_dir=out")
    done = run("csv:x", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "missing values by column: age 1, height " in done.stderr
    if missing == "drop":
        assert "label 1; 3 of 6 rows are left out" in done.stderr
    known = read_features(str(tmp_path / "out"))
    assert known["age"].dtype == "int64"
    found = parsed(tmp_path / "out", "train", "age", "height", "label")
    assert [values.tolist() for values in found] == [age, height, labels]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,b\n1,2\nNA,3\n,4\n", {}, r"line 4: column a has '', .* 2 of its numbers are"),
        ("a,b\n1,2\n?,3\n", NONE, r"line 3: column a has '\?'.*--missing=drop.*or --missing=0"),
        ("a,b\n1,2\n,3\n", Options("a", missing="0"), "the label a is empty. --missing=drop"),
        ("a,b\n1,2\n\n,3\n", Options("a"), r"line 4: the label a is empty"),
        ("a,b\n1,2\nNA,3\n", Options("a", missing="0"), r"leaves out such rows\.$"),
        ("a,b\n,2\n1,\n", Options(missing="drop"), "leaves no row"),
        ("a,b\n", NONE, r"has no rows\.$"),
        ("a,b\n0.5,2\n1.0,3\n", Options("a"), r"line 2: a is the label, and has '0\.5'; needed"),
        ("a,b\n-1,2\n", Options("a"), "a is the label, and has -1; needed are integers from 0"),
        ("01501,40.1\n01502,40.2\n", NONE, "begins with numbers, 01501, 40.1.*--noheader"),
        ("1 000;3,5;1e999\n2 000;1;2\n", NONE, "begins with numbers, 1 000, 3,5.*--noheader"),
        ("", NONE, "Received: nothing"),
        (",\n1,\n2,\n", Options(header=True, delimiter=","), r"no column with .*--noheader$"),
        ("a,b\n1,2\n", Options("c"), "--label may be a, b"),
        ('a,b\n1,"2\n', Options("a"), "line 2: unexpected end of data"),
    ],
)
def test_gaps_and_lines_that_nothing_is_said_about_are_refused(
    text: str, options: Options, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        prepare("csv:x", str(tmp_path / "out"), str(tmp_path / "a.csv"), options)


@pytest.mark.parametrize("name", ["folder:x", "parquet:x", "rewrite"])
def test_names_that_are_not_utf8_are_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    if name == "parquet:x":
        pytest.importorskip("pyarrow")
    endings = ("/1.png", ".parquet", ".tfrecord")
    (tmp_path / "in").mkdir()
    write_folder(tmp_path / "in", {f"train/caf\udce9{ending}": PNG for ending in endings})
    with pytest.raises(DataError, match=r"/in/train/caf\\udce9.*is not UTF-8.* Rename"):
        prepare(name, str(tmp_path / "out"), str(tmp_path / "in"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_label_may_have_a_slash_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,Pass/Fail\n" + "1,yes\n2,no\n" * 30)
    prepare("csv:a", str(tmp_path / "out"), str(tmp_path / "a.csv"), Options("Pass/Fail"))
    prepare("rewrite", str(tmp_path / "copy"), str(tmp_path / "out"))
    assert class_names(str(tmp_path / "copy"), "Pass/Fail") == ["no", "yes"]
    assert (tmp_path / "copy" / "Pass.Fail.labels.txt").exists(), "the name that TFDS reads"


@pytest.mark.parametrize(
    ("content", "options", "wanted", "note"),
    [
        # An index of pandas; separators at the end of lines; the first line that Excel wants.
        (",x,y\n0,5,a\n1,6,b\n", NONE, {"x": [5, 6], "y": "ab"}, "first column has no name"),
        (",x\na,5\nb,6\n", NONE, {"column_0": "ab", "x": [5, 6]}, "has no name, and is called"),
        (",x\n7,5\n8,6\n", Options(integer="column_0"), {"column_0": [7, 8], "x": [5, 6]}, ""),
        ("x,,z\n5,1,6\n", NONE, {"x": [5], "column_1": [1], "z": [6]}, "is called column_1"),
        ("x,y,\n5,1,\n6,,\n", Options(missing="0"), {"x": [5, 6], "y": [1, 0]}, "column_2 has no"),
        ("x,y\n5,1,\n6,2,,\n", NONE, {"x": [5, 6], "y": [1, 2]}, ""),
        ("5,1,\n6,2,\n", NO_HEADER, {"column_0": [5, 6], "column_1": [1, 2]}, "left out"),
        ("sep=;\r\nx;y\r\n5;1,a\r\n", NONE, {"x": [5], "y": ["1,a"]}, ""),
        ('"sep=|"\nx|y\n5|1\n', NONE, {"x": [5], "y": [1]}, ""),
        # Separators.
        ('a;"b,c";c\n1;2;"x;y,z"\n', NONE, {"a": [1], "b,c": [2], "c": ["x;y,z"]}, ""),
        ("a\tb\n1\tx;y,z\n", NONE, {"a": [1], "b": ["x;y,z"]}, ""),
        ("x|y z\n5|1\n", NONE, {"x": [5], "y z": [1]}, "'|' separate"),
        ("x|a, b|c\n5|1|2,a,b\n", NONE, {"x": [5], "a, b": [1], "c": ["2,a,b"]}, "'|' separate"),
        ("x y\n 5   1\n6 2 \n", NONE, {"x": [5, 6], "y": [1, 2]}, "spaces separate"),
        ("x, y z\n5, 1 2,\n", NONE, {"x": [5], "y z": ["1 2"]}, ""),
        ("some words\na\nb c\n", NONE, {"some words": ["a", "b c"]}, ""),
        ("2 words\na b\n", Options(delimiter=","), {"2 words": ["a b"]}, ""),
        ("x:y\n5:1\n", Options(delimiter=":"), {"x": [5], "y": [1]}, ""),
        ("x\ty\n5,\t1\n", Options(delimiter="tab"), {"x": ["5,"], "y": [1]}, ""),
        ("3|17\n5|2\n", Options(header=False, lists="column_0"), {"column_0": None}, "longest"),
        # Encodings.
        ("x,y\n5,é\n".encode("utf-16"), NONE, {"x": [5], "y": "é"}, ""),
        (b"\xfe\xff" + "x,y\n5,é\n".encode("utf-16-be"), NONE, {"x": [5], "y": "é"}, ""),
        ("x,y\n5,é\n".encode("utf-32"), NONE, {"x": [5], "y": "é"}, ""),
        ("x,y\n5,é\n".encode("latin-1"), Options(encoding="latin-1"), {"x": [5], "y": "é"}, ""),
        ("x,y\n5,é\n".encode("utf-8-sig"), Options(encoding="utf8"), {"x": [5], "y": "é"}, ""),
        (gzip.compress(b"x,y\n5,a\n", mtime=0), NONE, {"x": [5], "y": "a"}, ""),
        (gzip.compress(b"1;5\n", mtime=0), NO_HEADER, {"column_0": [1], "column_1": [5]}, ""),
        # Types.
        ("x,y\n1.0,3\n007,4\n", Options(integer="x"), {"x": [1, 7], "y": [3, 4]}, ""),
        ("x,y\n2e3,3\n1,4\n", Options(integer="x,y"), {"x": [2000, 1], "y": [3, 4]}, ""),
        ("x,y\n1,3\n007,4\n", Options(float="x"), {"x": [1.0, 7.0], "y": [3, 4]}, ""),
        ("x,y\n1,3\nA1,4\n", NONE, {"x": ["1", "A1"], "y": [3, 4]}, "2 of its 4 values are numb"),
        ("x,y\n5,0.0\n6,1.0\n7,1\n", Options("y"), {"x": [5, 6, 7], "y": [0, 1, 1]}, "has '0.0'"),
        ('"a,b",y\n5,1\n', Options(text='"a,b"'), {"a,b": ["5"], "y": [1]}, ""),
    ],
)
def test_table_is_read_as_it_is_found(
    content: str | bytes, options: Options, wanted: dict[str, Any], note: str, tmp_path: Path
) -> None:
    encoded = content if isinstance(content, bytes) else content.encode()
    suffix = ".csv.gz" if encoded.startswith(b"\x1f\x8b") else ".csv"
    for name in ("Train", "val"):
        (tmp_path / f"{name}{suffix}").write_bytes(encoded)
    found = csv.source("x", str(tmp_path), options)
    assert list(found.splits) == ["train", "val"]
    assert bool(found.notes) == bool(note)
    assert note in "".join(found.notes)
    for split in found.splits.values():
        examples = map(tf.train.Example.FromString, split.examples(0, split.num_examples))
        rows = [example.features.feature for example in examples]
        assert rows[0].keys() == wanted.keys()
        for name, values in wanted.items():
            lists = [getattr(row[name], row[name].WhichOneof("kind")).value[0] for row in rows]
            read = [value.decode() if isinstance(value, bytes) else value for value in lists]
            assert values is None or read == list(values)
            assert values is None or list(map(type, read)) == list(map(type, values))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04", "a ZIP archive or an Excel workbook: unzip it"),
        (b"PAR1", "a Parquet file"),
        ("x,y\n5,é\n".encode("utf-16")[:-1], "is cut off"),
        (b"x,y\n1,2,3\n", r"3 values, and there are 2 columns \(x, y\), separated by ','"),
        (gzip.compress(b"x,y\n1,2\n" * 99, mtime=0)[:-9], "nd-of-stream"),
    ],
)
def test_what_is_no_table_is_explained(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        csv.source("x", str(tmp_path / "a.csv"), NONE)


@pytest.mark.parametrize(("before", "where"), [(5, "a.csv"), (30, "a.csv, line 32")])
def test_values_may_be_long_but_a_quote_without_end_is_named(
    before: int, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path, lines = tmp_path / "a.csv", "x,y\n" + "1,b\n" * before
    features = {"y": Feature("y", "text", "string", (), None, "none", "Text")}
    path.write_text(f"{lines}2,{'a' * 200_000}\n")
    csv.source("x", str(path), Options(test_fraction=0.5))
    assert len(list(rows_of(str(path), features, ["y"]))) == before + 1
    request.addfinalizer(functools.partial(field_size_limit, field_size_limit(1000)))
    path.write_text(f'{lines}2,"' + "a" * 2000 + "\n")
    for read in (
        lambda: csv.source("x", str(path), Options()),
        lambda: list(rows_of(str(path), features, ["y"])),
    ):
        with pytest.raises(DataError, match=f"{where}: a value has more than 1,000 .* write it tw"):
            read()


BOXES = b"0\t0\t62\t62\n"
JPEG_HEAD = b"\xff\xd8\xff\xc0\0\x0b\x08\0\x09\0\x09\1"  # 9x9 pixels, one channel; no pixels.


@pytest.mark.parametrize(
    ("files", "wanted", "note"),
    [
        # As in Tiny ImageNet, with annotations beside the images; as in aclImdb.
        (
            {
                "Train/n01/images/a.JPEG": PNG,
                "Train/n01/n01_boxes.txt": BOXES,
                "Testing/n01/images/b.JPEG": PNG,
            },
            {"train": [("image", PNG, 0)], "test": [("image", PNG, 0)]},
            "1 file(s) beside the images are left out",
        ),
        (
            {"train/pos/0_9.txt": b"Good", "train/neg/0_1.txt": b"Bad", "TEST/pos/1.txt": b""},
            {"train": [("text", b"Bad", 0), ("text", b"Good", 1)], "test": [("text", b"", 1)]},
            "--config.data.inputs=\"('text',)\"",
        ),
    ],
)
def test_folder_is_read_as_it_is_found(
    files: dict[str, bytes],
    wanted: dict[str, list[tuple[str, bytes, int]]],
    note: str,
    tmp_path: Path,
) -> None:
    write_folder(tmp_path, files)
    found = folder.source("x", str(tmp_path), NONE)
    assert note in "; ".join(found.notes)
    assert found.splits.keys() == wanted.keys()
    for split, rows in wanted.items():
        examples = map(tf.train.Example.FromString, found.splits[split].examples(0, len(rows)))
        read = [
            (key, value.bytes_list.value[0], example.features.feature["label"].int64_list.value[0])
            for example in examples
            for key, value in example.features.feature.items()
            if key != "label"
        ]
        assert read == rows


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train/a/x.txt": b"caf\xe9", "test/a/y.txt": b""}, "not UTF-8: .* iconv -f LATIN1"),
        ({"a/x.png": PNG, "b/y.txt": b""}, "b has no images: fill it, or remove it"),
        ({"a/x.png": PNG, "a/y.mp4": b""}, r"y\.mp4 is not one of \.png"),
        ({"train/a/x.png": PNG, "Train/a/x.png": PNG}, "are both split 'train'. Move one away"),
        ({}, "no class folders"),
        ({"a/x.gif": b"?"}, r"x\.gif is not one of \.png, \.jpg, \.jpeg"),
        ({"a/x.png": b"GIF89a"}, "neither PNG nor JPEG: it begins with 47 49 46"),
        ({"train/a/x.png": PNG[:-8], "test/a/y.png": PNG}, r"x\.png is cut short"),
        ({"train/a/x.jpg": JPEG_HEAD, "test/a/y.png": PNG}, r"x\.jpg is cut short"),
        ({"train/a/x.png": PNG, "other/a/x.png": PNG}, "other is not one of them"),
        ({"train/a/x.png": PNG, "test/b/x.png": PNG}, "class 'b', which train does not have"),
    ],
)
def test_wrong_files_are_named(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_folder(tmp_path / "source", files)
    with pytest.raises(DataError, match=message):
        prepare("folder:x", str(tmp_path / "out"), str(tmp_path / "source"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("other", ["", "emnist-digits-"])
def test_idx_files_of_emnist_are_found_by_name(other: str, tmp_path: Path) -> None:
    for prefix in filter(None, ("emnist-letters-", other)):
        for split, count in (("train", 3), ("test", 2)):
            count += prefix == "emnist-letters-"
            images = np.zeros((count, 2, 2))
            write_idx(tmp_path / f"{prefix}{split}-images-idx3-ubyte.gz", images, compress=True)
            write_idx(tmp_path / f"{prefix}{split}-labels-idx1-ubyte.gz", np.ones(count), True)
    found = idx.source("emnist-letters", str(tmp_path), NONE)
    assert [split.num_examples for split in found.splits.values()] == [4, 3]
    if other:
        with pytest.raises(DataError, match=r"python -m data\.prepare emnist-digits --"):
            idx.source("emnist", str(tmp_path), NONE)
    else:
        assert len(idx.source("any", str(tmp_path), NONE).splits) == 2


def test_compressed_files_of_cifar_give_the_same_data_set(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "plain", images_of(12), np.arange(12) % 10)
    (tmp_path / "compressed").mkdir()
    for path in (tmp_path / "plain").iterdir():
        content = gzip.compress(path.read_bytes())
        (tmp_path / "compressed" / f"{path.name}.gz").write_bytes(content)
    found = []
    for name in ("plain", "compressed"):
        prepare("cifar10", str(tmp_path / f"out-{name}"), str(tmp_path / name))
        found.append(digest(tmp_path / f"out-{name}"))
    assert found[0] == found[1]


def test_incomplete_cifar_is_taken_if_that_is_asked_for(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write_cifar10(source, images_of(12), np.arange(12) % 10)
    (source / "data_batch_2.bin").unlink()
    with open(source / "data_batch_3.bin", "r+b") as file:
        file.truncate(3073 + 100)
    (source / "batches.meta.txt").unlink()
    with pytest.raises(DataError, match=r"no data_batch_2\.bin.*--allow_partial"):
        prepare("cifar10", str(tmp_path / "out"), str(source))
    done = run("cifar10", "--source=in", "--data_dir=out", "--allow_partial", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train: 7 images without data_batch_2.bin" in done.stderr
    (label,) = parsed(tmp_path / "out", "train", "label")
    assert label.tolist() == [0, 6, 2, 3, 9, 4, 0]
    (source / "test_batch.bin").unlink()
    done = run("cifar10", "--source=in", "--data_dir=new", "--allow_partial", cwd=tmp_path)
    assert done.returncode == 2
    assert "--allow_partial takes one file of each split" in done.stderr


def test_archive_of_cifar_is_answered_with_the_command_that_unpacks_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"tar -xf .*cifar\.tar\.gz"):
        prepare("cifar10", str(tmp_path / "out"), str(tmp_path / "cifar.tar.gz"))


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_linked_directories_are_read_as_others_and_each_once(kind: str, tmp_path: Path) -> None:
    def write(path: Path, number: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "parquet":
            pa, pq = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
            pq.write_table(pa.table({"x": [number] * 40}), path)
        else:
            path.write_bytes(b"%d" % number * 9999)

    for directory in ("source", "plain"):
        write(tmp_path / directory / "a" / "1.parquet", 1)
    for path in ("elsewhere/2.parquet", "plain/a/b/2.parquet"):
        write(tmp_path / path, 2)
    (tmp_path / "source" / "a" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to("../source/a")
    (tmp_path / "source" / "0").symlink_to("a")
    (tmp_path / "source" / "all").symlink_to(tmp_path)
    prepare(f"{kind}:x", str(tmp_path / "source" / "out"), str(tmp_path / "source"))
    prepare(f"{kind}:x", str(tmp_path / "out"), str(tmp_path / "plain"))
    assert digest(tmp_path / "source" / "out") == digest(tmp_path / "out")
    given = f"{kind}:x", str(tmp_path / "source" / "out"), str(tmp_path / "source"), NONE
    prepare(*given)  # Done already.
    write(tmp_path / "elsewhere" / "2.parquet", 3)
    with pytest.raises(DataError, match=r"a was 2 file.*, and is now 2 file"):
        prepare(*given)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_first_of_two_links_to_a_directory_counts_whatever_the_file_system_lists_first(
    is_reversed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(top: str, walk: Any = os.walk) -> Any:
        for parent, directories, names in walk(top):
            directories.sort(reverse=is_reversed)
            yield parent, directories, names

    write_folder(tmp_path, {"elsewhere/1.png": PNG, "source/cow/2.png": PNG})
    for name in ("cat", "dog"):
        (tmp_path / "source" / name).symlink_to("../elsewhere")
    monkeypatch.setattr(os, "walk", walk)
    found = files_below(f"{tmp_path}/source", lambda _: False)
    assert found == [f"{tmp_path}/source/{name}" for name in ("cat/1.png", "cow/2.png")]


def test_images_of_linked_directories_are_predicted_once(tmp_path: Path) -> None:
    write_folder(tmp_path, {"photos/a/1.png": PNG, "elsewhere/2.PNG": PNG, "elsewhere/.3.png": PNG})
    (tmp_path / "photos" / "b").symlink_to("../elsewhere")
    (tmp_path / "photos" / "a" / "all").symlink_to("..")
    features = {"image": Feature("image", "image", "uint8", (1, 1, 1), None, "png", "Image")}
    found = [
        about["file"] for _, about, _ in rows_of(str(tmp_path / "photos"), features, ["image"])
    ]
    assert found == [f"{tmp_path}/photos/{name}" for name in ("a/1.png", "b/2.PNG")]


def test_paths_here_are_shown_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(str(tmp_path / "runs" / "a")) == "runs/a"
    assert shown("runs/a") == "runs/a"
    outside = str(tmp_path.parent / "b")
    assert shown(outside) == outside
    assert shown("s3://bucket/a") == "s3://bucket/a"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert shown(outside) == outside
