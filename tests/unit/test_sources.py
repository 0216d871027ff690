"""Files of each format, byte for byte as they are passed around, become the right examples."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from data.example_features import read_features
from data.prepare.catalog import open_source
from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.system.files import DataError
from tests.commands import run_python
from tests.unit.test_csv_source import ROWS
from tests.unit.test_image_sources import RANDOM, png, write_cifar10, write_folder
from tests.unit.test_prepare import digest, needs_tfds, parsed, read_all, write_idx


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
        ({"x": np.zeros((3, 2), complex), "y": np.zeros(3, int)}, r"cannot hold\. Save it as one"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, r"or a name.*save y\.astype\(np\.int64\)"),
        (
            {"x": np.ones(3, np.uint64), "y": np.zeros(3, int)},
            r"as int64 only if all are below 2\*\*63, else \[N\] as x\.astype\(str\)",
        ),
        ({"x": np.ones((3, 2), bool), "y": np.zeros(3, int)}, "one of uint8, int8"),
        ({"x": np.ones(3, "M8[s]"), "y": np.zeros(3, int)}, r"one of .*int64.*, or as strings"),
        ({"x": np.ones(3), "y": np.ones(3, np.uint64)}, r"else \[N\] as y\.astype\(str\)"),
        ({"x": np.zeros((3, 2)), "y": -np.ones(3, int)}, "has -1"),
        ({"x": np.zeros((3, 2)), "z": np.zeros(3, int)}, "--label may be x, z"),
        ({"x": np.array([{}, None], object), "y": np.zeros(2, int)}, r"x\.npy is object"),
        (
            {"x": np.zeros((27, 2)), "y": np.array([b"cat", b"caf\xe9", b"dog"] * 9)},
            r"a\.npz: y has b'caf\\xe9', which is not UTF-8",
        ),
    ],
)
def test_wrong_npz_files_are_explained(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "a.npz", allow_pickle=True, **arrays)
    with pytest.raises(DataError, match=message):
        prepare("npz:a", str(tmp_path / "out"), str(tmp_path / "a.npz"), Options(label="y"))


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
