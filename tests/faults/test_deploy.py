"""Commands of deploy/ run as their schedulers start them, each task on a host of its own."""

import contextlib
from pathlib import Path

import pytest

from benchmarks.hosts import hosts, reason_why_not
from tests.cluster.hosts import named
from tests.cluster.runs import Process, assert_nothing_left
from tests.unit.test_deploy import tasks_of

pytestmark = pytest.mark.skipif(
    bool(reason_why_not()), reason=reason_why_not() or "hosts can be made"
)


@pytest.mark.parametrize("name", ["kubernetes/indexed-job.yaml", "kubernetes/jobset-ps.yaml"])
def test_tasks_of_a_file_train_together(name: str, digits: Path, tmp_path: Path) -> None:
    started, model_dir = tasks_of(name), tmp_path / "run"
    here = (f"--model_dir={model_dir}", f"--data_dir={digits}")
    short = ("--train_steps=20", "--num_threads=1", "--config.export=False")
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(len(started)))
        names = [task.host for task in started]
        stack.enter_context(named(dict(zip(names, places, strict=True))))
        processes = [
            stack.enter_context(
                Process(
                    (*task.argv, *here, *short),
                    model_dir,
                    env=task.environment,
                    under=place.command,
                )
            )
            for task, place in zip(started, places, strict=True)
        ]
        runs = [process.wait_alone(timeout_secs=200.0) for process in processes]
        assert [run.exit_code for run in runs] == [0] * len(runs), processes[0].output()
    assert_nothing_left(model_dir)
    assert runs[0].result["step"] >= 20
    for run, task in zip(runs, started, strict=True):
        assert f"at {task.host}:2222" in run.stderr, "what was found"
