"""Files of each format, byte for byte as they are passed around, become the right examples."""

import io
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import tensorflow as tf

from data import features
from data.example_features import read_features
from data.prepare.catalog import open_source
from data.prepare.preparing import prepare
from data.prepare.sources import Options, csv, folder
from data.system.files import DataError
from tests.commands import run_python
from tests.unit.test_prepare import digest, needs_tfds, read_all, serialized, write_idx

RANDOM = np.random.default_rng(0)


def parsed(directory: Path, split: str, *names: str) -> list[np.ndarray]:
    """All values of some features, in the order on disk."""
    known = read_features(str(directory))
    example = known.parse_example(serialized(directory, split), names)
    return [example[name].numpy() for name in names]


def images_of(count: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (count, 32, 32, 3), np.uint8)


def planes_of(images: np.ndarray) -> np.ndarray:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_cifar10(directory: Path, images: np.ndarray, labels: np.ndarray) -> None:
    directory.mkdir()
    for i, name in enumerate([*(f"data_batch_{j}" for j in range(1, 6)), "test_batch"]):
        rows = np.concatenate([labels[:, np.newaxis], planes_of(images)], axis=1)
        (directory / f"{name}.bin").write_bytes(rows[i::6].astype(np.uint8).tobytes())
    (directory / "batches.meta.txt").write_text("\n".join(TEN) + "\n\n")


def test_cifar10_is_prepared(tmp_path: Path) -> None:
    images, labels = images_of(60), np.arange(60) // 6
    archive = "cifar-10-batches-bin"
    write_cifar10(tmp_path / archive, images, labels)
    out = tmp_path / "out"
    prepare("cifar10", str(out), str(tmp_path))
    order = [row for batch in range(5) for row in range(batch, 60, 6)]
    inputs, classes = read_all(out, "train")
    assert np.array_equal(np.round(inputs * 255), images[order])
    assert np.array_equal(classes, labels[order])
    assert np.array_equal(parsed(out, "test", "image")[0], images[5::6])
    assert (out / "label.labels.txt").read_text().split() == TEN
    prepare("cifar10", str(tmp_path / "direct"), str(tmp_path / archive))
    assert digest(tmp_path / "direct") == digest(out)


@pytest.mark.parametrize(
    ("name", "file"), [("cifar10", "test_batch.gz"), ("cifar100", "cifar-100-python/train")]
)
def test_python_version_of_cifar_is_answered_with_the_binary_version(
    name: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"\x80\x02}")
    archive = f"{name.replace('cifar', 'cifar-')}-binary.tar.gz"
    with pytest.raises(DataError, match=f"kriz/{archive} is the binary version"):
        prepare(name, str(tmp_path / "out"), str(tmp_path))


def test_cifar100_has_both_labels_and_trains_on_the_fine_one(tmp_path: Path) -> None:
    images, fine, coarse = images_of(40), np.arange(40) + 60, np.arange(40) // 2
    binary = tmp_path / "cifar-100-binary"
    binary.mkdir()
    rows = np.concatenate([np.stack([coarse, fine], 1), planes_of(images)], 1).astype(np.uint8)
    names = {"coarse": [f"kind {i}" for i in range(20)], "fine": [f"thing {i}" for i in range(100)]}
    for split, chosen in (("train", slice(0, 30)), ("test", slice(30, 40))):
        (binary / f"{split}.bin").write_bytes(rows[chosen].tobytes())
    for kind, listed in names.items():
        (binary / f"{kind}_label_names.txt").write_text("\n".join(listed) + "\n")
    prepare("cifar100", str(tmp_path / "a"), str(tmp_path))
    inputs, classes = read_all(tmp_path / "a", "train")
    assert np.array_equal(np.round(inputs * 255), images[:30])
    assert np.array_equal(classes, fine[:30])
    assert np.array_equal(parsed(tmp_path / "a", "test", "coarse_label")[0], coarse[30:])
    assert (tmp_path / "a" / "label.labels.txt").read_text().splitlines() == names["fine"]


def test_svhn_is_prepared_as_scipy_reads_it(tmp_path: Path) -> None:
    counts = {"train": 50, "test": 20, "extra": 1}
    for i, (split, count) in enumerate(counts.items()):
        images = RANDOM.integers(0, 256, (32, 32, 3, count), np.uint8)
        labels = (np.arange(count) % 10 + 1)[:, np.newaxis].astype(np.float64 if i else np.uint8)
        path = str(tmp_path / f"{split}_32x32.mat")
        scipy.io.savemat(path, {"X": images, "y": labels}, do_compression=split != "test")
    prepare("svhn", str(tmp_path / "out"), str(tmp_path))
    for split, count in counts.items():
        read = scipy.io.loadmat(str(tmp_path / f"{split}_32x32.mat"))
        images, labels = parsed(tmp_path / "out", split, "image", "label")
        assert np.array_equal(images, read["X"].transpose(3, 0, 1, 2))
        assert np.array_equal(labels, read["y"][:, 0] % 10)
        assert len(images) == count


