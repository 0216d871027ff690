"""Tasks that are started one by one with TF_CONFIG, in any order, with any delay."""

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Cluster, Task, local_cluster
from tests.cluster.runs import Process, Run, assert_one_error, by_hand

DELAY_SECS = 8.0
FLAGS = ("--config=tests/cluster/configs/linear.py", "--num_threads=1", "--train_steps=60")


def run_by_hand(
    cluster: Cluster, order: Sequence[Task], model_dir: Path, digits: Path, delay_secs: float
) -> Mapping[str, Run]:
    """The runs of all tasks, by task, started in `order` with a delay before the last."""
    with by_hand(cluster, model_dir, *FLAGS, f"--data_dir={digits}") as tasks:
        *early, last = order
        tasks.start(*early)
        if delay_secs:
            time.sleep(delay_secs)
            for process in tasks.processes:
                assert process.popen.poll() is None, f"did not wait for {last}: {process.output()}"
        tasks.start(last)
        return tasks.wait()


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_workers_wait_for_each_other(first: int, digits: Path, tmp_path: Path) -> None:
    cluster = local_cluster("multiworker", 2, 0)
    order = [Task("worker", first), Task("worker", 1 - first)]
    runs = run_by_hand(cluster, order, tmp_path, digits, DELAY_SECS)
    assert runs["worker 0"].result["step"] == 60
    assert "eval" in runs["worker 0"].stdout
    assert "eval" not in runs["worker 1"].stdout


def test_servers_wait_for_the_chief(digits: Path, tmp_path: Path) -> None:
    # test_servers.py tests that a chief waits for servers.
    cluster = local_cluster("ps", 2, 1)
    order = [Task("ps", 0), Task("worker", 0), Task("worker", 1), Task("chief", 0)]
    runs = run_by_hand(cluster, order, tmp_path, digits, DELAY_SECS)
    result = runs["chief 0"].result
    assert result["step"] >= 60
    assert min(result["worker_steps"].values()) > 0

    again = run_by_hand(cluster, order, tmp_path, digits, delay_secs=0)

    assert all("is finished" in run.stdout for run in again.values())


def test_worker_that_waits_for_the_others_says_so_and_can_be_stopped(
    digits: Path, tmp_path: Path
) -> None:
    cluster = local_cluster("multiworker", 2, 0)
    config = cluster.for_task(Task("worker", 0)).tf_config()
    argv = ("--strategy=multiworker", *FLAGS, f"--data_dir={digits}", f"--model_dir={tmp_path}")
    with Process(argv, tmp_path, env={"TF_CONFIG": config}) as process:
        process.wait_until(
            lambda: "waiting for worker 1" in process.output(), "message that it waits"
        )
        process.send(signal.SIGTERM)
        run = process.wait(10.0)
    assert run.exit_code == 75


def test_workers_with_different_configs_are_refused(digits: Path, tmp_path: Path) -> None:
    cluster = local_cluster("multiworker", 2, 0)
    with by_hand(cluster, tmp_path, *FLAGS, f"--data_dir={digits}") as tasks:
        tasks.start(Task("worker", 0))
        tasks.start(Task("worker", 1), flags=("--learning_rate=0.5",))
        runs = tasks.wait(2)
    for name, rate in (("worker 0", "0.01"), ("worker 1", "0.5")):
        assert_one_error(runs[name], f"config.learning_rate ({rate} here)", "the same command")
    assert not (tmp_path / "config.json").exists()


def test_workers_that_see_different_directories_are_refused(digits: Path, tmp_path: Path) -> None:
    cluster = local_cluster("multiworker", 2, 0)
    with contextlib.ExitStack() as stack:
        processes = []
        for task in cluster.tasks():
            model_dir = tmp_path / str(task.index)
            flags = (*FLAGS, f"--data_dir={digits}", f"--model_dir={model_dir}")
            env = {"TF_CONFIG": cluster.for_task(task).tf_config()}
            process = Process(("--strategy=multiworker", *flags), model_dir, env=env)
            processes.append(stack.enter_context(process))
        runs = [process.wait_alone() for process in processes]
    for run in runs:
        assert_one_error(run, "is not one directory", "in the tasks of replica(s) 1.")
    left = [path.name for path in tmp_path.glob("*/*")]
    assert not [name for name in left if "shared" in name or name in ("config.json", "checkpoints")]
