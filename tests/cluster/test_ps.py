"""Asynchronous parameter servers: what only they could get wrong."""

from pathlib import Path

import pytest

from tests.cluster.runs import TOPOLOGIES, train

PS = TOPOLOGIES["ps-2+1"]


def test_every_applied_update_is_counted_and_no_other(digits: Path, tmp_path: Path) -> None:
    run = train(PS, tmp_path, "--config=tests/cluster/configs/counting.py", f"--data_dir={digits}")
    (weight,) = run.weights().values()
    step = run.result["step"]
    assert step >= 1000
    assert weight == step, "the weight gains 1 by each update that is applied"
    assert run.variables()["optimizer/_iterations/.ATTRIBUTES/VARIABLE_VALUE"] == step
    worker_steps = run.result["worker_steps"]
    assert worker_steps.keys() == {"worker 0", "worker 1"}
    assert min(worker_steps.values()) > 0
    assert sum(worker_steps.values()) == run.result["examples"] // 16 == step
    staleness = run.result["staleness"]
    assert {name: sum(ages.values()) for name, ages in staleness.items()} == worker_steps
    assert sum(run.result["worker_share"].values()) == pytest.approx(1, abs=1e-3)
    reports = run.metrics("train")
    assert [report["step"] for report in reports] == list(range(100, 1001, 100))
    assert reports[-1]["worker_steps"] == worker_steps
