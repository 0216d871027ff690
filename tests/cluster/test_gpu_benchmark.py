"""`python -m benchmarks.gpu --tiny` measures on a machine without a GPU, too."""

import json
from pathlib import Path

import pytest

from tests.commands import run_python

pytestmark = pytest.mark.nightly


def test_parts_have_a_row_and_figures_for_each_program(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    words = ("--tiny", "--parts=text_lm,digits", "--programs=trainer,fit", f"--out={path}")
    done = run_python("-m", "benchmarks.gpu", *words, check=True)
    report = json.loads(path.read_text())
    assert {"gpu", "driver", "machine", "tensorflow"} < report.keys()
    rows = {(row["part"], row["program"]): row["figures"] for row in report["results"]}
    assert list(rows) == [("text_lm", "trainer"), ("text_lm", "fit"), ("digits", "trainer")]
    for (part, program), (figures,) in rows.items():
        assert all(value > 0 for value in figures.values())
        assert ("tokens_per_sec" in figures) == (part == "text_lm")
        assert ("evaluation_examples_per_sec" in figures) == (program == "trainer")
        table = [line.split(" | ") for line in done.stdout.splitlines()]
        (shown,) = (line for line in table if line[:2] == [f"| {part}", program])
        assert float(shown[2].replace(",", "")) > 0


def test_unknown_parts_are_refused_before_anything_starts(tmp_path: Path) -> None:
    words = ("--tiny", "--parts=resnet51", f"--out={tmp_path / 'gpu.json'}")
    done = run_python("-m", "benchmarks.gpu", *words)
    assert done.returncode == 2
    assert "--parts=resnet51" in done.stderr
    assert "resnet, resnet_jpeg, text_lm" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
