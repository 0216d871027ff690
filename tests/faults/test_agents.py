"""A launcher on each of three hosts: the same command everywhere, in any order; nothing is lost."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import Host, hosts
from strategies.cluster.tf_config import Cluster, Task
from tests.cluster.elastic import Launchers
from tests.cluster.hosts import cluster_on, needs_hosts
from tests.cluster.runs import (
    Process,
    assert_nothing_left,
    by_hand,
    json_lines,
    largest_difference,
    last_step,
)
from tests.unit.stand_ins import is_gone

pytestmark = needs_hosts


@pytest.fixture
def three_hosts() -> Iterator[tuple[Host, ...]]:
    with hosts(3) as made:
        yield made


FLAGS = (
    "--config=tests/cluster/configs/normalised.py",
    "--bucket_mb=0.25",
    "--train_steps=500",
    "--num_threads=1",
)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_hosts_restart_after_a_worker_and_after_a_launcher_dies_and_lose_no_step(
    three_hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    addresses = [host.address for host in three_hosts]
    under = tuple(host.command for host in three_hosts)
    flags, model_dir = (*FLAGS, "--max_restarts=3"), tmp_path / "run"
    with contextlib.ExitStack() as stack:
        launchers = Launchers(stack, model_dir, ",".join(addresses), flags, under)
        launchers.start(2, 0, 1)
        first = launchers.on[0]

        first.wait_for_step(60)
        reported = last_step(model_dir)
        first.task("worker 1").kill()
        resumed = first.wait_for_resume("worker 0", 1)
        assert resumed >= reported

        # Without its launcher a task ends; the others wait until the host is back.
        first.wait_for_step(resumed + 60)
        reported = last_step(model_dir)
        orphan = first.task("worker 2")
        launchers.on[2].send(signal.SIGKILL)
        first.wait_until(lambda: is_gone(orphan.pid), "the end of worker 2")
        launchers.on[2].wait_for_family_to_end()
        launchers.start(2)
        resumed = first.wait_for_resume("worker 0", 2)
        assert resumed >= reported

        first.wait_for_step(resumed + 60)
        reported = last_step(model_dir)
        first.task("worker 0").kill()
        assert first.wait_for_resume("worker 0", 3) >= reported
        runs = launchers.wait()

    # There are no other checkpoints: without those of the survivors training would begin anew.
    assert len(first.resumes("worker 0")) == 3
    cluster, commands = cluster_on({Task("worker", i): h for i, h in enumerate(three_hosts)})
    with by_hand(cluster, tmp_path / "other", *FLAGS, under=commands) as tasks:
        tasks.start_all()
        undisturbed = tasks.wait()["worker 0"]
    assert largest_difference(runs[0].variables(), undisturbed.variables()) == 0
    failures = json_lines(model_dir / "failures.jsonl")
    causes = [(f["host"], f["task"]) for f in failures if f["exit_code"] == -9]
    assert causes == [(addresses[1], "worker 1"), (addresses[0], "worker 0")]
    assert f"worker 1 on {addresses[1]} (process" in runs[0].stderr
    assert "signal 9 (Killed)" in runs[0].stderr
    assert f"[{addresses[1]}] " in runs[1].stdout + runs[1].stderr


def test_launchers_of_a_ps_cluster_restart_tasks_that_end_with_75(
    three_hosts: tuple[Host, ...], digits: Path, tmp_path: Path
) -> None:
    """After a signal to the worker all tasks save and end; after its ps died the chief does."""
    places = dict(zip(("chief", "ps", "worker"), three_hosts, strict=True))
    jobs = {job: {0: f"{host.address}:2222"} for job, host in places.items()}
    argv = (
        "--strategy=ps",
        "--sync_replicas",
        "--max_restarts=3",
        "--config=tests/cluster/configs/slow.py",
        f"--model_dir={tmp_path}",
        f"--data_dir={digits}",
        "--num_threads=1",
        "--config.checkpoint_every_steps=20",
    )
    with contextlib.ExitStack() as stack:
        launchers = {}
        for job, host in places.items():
            env = {"TF_CONFIG": Cluster(jobs, Task(job, 0)).tf_config()}
            process = Process(argv, tmp_path, env=env, under=host.command)
            launchers[job] = stack.enter_context(process)
        chief = launchers["chief"]
        chief.wait_for_step(40)
        chief.task("worker 0").terminate()
        chief.wait_for_resume("chief 0")
        chief.wait_for_more_steps(40)
        chief.task("ps 0").kill()
        runs = {job: launcher.wait_alone() for job, launcher in launchers.items()}
        for job, run in runs.items():
            assert run.exit_code == 0, f"{job}: {launchers[job].output()}"
    assert_nothing_left(tmp_path)
    assert len(chief.resumes("chief 0")) == 2
    assert len(chief.starts("worker 0")) >= 2
    causes = {(f["task"], f["exit_code"]) for f in json_lines(tmp_path / "failures.jsonl")}
    assert {("ps 0", -9), ("chief 0", 75)} <= causes