@pytest.mark.parametrize(
    ("compress", "cut", "place"),
    [
        pytest.param(True, 100, None, marks=pytest.mark.slow),
        (True, 2000, None),
        (True, None, 1000),
        (False, None, 184),
        pytest.param(False, None, 185, marks=pytest.mark.slow),
    ],
)
def test_svhn_file_that_is_cut_short_or_has_a_wrong_byte_is_named(
    tmp_path: Path, compress: bool, cut: int | None, place: int | None
) -> None:
    images = RANDOM.integers(0, 256, (32, 32, 3, 2), np.uint8)
    path = tmp_path / "train_32x32.mat"
    scipy.io.savemat(path, {"X": images, "y": np.ones((2, 1))}, do_compression=compress)
    content = bytearray(path.read_bytes()[:cut])
    # Without compression the data type of X is at 184, and SciPy dies of another one.
    assert compress or content[184] == 2
    if place is not None:
        content[place] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train_32x32\.mat .* is damaged or cut short") as refusal:
        prepare("svhn", str(tmp_path / "out"), str(tmp_path))
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "has variables X; needed are X and y"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones(3)}, "and 3 labels; needed is"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones(2)}, "X of float64"),
        ({"X": np.zeros((32, 32, 2), np.uint8), "y": np.ones(2)}, r"\[32, 32, 2\] and 2 labels"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.zeros(2)}, "labels other than 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full(2, 1.5)}, "other than 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full(2, 1j)}, "no real numbers"),
        (None, "is not a MAT file"),
    ],
)
def test_mat_file_that_is_not_svhns_is_explained(
    tmp_path: Path, variables: dict[str, np.ndarray] | None, message: str
) -> None:
    path = tmp_path / "train_32x32.mat"
    if variables is None:
        path.write_text("<html>404</html>" * 100)
    else:
        scipy.io.savemat(path, variables)
    with pytest.raises(DataError, match=rf"train_32x32\.mat.*{message}"):
        prepare("svhn", str(tmp_path / "out"), str(tmp_path))


def png(height: int, width: int, channels: int = 3) -> bytes:
    pixels = RANDOM.integers(0, 256, (height, width, channels), np.uint8)
    return bytes(tf.io.encode_png(pixels).numpy())


def jpeg(height: int, width: int, **how: Any) -> bytes:
    pixels = RANDOM.integers(0, 256, (height, width, 3), np.uint8)
    return bytes(tf.io.encode_jpeg(pixels, **how).numpy())


def write_folder(directory: Path, images: dict[str, bytes]) -> Path:
    for name, content in images.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def test_folder_with_splits_keeps_bytes_and_names(tmp_path: Path) -> None:
    images = {
        "train/dog/b.png": png(4, 5),
        "train/dog/a.PNG": png(4, 5),
        "train/cat/c.png": png(4, 5),
        "test/dog/d.png": png(4, 5),
    }
    source = write_folder(tmp_path / "pets", {**images, "train/dog/.DS_Store": b"junk"})
    out = tmp_path / "out"
    prepare("folder:pets", str(out), str(source))
    for split in ("train", "test"):
        stored = [
            tf.train.Example.FromString(record).features.feature["image"].bytes_list.value[0]
            for record in serialized(out, split).numpy()
        ]
        assert stored == [images[name] for name in sorted(images) if split in name]
    inputs, labels = read_all(out, "train")
    assert inputs.shape == (3, 4, 5, 3)
    assert labels.tolist() == [0, 1, 1]
    assert (out / "label.labels.txt").read_text() == "cat\ndog\n"
    expected = tf.io.decode_png(images["train/cat/c.png"]).numpy()
    assert np.array_equal(np.round(inputs[0] * 255), expected)


def test_folder_of_images_of_16_bits_keeps_them(tmp_path: Path) -> None:
    values = RANDOM.integers(0, 2**16, (3, 4, 5, 1), np.uint16)
    images = {
        f"{split}/a/{number}.png": bytes(tf.io.encode_png(values[number]).numpy())
        for split in ("train", "test")
        for number in range(3)
    }
    source = write_folder(tmp_path / "depths", images)
    prepare("folder:depths", str(tmp_path / "out"), str(source))
    assert np.array_equal(parsed(tmp_path / "out", "train", "image")[0], values)
    assert np.array_equal(read_all(tmp_path / "out", "train")[0], values)
    write_folder(source, {"train/a/few.png": png(4, 5, 1)})
    with pytest.raises(DataError, match=r"\.png has 16 bits for each value, and .*few\.png has 8"):
        prepare("folder:depths", str(tmp_path / "other"), str(source))


