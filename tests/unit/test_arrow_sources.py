"""parquet:NAME and python:NAME: values, types, splits, missing values, and what is refused."""

import datetime
import decimal
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.example_features import class_names, read_features
from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.prepare.sources.arrow_tables import arrow_chunk, arrow_source
from data.prepare.sources.parquet import _chunks
from data.system.files import DataError
from tests.unit.test_prepare import digest, run, serialized

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
pd = pytest.importorskip("pandas", reason="needs the extra test")

_NONE = pa.array([None, None], pa.int32())
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")

# Containers of equal content; `content` is a dict of arrays [500, ...].
CONTAINERS = """
import numpy as np

def content():
    random, n = np.random.default_rng(0), 500
    return {
        "id": np.arange(n) * 10**9, "small": random.normal(size=n).astype(np.float32),
        "large": random.normal(size=n), "name": np.array([f"n{i % 7}" for i in range(n)]),
        "is_new": np.arange(n) % 2 == 0,
        "image": random.integers(0, 255, (n, 4, 3), dtype=np.uint8),
        "y": np.arange(n) % 3,
    }

def generator():
    return parts(0, 1)

def python_values():
    return [
        {name: value if name in ("image", "small") else value.item() for name, value in row.items()}
        for row in generator()
    ]

def dataset():
    import tensorflow as tf
    return tf.data.Dataset.from_tensor_slices(content())

def py_dataset():
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            batch = {k: v[100 * index : 100 * index + 100] for k, v in content().items()}
            y = batch.pop("y")
            return batch, y

    return Batches()

def structured():
    found = content()
    array = np.zeros(500, [(k, v.dtype, v.shape[1:]) for k, v in found.items()])
    for name, values in found.items():
        array[name] = values
    return array

def arrow():
    import pyarrow as pa
    found = content()
    found["image"] = pa.array(found["image"].tolist(), pa.list_(pa.list_(pa.uint8())))
    return pa.table({name: pa.array(values) for name, values in found.items()})

def pandas():
    import pandas as pd
    found, image = content(), arrow()["image"]
    found["image"] = pd.Series(image.to_pylist(), dtype=pd.ArrowDtype(image.type))
    return pd.DataFrame(found)

def parts(shard, num_shards):
    found = content()
    for k in range(500 * shard // num_shards, 500 * (shard + 1) // num_shards):
        yield {name: values[k] for name, values in found.items()}
"""


def read(directory: Path, split: str = "train") -> dict[str, np.ndarray]:
    """All values of a split by feature, as the reader of this program decodes them."""
    parsed = read_features(str(directory)).parse_example(serialized(directory, split))
    return {name: value.numpy() for name, value in parsed.items()}


def write(path: Path, columns: Mapping[str, Any], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)


def parquet(path: Path, out: Path, **options: Any) -> Path:
    prepare("parquet:x", str(out), str(path), Options(**options))
    return out


def moments(dtype: Any, *numbers: int | None) -> Any:
    stored = pa.int32() if dtype.bit_width == 32 else pa.int64()
    return pa.array(numbers, stored).view(dtype)


NO_ZONE = pa.timestamp("us", "Nowhere/City")  # As each zone on a system without tzdata.


