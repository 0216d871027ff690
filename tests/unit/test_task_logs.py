"""Logs of tasks that cannot be written, or are deleted during the run."""

import shutil
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task
from trainer.local.task_logs import TaskLogs


def test_logs_deleted_during_the_run_are_made_anew_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = TaskLogs(tmp_path / "tasks")
    opened = [logs.open(Task("worker", index)) for index in range(3)]
    for log in opened:
        log.write(b"first\n")
    assert len(list(logs.directory.iterdir())) == 3
    shutil.rmtree(logs.directory)
    for log in opened:
        log.write(b"later, without line end")
        log.write(b"=== worker, start 2\n", begins_line=True)
        log.close()
    logs.append("restarts.jsonl", "{}")
    said = f"{logs.directory} was deleted, with earlier logs. It is made anew."
    assert capsys.readouterr().err.splitlines() == [said]
    for index in range(3):
        text = logs.path(Task("worker", index)).read_text()
        assert text == "later, without line end\n=== worker, start 2\n"
    assert (logs.directory / "restarts.jsonl").read_text() == "{}\n"


def test_logs_that_cannot_be_written_are_reported_once_and_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks").write_text("mine")
    logs = TaskLogs(tmp_path / "tasks")
    for log in (logs.open(Task("worker", 0)), logs.open(Task("worker", 1))):
        log.write(b"a\n")
        log.write(b"b\n")
        log.close()
    assert capsys.readouterr().err.count("Lines are missing in") == 2
    assert (tmp_path / "tasks").read_text() == "mine"
