"""The supervisor with small stand-in programs: starts, signals, ends, restarts, several hosts.

What follows from an end has its rows in test_deaths, test_restarts and test_elastic.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task, local_cluster
from tests.unit.stand_ins import (
    KILLED,
    PS,
    ROOT,
    SMALL_PS,
    WAIT_SECS,
    WORKER,
    WORKERS,
    by_task,
    causes,
    children,
    is_gone,
    lines_of,
    namespace_or_skip,
    no_progress,
    notes,
    run,
    run_host,
    stop,
    wait_for,
    when_noted,
)
from trainer.local.deaths import Restarts, TaskEnd
from trainer.local.launch_report import LaunchReport
from trainer.local.network_namespace import Namespace
from trainer.local.policy import FixedPolicy
from trainer.local.supervisor import Supervisor
from trainer.local.task_process import TaskStarter


def first_failure(report: LaunchReport) -> TaskEnd:
    assert report.first_failure is not None
    return report.first_failure


def test_all_tasks_end_with_zero_and_so_does_the_cluster(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
        note(os.environ["TF_CONFIG"].replace("/", "|"))
        print("hello from", job, index, sys.argv[1:-1], os.getcwd())
    """
    report = run(tmp_path, PS, body)
    assert report.exit_code == 0
    assert report.first_failure is None
    assert by_task(report) == {"chief 0": 0, "worker 0": 0, "worker 1": 0, "ps 0": 0}
    hello = f"['--flag=1'] {os.getcwd()}\n"
    logs = {path.name: path.read_text() for path in (tmp_path / "tasks").iterdir()}
    assert logs.keys() == {f"{task.job}-{task.index}.log" for task in PS.tasks()}
    for end in report.tasks:
        mark, line = logs[f"{end.task.job}-{end.task.index}.log"].splitlines()
        assert mark.startswith(f"=== {end.task}, start 1, process {end.pid}, ")
        assert f"{line}\n" == f"hello from {end.task} {hello}"
        config = PS.for_task(end.task).tf_config()
        assert (tmp_path / f"{config}-{end.task.job}-{end.task.index}").exists()
    assert capfd.readouterr() == (f"hello from chief 0 {hello}", "")


