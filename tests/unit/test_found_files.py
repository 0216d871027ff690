"""Tables and pictures as people find them: gaps, other separators, no header, compressed, cut."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from data.example_features import read_features
from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.system.files import DataError, shown
from tests.unit.test_prepare import run
from tests.unit.test_sources import images_of, parsed, write_cifar10


def write_splits(directory: Path, train: str, test: str) -> Path:
    directory.mkdir()
    (directory / "train.csv").write_text(train)
    (directory / "test.csv").write_text(test)
    return directory


NONE = Options()
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


def test_missing_value_that_is_a_fraction_makes_numbers_of_integers(tmp_path: Path) -> None:
    source = write_splits(tmp_path / "in", "a,b\n1,2\n,3\n", "a,b\n1,2\n")
    prepare("csv:x", str(tmp_path / "out"), str(source), Options(missing="0.5"))
    (a,) = parsed(tmp_path / "out", "train", "a")
    assert a.tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "a,b\n1,2\nNA,3\n,4\n",
            {},
            r"line 4: column a has '', .* 2 of its numbers are",
        ),
        ("a,b\n1,2\n?,3\n", NONE, r"line 3: column a has '\?'.*--missing=drop.*or --missing=0"),
        ("a,b\n1,2\n,3\n", Options("a", missing="0"), "the label a is empty. --missing=drop"),
        ("a,b\n1,2\nNA,3\n", Options("a", missing="0"), r"leaves out such rows\.$"),
        ("a,b\n,2\n1,\n", Options(missing="drop"), "leaves no row"),
        ("a,b\n1,2\n", Options(missing="mean"), "must be drop or a number. Received: 'mean'"),
        ("1,2\n3,4\n", NONE, "begins with numbers, 1, 2.*--noheader"),
        ("01501,40.1\n01502,40.2\n", NONE, "begins with numbers, 01501, 40.1.*--noheader"),
        ("1 000;3,5;1e999\n2 000;1;2\n", NONE, "begins with numbers, 1 000, 3,5.*--noheader"),
    ],
)
def test_gaps_that_nothing_is_said_about_are_refused(
    text: str, options: Options, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        prepare("csv:x", str(tmp_path / "out"), str(tmp_path / "a.csv"), options)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separator_is_that_of_the_first_line(separator: str, tmp_path: Path) -> None:
    rows = [("a", "b,c" if separator == ";" else "b", "c"), ("1", "2", "x;y,z")]
    lines = "".join(
        separator.join(f'"{value}"' if set(value) & set(",;") else value for value in row) + "\n"
        for row in rows
    )
    source = write_splits(tmp_path / "in", lines, lines)
    prepare("csv:x", str(tmp_path / "out"), str(source))
    a, c = parsed(tmp_path / "out", "train", "a", "c")
    assert (a.tolist(), c.tolist()) == ([1], [b"x;y,z"])


def test_compressed_table_without_a_header_is_read(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.csv.gz").write_bytes(gzip.compress(b"1;2.5;3\n4;5;6\n"))
    flags = ("--source=in", "--data_dir=out", "--noheader", "--label=column_2")
    done = run("csv:x", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = parsed(tmp_path / "out", "test", "column_0", "column_1", "column_2")
    assert [values.tolist() for values in found] == [[1, 4], [2.5, 5], [3, 6]]
    (source / "train.csv.gz").write_bytes(gzip.compress(b"1,2,3\n" * 9)[:-9])
    with pytest.raises(DataError, match=r"train\.csv\.gz.*nd-of-stream"):
        prepare("csv:x", str(tmp_path / "other"), str(source), Options(header=False))


def test_compressed_files_of_cifar_give_the_same_data_set(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "plain", images_of(12), np.arange(12) % 10)
    (tmp_path / "compressed").mkdir()
    for path in (tmp_path / "plain").iterdir():
        content = gzip.compress(path.read_bytes())
        (tmp_path / "compressed" / f"{path.name}.gz").write_bytes(content)
    for name in ("plain", "compressed"):
        prepare("cifar10", str(tmp_path / f"out-{name}"), str(tmp_path / name))
    for name in ("cifar10-train.tfrecord-00000-of-00001", "label.labels.txt"):
        plain, compressed = (tmp_path / f"out-{x}" / name for x in ("plain", "compressed"))
        assert plain.read_bytes() == compressed.read_bytes()


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
    import tarfile

    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"tar -xf .*cifar\.tar\.gz"):
        prepare("cifar10", str(tmp_path / "out"), str(tmp_path / "cifar.tar.gz"))


def test_paths_below_the_working_directory_are_shown_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
