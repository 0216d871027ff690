"""The launcher of a local cluster whose number of workers changes, as tables."""

from pathlib import Path

import pytest

from strategies.cluster.tf_config import Cluster, Task, local_cluster
from tests.unit.stand_ins import KILLED, lines_of
from trainer.local.policy import Activity, Step
from trainer.local.resizing import ResizingPolicy, WantedWorkers

CHIEF, WORKER, PS = Task("chief", 0), Task("worker", 0), Task("ps", 0)


def wanted(run_dir: Path, text: str | None = None) -> WantedWorkers:
    file = WantedWorkers(run_dir, least=2, most=4)
    if text is not None:
        file.path.parent.mkdir(exist_ok=True)
        file.path.write_text(text)
    return file


def cluster() -> Cluster:
    return local_cluster("ps", 4, 1, lambda n: list(range(7000, 7000 + n)))


def workers_of(policy: ResizingPolicy) -> set[int]:
    """The number of workers that each task knows."""
    return {cluster.num("worker") for cluster in policy.clusters.values()}


@pytest.mark.parametrize(
    ("text", "number"), [(None, None), ("3\n", 3), (" 2", 2), ("4", 4), ("", None)]
)
def test_number_is_read_without_a_word(
    text: str | None, number: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert wanted(tmp_path, text).read() == number
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["1", "5", "three", "-2", "3.0", "9" * 5000, "\xb2"])
def test_wrong_number_is_refused_once(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = wanted(tmp_path, text)
    assert [file.read(), file.read()] == [None, None]
    (line,) = capfd.readouterr().err.splitlines()
    assert "from 2 (--min_workers) to 4 (--workers). Received: " in line
    assert f"Type: echo 4 > {file.path}" in line
    file.path.write_text("3")
    assert file.read() == 3
    file.path.write_text(text)
    file.read()
    assert len(capfd.readouterr().err.splitlines()) == 1, "another wrong number was not explained"


def test_run_begins_with_all_workers_or_with_the_number_in_the_file(tmp_path: Path) -> None:
    assert workers_of(ResizingPolicy(cluster(), wanted(tmp_path))) == {4}
    policy = ResizingPolicy(cluster(), wanted(tmp_path, "2"))
    assert workers_of(policy) == {2}
    assert [str(task) for task in policy.clusters] == ["chief 0", "worker 0", "worker 1", "ps 0"]


def test_all_tasks_start_again_with_another_number_when_the_last_has_ended(tmp_path: Path) -> None:
    file = wanted(tmp_path, "2")
    policy = ResizingPolicy(cluster(), file)
    assert policy.on_wanted(2, Activity.RUNNING) is Step.NONE
    assert policy.on_wanted(3, Activity.DELAYING) is Step.NONE
    file.path.write_text("3")
    assert policy.on_wanted(3, Activity.RUNNING) is Step.STOP_TOGETHER
    assert policy.on_wanted(3, Activity.RUNNING) is Step.NONE
    assert policy.on_exit(WORKER, KILLED, Activity.RUNNING) is Step.NONE
    assert not policy.to_start([WORKER]), "a worker whose restart was planned before"
    assert policy.on_exit(CHIEF, 75, Activity.RUNNING) is Step.NONE
    assert policy.on_exit(PS, 75, Activity.IDLE) is Step.START
    assert workers_of(policy) == {3}
    (line,) = lines_of(tmp_path / "failures.jsonl")
    assert (line["workers_before"], line["workers"]) == (2, 3)
    assert line["why"] == "membership/workers says 3"


def test_file_that_is_changed_back_meanwhile_changes_nothing(tmp_path: Path) -> None:
    policy = ResizingPolicy(cluster(), wanted(tmp_path, "2"))
    assert policy.on_wanted(3, Activity.RUNNING) is Step.STOP_TOGETHER
    assert policy.on_exit(CHIEF, 75, Activity.IDLE) is Step.START
    assert workers_of(policy) == {2}
    assert not (tmp_path / "failures.jsonl").exists()


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
    policy = ResizingPolicy(cluster(), wanted(tmp_path, "2"))
    policy.on_wanted(3, Activity.RUNNING)
    assert policy.on_exit(task, exit_code, activity) is None
    assert workers_of(policy) == {2}
