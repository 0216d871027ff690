"""Commands of deploy/ run as their schedulers start them, each task on a host of its own."""

import contextlib
from pathlib import Path

import pytest

from benchmarks.hosts import hosts
from tests.cluster.hosts import named, needs_hosts
from tests.cluster.runs import Process, assert_nothing_left, run_together
from tests.unit.test_deploy import tasks_of

pytestmark = needs_hosts


@pytest.mark.parametrize("name", ["kubernetes/indexed-job.yaml", "kubernetes/jobset-ps.yaml"])
def test_tasks_of_a_file_train_together(name: str, digits: Path, tmp_path: Path) -> None:
    started, model_dir = tasks_of(name), tmp_path / "run"
    short = ("--train_steps=20", "--num_threads=1", "--config.export=False")
    here = (f"--model_dir={model_dir}", f"--data_dir={digits}", *short)
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(len(started)))
        names = [task.host for task in started]
        stack.enter_context(named(dict(zip(names, places, strict=True))))
        processes = (
            Process((*task.argv, *here), model_dir, env=task.environment, under=place.command)
            for task, place in zip(started, places, strict=True)
        )
        runs = run_together(processes, timeout_secs=200.0)
    assert_nothing_left(model_dir)
    assert runs[0].result["step"] >= 20
    for run, task in zip(runs, started, strict=True):
        assert f"at {task.host}:2222" in run.stderr, "what was found"
