"""failures.jsonl: what the launchers of several hosts tell each other, without processes."""

from dataclasses import replace
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task
from trainer.local.deaths import TaskEnd
from trainer.local.launch_report import FailureLog, print_failure

KILLED = TaskEnd(
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
    log.write(replace(KILLED, exit_code=code, is_chief=is_chief), ends_run=ends_run)
    found = list(others.new_of_others())
    assert [failure.exit_of_others for failure in found] == exit_of_others
    assert all(failure.ends_run == ends_run for failure in found)
    assert not list(log.new_of_others()), "a host is not told of its own task"


def test_lines_of_earlier_launchers_damaged_and_incomplete_ones_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, log = tmp_path / "failures.jsonl", FailureLog(tmp_path, "host-b")
    log.write(KILLED, ends_run=False)
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
