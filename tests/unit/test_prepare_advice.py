"""What each message of data.prepare says to type works when it is typed."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from data.system.files import DataError
from data.tfrecord.split import open_split
from tests.unit.prepare_command import Run, run_prepare, server
from tests.unit.test_prepare import write_idx

__all__ = ["run_prepare", "server"]  # Fixtures.


class Case(NamedTuple):
    """`advice` is in the message of `command`.

    Flags in it are added, or replace those with the same name. A command in it replaces the
    command. `then`: the command, if the advice is a sentence or has a placeholder.
    """

    command: str
    files: Mapping[str, str | bytes]
    advice: str
    then: str = ""
    before: str = ""


def table(header: str, *rows: str) -> dict[str, str | bytes]:
    return {"a.csv": "\n".join([header, *rows * 30]) + "\n"}


def encoded(encoding: str, word: str) -> dict[str, str | bytes]:
    return {"a.csv": ("x,y\n" + f"{word},1\n" * 30).encode(encoding)}


def function(*rows: Mapping[str, object]) -> dict[str, str | bytes]:
    return {"a.py": f"def f():\n    return {[*rows * 30]}\n"}


def table_of(*rows: Mapping[str, object]) -> dict[str, str | bytes]:
    return {"a.parquet": json.dumps([*rows * 30])}


PNG = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\0\0\0\0"
    b"\x3a\x7e\x9b\x55\0\0\0\0IEND\xaeB`\x82"
)
IMAGES = [f"{name}/{number}.png" for name in "ab" for number in range(30)]
CLASSES = {f"d/train/{path}": PNG for path in IMAGES}
NUMBERS = table("x,y", "1,0", "2,1")
CONTENT = NUMBERS["a.csv"]
SPLITS, TRAIN = "csv:x --source=d", {"d/train.csv": CONTENT}
LACKING = table("x,y", "1,0", "NA,1")
PYTHON = "python:x --source=a.py:f"
PARQUET = "parquet:x --source=a.parquet"
SPLIT_ROWS = table_of({"x": "test", "y": 1}, {"x": "train", "y": 2})
FUNCTION = function({"x": 1, "y": 0}, {"x": 2, "y": 1})
ROWS = table_of({"x": 1, "y": 0}, {"x": 2, "y": 1})
CSV = "csv:x --source=a.csv"
HALF = f"{CSV} --missing=0.5"
IDX = {
    f"d/emnist-{kind}-{split}-{content}-ubyte": b""
    for kind in ("digits", "letters")
    for split in ("train", "test")
    for content in ("images-idx3", "labels-idx1")
}
BATCHES = {f"d/data_batch_{number}.bin": bytes(3073) for number in range(2, 6)}
ALL_BATCHES = {**BATCHES, "d/data_batch_1.bin": bytes(3073)}
CASES = [
    # Names of columns.
    Case(f"{CSV} --label=Y", NUMBERS, "--label=y"),
    Case(f"{CSV} --text=Zip", table("zip,y", "1,0"), "--text=zip"),
    Case(f"{CSV} --lists=Zip", table("zip,y", "1,0"), "--lists=zip"),
    Case(f"{CSV} --text=zip", table("zip code,y", "1,0"), "'--text=zip code'"),
    # Types.
    Case(CSV, table("x;y", "3,5;1"), "--text=x"),
    Case(f"{CSV} --text=y", table("a b;y", "3,5;1"), "'--text=y,a b'"),
    Case(CSV, table('"a,b";y', "3,5;1"), """'--text="a,b"'"""),
    Case(f"{CSV} --integer=x", table("x,y", "A7,1"), "--text=x in place", f"{CSV} --text=x"),
    Case(f"{CSV} --float=x", table("x,y", "A7,1"), "--text=x in place", f"{CSV} --text=x"),
    Case(f"{CSV} --integer=x", table("x,y", "1.5,0"), "--text=x in place", f"{CSV} --text=x"),
    Case(f"{CSV} --text=x --integer=x", NUMBERS, "Leave it out of one", f"{CSV} --integer=x"),
    Case(f"{CSV} --label=y --float=y", NUMBERS, "Leave it out of --float", f"{CSV} --label=y"),
    Case(f"{CSV} --label=y --float=y", NUMBERS, "leave --label out", f"{CSV} --float=y"),
    Case(f"{CSV} --lists=x", table("x,y", "3|17,0", "4|a,1"), "--text=x"),
    Case(f"{CSV} --lists=x", table("x,y", "3|17,0", "-1,1"), "--text=x"),
    # Missing values.
    Case(CSV, LACKING, "--missing=drop"),
    Case(CSV, table("x,y", "1,0", ",1"), "--missing=0"),
    Case(f"{CSV} --integer=x", table("x,y", ",0"), "--missing=0"),
    Case(f"{CSV} --label=y", table("x,y", "1,0", "2,"), "--missing=drop"),
    Case(f"{CSV} --missing=mean", LACKING, "--missing=drop"),
    Case(f"{CSV} --missing=mean", LACKING, "--missing=0"),
    Case(f"{CSV} --missing=drop", table("x,y", "1,", ",2"), "--missing=0"),
    Case(f"{HALF} --integer=x", LACKING, "--missing=0"),
    Case(f"{HALF} --integer=x", LACKING, "--float=x in place of --integer=x", f"{HALF} --float=x"),
    Case(f"{CSV} --missing=0", table("5,,3b83,1", "4,5,aa,", "7,,bb,2"), "--noheader"),
    # Labels.
    Case(f"{CSV} --label=y", table("x,y", "1,0.5", "2,1"), "--text=y"),
    Case(f"{CSV} --label=y", table("x,y", "1,0.5", "2,1"), "leave --label out", CSV),
    Case(f"{CSV} --label=y", table("x,y", "1,-1", "2,1"), "--text=y"),
    # The first line.
    Case(CSV, table("1,2", "3,4"), "--noheader"),
    Case(CSV, table("1,2", "3,4"), "--header"),
    Case(CSV, table("a,a", "b,c"), "--noheader"),
    # Separators.
    Case(f"{CSV} --delimiter=;;", table("x;y", "1;2"), "'--delimiter=;'"),
    Case(f"{CSV} --delimiter=pipe", table("x|y", "1|2"), "'--delimiter=|'"),
    Case(f"{CSV} --label=y", table("x:y", "1:0"), "--delimiter=:"),
    Case(f"{CSV} --lists=x", table("x y", "3|17 0"), "'--delimiter= '"),
    Case(CSV, table("x, in cm\ty", "1\t2"), "--delimiter=tab"),
    # Encodings.
    Case(CSV, encoded("latin-1", "café"), "--encoding=latin-1"),
    Case(CSV, encoded("cp1252", "“café”"), "--encoding=cp1252"),
    Case(CSV, encoded("gb18030", "数据"), "--encoding=gb18030"),
    Case(CSV, encoded("latin-1", "\x81é"), "--encoding=latin-1"),
    Case(CSV, encoded("utf-16-le", "a"), "--encoding=utf-16-le"),
    Case(CSV, encoded("utf-16-be", "a"), "--encoding=utf-16-be"),
    Case(f"{CSV} --encoding=ascii", encoded("latin-1", "café"), "--encoding=latin-1"),
    Case(f"{CSV} --encoding=latn1", NUMBERS, "--encoding=latin-1"),
    Case(f"{CSV} --encoding=base64", NUMBERS, "--encoding=latin-1"),
    Case(f"{CSV} --encoding=latin-1", encoded("utf-16", "1"), "Leave --encoding out", CSV),
    # Files and splits.
    Case("csv:x --source=d", {"d/data.csv": CONTENT}, "--source=d/data.csv"),
    Case(f"{SPLITS} --label=y", {**TRAIN, "d/test.csv": "x\n1\n"}, "--source=d/train.csv"),
    Case(f"{SPLITS} --seed=1", {**TRAIN, "d/test.csv": CONTENT}, "--seed would be ignored", SPLITS),
    Case(f"{SPLITS} --data_dir=d", TRAIN, "--data_dir=DIR", f"{SPLITS} --data_dir=e"),
    Case(
        SPLITS,
        {f"d/part-{number}.csv": CONTENT for number in range(2)},
        "one file alone, which is then divided: --source=d/part-0.csv",
        "csv:x --source=d/part-0.csv",
    ),
    Case(f"{CSV} --test_fraction=1.5", NUMBERS, "--test_fraction=0.1"),
    Case(f"{CSV} --test_fraction=1e-9", NUMBERS, r"re:--test_fraction=0\.\d+(?=,)"),
    Case(f"{CSV} --test_fraction=0.999999", NUMBERS, r"re:--test_fraction=0\.\d+(?=,)"),
    Case(CSV, {"a.csv": "x,y\n1,2\n3,4\n"}, r"re:--test_fraction=0\.\d+(?=,)"),
    Case("npz:x --source=a.npz --label=Y", {"a.npz": b""}, "--label=y"),
    Case("npz:x --source=a.npz --label=z", {"a.npz": b""}, "--label out", "npz:x --source=a.npz"),
    # Parquet, and Python, which has the same messages.
    Case(f"{PARQUET} --label=Y", ROWS, "--label=y"),
    Case(f"{PARQUET} --columns=X", ROWS, "--columns=x"),
    Case(f"{PARQUET} --split_column=X", SPLIT_ROWS, "--split_column=x"),
    Case(f"{PARQUET} --split_column=x", table_of({"x": "test"}), "Leave --split_column", PARQUET),
    Case("python:x --source=a.py:g", FUNCTION, "--source=FILE.py:f", PYTHON),
    Case(f"{PYTHON} --processes=2", FUNCTION, "leave --processes out", PYTHON),
    Case(f"{PYTHON} --processes=0", FUNCTION, "--processes=2", PYTHON),
    Case(PYTHON, function({"x": 1}, {"x": None}), "--missing=drop"),
    Case(PARQUET, table_of({"x": 1.5}, {"x": None}), "--missing=0"),
    Case(f"{PARQUET} --integer=x", table_of({"x": "A7"}), "--text=x in", f"{PARQUET} --text=x"),
    Case(f"{PARQUET} --label=y", table_of({"x": 1, "y": 0.5}, {"x": 1, "y": 1.0}), "--text=y"),
    Case(PARQUET, table_of({"x": [1, 2]}, {"x": [-1]}), "--text=x"),
    # Folders.
    Case("folder:x --source=.", CLASSES, "--source=./d/train"),
    Case("folder:x --source=.", {f"d/{path}": PNG for path in IMAGES}, "--source=./d"),
    Case("folder:x --source=d", {**CLASSES, "d/val/images/1.png": PNG}, "--source=d/train"),
    Case("folder:x --source=d", {**CLASSES, "d/test/1.png": PNG}, "--source=d/train"),
    Case("folder:x --source=d", {**CLASSES, "d/other/c/1.png": PNG}, "--source=d/train"),
    Case("folder:x --source=d --label=y", CLASSES, "Leave it out", "folder:x --source=d"),
    Case("folder:x --source=d --test_fraction=0.5", CLASSES, "Leave it out", "folder:x --source=d"),
    # Other formats.
    Case("emnist --source=d", IDX, "python -m data.prepare emnist-digits --source=d"),
    Case("text:x --source=a.txt --length=0", {"a.txt": "words " * 999}, "--length=256"),
    Case("text:x --source=a.txt", {"a.txt": "words " * 20}, "--length=1"),
    Case("text:x --source=d", {"d/train/a": "words " * 99, "d/test/a": "few words"}, "--length=1"),
    Case("cifar10 --source=d", {**BATCHES, "d/test_batch.bin": bytes(3073)}, "--allow_partial"),
    Case("cifar10 --source=d", {**ALL_BATCHES, "d/test_batch.bin": bytes(4000)}, "--allow_partial"),
    Case("clicks --num_clicks=100 --id_scale=2", {}, "--id_scale=0.01"),
    Case("clicks --num_clicks=0", {}, "--num_clicks=1000"),
    Case("digits --source=d", {"d/a": ""}, "Leave it out", "digits"),
    Case("digits --nooverwrite --noheader", {}, "--noheader would be ignored", "digits"),
    # Names, and directories to write.
    Case("digts", {}, "Did you mean digits?", "digits"),
    Case("csv --source=a.csv", NUMBERS, "csv:NAME", CSV),
    Case("csv:x", NUMBERS, "--source=PATH", CSV),
    Case("emnist-letters", IDX, "--source=DIR", "emnist-letters --source=d"),
    Case("digits --out=d", {}, "write --data_dir", "digits --data_dir=d"),
    *(
        Case("digits --data_dir=d", {file: text}, "--data_dir=DIR", "digits --data_dir=e")
        for file, text in (
            ("d", "a file"),
            ("d/thesis.txt", ""),
            ("d/dataset_info.json", "{"),
            ("d/dataset_info.json", "[]"),
            ("d/dataset_info.json", "{}"),
            ("d/dataset_info.json", '{"name": "other"}'),
        )
    ),
    Case(f"{CSV} --seed=3", NUMBERS, "--overwrite", before=CSV),
    Case(f"{CSV} --seed=3", NUMBERS, "leave --source out", "csv:x", before=CSV),
    Case(f"{CSV} --seed=3", NUMBERS, "--data_dir=DIR", f"{CSV} --seed=3 --data_dir=e", before=CSV),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.command}: {case.advice}" for case in CASES])
def test_advice_works(case: Case, run_prepare: Run, tmp_path: Path) -> None:
    for name, content in case.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        if "idx" in name:
            write_idx(path, np.zeros((5, 2, 2) if "idx3" in name else 5))
        if path.suffix == ".npz":
            np.savez(path, x=np.arange(60), y=np.arange(60) % 3, z=np.ones(60))
        if path.suffix == ".parquet":
            pa, pq = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
            pq.write_table(pa.Table.from_pylist(json.loads(content)), path)
    assert not case.before or run_prepare(case.before)[0] == 0
    code, said = run_prepare(case.command)
    assert (code, said.count("\n")) == (2, 1), said
    assert case.before or not (tmp_path / "datasets").exists()
    advice = case.advice.removeprefix("re:")
    found = re.search(advice if advice != case.advice else re.escape(advice), said)
    assert found, said
    code, said = run_prepare(case.then or followed(case.command, found[0]))
    assert code == 0, said


def followed(command: str, advice: str) -> str:
    if advice.startswith("python "):
        return advice.removeprefix("python -m data.prepare ")
    (flag,) = shlex.split(advice)
    same = flag.partition("=")[0] + "="
    former = [word for word in shlex.split(command) if not word.startswith(same)]
    return shlex.join([*former, flag])


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("csv:x", "adult_train.csv adult_test.csv"),
        ("folder:x", "training_set/a/1.png training_set/b/1.png test_set/a/1.png test_set/b/1.png"),
    ],
)
def test_files_of_splits_are_to_be_renamed(
    command: str, files: str, run_prepare: Run, tmp_path: Path
) -> None:
    for name in files.split():
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(b"x,y\n1,2\n")
    code, said = run_prepare(f"{command} --source=d")
    assert code == 2
    assert "rename" in said
    assert "--source" not in said


def test_split_to_evaluate_is_named(run_prepare: Run, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("train.csv", "Val.csv"):
        (tmp_path / "d" / name).write_text("x,y\n1,2\n")
    code, said = run_prepare("csv:x --source=d")
    assert code == 0
    assert "There is no split test. Train with --config.data.eval_split=val." in said
    written = str(tmp_path / "datasets" / "x")
    with pytest.raises(DataError, match=r"only train, val\. .*--config\.data\.eval_split=val\."):
        open_split(written, "test")
    assert open_split(written, "val").num_examples == 1
