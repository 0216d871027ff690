"""The launcher of a local cluster whose number of workers changes, as tables."""

import os
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task, local_cluster
from tests.unit.stand_ins import KILLED, lines_of, no_progress, starter, when_noted
from trainer.local.policy import Activity, ResizingPolicy, Step
from trainer.local.supervisor import Supervisor

CHIEF, WORKER, PS = Task("chief", 0), Task("worker", 0), Task("ps", 0)


def resizing(run_dir: Path, text: str | None = None) -> ResizingPolicy:
    """The policy for 2 to 4 workers; `text` is in the file when it begins."""
    path = run_dir / "membership/workers"
    if text is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    cluster = local_cluster("ps", 4, 1)
    policy = ResizingPolicy(cluster, run_dir, least=2)
    assert policy.path == path
    return policy


def workers_of(policy: ResizingPolicy) -> set[int]:
    """The number of workers that each task knows."""
    return {cluster.num("worker") for cluster in policy.clusters.values()}


@pytest.mark.parametrize(
    ("text", "number"), [(None, None), ("3\n", 3), (" 2", 2), ("4", 4), ("", None)]
)
def test_number_is_read_without_a_word(
    text: str | None, number: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert resizing(tmp_path, text).wanted() == number
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["1", "5", "three", "-2", "3.0", "9" * 5000, "\xb2"])
def test_wrong_number_is_refused_once(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = resizing(tmp_path, text)
    assert [policy.wanted(), policy.wanted()] == [None, None]
    (line,) = capfd.readouterr().err.splitlines()
    assert "from 2 (--min_workers) to 4 (--workers). Received: " in line
    assert f"Type: echo 4 > {policy.path}" in line
    policy.path.write_text("3")
    assert policy.wanted() == 3
    policy.path.write_text(text)
    policy.wanted()
    assert len(capfd.readouterr().err.splitlines()) == 1, "another wrong number was not explained"


def test_run_begins_with_all_workers_or_with_the_number_in_the_file(tmp_path: Path) -> None:
    assert workers_of(resizing(tmp_path)) == {4}
    policy = resizing(tmp_path, "2")
    assert workers_of(policy) == {2}
    assert [str(task) for task in policy.clusters] == ["chief 0", "worker 0", "worker 1", "ps 0"]


def test_all_tasks_start_again_with_another_number_when_the_last_has_ended(tmp_path: Path) -> None:
    policy = resizing(tmp_path, "2")
    assert policy.look(Activity.RUNNING) is Step.NONE
    policy.path.write_text("3")
    assert policy.look(Activity.DELAYING) is Step.NONE
    assert policy.look(Activity.RUNNING) is Step.STOP_TOGETHER
    assert policy.look(Activity.RUNNING) is Step.NONE
    assert policy.on_exit(WORKER, KILLED, Activity.RUNNING) is Step.NONE
    assert not policy.to_start([WORKER]), "a worker whose restart was planned before"
    assert policy.on_exit(CHIEF, 75, Activity.RUNNING) is Step.NONE
    assert policy.on_exit(PS, 75, Activity.IDLE) is Step.START
    assert workers_of(policy) == {3}
    (line,) = lines_of(tmp_path / "failures.jsonl")
    assert (line["workers_before"], line["workers"]) == (2, 3)
    assert line["why"] == "membership/workers says 3"


def test_file_that_is_changed_back_meanwhile_changes_nothing(tmp_path: Path) -> None:
    policy = resizing(tmp_path, "2")
    policy.path.write_text("3")
    assert policy.look(Activity.RUNNING) is Step.STOP_TOGETHER
    policy.path.write_text("2")
    assert policy.on_exit(CHIEF, 75, Activity.IDLE) is Step.START
    assert workers_of(policy) == {2}
    assert not (tmp_path / "failures.jsonl").exists()


def test_storage_that_does_not_answer_stops_nothing(tmp_path: Path) -> None:
    policy = resizing(tmp_path)
    os.mkfifo(policy.path)
    assert [policy.look(Activity.RUNNING) for _ in range(3)] == [Step.NONE] * 3
    policy.path.write_text("3")  # Ends when the read does.
    assert policy.look(Activity.RUNNING) is Step.STOP_TOGETHER


def test_chief_that_does_not_stop_for_another_number_is_a_failure_with_a_reason(
    tmp_path: Path,
) -> None:
    policy = resizing(tmp_path, "2")
    body = """
        if job == "chief":
            ignore(signal.SIGTERM)
        time.sleep(60)
    """
    made = Supervisor(policy, starter(tmp_path, body), tmp_path, no_progress(0), grace_secs=0.2)
    with when_noted(tmp_path, "running", 1, lambda: (policy.path.write_text("3"), None)[1]):
        report = made.run()
    assert report.first_failure is not None
    assert report.first_failure.task == CHIEF
    assert "did not save and end within 0.2 s" in report.first_failure.failure
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("task", "exit_code", "activity"),
    [
        (CHIEF, 0, Activity.RUNNING),  # The run is complete.
        (CHIEF, 1, Activity.RUNNING),
        (CHIEF, KILLED, Activity.RUNNING),  # The next chief takes over what the servers keep.
        (WORKER, 1, Activity.RUNNING),
        (PS, 75, Activity.ENDING),
    ],
)
def test_other_end_while_the_number_changes_is_decided_as_always(
    task: Task, exit_code: int, activity: Activity, tmp_path: Path
) -> None:
    policy = resizing(tmp_path, "2")
    policy.path.write_text("3")
    policy.look(Activity.RUNNING)
    assert policy.on_exit(task, exit_code, activity) is None
    assert workers_of(policy) == {2}
