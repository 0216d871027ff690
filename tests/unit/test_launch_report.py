"""What a local cluster leaves: its exit code, the failure to look at first, the logs of tasks.

And failures.jsonl: what the launchers of several hosts tell each other, without processes.
"""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task
from trainer.local.deaths import TaskEnd
from trainer.local.launch_report import (
    FailureLog,
    LaunchReport,
    Restart,
    print_failure,
    print_summary,
)
from trainer.local.task_logs import TaskLogs

KILLED = -signal.SIGKILL


def end(index: int, code: int, *, survived: bool = False, was_overdue: bool = False) -> TaskEnd:
    task, failure = Task("worker", index), f"exit code {code}" if code else ""
    return TaskEnd(
        task, index == 0, False, 100 + index, code, 1.0, failure, was_overdue, ("last",), survived
    )


@pytest.mark.parametrize(
    ("ends", "is_stopped", "exit_code", "first"),
    [
        ([end(0, 0), end(1, 0)], False, 0, None),
        ([end(1, KILLED, survived=True), end(0, 0)], False, 0, 1),
        ([end(1, KILLED), end(0, 75)], False, 75, 1),
        # An exit with 75 follows from another failure, whichever was recorded first.
        ([end(0, 75), end(1, 1)], False, 1, 1),
        ([end(0, 75), end(1, 75)], False, 75, 0),
        ([end(0, KILLED, survived=True), end(1, 75)], False, 75, 1),
        ([end(0, 1), end(1, 2)], False, 2, 0),
        ([end(0, 0), end(1, -signal.SIGTERM, was_overdue=True)], False, 1, 1),
        # A stop was requested.
        ([end(0, 75), end(1, 75)], True, 75, 0),
        ([end(0, 0), end(1, 0)], True, 0, None),
        ([end(1, 0)], True, 75, None),
        ([end(0, KILLED, was_overdue=True)], True, 75, 0),
    ],
)
def test_exit_code_and_first_failure(
    ends: list[TaskEnd], is_stopped: bool, exit_code: int, first: int | None
) -> None:
    report = LaunchReport(ends, (), is_stopped)
    assert report.exit_code == exit_code
    assert (report.first_failure and report.first_failure.task.index) == first


def test_summary_has_the_last_restarts_and_the_lines_of_the_failed_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = end(1, 1)
    workers = (Task("worker", 0), Task("worker", 1), Task("worker", 2))
    restarts = [Restart(end(1, KILLED), workers[1:2], f"at {i}") for i in range(21)]
    restarts.append(Restart(end(1, KILLED), workers, "at 21"))
    print_summary(LaunchReport([failed], restarts, is_stopped=False), TaskLogs(tmp_path))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"2 earlier restarts are in {tmp_path}/restarts.jsonl",
        *(f"at {i}  worker 1 died: exit code -9; restarted worker 1" for i in range(2, 21)),
        "at 21  worker 1 died: exit code -9; restarted 3 tasks",
        "[worker 1] last",
        f"worker 1 failed after 1.0 s: exit code 1. Its log: {tmp_path}/worker-1.log",
    ]


def test_logs_deleted_during_the_run_are_made_anew_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = TaskLogs(tmp_path / "tasks")
    paths = [logs.path(Task("worker", index)) for index in range(3)]
    for path in paths:
        logs.append(path, b"first\n")
    assert len(list(logs.directory.iterdir())) == 3
    shutil.rmtree(logs.directory)
    for path in paths:
        logs.append(path, b"later, without line end")
        logs.append(path, b"=== worker, start 2\n", begins_line=True)
    said = f"{logs.directory} was deleted, with earlier logs. It is made anew."
    assert capsys.readouterr().err.splitlines() == [said]
    for path in paths:
        assert path.read_text() == "later, without line end\n=== worker, start 2\n"
    paths[0].unlink()
    logs.append(paths[0], b"last\n")
    assert paths[0].read_text() == "last\n"
    logs.close()


def test_log_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = TaskLogs(tmp_path / "tasks")
    path = logs.path(Task("worker", 0))
    logs.append(path, b"first\n")
    with monkeypatch.context() as patch:
        patch.delattr(Path, "open")
        logs.append(path, b"second\n")
    logs.close()
    logs.append(path, b"third\n")
    logs.close()
    assert path.read_text() == "first\nsecond\nthird\n"


def test_logs_that_cannot_be_written_are_reported_once_and_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks").write_text("mine")
    logs = TaskLogs(tmp_path / "tasks")
    for path in (logs.path(Task("worker", 0)), logs.path(Task("worker", 1))):
        logs.append(path, b"a\n")
        logs.append(path, b"b\n")
    assert capsys.readouterr().err.count("Lines are missing in") == 2
    assert (tmp_path / "tasks").read_text() == "mine"


FAILED = TaskEnd(
    Task("worker", 1), False, False, 100, -9, 2.34, "signal 9 (Killed)", last_lines=("last\n",)
)


@pytest.mark.parametrize(
    ("code", "is_chief", "ends_run", "exit_of_others"),
    [
        (-9, False, False, [75]),
        (1, False, True, [75]),
        (2, False, True, [2]),
        # A task that lost another one is not the cause, except for the chief and the last restart.
        (75, False, False, []),
        (75, True, False, [75]),
        (75, False, True, [75]),
    ],
)
def test_other_hosts_are_told_of_causes_only(
    code: int, is_chief: bool, ends_run: bool, exit_of_others: list[int], tmp_path: Path
) -> None:
    log, others = FailureLog(tmp_path, "host-b"), FailureLog(tmp_path, "host-a")
    log.write(replace(FAILED, exit_code=code, is_chief=is_chief), ends_run=ends_run)
    found = list(others.new_of_others())
    assert [failure.exit_of_others for failure in found] == exit_of_others
    assert all(failure.ends_run == ends_run for failure in found)
    assert not list(log.new_of_others()), "a host is not told of its own task"


def test_lines_of_earlier_launchers_damaged_and_incomplete_ones_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, log = tmp_path / "failures.jsonl", FailureLog(tmp_path, "host-b")
    log.write(FAILED, ends_run=False)
    line = path.read_text()
    others = FailureLog(tmp_path, "host-a")
    assert not list(others.new_of_others())
    with path.open("a") as file:
        file.write("damaged\n" + line + line[:20])
    assert len(list(others.new_of_others())) == 1
    with path.open("a") as file:
        file.write(line[20:])
    assert len(list(others.new_of_others())) == 1
    assert not list(others.new_of_others())
    path.write_text(line)  # It was deleted, and made anew.
    print_failure(*others.new_of_others())
    assert capsys.readouterr().err.splitlines() == [
        "[worker 1 on host-b] last",
        "worker 1 on host-b (process 100) ended after 2.3 s: signal 9 (Killed).",
    ]