def test_folder_without_splits_is_split_by_a_seed_whatever_else_is_there(tmp_path: Path) -> None:
    images = {f"{c}/{i}.png": png(2, 2, 1) for c in "ab" for i in range(150)}
    source = write_folder(tmp_path / "all", images)
    fewer = write_folder(tmp_path / "fewer", {k: v for k, v in images.items() if "7" not in k})

    def tests(directory: Path, **options: Any) -> set[bytes]:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        prepare("folder:all", str(out), str(directory), Options(**options))
        train, test = (parsed(out, split, "image")[0] for split in ("train", "test"))
        assert len(train) + len(test) == len(list(directory.glob("*/*")))
        return {image.tobytes() for image in test}

    default = tests(source)
    assert 10 < len(default) < 60, "about a tenth of 300"
    assert default == tests(source, seed=0, test_fraction=0.1)
    assert default != tests(source, seed=1)
    assert 100 < len(tests(source, test_fraction=0.5)) < 200
    left = {tf.io.decode_png(v).numpy().tobytes() for k, v in images.items() if "7" not in k}
    assert tests(fewer) == default & left, "each image is chosen for itself"


def test_class_that_a_split_lacks_and_a_single_class_are_said(tmp_path: Path) -> None:
    names = ("train/neg/1.png", "train/unsup/1.png", "test/neg/1.png")
    source = write_folder(tmp_path / "two", {name: png(2, 2) for name in names})
    notes = folder.source("x", str(source), Options()).notes
    assert f"{source}: split 'test' has no example of class unsup" in notes
    assert not [note for note in notes if "'train' has no" in note or "one class" in note]
    single = write_folder(
        tmp_path / "one", {f"images/{number}.png": png(2, 2) for number in range(40)}
    )
    notes = folder.source("x", str(single), Options(test_fraction=0.5)).notes
    assert [note for note in notes if "there is one class" in note]


def test_folder_of_images_of_many_kinds_says_that_sizes_vary(tmp_path: Path) -> None:
    source = write_folder(
        tmp_path / "mixed",
        {
            "a/1.jpg": jpeg(4, 6),
            "a/2.jpeg": jpeg(9, 3, progressive=True, xmp_metadata="<x>" + "y" * 500 + "</x>"),
            "b/3.png": png(5, 5, 4),
            "b/4.png": png(5, 5, 1),
        },
    )
    prepare("folder:mixed", str(tmp_path / "out"), str(source), Options(test_fraction=0.5))
    known = read_features(str(tmp_path / "out"))
    assert known["image"].shape == (None, None, 3)
    with pytest.raises(DataError, match="Resize or pad"):
        features.default_parse(known)


ROWS = """sepal,petal,count,species
5.1,1.4,3,setosa
7,4.7,-2,versicolor
6.3,6e0,9223372036854775807,"virginica, or so"

4.9,1.5,1,setosa
"""


def test_csv_types_hold_over_the_whole_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.csv").write_text("\ufeff" + ROWS)
    (source / "test.csv").write_text("sepal,petal,count,species\r\n1,2,3,setosa\r\n")
    out = tmp_path / "out"
    prepare("csv:iris", str(out), str(source), Options(label="species"))
    known = read_features(str(out))
    dtypes = {"sepal": "float32", "petal": "float32", "count": "int64", "species": "int64"}
    assert {name: known[name].dtype for name in known} == dtypes
    sepal, count, species = parsed(out, "train", "sepal", "count", "species")
    assert sepal.tolist() == pytest.approx([5.1, 7, 6.3, 4.9])
    assert count.tolist() == [3, -2, 2**63 - 1, 1]
    assert species.tolist() == [0, 1, 2, 0]
    assert (out / "species.labels.txt").read_text() == "setosa\nversicolor\nvirginica, or so\n"
    inputs, labels = read_all(out, "test")
    assert inputs.tolist() == [[1, 2, 3]], "columns of numbers side by side are the input"
    assert labels.tolist() == [0]


def prepared_csv(tmp_path: Path, values: list[str], **options: Any) -> tuple[Path, list[str]]:
    """A data set of column x with these values, in the split train; and the notes."""
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    for split in ("train", "test"):
        lines = [f"{number};{value}" for number, value in enumerate(values)]
        (source / f"{split}.csv").write_text("\n".join(["n;x", *lines]) + "\n")
    notes = csv.source("x", str(source), Options(**options)).notes
    out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
    prepare("csv:x", str(out), str(source), Options(**options))
    return out, list(notes)


