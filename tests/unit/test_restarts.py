"""Limits of restarts: what counts as progress, and what as a crash loop."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task
from trainer.local.deaths import Restarts, TaskEnd
from trainer.run_files import Progress, progress_of

WORKER = Task("worker", 1)
DEATH = TaskEnd(WORKER, False, False, 100, -9, 60.0, "signal 9")  # After more than a short life.


class Run:
    """A clock and the progress of a run, both set by the test."""

    def __init__(self) -> None:
        self.secs = 0.0
        self.progress: Progress = (0, 0)

    def restarts(self, max_restarts: int) -> Restarts:
        return Restarts(max_restarts, lambda: self.progress, lambda: self.secs)


@pytest.mark.parametrize("delays", [[None], [0, 1, 2, 4, 8, 16, 30, 30, None]])
def test_delays_of_a_crash_loop_grow_until_it_ends(delays: list[float | None]) -> None:
    restarts = Run().restarts(max_restarts=len(delays) - 1)
    assert [restarts.next_delay_secs(DEATH) for _ in delays] == delays


SOON = replace(DEATH, seconds=9.0)
LOST_ANOTHER = replace(SOON, exit_code=75)  # The other task is the cause.
PS_WORKER = replace(LOST_ANOTHER, is_ps_worker=True)


@pytest.mark.parametrize(
    ("ends", "delays"),
    [
        ([SOON] * 4 + [DEATH] + [SOON] * 2, [0, 1, 2, 4, 0, 0, 1]),
        ([PS_WORKER] * 3, [0, 1, 2]),
        ([SOON] * 12, [0, 1, 2, 4, 8, 16, *[30] * 6]),
        ([*[LOST_ANOTHER] * 3, SOON, SOON, LOST_ANOTHER, SOON], [0, 0, 0, 0, 1, 2, 2]),
    ],
)
def test_task_that_dies_at_once_has_growing_delays_though_the_run_makes_progress(
    ends: list[TaskEnd], delays: list[float]
) -> None:
    run = Run()
    restarts = run.restarts(max_restarts=1)
    found = []
    for end in ends:
        run.progress = (0, run.progress[1] + 1)
        found.append(restarts.next_delay_secs(end))
    assert found == delays


def test_restart_that_does_not_count_lengthens_delays_but_has_no_limit() -> None:
    restarts = Run().restarts(max_restarts=2)
    delays = [restarts.next_delay_secs(DEATH, counts=n in (1, 4, 6)) for n in range(7)]
    assert delays == [0, 1, 2, 4, 8, 16, None]


@pytest.mark.parametrize("part", [0, 1], ids=["checkpoint", "report"])
def test_run_with_progress_is_restarted_without_limit(part: int) -> None:
    run = Run()
    restarts = run.restarts(max_restarts=1)
    for step in range(10, 1000, 10):
        run.progress = (step, 0) if part == 0 else (0, step)
        assert restarts.next_delay_secs(DEATH) == 0
    assert restarts.next_delay_secs(DEATH) is None


def test_run_that_only_repeats_makes_no_progress() -> None:
    run = Run()
    run.progress = (100, 190)
    restarts = run.restarts(max_restarts=3)
    for reported in (180, 190, 170):
        run.progress = (100, reported)
        assert restarts.next_delay_secs(DEATH) is not None
    run.progress = (100, 190)
    assert restarts.next_delay_secs(DEATH) is None


def test_restarts_are_forgotten_after_ten_minutes() -> None:
    run = Run()
    restarts = run.restarts(max_restarts=2)
    for _ in range(20):
        run.secs += 301
        assert restarts.next_delay_secs(DEATH) is not None
    run.secs += 1
    assert restarts.next_delay_secs(DEATH) is None


def test_progress_is_read_from_complete_checkpoints_and_complete_reports(tmp_path: Path) -> None:
    assert progress_of(str(tmp_path)) == (0, 0)
    for name in ("step-00000020", "step-00000100", "best-00000900", "step-00000800"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "checkpoint.json").touch()
    (tmp_path / "checkpoints" / "step-00000800" / "checkpoint.json").unlink()  # Not complete.
    report = json.dumps({"step": 140, "filler": "x" * 100})
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write(f"{report}\n" * 1000 + '{"step": 150}\n{"step": 16')
    assert progress_of(str(tmp_path)) == (100, 150)
