"""Asynchronous parameter servers: counts, staleness, placement, one core."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.runs import Run, TrainOnce, histograms, train

PS = "ps-2+1"


@pytest.fixture
def counted(train_once: TrainOnce) -> Run:
    # Applying takes time, so that gradients of the other worker arrive meanwhile.
    flags = ("--train_steps=500", "--config.apply_ms=5")
    return train_once(PS, "--config=tests/cluster/configs/counting.py", *flags)


def test_every_applied_update_is_counted_and_no_other(counted: Run) -> None:
    (weight,) = counted.weights().values()
    step = counted.result["step"]
    assert step >= 500
    assert weight == step, "the weight gains 1 by each update that is applied"
    assert counted.variables()["optimizer/_iterations/.ATTRIBUTES/VARIABLE_VALUE"] == step
    worker_steps = counted.result["worker_steps"]
    assert worker_steps.keys() == {"worker 0", "worker 1"}
    assert min(worker_steps.values()) > 0
    assert sum(worker_steps.values()) == counted.result["examples"] // 16 == step
    staleness = counted.result["staleness"]
    assert {name: sum(ages.values()) for name, ages in staleness.items()} == worker_steps
    assert oldest(counted) > 0, "no two workers applied at the same time"
    assert sum(counted.result["worker_share"].values()) == pytest.approx(1, abs=1e-3)
    shown = histograms(counted.model_dir)
    assert {"staleness/worker 0", "staleness/worker 1"} <= shown.keys()
    reports = counted.metrics("train")
    assert counted.steps("train") == list(range(100, 501, 100))
    assert reports[-1]["worker_steps"] == worker_steps


def test_gradient_that_is_too_old_is_dropped_and_its_batch_done_again(tmp_path: Path) -> None:
    """Applying takes long, so gradients of other workers arrive meanwhile."""
    config = ("--config=tests/cluster/configs/counting.py", "--config.apply_ms=30")
    flags = (*config, "--train_steps=100")
    bounded = train("ps-2+2", tmp_path, *flags, "--max_staleness=0")

    result = bounded.result
    (weight,) = bounded.weights().values()
    assert sum(result["worker_dropped"].values()) > 0, "no two workers applied at once"
    assert weight == result["step"] == sum(result["worker_steps"].values()) == 100
    assert result["batches"] == {"handed_out": 100, "finished": 100, "repeated": 0}
    assert oldest(bounded) == 0
    # The loss of step k is -k, and dropped gradients are not in the mean.
    (report,) = bounded.metrics("train")
    assert report["loss"] == -np.arange(100).mean()


def test_only_worker_knows_all_its_own_steps_whatever_is_applied_when(tmp_path: Path) -> None:
    """Variables are read as soon as the former gradient was applied to each of them."""
    counting = "--config=tests/cluster/configs/counting.py"
    trained = train("ps-1+2", tmp_path, counting, "--train_steps=200", "--config.apply_ms=2")
    assert trained.result["staleness"] == {"worker 0": {"0": 200}}
    # The loss of step k is -k.
    assert [report["loss"] for report in trained.metrics("train")] == [-49.5, -149.5]


def oldest(run: Run) -> int:
    return max(int(age) for ages in run.result["staleness"].values() for age in ages)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset binds to a core; not there")
@pytest.mark.parametrize("sync", [False, True], ids=["asynchronous", "synchronous"])
def test_cluster_trains_on_one_core(tmp_path: Path, sync: bool) -> None:
    """With a pool of one thread a server waits for itself."""
    on_one = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))
    flags = ("--config=tests/cluster/configs/counting.py", "--train_steps=100")
    done = train(PS, tmp_path, *flags, f"--sync_replicas={sync}", under=on_one)
    assert done.result["step"] == 100


def test_variables_and_their_optimizer_state_are_placed_as_the_table_says(tmp_path: Path) -> None:
    config = "--config=tests/cluster/configs/placed.py"
    flags = (config, "--train_steps=10", "--verbose")
    trained = train("ps-1+2", tmp_path, *flags)
    devices = json.loads((tmp_path / "devices.json").read_text())
    num_bytes = {task: sum(size for _, size in made) for task, made in devices.items()}
    table = dict(re.findall(r"^ps (\d): ([\d,]+) bytes", trained.stdout, re.MULTILINE))
    assert {task: f"{size:,}" for task, size in num_bytes.items()} == table
    # The largest variable is alone with its optimizer state; the others are on the other ps.
    (alone,) = (made for made in devices.values() if any("large" in name for name, _ in made))
    assert len(alone) == 3
    assert all("large" in name for name, _ in alone)