AVAZU = [str(10000009418151094273 + number) for number in range(60)]


@pytest.mark.parametrize(
    ("values", "dtype", "stored", "changed"),
    [
        (
            ["0", "-0", "+5", "16777217", "-9223372036854775808"],
            "int64",
            [0, 0, 5, 2**24 + 1, -(2**63)],
            "",
        ),
        (["1.", ".5", "2e-3", "-0"], "float32", [1, 0.5, np.float32(2e-3), -0.0], ""),
        (["0.1", "33554432", "NA"], "float32", [np.float32(0.1), 2**25, 0], ""),
        (["1700000000.123", "2"], "float64", [1700000000.123, 2], ""),
        (["16777217", "0.5"], "float64", [2**24 + 1, 0.5], ""),
        (["1e39", "3"], "float64", [1e39, 3], ""),
        (["2e-60", "1e-42", "0e-99"], "float64", [2e-60, 1e-42, 0], ""),
        (AVAZU, "string", AVAZU, AVAZU[0]),
        (["9223372036854775807", "9223372036854775808"], "string", None, "9223372036854775808"),
        (["9007199254740993", "0.5"], "string", None, "9007199254740993"),
        (["10115", "01067", "NA"], "string", None, "01067"),
        (["01e1", "02e2"], "string", None, "01e1"),
        (["7", "007", "A7"], "string", None, "A7"),
        (["05db9164", "12345678", "1e234567"], "string", None, "05db9164"),
        (["0x10", "1e"], "string", None, ""),
        (["inf", "nan", "infinity"], "string", None, ""),
        (["3,5", "a lot", "none"], "string", None, ""),
        (["1.2.3", "10.0.0.1", "12:30", "2024-01-02", "030 123"], "string", None, ""),
        (["20_29", "2024_01_15", "1_0000"], "string", None, ""),
        (["555 123 456", "+49 123 456"], "string", None, "555 123 456"),
        (["192.168.100.200", "1.100.200"], "string", None, "192.168.100.200"),
        (["1_000", "2_000"], "string", None, "1_000"),
    ],
)
def test_csv_values_are_stored_as_they_are(
    tmp_path: Path, values: list[str], dtype: str, stored: list[Any] | None, changed: str
) -> None:
    out, notes = prepared_csv(tmp_path, values, missing="0")
    found = [note for note in notes if "is text" in note]
    assert len(found) == bool(changed)
    assert not changed or re.search(
        f"x is text, because (a number (would|has).*|it has) '{re.escape(changed)}'", found[0]
    )
    assert read_features(str(out))["x"].dtype == dtype
    (read,) = parsed(out, "train", "x")
    if dtype == "string":
        assert [value.decode() for value in read] == values
    else:
        assert read.tolist() == stored
    if dtype == "float32":
        assert np.array_equal(np.signbit(read), np.signbit(np.array(stored)))


@pytest.mark.parametrize(
    ("values", "options", "stored"),
    [
        ([str(2**63 + 2048), "007"], {"float": "x"}, [2**63 + 2048, 7]),
        (["1", "NA"], {"missing": "2.0"}, [1, 2]),
        (["1", ""], {"missing": "0.5"}, [1, 0.5]),
        (["1", "NA"], {"missing": "1e39"}, [1, 1e39]),
        (["1", "NA"], {"missing": "1e16"}, [1, 10**16]),
        (["0.5", "NA"], {"missing": "1e16"}, [0.5, 1e16]),
    ],
)
def test_numbers_become_what_the_options_say(
    tmp_path: Path, values: list[str], options: dict[str, str], stored: list[float]
) -> None:
    out, _ = prepared_csv(tmp_path, values, **options)
    assert parsed(out, "train", "x")[0].tolist() == stored


@pytest.mark.parametrize(
    ("values", "rewritten"),
    [
        (["3,5", "2,25", "-1"], ["3.5", "2.25", "-1"]),
        (["37,697", "25"], ["37697", "25"]),
        (["1.234,5", "1.234.567"], ["1234.5", "1234567"]),
        (["1'000", "1_000", "1\u00a0000"], ["1000", "1000", "1000"]),
        (["1 234 567", "25"], ["1234567", "25"]),
        (["1_000.5", "1_000"], ["1000.5", "1000"]),
        (["\uff11\uff12", "3"], ["12", "3"]),
        (["\u22125", "3"], ["-5", "3"]),
        (["1e400", "3"], ["1e300", "3"]),
        (["1e-400", "3"], ["1e-300", "3"]),
    ],
)
def test_numbers_in_another_notation_are_refused_and_the_advice_works(
    tmp_path: Path, values: list[str], rewritten: list[str]
) -> None:
    first = re.escape(repr(values[0]))
    said = rf"train\.csv, line 2: column x has {first}: .*another notation.*--text=x"
    for label in (None, "x"):
        with pytest.raises(DataError, match=said):
            prepared_csv(tmp_path, values, label=label)
    out, _ = prepared_csv(tmp_path, rewritten)
    assert parsed(out, "train", "x")[0].tolist() == list(map(float, rewritten))
    out, notes = prepared_csv(tmp_path, values, text="x")
    assert [value.decode() for value in parsed(out, "train", "x")[0]] == values
    assert not notes


