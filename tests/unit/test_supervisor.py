"""The supervisor with small stand-in programs: starts, signals and ends.

What follows from an end has its rows in test_deaths, test_restarts and test_elastic.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task
from tests.unit.stand_ins import (
    KILLED,
    PS,
    ROOT,
    SMALL_PS,
    WORKER,
    WORKERS,
    by_task,
    children,
    is_gone,
    namespace_or_skip,
    no_progress,
    notes,
    run,
    stop,
    wait_for,
    when_noted,
)
from trainer.local.network_namespace import Namespace
from trainer.local.policy import FixedPolicy
from trainer.local.supervisor import Supervisor
from trainer.local.task_process import TaskStarter


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
    assert report.first_failure is not None
    assert report.first_failure.task == Task("worker", 1)
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
    assert report.first_failure is not None
    assert report.first_failure.task == Task("ps", 0)
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
    assert report.first_failure is not None
    assert report.first_failure.task == Task("ps", 0)
    assert "after chief 0 was done" in report.first_failure.failure
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
    assert report.first_failure is not None
    assert "0.5 s" in report.first_failure.failure
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