def test_log_has_every_byte_of_each_run_and_the_output_no_line_about_lost_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "E0000 00:00:1 13525 context.cc:873] Failed to register function remotely due to failed",
        "Additional GRPC error information from remote target /job:worker/replica:0/task:1 while",
        ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}',
        "This could happen if the remote target has been disconnected from the client.",
        "E0000 00:00:1 13525 base_collective_executor.cc:1] BaseCollectiveExecutor::StartAbort "
        "UNAVAILABLE: Socket closed",
        "E0000 00:00:1 13525 other.cc:1] Out of memory",
        "ERROR Worker /job:worker/replica:0/task:1 failed with UnavailableError():Socket closed",
    ]
    body = f"""
        print(*{lines!r}, sep="\\n", flush=True)
        sys.stdout.buffer.write(b"\\xff no line end")
    """
    for _ in range(2):
        run(tmp_path, WORKER, body)
        assert capfd.readouterr().out.splitlines()[:-1] == lines[5:]
    log = (tmp_path / "tasks" / "worker-0.log").read_bytes().splitlines()
    written = [*(line.encode() for line in lines), b"\xff no line end"]
    for mark, *found in (log[: len(log) // 2], log[len(log) // 2 :]):
        assert mark.startswith(b"=== worker 0, start 1")
        assert found == written


def test_bad_usage_of_one_task_stops_the_others_at_once_and_is_the_exit_code(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    body = """
        note("running")
        if job == "worker" and index == 1:
            await_note("running-chief-0")
            sys.exit(2)
        time.sleep(60)
    """
    report = run(tmp_path, PS, body)
    assert report.exit_code == 2
    assert first_failure(report).task == Task("worker", 1)
    assert time.monotonic() - began < 5


def test_failure_that_ends_the_run_has_the_trainer_save_then_ends_it_and_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._PEER_LOST_SECS", 0.1)
    monkeypatch.setattr("trainer.local.supervisor._SERVERS_ALONE_SECS", 0.1)
    body = """
        note("running")
        if job == "chief":
            signal.signal(signal.SIGTERM, lambda *_: note("asked"))
            await_note("running-ps-0")
            os.kill(int((model_dir / "running-ps-0").read_text()), signal.SIGKILL)
        while True:
            time.sleep(60)
    """
    report = run(tmp_path, SMALL_PS, body, grace_secs=0.5)
    assert set(notes(tmp_path, "asked")) == {"chief-0"}
    assert by_task(report) == {"chief 0": KILLED, "ps 0": KILLED, "worker 0": -signal.SIGTERM}
    assert first_failure(report).task == Task("ps", 0)
    assert report.exit_code == 75


def test_task_still_running_after_the_chief_is_done_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._SHUTDOWN_GRACE_SECS", 0.2)
    body = """
        note("running")
        if job == "chief":
            await_note("running-ps-0")
        if job == "ps":
            time.sleep(60)
    """
    report = run(tmp_path, SMALL_PS, body)
    assert by_task(report) == {"chief 0": 0, "worker 0": 0, "ps 0": -signal.SIGTERM}
    assert first_failure(report).task == Task("ps", 0)
    assert "after chief 0 was done" in first_failure(report).failure
    assert report.exit_code == 1


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[Namespace | None]:
    """None, or with "isolated" a network namespace if this machine allows one."""
    with namespace_or_skip() if request.param else contextlib.nullcontext() as namespace:
        yield namespace


@pytest.mark.parametrize(
    ("signum", "namespace"),
    [(signal.SIGINT, ""), (signal.SIGTERM, "isolated"), (signal.SIGTERM, ""), (signal.SIGHUP, "")],
    indirect=["namespace"],
)
def test_signal_makes_every_worker_save_and_end(
    signum: signal.Signals,
    namespace: Namespace | None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # These tests may run under nohup, which ignores SIGHUP.
    former = signal.signal(signum, signal.default_int_handler)
    body = """
        def on_signal(*arguments):
            print("WARNING SIGTERM: this task saves and ends after the steps in flight", flush=True)
            save_and_end(*arguments)

        signal.signal(signal.SIGTERM, on_signal)
        note("running")
        time.sleep(60)
    """
    try:
        with when_noted(tmp_path, "running", 2, partial(stop, signum)):
            report = run(tmp_path, WORKERS, body, namespace=namespace)
        assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        signal.signal(signum, former)
    assert set(notes(tmp_path, "saved")) == {"worker-0", "worker-1"}
    assert by_task(report) == {"worker 0": 75, "worker 1": 75}
    assert report.exit_code == 75
    output, errors = capfd.readouterr()
    assert errors.count(f"{signum.name}: the tasks are asked to save and end") == 1
    assert "this task saves and ends" not in output, "the launcher has said so"
    assert "this task saves and ends" in (tmp_path / "tasks" / "worker-0.log").read_text()


def test_signal_under_ps_asks_only_the_chief_which_ends_the_servers(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        if job == "chief":
            time.sleep(60)
        await_note("saved-chief-0")
    """
    with when_noted(tmp_path, "running", 4, stop):
        report = run(tmp_path, PS, body)
    assert set(notes(tmp_path, "saved")) == {"chief-0"}
    assert by_task(report) == {"chief 0": 75, "worker 0": 0, "worker 1": 0, "ps 0": 0}
    assert report.exit_code == 75


def test_task_that_ignores_the_signal_is_killed_after_grace_secs_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._LATE_SECS", 0.1)
    with when_noted(tmp_path, "running", 1, stop):
        report = run(tmp_path, WORKER, "ignore(signal.SIGTERM)", grace_secs=0.5)
    assert set(notes(tmp_path, "asked")) == {"worker-0"}
    assert by_task(report) == {"worker 0": KILLED}
    assert "0.5 s" in first_failure(report).failure
    assert report.exit_code == 75


def test_second_signal_kills_at_once(tmp_path: Path) -> None:
    def stop_again() -> None:
        time.sleep(0.6)  # A signal within 0.5 s of the first is its repetition.
        stop(signal.SIGINT)

    with (
        when_noted(tmp_path, "running", 2, partial(stop, signal.SIGINT)),
        when_noted(tmp_path, "asked", 2, stop_again),
    ):
        report = run(tmp_path, WORKERS, "ignore(signal.SIGTERM)", grace_secs=600)
    assert by_task(report) == {"worker 0": KILLED, "worker 1": KILLED}
    assert report.exit_code == 75


LAUNCHER = """
import sys
from pathlib import Path
from tests.unit.stand_ins import PS, run
from trainer.local.network_namespace import Namespace
model_dir, *fds = sys.argv[1:]
namespace = Namespace(map(int, fds)) if fds else None
run(Path(model_dir), PS, "ignore(signal.SIGTERM)", namespace=namespace)
"""


@pytest.mark.parametrize("namespace", ["", "isolated"], indirect=True)
def test_killed_launcher_leaves_no_orphan(namespace: Namespace | None, tmp_path: Path) -> None:
    fds = namespace.fds if namespace else ()
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), *map(str, fds)]
    launcher = subprocess.Popen(command, pass_fds=fds, cwd=ROOT)
    try:
        wait_for(lambda: len(notes(tmp_path, "running")) == 4)
        assert not any(map(is_gone, notes(tmp_path, "running").values()))
        launcher.kill()
        launcher.wait()
        wait_for(lambda: all(map(is_gone, notes(tmp_path, "running").values())))
    finally:
        launcher.kill()
        launcher.wait()
        for pid in notes(tmp_path, "running").values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_program_that_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    starter = TaskStarter([], command=[str(tmp_path / "missing")])
    with pytest.raises(FileNotFoundError):
        Supervisor(FixedPolicy(WORKERS, WORKERS.tasks()), starter, tmp_path, no_progress(0)).run()
    assert not children() - before


def test_ps_worker_that_dies_ends_or_hangs_is_restarted_alone_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.deaths._FIRST_DELAY_SECS", 0.1)
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
    monkeypatch.setattr("trainer.local.deaths._FIRST_DELAY_SECS", 0.1)
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
    assert first_failure(report).survived
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
    monkeypatch.setattr("trainer.local.supervisor._SHUTDOWN_GRACE_SECS", 0.5)
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
    assert by_task(report) == {"chief 0": 0, "ps 0": KILLED, "worker 0": -signal.SIGTERM}
    assert report.tasks[-1].task == Task("worker", 0)
    assert report.tasks[-1].survived
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
    monkeypatch.setattr("trainer.local.supervisor._POLL_SECS", 0.2)
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