@pytest.mark.parametrize(
    ("values", "names", "note"),
    [
        (["0", "2", "5"], None, "x has 3 different values from 0 to 5. So the label has 6 classes"),
        (["0", "1"], None, ""),
        (["true", "False"], ["False", "true"], ""),
        (["20_29", "30_39"], ["20_29", "30_39"], ""),
        (["1", "10", "x"], ["1", "10", "x"], "the label x has 'x', so all its values are names"),
        (["01", "1"], ["01", "1"], "column x is text, because a number would change '01'"),
    ],
)
def test_values_of_a_label_are_never_changed_unsaid(
    tmp_path: Path, values: list[str], names: list[str] | None, note: str
) -> None:
    out, notes = prepared_csv(tmp_path, values, label="x")
    assert len(notes) == bool(note)
    assert note in "".join(notes)
    (labels,) = parsed(out, "train", "x")
    if names is None:
        assert labels.tolist() == list(map(int, values))
    else:
        assert [names[number] for number in labels] == values
        assert (out / "x.labels.txt").read_text().splitlines() == names


def test_csv_lists_of_any_length_are_filled_up(tmp_path: Path) -> None:
    lines = [
        "tags,genres,words,n,clicked",
        "3|17|5,Drama|Science Fiction,a b,1.5,0",
        "-2,Drama,,2,1",
        ",,c,3,0",
    ]
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.csv").write_text("\n".join(lines))
    out = tmp_path / "out"
    options = Options(label="clicked", lists="tags, genres,words")
    prepare("csv:films", str(out), str(source), options)
    tags, genres, words = parsed(out, "train", "tags", "genres", "words")
    assert tags.tolist() == [[3, 17, 5], [-2, -1, -1], [-1, -1, -1]]
    assert genres.tolist() == [[b"Drama", b"Science Fiction"], [b"Drama", b""], [b"", b""]]
    assert words.tolist() == [[b"a", b"b"], [b"", b""], [b"c", b""]]
    wrong = Options(label="clicked", lists="clicked")
    with pytest.raises(DataError, match="--lists has 'clicked'"):
        prepare("csv:films", str(tmp_path / "other"), str(source), wrong)


def test_the_longest_list_is_named_and_counts_as_space(tmp_path: Path) -> None:
    source = tmp_path / "x.csv"
    source.write_text("n,tags\n" + "1,\n" * 50 + "2," + "3|" * 4999 + "3\n")
    found = csv.source("x", str(source), Options(lists="tags"))
    assert found.notes == [f"{source}: the longest list of tags has 5,000 items"]
    for split in found.splits.values():
        examples = split.examples(0, split.num_examples)
        needed = sum(map(len, examples))
        assert needed <= split.num_bytes <= 1.5 * needed + 20_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["3|17", "4|x"], r"line 3: column tags has the item 'x', but '3' in .*x\.csv, line 2\."),
        (["Drama", "NA|12"], r"line 2: column tags has the item 'Drama', but '12' in .*, line 3\."),
        (["1.5", "12"], r"line 2: column tags has the item '1.5', but '12' in .*, line 3\."),
        (["3 5", "2 -1"], r"line 3: column tags has the item -1, with which shorter lists"),
    ],
)
def test_wrong_lists_are_explained_by_line(tmp_path: Path, values: list[str], message: str) -> None:
    (tmp_path / "x.csv").write_text("\n".join(["n,tags", *(f"1,{value}" for value in values)]))
    with pytest.raises(DataError, match=message + ".*add --text=tags"):
        prepare("csv:x", str(tmp_path / "out"), str(tmp_path / "x.csv"), Options(lists="tags"))
    out, _ = prepared_csv(tmp_path, values, lists="x", text="x")
    (items,) = parsed(out, "train", "x")
    assert [b"|".join(filter(None, row)).decode() for row in items] == [
        value.replace(" ", "|") for value in values
    ]


def test_items_that_a_number_would_change_are_text(tmp_path: Path) -> None:
    out, notes = prepared_csv(tmp_path, ["007|12", AVAZU[0]], lists="x")
    assert parsed(out, "train", "x")[0].tolist() == [[b"007", b"12"], [AVAZU[0].encode(), b""]]
    assert "the items of x are text, because a number would change '007'" in notes[1]


