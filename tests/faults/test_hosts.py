"""Hosts with their own addresses: a late host, and links that go down, some of them for good."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import Host, dropped, hosts, silent
from strategies.cluster.tf_config import Cluster, Task
from tests.cluster.hosts import cluster_on, needs_hosts
from tests.cluster.runs import Process, Tasks, by_hand, last_step, read_metrics

pytestmark = needs_hosts

SLOW = ("--config=tests/cluster/configs/slow.py", "--num_threads=1")
# A task may be silent for half of it.
STALLS = "--stall_timeout_secs=16"
# From the cut to the end of the last task.
END_SECS = 40.0


@pytest.fixture
def three_hosts() -> Iterator[tuple[Host, ...]]:
    with hosts(3) as made:
        yield made


def workers_on(places: Sequence[Host]) -> tuple[Cluster, dict[Task, tuple[str, ...]]]:
    return cluster_on({Task("worker", i): host for i, host in enumerate(places)})


def ps_and_workers_on(places: Sequence[Host]) -> tuple[Cluster, dict[Task, tuple[str, ...]]]:
    """The chief and the ps on the first host, a worker on each of the others."""
    first, *others = places
    servers = {Task("chief", 0): first, Task("ps", 0): first}
    return cluster_on(servers | {Task("worker", i): host for i, host in enumerate(others)})


def last_report(model_dir: Path) -> dict[str, Any]:
    return [line for line in read_metrics(model_dir) if line["split"] == "train"][-1]


def wait_for_steps_of_worker_1(chief: Process, number: int) -> None:
    """Returns when worker 1 has made more than `number` steps from now on."""

    def steps() -> int:
        return int(last_report(chief.model_dir)["worker_steps"]["worker 1"])

    before = steps()
    chief.wait_until(lambda: steps() > before + number, "steps of worker 1, again")


@contextlib.contextmanager
def unreachable(host: Host, tasks: Tasks, chief: str) -> Iterator[None]:
    """The link of `host` is down, and steps were being trained when it went."""
    tasks[chief].wait_for_more_steps(20)
    with host.link_down():
        yield


def test_workers_outlive_or_resume_after_a_short_cut_and_end_with_75_after_one_for_good(
    three_hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    cluster, commands = workers_on(three_hosts)
    flags = (*SLOW, STALLS, "--config.checkpoint_every_steps=20")
    endless = "--config.train_steps=100000"
    with by_hand(cluster, tmp_path, *flags, endless, under=commands) as tasks:
        # The last is late, and the others wait for it.
        tasks.start(Task("worker", 1), Task("worker", 0))
        time.sleep(5)
        tasks.start(Task("worker", 2))
        tasks["worker 0"].wait_for_step(40)
        with unreachable(three_hosts[2], tasks, "worker 0"):
            time.sleep(5)
        step, began = last_report(tmp_path)["step"], time.monotonic()
        while (
            not (ended := any(process.popen.poll() is not None for process in tasks.processes))
            and last_report(tmp_path)["step"] < step + 40
        ):
            assert time.monotonic() - began < END_SECS
            time.sleep(0.1)
        if ended:
            tasks.wait(75)  # None continues without the others.
            tasks.start_all()
            chief = tasks["worker 0"]
            chief.wait_until(lambda: "resuming from step" in chief.output(), "a resume")
        with unreachable(three_hosts[2], tasks, "worker 0"):
            began = time.monotonic()
            tasks.wait(75)
            assert time.monotonic() - began < END_SECS


def test_parameter_servers_continue_without_a_worker_that_is_cut_off_until_it_is_back(
    three_hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    cluster, commands = ps_and_workers_on(three_hosts)
    flags = (*SLOW, STALLS, "--config.train_steps=100000")

    with by_hand(cluster, tmp_path, *flags, under=commands) as tasks:
        tasks.start_all()
        chief = tasks["chief 0"]
        chief.wait_for_step(40)
        with unreachable(three_hosts[2], tasks, "chief 0"):
            chief.wait_until(lambda: "worker 1" in chief.output(), "word of worker 1")
            chief.wait_until(lambda: "is considered lost." in chief.output(), "its loss")
            chief.wait_for_more_steps(60)
        wait_for_steps_of_worker_1(chief, 20)
        tasks["ps 0"].send(signal.SIGTERM)
        runs = tasks.wait(75)
    result = runs["chief 0"].result
    assert sum(result["worker_steps"].values()) == result["step"]


@pytest.fixture
def four_hosts() -> Iterator[tuple[Host, ...]]:
    with hosts(4) as made:
        yield made


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(("--sync_replicas",), id="sync"),
        pytest.param((), id="async", marks=pytest.mark.nightly),
    ],
)
def test_worker_whose_packets_are_dropped_is_left_out_until_it_is_back(
    mode: tuple[str, ...], four_hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """The chief alone reaches all tasks; no connection is refused or reset, in either direction.

    The first evaluation comes while the worker is away.
    """
    first, ps, other, lost = four_hosts
    own = (Task("chief", 0), Task("ps", 0), Task("worker", 0), Task("worker", 1))
    cluster, commands = cluster_on(dict(zip(own, four_hosts, strict=True)))
    flags = (*SLOW, *mode, "--config.train_steps=100000")
    flags = (*flags, "--config.eval_every_steps=150")
    times = ("--stall_timeout_secs=14", "--chief_timeout_secs=100")

    with by_hand(cluster, tmp_path, *flags, *times, under=commands) as tasks:
        tasks.start_all()
        chief = tasks["chief 0"]
        chief.wait_for_step(100)

        # Not the way back: the worker hears nothing, and all hear it.
        with dropped(*((host, lost) for host in (first, ps, other))):
            is_lost = f"worker 1 ({cluster.address_of(own[3])}) has not answered for"
            chief.wait_until(lambda: chief.warned(is_lost) == 2, "its loss")
            chief.wait_for_step(max(150, last_step(tmp_path)) + 60)
            assert any(line["split"] == "eval" for line in read_metrics(tmp_path))
        wait_for_steps_of_worker_1(chief, 20)

        # Only one pair: the chief reaches both.
        worker = tasks["worker 1"]
        with silent(lost, ps):
            run = worker.wait_alone()
            assert run.exit_code == 75, worker.output()
            pair = f"ps 0 ({cluster.address_of(own[1])}) does not answer worker 1"
            assert pair in run.stderr
            chief.wait_until(lambda: bool(chief.warned(pair)), "the pair")
            chief.wait_for_more_steps(60)
        tasks.start(Task("worker", 1), flags=("--chief_timeout_secs=5",))
        wait_for_steps_of_worker_1(chief, 20)

        # The run ends without the worker, which ends by itself.
        with silent(lost, first, ps, other):
            chief.send(signal.SIGTERM)
            runs = tasks.wait(75)
        assert "chief 0" in runs["worker 1"].stderr
    result = runs["chief 0"].result
    assert result["why"] == "asked to stop"
    gradients_of_a_step = 2 if mode else 1
    assert sum(result["worker_steps"].values()) == gradients_of_a_step * result["step"]


def test_backup_worker_takes_over_at_once_when_packets_of_a_worker_are_dropped(
    tmp_path: Path,
) -> None:
    """Steps go on before the worker is considered lost; its sub-batches are handed out again."""
    with hosts(4) as places:
        cluster, commands = ps_and_workers_on(places)
        mode = ("--sync_replicas", "--replicas_to_aggregate=2", "--stall_timeout_secs=24")
        flags = (*SLOW, *mode, "--config.train_steps=100000")

        with by_hand(cluster, tmp_path, *flags, under=commands) as tasks:
            tasks.start_all()
            chief = tasks["chief 0"]
            chief.wait_for_step(100)
            lost = places[2]
            links = [(lost, host) for host in places if host is not lost]
            loss = " s: it is considered lost"
            # Several cuts: each may come while a message to the worker is on its way.
            for _ in range(3):
                before = chief.warned(loss)
                with dropped(*links):
                    chief.wait_for_more_steps(60)
                    is_lost = chief.warned(loss) > before
                    assert not is_lost, "steps stopped until the worker was given up"
                wait_for_steps_of_worker_1(chief, 5)
            before = chief.warned(loss)
            with dropped(*links):
                chief.wait_until(lambda: chief.warned(loss) > before, "its loss")
                chief.wait_for_more_steps(60)
            wait_for_steps_of_worker_1(chief, 5)
            chief.send(signal.SIGTERM)
            result = tasks.wait(75)["chief 0"].result
        assert result["why"] == "asked to stop"
        assert sum(result["worker_steps"].values()) == 2 * result["step"]
