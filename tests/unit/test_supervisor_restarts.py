"""The supervisor with small stand-in programs: restarts, and launchers of several hosts.

What follows from an end has its rows in test_deaths, test_restarts and test_elastic.
"""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task, local_cluster
from tests.unit.stand_ins import (
    KILLED,
    PS,
    SMALL_PS,
    WAIT_SECS,
    WORKER,
    WORKERS,
    by_task,
    causes,
    is_gone,
    lines_of,
    notes,
    run,
    run_host,
    stop,
    wait_for,
    when_noted,
)
from trainer.local.deaths import TaskEnd
from trainer.local.restarts import Restarts


def test_ps_worker_that_dies_ends_or_hangs_is_restarted_alone_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.restarts._FIRST_DELAY_SECS", 0.1)
    body = """
        note(f"running-{start}-{config['cluster'][job][index]}")
        if (job, index) == ("worker", 0):
            if start == 1:
                die()
            if start == 2:
                sys.exit(75)
            if start == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            note("again")
        await_note("again-worker-0")
    """
    report = run(tmp_path, PS, body, max_restarts=3, stall_timeout_secs=4.0)
    assert causes(report) == [("worker 0", code, 1) for code in (KILLED, 75, KILLED)]
    assert "unresponsive" in report.restarts[2].cause.failure
    assert report.exit_code == 0
    others = len(PS.tasks()) - 1
    assert sorted(p.read_text() for p in tmp_path.glob("starts-*")) == [*["."] * others, "...."]
    address = PS.address_of(Task("worker", 0))
    assert {f"running-{n}-{address}-worker-0" for n in range(1, 5)} <= set(os.listdir(tmp_path))
    assert (tmp_path / "tasks" / "worker-0.log").read_text().count("=== worker 0, start") == 4