def test_npz_with_splits_in_its_names_keeps_numbers_exactly(tmp_path: Path) -> None:
    arrays = {
        "x": RANDOM.integers(0, 256, (30, 5, 4), np.uint8),
        "y": np.arange(30, dtype=np.uint8) % 3,
        "exact": RANDOM.normal(size=30),
        "big": RANDOM.normal(size=(30, 2)).astype(">f4"),
        "flag": np.arange(30) % 2 == 0,
        "word": np.array([f"w{i}" for i in range(30)]),
    }
    saved = {f"{k}_train": v[:20] for k, v in arrays.items()}
    saved |= {f"{k}_test": v[20:] for k, v in arrays.items()}
    np.savez_compressed(tmp_path / "packed.npz", **saved)
    np.savez(tmp_path / "plain.npz", **saved)
    for name in ("packed", "plain"):
        source = str(tmp_path / f"{name}.npz")
        prepare("npz:set", str(tmp_path / name), source, Options(label="y"))
    assert digest(tmp_path / "packed") == digest(tmp_path / "plain")
    for split, rows in (("train", slice(0, 20)), ("test", slice(20, 30))):
        for name, values in zip(arrays, parsed(tmp_path / "plain", split, *arrays), strict=True):
            expected = arrays[name][rows]
            if name == "word":
                expected = np.char.encode(expected).astype(object)
            assert np.array_equal(values, expected), name
    assert read_features(str(tmp_path / "plain"))["y"].num_classes == 3


def test_npz_of_names_is_split_by_the_seed_and_trains(tmp_path: Path) -> None:
    names = np.array(["b", "a", "ccc"])[np.arange(300) % 3]
    np.savez(tmp_path / "x.npz", x=np.arange(600, dtype=np.float32).reshape(300, 2), y=names)
    options = Options(label="y", test_fraction=0.3, seed=5)
    prepare("npz:x", str(tmp_path / "out"), str(tmp_path / "x.npz"), options)
    inputs, labels = read_all(tmp_path / "out", "train")
    rest, _ = read_all(tmp_path / "out", "test")
    rows = (inputs[:, 0] / 2).astype(int)
    assert np.array_equal(labels, np.array([1, 0, 2])[rows % 3])
    assert sorted([*inputs[:, 0], *rest[:, 0]]) == list(range(0, 600, 2))
    assert 50 < len(rest) < 130


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4, int)}, "differ in their rows"),
        ({"x": np.asfortranarray(np.ones((3, 2))), "y": np.zeros(3, int)}, "ascontiguousarray"),
        ({"x": np.zeros((3, 2), complex), "y": np.zeros(3, int)}, "a record cannot hold"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, r"or a name.*save y\.astype\(np\.int64\)"),
        ({"x": np.ones(3, np.uint64), "y": np.zeros(3, int)}, r"x\.astype\(str\), which keeps ids"),
        ({"x": np.ones((3, 2), bool), "y": np.zeros(3, int)}, r"Save x\.astype\(np\.uint8\)"),
        ({"x": np.ones((3, 2), np.uint32), "y": np.zeros(3, int)}, r"Save x\.astype\(np\.int64\)"),
        ({"x": np.ones(3, "M8[s]"), "y": np.zeros(3, int)}, r"Save x\.astype\(np\.int64\)"),
        ({"x": np.ones(3), "y": np.ones(3, np.uint64)}, r"Save y\.astype\(np\.int64\)"),
        ({"x": np.zeros((3, 2)), "y": -np.ones(3, int)}, "has -1"),
        ({"x": np.zeros((3, 2)), "z": np.zeros(3, int)}, "--label may be x, z"),
        ({"x": np.array([{}, None], object), "y": np.zeros(2, int)}, r"x\.npy is object"),
        (
            {"x": np.zeros((27, 2)), "y": np.array([b"cat", b"caf\xe9", b"dog"] * 9)},
            r"a\.npz: row 1 of y is b'caf\\xe9', which is not UTF-8",
        ),
    ],
)
def test_wrong_npz_files_are_explained(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "a.npz", allow_pickle=True, **arrays)
    with pytest.raises(DataError, match=message):
        prepare("npz:a", str(tmp_path / "out"), str(tmp_path / "a.npz"), Options(label="y"))


def test_cmyk_jpegs_are_three_channels_as_they_are_decoded(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="only Pillow writes CMYK")
    content = io.BytesIO()
    image.new("CMYK", (6, 4), (10, 200, 30, 40)).save(content, "jpeg")
    files = {f"{c}/{i}.jpg": content.getvalue() for c in "ab" for i in range(20)}
    write_folder(tmp_path / "folder", files)
    prepare("folder:f", str(tmp_path / "out"), str(tmp_path / "folder"))
    found = read_features(str(tmp_path / "out"))
    assert found["image"].shape == (4, 6, 3)
    images, _ = read_all(tmp_path / "out", "train")
    assert images.shape[1:] == (4, 6, 3)


