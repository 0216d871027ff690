"""Tasks that are started one by one with TF_CONFIG, in any order, with any delay."""

import signal
import time
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task, local_cluster
from tests.cluster.runs import Process, assert_one_error, by_hand, run_together

FLAGS = ("--config=tests/cluster/configs/linear.py", "--num_threads=1", "--train_steps=60")


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_worker_waits_for_the_other_says_so_and_can_be_stopped_and_started_again(
    first: int, tmp_path: Path
) -> None:
    cluster = local_cluster("multiworker", 2, 0)
    early, late = Task("worker", first), Task("worker", 1 - first)
    with by_hand(cluster, tmp_path, *FLAGS) as tasks:
        tasks.start(early)
        stopped = tasks[str(early)]
        stopped.wait_until(lambda: f"waiting for {late}" in stopped.output(), "message")
        stopped.send(signal.SIGTERM)
        assert stopped.wait_alone(10.0).exit_code == 75
        tasks.start(early)
        time.sleep(2)  # Less than what the message takes.
        tasks.start(late)
        runs = tasks.wait()
    assert runs["worker 0"].result["step"] == 60
    assert "eval" in runs["worker 0"].stdout
    assert "eval" not in runs["worker 1"].stdout


def test_servers_wait_for_the_chief(tmp_path: Path) -> None:
    # test_servers.py tests that a chief waits for servers.
    cluster = local_cluster("ps", 2, 1)
    servers = (Task("ps", 0), Task("worker", 0), Task("worker", 1))
    with by_hand(cluster, tmp_path, *FLAGS) as tasks:
        tasks.start(*servers)
        tasks["ps 0"].wait_until(
            lambda: all("serves at" in each.output() for each in tasks.processes), "servers"
        )
        tasks.start(Task("chief", 0))
        result = tasks.wait()["chief 0"].result
        assert result["step"] >= 60
        assert min(result["worker_steps"].values()) > 0

        tasks.start_all()
        assert all("is finished" in run.stdout for run in tasks.wait().values())


def test_workers_with_different_configs_are_refused(tmp_path: Path) -> None:
    cluster = local_cluster("multiworker", 2, 0)
    with by_hand(cluster, tmp_path, *FLAGS) as tasks:
        tasks.start(Task("worker", 0))
        tasks.start(Task("worker", 1), flags=("--learning_rate=0.5",))
        runs = tasks.wait(2)
    for name, rate in (("worker 0", "0.01"), ("worker 1", "0.5")):
        assert_one_error(runs[name], f"config.learning_rate ({rate} here)", "the same command")
    assert not (tmp_path / "config.json").exists()


def test_workers_that_see_different_directories_are_refused(digits: Path, tmp_path: Path) -> None:
    cluster = local_cluster("multiworker", 2, 0)

    def started(task: Task) -> Process:
        model_dir = tmp_path / str(task.index)
        flags = (*FLAGS, f"--data_dir={digits}", f"--model_dir={model_dir}")
        env = {"TF_CONFIG": cluster.for_task(task).tf_config()}
        return Process(("--strategy=multiworker", *flags), model_dir, env=env)

    runs = run_together(map(started, cluster.tasks()), exit_code=2)
    for run in runs:
        assert_one_error(run, "is not one directory", "in the tasks of replica(s) 1.")
    left = [path.name for path in tmp_path.glob("*/*")]
    assert not [name for name in left if "shared" in name or name in ("config.json", "checkpoints")]
