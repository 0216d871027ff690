"""A launcher on each of three hosts: the same command everywhere, in any order; nothing is lost."""

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import Host, hosts
from strategies.cluster.tf_config import Cluster, Task
from tests.cluster.hosts import cluster_on, needs_hosts
from tests.cluster.runs import (
    Process,
    Run,
    assert_nothing_left,
    by_hand,
    largest_difference,
    read_metrics,
)
from tests.unit.stand_ins import is_gone, lines_of

pytestmark = needs_hosts

STEPS = 500


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[tuple[Host, ...]]:
    with hosts(3) as made:
        yield made


def flags_for(digits: Path) -> tuple[str, ...]:
    return (
        "--config=tests/cluster/configs/normalised.py",
        f"--data_dir={digits}",
        "--bucket_mb=0.25",
        f"--train_steps={STEPS}",
        "--num_threads=1",
        "--config.checkpoint_every_steps=0",
    )


@pytest.fixture(scope="module")
def undisturbed(
    three_hosts: tuple[Host, ...], digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    model_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    cluster, commands = cluster_on({Task("worker", i): h for i, h in enumerate(three_hosts)})
    with by_hand(cluster, model_dir, *flags_for(digits), under=commands) as tasks:
        tasks.start_all()
        return tasks.wait()["worker 0"]


class Launchers:
    """The launchers on all hosts, each started with the same command."""

    def __init__(
        self, stack: contextlib.ExitStack, places: tuple[Host, ...], model_dir: Path, digits: Path
    ) -> None:
        self._stack = stack
        self._places = places
        self.model_dir = model_dir
        listed = ",".join(host.address for host in places)
        self._argv = (
            "--strategy=multiworker",
            f"--hosts={listed}",
            "--max_restarts=3",
            f"--model_dir={model_dir}",
            *flags_for(digits),
        )
        self.on: dict[int, Process] = {}

    def start(self, index: int) -> None:
        process = Process(self._argv, self.model_dir, under=self._places[index].command)
        self.on[index] = self._stack.enter_context(process)

    def log(self, index: int) -> str:
        path = self.model_dir / f"tasks/worker-{index}.log"
        return path.read_text() if path.exists() else ""

    def resumes(self) -> list[int]:
        found = re.findall(r"resuming from step ([\d,]+)", self.log(0))
        return [int(step.replace(",", "")) for step in found]

    def wait_for_step(self, step: int) -> int:
        self.on[0].wait_for_step(step)
        return int(read_metrics(self.model_dir)[-1]["step"])

    def wait_for_resume(self, number: int) -> int:
        self.on[0].wait_until(lambda: len(self.resumes()) >= number, f"restart {number}")
        return self.resumes()[number - 1]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_hosts_restart_after_a_worker_and_after_a_launcher_dies_and_lose_no_step(
    three_hosts: tuple[Host, ...], digits: Path, tmp_path: Path, undisturbed: Run
) -> None:
    model_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        launchers = Launchers(stack, three_hosts, model_dir, digits)
        for index in (2, 0, 1):
            launchers.start(index)

        reported = launchers.wait_for_step(60)
        launchers.on[0].task("worker 1").kill()
        first = launchers.wait_for_resume(1)
        assert first >= reported

        # Without its launcher a task ends; the others wait until the host is back.
        reported = launchers.wait_for_step(first + 60)
        orphan = launchers.on[0].task("worker 2")
        launchers.on[2].send(signal.SIGKILL)
        launchers.on[0].wait_until(lambda: is_gone(orphan.pid), "the end of worker 2")
        launchers.on[2].wait_for_family_to_end()
        launchers.start(2)
        second = launchers.wait_for_resume(2)
        assert second >= reported

        reported = launchers.wait_for_step(second + 60)
        launchers.on[0].task("worker 0").kill()
        third = launchers.wait_for_resume(3)
        assert third >= reported

        runs = [launchers.on[index].wait_alone() for index in range(3)]
        for index, run in enumerate(runs):
            assert run.exit_code == 0, launchers.on[index].output()
            launchers.on[index].wait_for_family_to_end()
    assert_nothing_left(model_dir)

    # There are no other checkpoints: without those of the survivors training would begin anew.
    assert launchers.resumes() == [first, second, third]
    assert largest_difference(runs[0].variables(), undisturbed.variables()) == 0
    failures = lines_of(model_dir / "failures.jsonl")
    causes = [(f["host"], f["task"]) for f in failures if f["exit_code"] == -9]
    assert causes == [(three_hosts[1].address, "worker 1"), (three_hosts[0].address, "worker 0")]
    assert f"worker 1 on {three_hosts[1].address} (process" in runs[0].stderr
    assert "signal 9 (Killed)" in runs[0].stderr
    assert f"[{three_hosts[1].address}] " in runs[1].stdout + runs[1].stderr


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
        chief.wait_until(lambda: num_resumes(tmp_path) == 1, "restart")
        chief.wait_for_step(read_metrics(tmp_path)[-1]["step"] + 40)
        chief.task("ps 0").kill()
        runs = {job: launcher.wait_alone() for job, launcher in launchers.items()}
        for job, run in runs.items():
            assert run.exit_code == 0, f"{job}: {launchers[job].output()}"
    assert_nothing_left(tmp_path)
    assert num_resumes(tmp_path) == 2
    assert re.search("start 2", (tmp_path / "tasks/worker-0.log").read_text())
    causes = {(f["task"], f["exit_code"]) for f in lines_of(tmp_path / "failures.jsonl")}
    assert {("ps 0", -9), ("chief 0", 75)} <= causes


def num_resumes(model_dir: Path) -> int:
    return (model_dir / "tasks/chief-0.log").read_text().count("resuming from step")