def test_damaged_npz_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(50_000).reshape(-1, 2), y=np.zeros(25_000, int))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[100_000] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz: x\.npy is damaged: Bad CRC"):
        prepare("npz:a", str(tmp_path / "out"), str(tmp_path / "a.npz"), Options(label="y"))


@needs_tfds
def test_tfds_reads_features_of_every_kind(tmp_path: Path) -> None:
    import tensorflow_datasets as tfds

    (tmp_path / "a.csv").write_text(ROWS)
    options = Options(label="species", test_fraction=0.5)
    prepare("csv:a", str(tmp_path / "csv"), str(tmp_path / "a.csv"), options)
    source = write_folder(tmp_path / "f", {"train/a/1.png": png(3, 3), "train/b/1.png": png(3, 3)})
    prepare("folder:f", str(tmp_path / "folder"), str(source))
    by_tfds = tfds.builder_from_directory(str(tmp_path / "csv"))
    rows = [e for s in ("train", "test") for e in by_tfds.as_dataset(split=s).as_numpy_iterator()]
    assert sorted(row["count"] for row in rows) == [-2, 1, 3, 2**63 - 1]
    assert by_tfds.info.features["species"].names[0] == "setosa"
    of_folder = tfds.builder_from_directory(str(tmp_path / "folder"))
    images = [e["image"] for e in of_folder.as_dataset(split="train").as_numpy_iterator()]
    assert np.array_equal(images, parsed(tmp_path / "folder", "train", "image")[0])


@needs_tfds
def test_directory_that_tfds_prepared_is_read_where_it_is(tmp_path: Path) -> None:
    import tensorflow_datasets as tfds

    images = RANDOM.integers(0, 256, (25, 6, 6, 3), np.uint8)
    tfds.dataset_builders.store_as_tfds_dataset(
        name="small",
        version="1.0.0",
        features=tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(6, 6, 3)),
                "label": tfds.features.ClassLabel(names=["a", "b", "c"]),
            }
        ),
        split_datasets={
            split: [(i, {"image": images[i], "label": i % 3}) for i in rows]
            for split, rows in (("train", range(20)), ("test", range(20, 25)))
        },
        data_dir=str(tmp_path),
        download_config=tfds.download.DownloadConfig(num_shards=3),
        disable_shuffling=True,
    )
    directory = tmp_path / "small" / "1.0.0"
    assert len(list(directory.glob("small-train.tfrecord-*-of-00003"))) == 3
    inputs, labels = read_all(directory, "train")
    assert np.array_equal(np.round(inputs * 255), images[:20])
    assert np.array_equal(labels, np.arange(20) % 3)
    assert read_all(directory, "test")[0].shape == (5, 6, 6, 3)
    prepare("tfds:small", str(tmp_path / "out"), str(tmp_path))
    assert np.array_equal(parsed(tmp_path / "out", "train", "image")[0], images[:20])


def many_sources(directory: Path, count: int) -> dict[str, tuple[str, Options]]:
    """Name -> source of about 3 KB times `count`, a format each."""
    images = RANDOM.integers(0, 256, (count, 32, 32, 3), np.uint8)
    labels = np.arange(count) % 10
    directory.mkdir()
    write_cifar10(directory / "cifar", images, labels)
    (directory / "svhn").mkdir()
    (directory / "idx").mkdir()
    for split, prefix in (("train", "train"), ("test", "t10k")):
        mat = {"X": images.transpose(1, 2, 3, 0), "y": labels[:, np.newaxis] + 1}
        scipy.io.savemat(directory / "svhn" / f"{split}_32x32.mat", mat, do_compression=True)
        pixels = images.reshape(count, 48, 64)
        write_idx(directory / "idx" / f"{prefix}-images-idx3-ubyte.gz", pixels, compress=True)
        write_idx(directory / "idx" / f"{prefix}-labels-idx1-ubyte", labels)
    np.savez(directory / "table.npz", x=images, y=labels)
    numbers = [",".join(map(str, row)) for row in images[:, :16, :16, 0].reshape(count, -1)]
    header = ",".join(f"x{i}" for i in range(256))
    (directory / "table.csv").write_text("\n".join([header, *numbers]) + "\n")
    names = {f"{i % 10}/{i}.png": png(32, 32) for i in range(count)}
    write_folder(directory / "folder", names)
    return {
        "cifar10": (str(directory / "cifar"), Options()),
        "svhn": (str(directory / "svhn"), Options()),
        "idx": (str(directory / "idx"), Options()),
        "npz:x": (str(directory / "table.npz"), Options(label="y")),
        "csv:x": (str(directory / "table.csv"), Options()),
        "folder:x": (str(directory / "folder"), Options()),
    }