@pytest.mark.parametrize(("victim", "num_restarted"), [("chief 0", 1), ("ps 0", 2)])
def test_servers_stay_when_another_task_is_killed_until_that_brings_no_progress(
    victim: str, num_restarted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the variables. If that brings no progress, all tasks are restarted."""
    monkeypatch.setattr("trainer.local.restarts._FIRST_DELAY_SECS", 0.1)
    cluster = local_cluster("ps", 2, 2)
    body = """
        note(f"running-{start}")
        if f"{job} {index}" == "VICTIM" and start < 3:
            for task in ("chief-0", "worker-0", "worker-1", "ps-0", "ps-1"):
                await_note("running-1-" + task)
            await_note(f"running-{start}-chief-0")
            die()
        if job == "chief" and start < 3:
            time.sleep(60)
        if job == "chief":
            note("done")
        await_note("done-chief-0")
    """
    report = run(tmp_path, cluster, body.replace("VICTIM", victim), max_restarts=2)
    all_tasks = len(cluster.tasks())
    assert causes(report) == [(victim, KILLED, num_restarted), (victim, KILLED, all_tasks)]
    assert report.exit_code == 0
    lines = lines_of(tmp_path / "tasks" / "restarts.jsonl")
    started_again = [set(line["started_again"]) for line in lines]
    assert started_again == [{"chief 0", victim}, set(map(str, cluster.tasks()))]
    assert len(notes(tmp_path, "running-3")) == num_restarted
    assert len(notes(tmp_path, "running-2")) == all_tasks


def test_workers_that_are_left_save_before_all_are_restarted(tmp_path: Path) -> None:
    """Worker 0 saves in response to SIGUSR1; worker 2, which hangs, is killed after the grace."""
    cluster = local_cluster("multiworker", 3, 0)
    body = """
        print("start", start)
        if start > 1:
            sys.exit(0)
        if index == 0:
            signal.signal(signal.SIGUSR1, save_and_end)
        if index == 2:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        note("running")
        for other in (0, 2):
            await_note(f"running-worker-{other}")
        if index == 1:
            die()
        time.sleep(60)
    """
    report = run(tmp_path, cluster, body, max_restarts=1, grace_secs=1.0)
    assert set(notes(tmp_path, "saved")) == {"worker-0"}
    first_ends = {str(end.task): end for end in report.tasks[:3]}
    codes = {name: end.exit_code for name, end in first_ends.items()}
    assert codes == {"worker 0": 75, "worker 1": KILLED, "worker 2": KILLED}
    assert first_ends["worker 0"].failure == first_ends["worker 2"].failure == ""
    assert causes(report) == [("worker 1", KILLED, 3)]
    assert report.exit_code == 0
    assert report.first_failure is not None
    assert report.first_failure.survived
    (written,) = lines_of(tmp_path / "tasks" / "restarts.jsonl")
    assert (written["task"], written["exit_code"]) == ("worker 1", KILLED)
    assert written["started_again"] == list(map(str, cluster.tasks()))
    assert written["last_lines"] == ["start 1"]


def test_tasks_that_end_themselves_after_a_peer_are_not_killed(tmp_path: Path) -> None:
    """After a SIGTERM to one of them, all save, and exit with 75 one after another."""
    body = """
        if start > 1:
            sys.exit(0)
        note("running")
        if index == 0:
            await_note("running-worker-1")
            sys.exit(75)
        await_end("running-worker-0")
        time.sleep(0.5)
        note("saved")
        sys.exit(75)
    """
    report = run(tmp_path, WORKERS, body, max_restarts=1)
    assert set(notes(tmp_path, "saved")) == {"worker-1"}
    assert [end.exit_code for end in report.tasks] == [75, 75, 0, 0]
    assert causes(report) == [("worker 0", 75, 2)]
    assert report.exit_code == 0


def test_servers_that_the_chief_ends_with_75_cause_no_separate_restart(tmp_path: Path) -> None:
    """After a SIGTERM to one of them, the chief saves, has the servers end, and ends."""
    body = """
        if start > 1:
            sys.exit(0)
        note("running")
        if job == "chief":
            servers = ["running-worker-0", "running-worker-1", "running-ps-0"]
            for name in servers:
                await_note(name)
            note("end")
            for name in servers:
                await_end(name)
            time.sleep(0.2)
        await_note("end-chief-0")
        sys.exit(75)
    """
    report = run(tmp_path, PS, body, max_restarts=1)
    (restart,) = report.restarts
    assert len(restart.tasks) == 4
    assert [end.exit_code for end in report.tasks] == [75] * 4 + [0] * 4
    assert report.exit_code == 0


def test_servers_that_die_or_are_restarted_when_the_chief_is_done_do_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._SERVERS_ALONE_SECS", 0.5)
    body = """
        note(f"running-{start}")
        if job == "chief":
            await_note("running-1-ps-0")
            await_note("running-2-worker-0")
        elif job == "worker":
            if start == 1:
                die()
            time.sleep(60)
        else:
            await_end("running-1-chief-0")
            die()
    """
    report = run(tmp_path, SMALL_PS, body, max_restarts=1)
    assert causes(report) == [("worker 0", KILLED, 1)]
    assert by_task(report) == {"chief 0": 0, "ps 0": KILLED, "worker 0": KILLED}
    assert report.tasks[-1].task == Task("worker", 0)
    assert report.tasks[-1].failure == ""
    assert report.exit_code == 0


def test_signal_while_a_restart_is_awaited_ends_the_run_at_once(tmp_path: Path) -> None:
    """The children of the task that died do not outlive it."""

    class Later(Restarts):
        def next_delay_secs(self, end: TaskEnd, *, counts: bool = True) -> float | None:
            wait_for(lambda: is_gone(int((tmp_path / "child").read_text())))
            threading.Timer(0.5, stop).start()
            return 60.0

    body = """
        import subprocess
        (model_dir / "child").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        die()
    """
    began = time.monotonic()
    report = run(tmp_path, WORKER, body, restarts=Later(1, lambda: (0, 0)))
    assert 0.5 <= time.monotonic() - began < 30
    assert not report.restarts
    assert report.exit_code == 75


def test_worker_of_ps_that_lost_a_task_is_restarted_by_the_launcher_of_its_host(
    tmp_path: Path,
) -> None:
    """The launcher has no other task, and waits a second to see whether the chief ends too."""
    body = "sys.exit(75 if start == 1 else 0)"
    report = run_host(tmp_path, 1, body, max_restarts=3, chief_on="host-c")
    assert causes(report) == [("worker 1", 75, 1)]
    assert report.exit_code == 0


def test_error_that_a_restart_does_not_repair_ends_the_launchers_of_all_hosts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._PEER_LOST_SECS", 0.5)
    monkeypatch.setattr("trainer.local.supervisor._FOLLOW_SECS", 0.2)
    path = tmp_path / "failures.jsonl"
    assert run_host(tmp_path, 1, "print('the reason'); sys.exit(1)", max_restarts=3).exit_code == 1
    assert "[host-b] the reason\n" in capfd.readouterr().out
    lines = path.read_text()
    assert [line["ends_run"] for line in lines_of(path)] == [True]

    # What is there at the start is of an earlier run.
    assert run_host(tmp_path, 0, "", max_restarts=3).exit_code == 0
    capfd.readouterr()

    body = """
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        time.sleep(60)
    """

    def write_again() -> None:
        earlier = {**json.loads(lines), "ends_run": False, "last_lines": ["no reason"]}
        path.write_text(lines + json.dumps(earlier) + "\n" + lines)

    with when_noted(tmp_path, "running", 1, write_again):
        began = time.monotonic()
        report = run_host(tmp_path, 0, body, max_restarts=3)
    assert report.exit_code == 75
    assert time.monotonic() - began < WAIT_SECS + 5
    assert notes(tmp_path, "saved")
    errors = capfd.readouterr().err
    assert "[worker 1 on host-b] no reason" in errors, "the chief's host shows all failures"
    assert "[worker 1 on host-b] the reason" in errors