def columns_of_all_types(count: int) -> dict[str, Any]:
    start = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    days = [(start + datetime.timedelta(days=row)).date() for row in range(count)]
    random = np.random.default_rng(1)
    numbers = {name: pa.array(np.arange(count), type=name) for name in (*INTEGERS, "uint64")}
    return numbers | {
        "float": pa.array(random.normal(size=count), type=pa.float32()),
        "double": random.normal(size=count),
        "bool": np.arange(count) % 3 == 0,
        "text": [None if row % 5 == 0 else f"é{row}" for row in range(count)],
        "category": pa.array(["a", "b"] * (count // 2)).dictionary_encode(),
        "binary": [bytes([row, 255]) for row in range(count)],
        "date": days,
        "date64": pa.array(days, pa.date64()),
        "stamp": pa.array([start + datetime.timedelta(seconds=row) for row in range(count)]),
        "nanos": pa.array(np.arange(count), type=pa.timestamp("ns")),
        "cents": [decimal.Decimal(int(x)) / 100 for x in random.integers(-(10**9), 10**9, count)],
        "whole": [decimal.Decimal(row) for row in range(count)],
        "fixed": pa.array(random.normal(size=(count, 3)).tolist(), pa.list_(pa.float32(), 3)),
        "equal": [[row, -1] for row in range(count)],
        "ragged": [list(range(row % 4)) for row in range(count)],
        "words": [["a", "bc"][: row % 3] for row in range(count)],
        "y": np.arange(count) % 4,
    }


def test_values_and_types_are_those_that_pandas_reads(tmp_path: Path) -> None:
    for split in ("train", "test"):
        path = tmp_path / "in" / f"{split}.parquet"
        write(path, columns_of_all_types(50), row_group_size=7)
    frame = pd.read_parquet(path)
    found = read(parquet(tmp_path / "in", tmp_path / "out"))
    assert found.keys() == set(frame.columns)
    for name in (*INTEGERS, "bool", "float", "double"):
        assert found[name].dtype == frame[name].dtype, name
        np.testing.assert_array_equal(found[name], frame[name])
    for name in ("uint64", "stamp", "nanos"):
        np.testing.assert_array_equal(found[name], frame[name].astype(np.int64))
    for name in ("text", "category"):
        expected = [value if isinstance(value, str) else "" for value in frame[name]]
        assert [value.decode() for value in found[name]] == expected
    assert found["binary"].tolist() == frame["binary"].tolist()
    days = [(date - datetime.date(1970, 1, 1)).days for date in frame["date"]]
    assert found["date"].tolist() == found["date64"].tolist() == days
    assert found["cents"].tolist() == [float(value) for value in frame["cents"]]
    assert found["whole"].tolist() == [int(value) for value in frame["whole"]]
    for name in ("fixed", "equal"):
        np.testing.assert_array_equal(found[name], np.stack(frame[name]))
    for row, values in enumerate(frame["ragged"]):
        assert found["ragged"][row].tolist() == [*values, *[-1] * (3 - len(values))]
    for row, values in enumerate(frame["words"]):
        padded = [*(word.encode() for word in values), *[b""] * (2 - len(values))]
        assert found["words"][row].tolist() == padded


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (pa.date32(), [5_000_000, -(2**31)]),
        (pa.timestamp("us"), [5 - 2**63, 1]),
        (pa.timestamp("ns"), [1, 2**62 + 1]),
        (pa.duration("s"), [2**62 + 1, -1]),
        (NO_ZONE, [1, 2]),
    ],
    ids=str,
)
def test_times_that_python_does_not_hold_are_integers(
    dtype: Any, numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.parquet", {"x": moments(dtype, *numbers * 20), "y": [0, 1] * 20})
    monkeypatch.delattr(pd, "Timestamp")  # It is not installed with the extra parquet.
    found = read(parquet(tmp_path / "a.parquet", tmp_path / "out", label="y"))
    assert [numbers[label] for label in found["y"]] == found["x"].tolist()
    assert found["x"].dtype == np.int64


def test_numbers_as_text_and_integers_of_text_are_declared(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {"id": [1, 20] * 30, "code": ["007", "3.0"] * 30, "d": [0.1, 3e9 + 0.5] * 30}
    write(path, {**columns, "lists": [[1], [2, 30]] * 30, "e": [0.1, 0.2] * 30})
    out = parquet(path, tmp_path / "out", text="id,lists", integer="code", float="d,e")
    found = read(out)
    assert set(found["id"]) == {b"1", b"20"}
    assert set(found["code"]) == {7, 3}
    assert set(found["d"]) == {0.1, 3e9 + 0.5}, "float32 would change the whole part"
    assert found["e"].dtype == np.float32
    assert set(map(tuple, found["lists"])) == {(b"1", b""), (b"2", b"30")}


@pytest.mark.parametrize("missing", ["drop", "0"])
def test_missing_numbers_are_dropped_or_replaced(missing: str, tmp_path: Path) -> None:
    path, is_dropped = tmp_path / "a.parquet", missing == "drop"
    columns = {
        "x": [1, None, 3] * 20,
        "z": [1.0, 2.0, 3.0 if is_dropped else float("nan")] * 20,
        "t": ["a", None, ""] * 20,
        "y": ["b", "c", "a"] * 20,
    }
    write(path, columns, row_group_size=7)
    message = r"a\.parquet, row 1: column x has 'null', but '1' in .*row 0"
    with pytest.raises(DataError, match=message):
        parquet(path, tmp_path / "out")
    out = parquet(path, tmp_path / "out", missing=missing, label="y")
    train, test = (read(out, split) for split in ("train", "test"))
    assert len(train["x"]) + len(test["x"]) == (40 if is_dropped else 60)
    assert {*train["x"], *test["x"]} == ({1, 3} if is_dropped else {0, 1, 3})
    assert {*train["z"], *test["z"]} == ({1, 3} if is_dropped else {0, 1, 2})
    assert class_names(str(out), "y") == (["a", "b"] if is_dropped else ["a", "b", "c"])


def test_table_has_the_splits_that_csv_of_the_same_rows_has(tmp_path: Path) -> None:
    columns = {"x": np.arange(300), "y": ["b", "a", "c"] * 100}
    write(tmp_path / "a.parquet", columns, row_group_size=70)
    pd.DataFrame(columns).to_csv(tmp_path / "a.csv", index=False)
    options = Options(label="y", test_fraction=0.3, seed=7)
    prepare("csv:x", str(tmp_path / "csv"), str(tmp_path / "a.csv"), options)
    prepare("parquet:x", str(tmp_path / "parquet"), str(tmp_path / "a.parquet"), options)
    for split in ("train", "test"):
        of_csv, found = (read(tmp_path / kind, split) for kind in ("csv", "parquet"))
        for name in ("x", "y"):
            np.testing.assert_array_equal(found[name], of_csv[name])


def test_partitions_are_columns_and_words_in_paths_are_splits(tmp_path: Path) -> None:
    for split in ("training", "test"):
        for day in (1, 2):
            for city in ("a b", "c"):
                path = tmp_path / "in" / split / f"day={day}" / f"city={city.replace(' ', '%20')}"
                write(path / "part-0.parquet", {"x": [day]})
    (tmp_path / "in" / "training" / "_SUCCESS").touch()
    write(tmp_path / "in" / "_temporary" / "0.parquet", {"other": [1]})
    out = parquet(tmp_path / "in", tmp_path / "out")
    found = read(out)
    assert found["day"].tolist() == found["x"].tolist() == [1, 1, 2, 2]
    assert found["city"].tolist() == [b"a b", b"c"] * 2
    assert len(read(out, "test")["x"]) == 4


def test_splits_are_those_of_a_column_or_of_patterns(tmp_path: Path) -> None:
    names = ["Train"] * 5 + ["val"] * 3 + ["train"] * 2
    columns = {"x": [None, *range(1, 10)], "part": names, "z": [0.5] * 10}
    write(tmp_path / "in" / "a.parquet", columns, row_group_size=4)
    out = parquet(tmp_path / "in", tmp_path / "a", split_column="part", missing="drop", columns="x")
    assert read(out)["x"].tolist() == [1, 2, 3, 4, 8, 9]
    assert read(out, "val").keys() == {"x"}
    write(tmp_path / "in" / "b.parquet", columns)
    out = parquet(tmp_path / "in", tmp_path / "b", splits="test=b*,train=*", missing="0")
    assert read(out, "test")["x"].tolist() == [*range(10)]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"x": [1.5, float("inf")]}, {}, r"row 1: column x has an infinite value"),
        ({"x": [0.5, 1.0]}, {"label": "x"}, r"row 0: x is the label, and has '0\.5'"),
        ({"x": [0, -1]}, {"label": "x"}, "x is the label, and has -1"),
        ({"x": ["a", None]}, {"label": "x"}, r"row 1: the label x is empty. --missing=drop"),
        ({"x": _NONE}, {}, r"row 0: column x has 'null': 2 of its numbers.*, or --missing=0"),
        ({"x": _NONE}, {"label": "x"}, r"'null': 2 of its numbers are missing. Add --missing=drop"),
        ({"x": _NONE}, {"missing": "drop"}, "--missing=drop leaves no row"),
        ({"x": [1.5]}, {"integer": "x"}, r"row 0: column x has '1\.5', and --integer says"),
        ({"x": ["a"]}, {"float": "x"}, r"column x has 'a', and --float says"),
        ({"x": [{"a": 1}]}, {}, "column x is struct.*--columns"),
        ({"x": [[{"a": 1}]]}, {}, "column x is list<.*--columns"),
        ({"x": [[1.5], [1.0, 2.0]]}, {}, "lists of 1 to 2 items, of numbers with a fraction"),
        ({"x": [[1], [-1, 2]]}, {}, "row 1: column x has the item -1"),
        ({"x": [[1], [None]]}, {}, "row 1: an item of x is missing"),
        ({"x": [["a"], ["b", None]]}, {}, "row 1: an item of x is missing"),
        ({"x": [[1.5], [float("nan")]]}, {"text": "x"}, "row 1: an item of x is missing"),
        ({"x": [None, [[1], [2]], [[3], None]]}, {}, "row 2: an item of x is missing"),
        ({"x": [[1], None, None]}, {"missing": "0"}, "row 1: column x has 'null': 2 of its lists"),
        ({"x": pa.array([[]] * 4, pa.list_(pa.float32()))}, {}, "of numbers with a fraction"),
        ({"x": [[1]]}, {"label": "x"}, "column x has lists, so it cannot be in --label"),
        ({"x": ["trian"], "z": [1]}, {"split_column": "x"}, "column x has 'trian'"),
        ({"x": [["train"]], "z": [1]}, {"split_column": "x"}, "column x has 'list<"),
        ({"x": moments(pa.date32(), 5_000_000, -1)}, {"label": "x"}, "x is the label, and has -1"),
        (
            {"x": moments(pa.timestamp("ns"), 1, None)},
            {},
            "row 1: column x has 'null', but '1' in .*row 0: 1",
        ),
        ({"x": moments(NO_ZONE, 1)}, {"text": "x"}, "Nowhere/City.* cannot become text: .*tzdata"),
        (
            {"x": pa.array([b"caf\xe9"]).view(pa.string())},
            {"float": "x"},
            "row 0: column x has 'caf\ufffd', and --float says",
        ),
    ],
)
def test_wrong_columns_are_explained(
    columns: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=message):
        parquet(tmp_path / "a.parquet", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_wrong_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is not all")
    with pytest.raises(DataError, match=r"a\.parquet is no Parquet file, or damaged"):
        parquet(tmp_path / "a.parquet", tmp_path / "out")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match=r"a\.csv is no Parquet file.*type csv:NAME"):
        parquet(tmp_path / "a.csv", tmp_path / "out")
    pq.write_table(pa.table([[1], [2], [3]], names=["x", "z", "z"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has two columns 'z'"):
        parquet(tmp_path / "b.parquet", tmp_path / "out")
    write(tmp_path / "in" / "train.parquet", {"x": [1]})
    write(tmp_path / "in" / "more.parquet", {"x": [1]})
    with pytest.raises(DataError, match=r"the splits are not clear: .*more\.parquet is of no"):
        parquet(tmp_path / "in", tmp_path / "out")
    write(tmp_path / "in" / "more.parquet", {"z": [1]})
    with pytest.raises(DataError, match=r"other columns than in .*lacks z and also has x"):
        parquet(tmp_path / "in", tmp_path / "out", splits="train=*")


def test_column_that_is_not_taken_may_be_missing_in_a_file(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.parquet", {"x": [1] * 30, "z": [3] * 30})
    write(tmp_path / "in" / "b.parquet", {"x": [2] * 30})
    with pytest.raises(DataError, match=r"it lacks z\. .*: --columns has those that are taken"):
        parquet(tmp_path / "in", tmp_path / "out")
    found = read(parquet(tmp_path / "in", tmp_path / "out", columns="x"))
    assert set(found["x"]) == {1, 2}


@pytest.mark.parametrize(
    ("values", "dtype", "missing", "stored"),
    [
        ([1, 2**64 - 1], pa.uint64(), None, {b"1", b"18446744073709551615"}),
        ([None, 2**53 + 1], pa.int64(), "0.5", {b"", b"9007199254740993"}),
        ([None, -(2**63)], pa.int64(), "0.5", {-(2.0**63), 0.5}),
    ],
)
def test_integers_that_no_number_holds_are_text_as_in_csv(
    values: list[int | None],
    dtype: Any,
    missing: str | None,
    stored: set[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "a.parquet", {"x": pa.array(values * 30, dtype)})
    found = read(parquet(tmp_path / "a.parquet", tmp_path / "out", missing=missing))
    assert set(found["x"].tolist()) == stored
    is_text = "row 1: column x is text, because a number would change" in capsys.readouterr().err
    assert is_text == (found["x"].dtype == object)


def test_progress_is_said_while_types_are_found_and_rows_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.prepare.progress._LINE_ROWS", 200)
    table = {"x": np.arange(300)}
    write(tmp_path / "a.parquet", table, row_group_size=150)
    pd.DataFrame(table).to_csv(tmp_path / "a.csv", index=False)
    for kind, total in (("parquet", " of 300"), ("csv", "")):
        path = tmp_path / f"a.{kind}"
        prepare(f"{kind}:x", str(tmp_path / kind), str(path))
        said = capsys.readouterr().err
        assert re.search(rf"{path.name}, types: (256|300){total} rows\n", said)
        assert re.search(r"^train: 200 of 2\d\d examples\n", said, re.MULTILINE)


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], Path]:
    """A function that writes the data set of a function in CONTAINERS."""
    (tmp_path / "made.py").write_text(CONTAINERS)

    def written(function: str, **options: Any) -> Path:
        source, out = f"{tmp_path}/made.py:{function}", tmp_path / function
        prepare("python:x", str(out), source, Options(label="y", **options))
        return out

    return written


@pytest.mark.parametrize(
    "function",
    ["python_values", "dataset", "py_dataset", "structured", "arrow", "pandas", "parts"],
)
def test_equal_content_gives_equal_files(
    function: str, python: Callable[[str], Path], tmp_path: Path
) -> None:
    wanted = digest(python("generator"))
    assert digest(python(function)) == wanted
    found = read(tmp_path / function)
    assert found["image"].shape[1:] == (4, 3)
    assert found["large"].dtype == np.float64
    assert found["small"].dtype == np.float32


@pytest.mark.slow
def test_result_is_that_of_parquet_and_the_same_for_any_number_of_processes(
    python: Callable[[str], Path], tmp_path: Path
) -> None:
    wanted = digest(python("generator"))
    code = "import made, pyarrow.parquet as p; p.write_table(made.arrow(), 'a.parquet')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert digest(parquet(tmp_path / "a.parquet", tmp_path / "p", label="y")) == wanted
    for processes in (1, 3):
        out = f"{tmp_path}/{processes}"
        arguments = ("--source=made.py:parts", "--label=y", f"--processes={processes}")
        done = run("python:x", *arguments, f"--data_dir={out}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "image uint8 [4, 3], y label of 3 classes" in done.stderr
        assert digest(Path(out)) == wanted
    assert "already holds" in run("python:x", *arguments, f"--data_dir={out}", cwd=tmp_path).stderr


def test_types_of_times_and_numbers_are_not_mixed(tmp_path: Path) -> None:
    dtypes = pa.timestamp("ms"), pa.timestamp("us"), pa.date32(), pa.int64()
    message = r"1\.parquet: column t has .* row 0 on, and .* in .*0\.parquet from row 0 on"
    for pair in itertools.permutations(dtypes, 2):
        for is_list in (False, True):
            for number, dtype in enumerate(pair):
                column = pa.array([[1]], pa.list_(dtype)) if is_list else pa.array([1], dtype)
                write(tmp_path / "in" / f"{number}.parquet", {"t": column})
            with pytest.raises(DataError, match=message):
                parquet(tmp_path / "in", tmp_path / "out")


_TEXT, _VIEW = pa.array(["a", "b"]), pa.array(["a", "b"], pa.string_view())
_TEXTS = pa.string(), pa.string_view(), pa.binary_view(), pa.large_string()
_CODES = pa.array([0, 1, 1])
_CATEGORIES = _TEXT.take(_CODES).dictionary_encode()
_BIG = decimal.Decimal(10) ** 40
_MAP, _PAIR = pa.map_(pa.string(), pa.int8()), pa.struct([("a", pa.int8())])
_LISTS = (pa.list_, pa.large_list, lambda dtype: pa.list_(dtype, 1))


@pytest.mark.parametrize(
    ("column", "stored"),
    [
        *((pa.array(["a", "b", None], dtype), "text") for dtype in _TEXTS),
        (pa.array([b"a", b"b", None], pa.binary(1)), "text"),
        *((pa.array([["a"]] * 3, of(pa.string_view())), "text [1]") for of in _LISTS),
        (pa.array([[[b"a"]]] * 3, pa.list_(pa.list_(pa.binary_view()))), "text [1, 1]"),
        (pa.array([[1], [2], [3]], pa.large_list(pa.int32())), "int32 [1]"),
        (pa.DictionaryArray.from_arrays(_CODES, _TEXT), "text"),
        (pa.DictionaryArray.from_arrays(_CODES, _VIEW), "text"),
        (pa.array([5, 5, 6], pa.int32()).dictionary_encode(), "int32"),
        (pa.array([3 * 86_400_000, None, 0], pa.date64()), "int64 of date64[ms]"),
        (pa.ListArray.from_arrays([0, 1, 2, 3], _CATEGORIES), "text [1]"),
        (pa.array(np.array([0.5, 1, 2], np.float16)), "float32 of halffloat"),
        (pa.array(np.arange(3) / 2).cast(pa.decimal256(50, 2)), "float64 of decimal256(50, 2)"),
        (pa.array([_BIG, 1, 2], pa.decimal256(50, 0)), "text of decimal256(50, 0)"),
        (pa.array([1, 2, 3], pa.duration("ms")), "int64 of duration[ms]"),
        (pa.array([1, 2, 3], pa.time64("us")), "int64 of time64[us]"),
        (pa.array([[("a", 1)]] * 3, _MAP), None),
        (pa.array([{"a": 1}] * 3, _PAIR), None),
        (pa.array([[{"a": 1}]] * 3, pa.list_(_PAIR)), None),
        (pa.array([[1]] * 3, pa.list_view(pa.int8())), None),
        (pa.array([(1, 2, 3)] * 3, pa.month_day_nano_interval()), None),
        (pa.RunEndEncodedArray.from_arrays([1, 3], [1, 2]), None),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_each_type_of_arrow_is_stored_by_a_rule_or_refused_with_its_name(
    column: Any, stored: str | None
) -> None:
    table = pa.table({"x": column})
    chunk = arrow_chunk("a", 0, 3, table.schema, lambda names: table.select(names).to_batches())
    if stored is None:
        with pytest.raises(DataError, match=r"column x is .*, which a record cannot hold"):
            arrow_source("x", "a", {"train": [chunk]}, Options())
        return
    source = arrow_source("x", "a", {"train": [chunk]}, Options(missing="0"))
    assert source.notes[-1] == f"a: columns: x {stored}"
    first, _ = source.splits["train"].examples(1, 3)
    assert first.endswith(b"b") or stored != "text"


@pytest.mark.parametrize("dtype", [pa.list_(pa.int64()), pa.list_(pa.int64(), 2)], ids=str)
def test_rows_without_a_list_are_dropped(dtype: Any, tmp_path: Path) -> None:
    lists = [None, [1, 2], None, [3, 4]] * 20
    write(tmp_path / "train.parquet", {"x": pa.array(lists, dtype)}, row_group_size=7)
    write(tmp_path / "test.parquet", {"x": pa.array(lists, dtype)})
    found = read(parquet(tmp_path, tmp_path / "out", missing="drop"))["x"]
    np.testing.assert_array_equal(found, [[1, 2], [3, 4]] * 20)


def test_integers_in_lists_are_not_rounded_to_floats(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"in/{split}-0.parquet", {"x": [[1], [-(2**53) - 1]]})
        write(tmp_path / f"in/{split}-1.parquet", {"x": [[0.5]]})
    with pytest.raises(DataError, match=r"-0\.parquet, row 1: column x has integers above 2\*\*53"):
        parquet(tmp_path / "in", tmp_path / "out")


def test_numbers_that_are_all_missing_are_numbers(tmp_path: Path) -> None:
    dtypes = pa.int32(), pa.float32(), pa.float64(), pa.decimal128(5, 2)
    columns = {str(dtype): pa.array([None] * 40, dtype) for dtype in dtypes}
    write(tmp_path / "a.parquet", {**columns, "null": pa.nulls(40)})
    found = read(parquet(tmp_path / "a.parquet", tmp_path / "out", missing="0"))
    stored = [np.int64, np.float32, np.float64, np.float64]
    assert [found[name].dtype for name in columns] == stored
    assert set(found["null"]) == {b""}


@pytest.mark.parametrize(
    "texts",
    [
        [letter * 200_000 for letter in "ab" * 200],
        [""] * 100 + [letter * 20_000 for letter in "ab" * 1000],
    ],
    ids=["of one size", "small ones first"],
)
def test_rows_that_are_larger_in_memory_than_in_the_file_are_read_few_at_a_time(
    texts: list[str], tmp_path: Path
) -> None:
    write(tmp_path / "a.parquet", {"x": texts})
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    (chunk,) = _chunks(str(tmp_path / "a.parquet"), {}, {})
    sizes, found = [], []
    for _, batch in chunk.batches(["x"]):
        sizes.append(batch["x"].nbytes)
        found += batch["x"].to_pylist()
    assert found == texts
    assert max(sizes) < 10 << 20
