"""CIFAR, SVHN and folders of images become the right examples, byte for byte."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import tensorflow as tf

from data import features
from data.example_features import read_features
from data.prepare.preparing import prepare
from data.prepare.sources import Options, folder
from data.system.files import DataError
from tests.unit.test_prepare import digest, parsed, read_all, serialized

RANDOM = np.random.default_rng(0)


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
