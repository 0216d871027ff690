"""python:NAME: types of all rows; a function that is wrong, that fails, or whose process ends."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.prepare.sources.python import _RowFile
from data.system.files import DataError
from tests.commands import ROOT
from tests.unit.prepare_command import Run, run_prepare, server
from tests.unit.test_arrow_sources import read

__all__ = ["run_prepare", "server"]  # Fixtures.

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")


def test_types_are_those_of_all_rows_not_of_the_first_ones(tmp_path: Path) -> None:
    code = """
def rows():
    for number in range(5000):
        is_late = number > 4000
        yield {
            "float": 0.5 if is_late else None, "mixed": 1.5 if is_late else number,
            "list": [number, 7] if is_late else [], "text": "a" if is_late else None,
        }
"""
    (tmp_path / "f.py").write_text(code)
    options = Options(missing="0", test_fraction=0.01)
    prepare("python:x", str(tmp_path / "out"), f"{tmp_path}/f.py:rows", options)
    found = read(tmp_path / "out")
    assert set(found["float"]) == {0, 0.5}
    assert found["mixed"].dtype == np.float64
    assert found["mixed"][3000] > 2000
    assert found["list"][0].tolist() == [-1, -1]
    assert found["list"][-1][1] == 7
    assert set(found["text"]) == {b"", b"a"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    yield {'x': 1}\n    1 / 0", r"fails: ZeroDivisionError: .*f\.py, line 3\)"),
        ("    import no_such_module", r"No module named 'no_such_module' \(.*f\.py, line 2\)"),
        ("    raise SystemExit(3)", r"fails: SystemExit: 3 \(.*f\.py, line 2\)"),
        ("    return (", r"SyntaxError: .*f\.py, line 2\)"),
        ("    return {'a': [1]}", r"a dict with a. Needed are names of splits"),
        ("    return 5", r"is of type int. Needed is an iterable of dicts"),
        ("    return [5]", r"an element that is of type int"),
        ("    return [{'x': 1}, {'z': 2}]", r"row 1: its columns are z"),
        ("    return [{'x': 1}, {'x': 'a'}]", r"column x has values of int, str"),
        (
            "    return [{'x': 2**65}]",
            r"values of int, .*too large.* Needed are numbers of 64 bits",
        ),
        (
            "    d = datetime.date(2020, 1, 1)\n    t = datetime.datetime(2020, 1, 1)\n"
            "    return [{'x': d}] * 2048 + [{'x': t}]",
            r"column x has timestamp\[us\] from row 2048 on, and date in .* from row 0 on",
        ),
        (
            "    t = datetime.datetime.now()\n    return [{'x': t.date()}, {'x': t}]",
            "date, datetime",
        ),
        (
            "    t = datetime.datetime.now()\n    return [{'x': [t.date()]}, {'x': [t]}]",
            "units differ",
        ),
        ("    return [{'x': None}, {'x': 1}]", r"row 0: column x has 'null'.*--missing=0"),
        ("    import tensorflow as tf\n    return tf.data.Dataset.range(9).repeat()", "repeat"),
        (
            "    import tensorflow as tf\n    return tf.data.Dataset.range(9).batch(2)",
            r"dataset\.unbatch\(\)",
        ),
        (
            "    import tensorflow as tf\n    d = tf.data.Dataset.range(9)\n"
            "    return d.map(lambda x: {'x': tf.debugging.assert_less(x, tf.constant(3, x.dtype)) "
            "or tf.ensure_shape(x, [2])})",
            r"fails: .*f\.py, line [14]\)",
        ),
    ],
    ids=str,
)
def test_errors_of_the_function_are_one_message(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(f"def f():\n{body}\n\nimport datetime\n")
    with pytest.raises(DataError, match=f"(?s){message}"):
        prepare("python:x", str(tmp_path / "out"), f"{tmp_path}/f.py:f", Options())
    assert not (tmp_path / "out").exists()


ENDED = "--source=f.py:f: its process ended with exit code"


@pytest.mark.parametrize(
    ("source", "body", "message"),
    [
        ("f.py", "return []", "must be FILE.py:FUNCTION"),
        ("no.py:f", "return []", "There is no no.py"),
        ("f.py:g", "return []", "has no function 'g'. It has: f, two. Type --source=FILE.py:f"),
        ("f.py:two", "return []", "has the parameters a, b. Needed are none, or shard and"),
        ("f.py:f", "os._exit(3)", f"{ENDED} 3. Nothing was written."),
        ("f.py:f", "os.kill(os.getpid(), 9)", f"{ENDED} -9 (SIGKILL): perhaps the memory is too"),
    ],
    ids=str,
)
def test_function_that_is_wrong_or_ends_its_process_is_exit_code_2_and_one_line(
    source: str, body: str, message: str, run_prepare: Run, tmp_path: Path
) -> None:
    code = f"import os\n\n\ndef f():\n    {body}\n\n\ndef two(a, b):\n    return []\n"
    (tmp_path / "f.py").write_text(code)
    exit_code, said = run_prepare(f"python:x --source={source}")
    assert (exit_code, said.count("\n")) == (2, 1), said
    assert message in said
    assert not (tmp_path / "datasets").exists()


def test_function_ends_when_the_program_is_killed(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "import time\n\n\ndef f():\n    print('started', flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "data.prepare", "python:x", f"--source={tmp_path}/f.py:f"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "started\n"
        process.kill()
        # The function's process has the pipe, too: it is at its end when both have ended.
        assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == -9


def test_rows_are_read_in_parts_if_the_system_reads_less_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = _RowFile()
    piece = rows.append(pa.record_batch({"x": np.arange(5000)}))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 999), at))
    (batch,) = rows.read(piece, ["x"])
    assert batch.column("x").to_pylist() == list(range(5000))