def test_any_part_of_a_split_can_be_read_alone(tmp_path: Path) -> None:
    for name, (path, options) in many_sources(tmp_path / "sources", 60).items():
        source = open_source(name, path, options)
        for split in source.splits.values():
            whole = list(split.examples(0, split.num_examples))
            assert len(whole) == split.num_examples
            bounds = [*(cut for cut in (0, 1, 17, 23, 24) if cut < len(whole)), len(whole)]
            parts = [list(split.examples(a, b)) for a, b in itertools.pairwise([0, *bounds])]
            assert [example for part in parts for example in part] == whole, name


WRITES = """
import json, sys
from data.prepare import preparing

source, out = json.loads(sys.argv[1])
preparing._SHARD_BYTES = 30_000
for num_processes in (2, 1):
    preparing.num_cores = lambda: num_processes
    preparing.prepare("svhn", f"{out}-{num_processes}", source)
    assert num_processes == 1 or "tensorflow" not in sys.modules, "this process has written"
"""


@pytest.mark.slow
def test_result_is_the_same_bytes_whatever_the_number_of_processes(tmp_path: Path) -> None:
    source, _ = many_sources(tmp_path / "sources", 60)["svhn"]
    run_python("-c", WRITES, json.dumps([source, str(tmp_path / "out")]), check=True)
    assert len(list((tmp_path / "out-1").glob("*train.tfrecord-*"))) > 3
    assert digest(tmp_path / "out-1") == digest(tmp_path / "out-2")


FAILS = """
import json, os, signal, sys
from data.system import files
from data.prepare import writing

out, how = json.loads(sys.argv[1])

def examples(first, last):
    while True:
        yield b"y" * 100
        if first and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if first:
            raise files.DataError("damaged")

try:
    writing.write_split(examples, out, "toy", "train", 2, 10**9, num_processes=2)
except (files.DataError, OSError) as error:
    print(error)
"""


@pytest.mark.parametrize(("how", "said"), [("raises", "damaged"), ("killed", "exit code -9")])
def test_failure_in_one_process_ends_all_and_leaves_nothing(
    tmp_path: Path, how: str, said: str
) -> None:
    done = run_python("-c", FAILS, json.dumps([str(tmp_path), how]))
    assert said in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


MEASURES = """
import json, re, sys
from pathlib import Path

from data.prepare.preparing import prepare
from data.prepare.sources import Options, csv

status = Path("/proc/self/status")
for name, options, small, large in json.loads(sys.argv[1]):
    prepare(name, small[1], small[0], Options(**options))
    before = int(re.search(r"VmRSS:\\s+(\\d+) kB", status.read_text())[1])
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
    prepare(name, large[1], large[0], Options(**options))
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1])
    print(name, peak - before >> 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_number_of_examples(tmp_path: Path) -> None:
    small = many_sources(tmp_path / "small", 300)
    large = many_sources(tmp_path / "large", 5_000)
    jobs = []
    for name, (source, options) in large.items():
        pairs = [(small[name][0], str(tmp_path / f"{name}-1")), (source, str(tmp_path / name))]
        jobs.append([name, options.given(), *pairs])
    done = run_python("-c", MEASURES, json.dumps(jobs), check=True)
    more_mib = dict(line.split() for line in done.stdout.splitlines())
    assert more_mib.keys() == large.keys()
    for name, more in more_mib.items():
        written = sum(path.stat().st_size for path in (tmp_path / name).iterdir()) >> 20
        print(f"{name}: {written} MiB written, {more} MiB more memory")
        assert written > 12, "there was something to hold"
        # A set of images fits in memory.
        most = 8 + 2 * written if name in ("cifar10", "idx", "svhn") else 8
        assert int(more) < most, f"{name}: {written} MiB were written"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_rows_of_a_row_group(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    pairs = []
    for rows in (150_000, 500_000):  # Each with complete pages and dictionaries.
        values = np.random.default_rng(0).normal(size=(8, rows))
        table = pyarrow.table({f"c{i}": column for i, column in enumerate(values)})
        parquet.write_table(table, tmp_path / f"{rows}.parquet", row_group_size=rows)
        pairs.append((f"{tmp_path}/{rows}.parquet", f"{tmp_path}/out-{rows}"))
    assert os.path.getsize(pairs[1][0]) > 25 << 20, "there was something to hold"
    done = run_python("-c", MEASURES, json.dumps([("parquet:x", {}, *pairs)]), check=True)
    assert int(done.stdout.split()[1]) < 20, done.stdout
