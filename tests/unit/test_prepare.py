"""Preparing data: whole or not at all, the same bytes every time, and readable by others too."""

import gzip
import hashlib
import importlib.util
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from data import features
from data.example_features import read_features
from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.system import files
from data.system.files import DataError
from data.tfrecord import split as records
from tests.commands import run_python
from tests.unit.prepare_command import Run, run_prepare, server
from tests.unit.test_split import contents

__all__ = ["run_prepare", "server"]  # Fixtures.

ROOT = Path(__file__).parents[2]
needs_tfds = pytest.mark.skipif(
    importlib.util.find_spec("importlib_resources") is None,
    reason="tensorflow-datasets needs importlib_resources to make a builder",
)


def digest(directory: Path) -> dict[str, str]:
    """Of all files except source.json, which has the times of the source's files."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.name != "source.json"
    }


def run(
    *arguments: str, cwd: Path, module: str = "data.prepare"
) -> subprocess.CompletedProcess[str]:
    return run_python("-m", module, *arguments, cwd=cwd)


def write_idx(path: Path, array: np.ndarray, compress: bool = False) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if compress else content)


def test_url_is_written_to_as_a_directory_is_and_nothing_half_done_is_left(
    tmp_path: Path,
) -> None:
    url = "ram://prepared/digits"
    prepare("digits", url)
    prepare("digits", str(tmp_path / "digits"))
    wanted = digest(tmp_path / "digits")
    assert sorted(tf.io.gfile.listdir(url)) == sorted([*wanted, "source.json"])
    for name, sha256 in wanted.items():
        with tf.io.gfile.GFile(f"{url}/{name}", "rb") as file:
            assert hashlib.sha256(file.read()).hexdigest() == sha256, name
    prepare("digits", url + "/")  # Done already.
    with pytest.raises(DataError, match="holds 'digits', not 'other'"):
        prepare("csv:other", url, str(tmp_path / "missing.csv"))
    (tmp_path / "bad.csv").write_text("x,y\n1,2\n3\n")
    for _ in range(2):
        with pytest.raises(DataError, match=r"bad\.csv"):
            prepare("csv:bad", "ram://prepared/bad", str(tmp_path / "bad.csv"))
        assert not files.exists("ram://prepared/bad/dataset_info.json")


@pytest.fixture
def idx_files(tmp_path: Path) -> Path:
    directory = tmp_path / "idx"
    directory.mkdir()
    for prefix, count, compress in (("train", 30, True), ("t10k", 7, False)):
        suffix = ".gz" if compress else ""
        images = np.arange(count * 20).reshape(count, 4, 5) % 256
        write_idx(directory / f"{prefix}-images-idx3-ubyte{suffix}", images, compress)
        write_idx(directory / f"{prefix}-labels-idx1-ubyte{suffix}", np.arange(count) % 6, compress)
    return directory


def serialized(directory: Path, split: str) -> tf.Tensor:
    """All records of a split, in the order on disk."""
    return tf.constant(contents(records.open_split(str(directory), split)))


def parsed(directory: Path, split: str, *names: str) -> list[np.ndarray]:
    """All values of some features, in the order on disk."""
    known = read_features(str(directory))
    example = known.parse_example(serialized(directory, split), names)
    return [example[name].numpy() for name in names]


def read_all(directory: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """What a config without a `parse` of its own gets."""
    parse = features.default_parse(read_features(str(directory)))
    images, labels = parse(serialized(directory, split))
    return images.numpy(), labels.numpy()


def test_digits_are_prepared_whole_stratified_and_the_same_every_time(tmp_path: Path) -> None:
    prepare("digits", str(tmp_path / "a"))
    prepare("digits", str(tmp_path / "b"))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"], "nothing is left beside them"
    splits = {split: read_all(tmp_path / "a", split) for split in ("train", "test")}
    for split, count in (("train", 1437), ("test", 360)):
        images, labels = splits[split]
        assert images.shape == (count, 8, 8, 1)
        assert images.min() == 0
        assert images.max() == 1
        assert np.bincount(labels, minlength=10).min() > 0.09 * count
    both = np.concatenate([images.reshape(len(images), -1) for images, _ in splits.values()])
    from sklearn.datasets import load_digits

    expected = np.round(load_digits().data * (255 / 16))
    assert sorted(map(tuple, np.round(both * 255))) == sorted(map(tuple, expected))


def test_idx_files_are_prepared_by_any_name(tmp_path: Path, idx_files: Path) -> None:
    out = tmp_path / "out"
    prepare("a-b_c.v1", str(out), str(idx_files))
    assert (out / "a-b_c.v1-train.tfrecord-00000-of-00001").exists()
    images, labels = read_all(out, "train")
    assert np.array_equal(np.round(images * 255).reshape(-1), np.arange(600) % 256)
    assert np.array_equal(labels, np.arange(30) % 6)
    assert read_all(out, "test")[0].shape == (7, 4, 5, 1)
    assert read_features(str(out))["label"].num_classes == 6


STOPS_HALF_WAY = """
import sys
from data.prepare import catalog, preparing
from data.prepare.sources import Options, Source, SourceSplit

