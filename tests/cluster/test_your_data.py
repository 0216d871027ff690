"""The commands `data.prepare KIND:NAME` of the documents write the data sets that they name."""

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.runs import ROOT
from tests.cluster.test_readme import PREPARE, blocks, ids, run

YOUR_DATA = [command for command in PREPARE if ":" in command[3]]


@pytest.fixture
def your_data(tmp_path: Path) -> Path:
    """A directory with the files of the commands."""
    pandas = pytest.importorskip("pandas", reason="needs the extra test")
    rows = range(60)
    table = pandas.DataFrame({"age": rows, "plan": [f"plan {row % 3}" for row in rows]})
    table.to_csv(tmp_path / "people.csv", index=False)
    (tmp_path / "films.csv").write_text("tags,genres,clicked\n" + "3|17,Drama,1\n5,Opera,0\n" * 30)
    np.savez(tmp_path / "arrays.npz", x=np.ones((60, 3)), y=np.arange(60) % 3)
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for row in rows:
            (tmp_path / "pets" / name / f"{row}.txt").write_text(f"{name} {row}")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("A sentence. " * 1000)
    visits = table.assign(part=["train", "train", "val"] * 20, seconds=[0.5, 1.5, 2.5] * 20)
    visits.to_parquet(tmp_path / "visits.parquet")
    for number, split in enumerate(("train", "test")):
        (tmp_path / "days" / split / f"day={number}").mkdir(parents=True)
        visits.to_parquet(tmp_path / "days" / split / f"day={number}" / "0.parquet")
    (block,) = [b for b in blocks(ROOT / "docs" / "data.md", "python") if "# people.py" in b]
    (tmp_path / "people.py").write_text(block)
    return tmp_path


@pytest.mark.parametrize("command", YOUR_DATA, ids=ids(YOUR_DATA))
def test_your_data_is_prepared(command: tuple[str, ...], your_data: Path) -> None:
    run(command, your_data)
    name = command[3].partition(":")[2]
    assert (your_data / "datasets" / name / "features.json").exists()
