"""Model directories that an earlier version of this program wrote still resume."""

import json
import shutil
from pathlib import Path

from tests.cluster.runs import ROOT, largest_difference, train, train_here

OLD_RUNS = ROOT / "tests" / "cluster" / "old_runs"
LINEAR = "tests/cluster/configs/linear.py"


def test_checkpoint_of_an_earlier_version_resumes_in_the_same_weights(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUNS / "mirrored", tmp_path / "old")
    flags = (f"--config={LINEAR}", "--train_steps=120")
    old = train("mirrored-1", tmp_path / "old", *flags, data=False)
    undisturbed = train_here(LINEAR, tmp_path / "new", train_steps=120)
    assert old.steps("train") == [20, 40, 60, 80, 100, 120]
    assert largest_difference(old.weights(), undisturbed.weights()) < 1e-5


def test_statistics_of_workers_of_an_earlier_version_are_added_to(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUNS / "ps", tmp_path / "old")
    before = json.loads((OLD_RUNS / "ps" / "result.json").read_text())
    flags = (f"--config={LINEAR}", "--train_steps=80")
    resumed = train("ps-2+1", tmp_path / "old", *flags, data=False)
    assert sum(before["worker_steps"].values()) == 60
    assert sum(resumed.result["worker_steps"].values()) == resumed.result["step"] == 80
    assert resumed.result["examples"] == 80 * 48