whole = catalog.open_source("digits", None, Options())

def half(first, last):
    examples = whole.splits["train"].examples(first, last)
    for _ in range(700):
        yield next(examples)
    print("half", flush=True)
    sys.stdin.read()

train = SourceSplit(1437, 10**9, half)
mixed = Source("digits", {**whole.splits, "train": train}, whole.files)
preparing.open_source = lambda name, path, options: mixed
preparing.num_cores = lambda: 1
preparing.prepare("digits", sys.argv[1])
"""


def test_killed_prepare_leaves_nothing_that_looks_finished_and_the_next_one_succeeds(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", STOPS_HALF_WAY, str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    left = list((tmp_path / ".out.partial").iterdir())
    assert len(left) > 3, "it was in the middle of writing its shards"
    assert not out.exists()
    prepare("digits", str(out))
    prepare("digits", str(tmp_path / "other"))
    assert digest(out) == digest(tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


def test_interrupt_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    lines = ["import time", "def rows():", "    print('begun', flush=True)", "    time.sleep(60)"]
    (tmp_path / "slow.py").write_text("\n".join([*lines, "    return []"]))
    with subprocess.Popen(
        [sys.executable, "-m", "data.prepare", "python:x", "--source=slow.py:rows"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGINT
    assert said.count("\n") == 2
    assert "interrupted before python:x was complete. The same command" in said
    assert [p.name for p in tmp_path.iterdir()] == ["slow.py"]


def test_two_prepares_at_once_both_succeed(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "data.prepare", "digits", "--data_dir=both"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert records.open_split(str(tmp_path / "both"), "train").num_examples == 1437
    assert sum("both holds digits." in line for line in said) == 1, "one wrote, the other found it"
    assert [p.name for p in tmp_path.iterdir()] == ["both"]


LABELS = "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (LABELS, Path.unlink, f"has no {LABELS}"),
        (LABELS, lambda path: path.write_bytes(b"<html>"), "3c 68 74 6d, needed is 00 00 08 01"),
        (LABELS, lambda path: write_idx(path, np.arange(6)), "7 images and 6 labels"),
        (
            "t10k-images-idx3-ubyte",
            lambda path: os.truncate(path, 100),
            "7 x 4 x 5 bytes, which makes 156 with its header; it has 100",
        ),
        ("train-images-idx3-ubyte.gz", lambda path: os.truncate(path, 50), "damaged GZIP"),
    ],
)
def test_wrong_idx_files_are_named(
    tmp_path: Path, idx_files: Path, file: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(idx_files / file)
    with pytest.raises(DataError, match=message):
        prepare("kuzushiji", str(tmp_path / "out"), str(idx_files))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["idx"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "One NAME is needed"),
        ("digits mnist", "One NAME is needed"),
        ("unheard_of", "--source=DIR"),
        ("mnist", "train-images-idx3-ubyte.gz"),
        ("mnist --source=nowhere", "There is no --source=nowhere"),
        (f"mnist --source={__file__}", "made from the IDX files train-images-idx3-ubyte.gz"),
        (f"folder:x --source={__file__}", "class folders of PNG or JPEG files. Give their dir"),
        ("what?:x", "Known: digits"),
        ("rewrite", "--data_dir=OTHER_DIR"),
        ("cifar10 --source=.", "Unpack cifar-10-binary.tar.gz and give the directory"),
        ("svhn --source=.", "train_32x32.mat"),
        ("svhn --label=x", "--label=x would be ignored: svhn takes --layout"),
        ("svhn --layout=what", "image_raw"),
        ("csv:x --layout=tfds", "takes --label, --test_fraction, --seed"),
        ("tfds:mnist --seed=1", "takes no options"),
    ],
)
def test_wrong_command_lines_end_with_2_and_a_hint(
    words: str, message: str, run_prepare: Run, tmp_path: Path
) -> None:
    code, said = run_prepare(words)
    assert code == 2
    assert message in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == [], "no empty datasets/ is left"


def test_directory_that_was_empty_before_a_wrong_source_is_left(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="There is no --source="):
        prepare("mnist", str(tmp_path / "mine" / "new" / "mnist"), str(tmp_path / "nowhere"))
    assert list((tmp_path / "mine").iterdir()) == []


def test_rewrite_into_a_directory_of_another_data_set_is_refused(
    tmp_path: Path, idx_files: Path
) -> None:
    prepare("digits", str(tmp_path / "digits"))
    prepare("kuzushiji", str(tmp_path / "letters"), str(idx_files))
    before = digest(tmp_path / "letters")
    with pytest.raises(DataError, match="holds 'kuzushiji', not 'digits'"):
        prepare("rewrite", str(tmp_path / "letters"), str(tmp_path / "digits"))
    with pytest.raises(DataError, match="is the directory to write, too"):
        prepare("rewrite", str(tmp_path / "letters"), str(tmp_path / "letters"))
    assert digest(tmp_path / "letters") == before
    prepare("rewrite", str(tmp_path / "copy"), str(tmp_path / "digits"))
    assert digest(tmp_path / "copy") == digest(tmp_path / "digits")
    prepare("rewrite", str(tmp_path / "copy"), str(tmp_path / "digits"))  # Done already.


def test_shards_that_lack_records_are_not_rewritten(tmp_path: Path) -> None:
    prepare("digits", str(tmp_path / "whole"))
    (shard,) = (tmp_path / "whole").glob("*test*tfrecord*")
    content = shard.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    shard.write_bytes(content[length + 16 :])  # Without its first record.
    with pytest.raises(DataError, match=r"'test' .* hold \[359\] .* says \[360\]"):
        prepare("rewrite", str(tmp_path / "out"), str(tmp_path / "whole"))
    shard.write_bytes(b"")
    with pytest.raises(DataError, match="no record"):
        prepare("rewrite", str(tmp_path / "out"), str(tmp_path / "whole"))
    assert not (tmp_path / "out").exists()


@needs_tfds
def test_tfds_names_that_cannot_be_had_say_what_to_bring_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    with pytest.raises(DataError, match="has no 'no_such_set'"):
        prepare("tfds:no_such_set", str(tmp_path / "out"))
    monkeypatch.setattr("urllib.request.getproxies", dict)

    def no_network(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    with pytest.raises(DataError) as caught:
        prepare("tfds:mnist", str(tmp_path / "out"))
    assert "train-images-idx3-ubyte.gz" in str(caught.value)
    assert "python -m data.prepare tfds:mnist --source=DIR" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["../x", "..", ".x", "-x", "a/b", "csv:../x", "csv:..", "tfds:../x", "tfds:", "folder:"],
)
def test_name_that_is_no_directory_below_datasets_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"There is no data set|needs a name"):
        prepare(name, str(tmp_path / "out"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_layout_of_tensorflow_1_programs_is_written_and_read_by_either_parse(
    tmp_path: Path, idx_files: Path
) -> None:
    out = tmp_path / "out"
    prepare("kuzushiji", str(out), str(idx_files), Options(layout="image_raw"))
    written = serialized(out, "train")
    feature = tf.train.Example.FromString(written[29].numpy()).features.feature
    assert feature["image_raw"].bytes_list.value[0] == bytes(x % 256 for x in range(580, 600))
    numbers = {name: feature[name].int64_list.value[0] for name in feature if name != "image_raw"}
    assert numbers == {"pixels": 20, "height": 4, "width": 5, "depth": 1, "label": 5}
    images, labels = read_all(out, "train")
    parsed_images, parsed_labels = features.image_raw_parse((4, 5, 1))(written)
    assert np.array_equal(images, parsed_images)
    assert np.array_equal(labels, parsed_labels)


@pytest.mark.parametrize("out", ["url", "path"])
def test_changed_source_is_refused_and_written_again_with_overwrite(
    out: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data_dir = f"ram://changed/{tmp_path.name}" if out == "url" else f"{tmp_path}/out"
    source = tmp_path / "a.csv"
    source.write_text("x,label\n" + "1,a\n2,b\n" * 50)
    options = Options(label="label")
    prepare("csv:a", data_dir, str(source), options)
    paths = [files.join(data_dir, name) for name in files.names_in(data_dir)]
    stamps = list(map(files.stamp, paths))
    prepare("csv:a", data_dir, str(source), options)
    prepare("csv:a", data_dir)  # As a run does, which does not know the source.
    assert capfd.readouterr().err.count("already holds csv:a. Add --overwrite") == 2
    assert list(map(files.stamp, paths)) == stamps, "nothing is written again"
    assert records.open_split(data_dir, "train").num_examples < 100

    with pytest.raises(DataError, match=r"--seed was 0, and is now 5.* --overwrite"):
        prepare("csv:a", data_dir, None, options._replace(seed=5))
    source.write_text("x,label\n" + "3,a\n4,b\n" * 500)
    with pytest.raises(DataError, match=r"a\.csv was 1 file.* of 408 bytes.* now 1 file.* 4,008"):
        prepare("csv:a", data_dir, str(source), options)
    prepare("csv:a", data_dir, str(source), options, overwrite=True)
    assert records.open_split(data_dir, "train").num_examples > 800
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns + 1
    os.utime(source, ns=times)  # As many bytes, written later.
    with pytest.raises(DataError, match=r"a\.csv was 1 file"):
        prepare("csv:a", data_dir, str(source), options)


def test_new_files_in_a_source_are_noticed_and_files_of_others_are_not(
    tmp_path: Path, idx_files: Path
) -> None:
    out = idx_files / "out"  # Below its source.
    prepare("kuzushiji", str(out), str(idx_files))
    (idx_files / "notes.txt").write_text("no part of the data")
    prepare("kuzushiji", str(out), str(idx_files), Options())
    (idx_files / "train-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(DataError, match="train-labels-idx1-ubyte was missing, and is now 1 file"):
        prepare("kuzushiji", str(out), str(idx_files), Options())


def test_overwriting_removes_no_file_that_the_program_did_not_write(
    run_prepare: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run_prepare("digits --data_dir=out")[0] == 0
    before = digest(out)
    (out / "thesis.txt").write_text("dear to me")
    code, said = run_prepare("digits --data_dir=out --overwrite")
    assert code == 2
    assert "also holds thesis.txt" in said
    (out / "thesis.txt").rename(tmp_path / "thesis.txt")
    (out / "features.json").write_text("damaged")
    assert run_prepare("digits --data_dir=out --overwrite")[0] == 0
    assert digest(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "thesis.txt"]
