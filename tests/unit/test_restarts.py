"""Limits of restarts: what counts as progress, and what as a crash loop."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task
from trainer.local.deaths import TaskEnd
from trainer.local.restarts import Restarts
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


def test_delays_of_a_crash_loop_grow_until_it_ends() -> None:
    restarts = Run().restarts(max_restarts=8)
    delays = [restarts.next_delay_secs(DEATH) for _ in range(9)]
    assert delays == [0, 1, 2, 4, 8, 16, 30, 30, None]


@pytest.mark.parametrize(
    ("code", "is_ps_worker", "delays"),
    [
        # The fifth of six tasks lives long; then the count starts again.
        (-9, False, [0, 1, 2, 4, 0, 0, 1]),
        (75, True, [0, 1, 2, 4, 0, 0, 1]),
        # It has lost another task, which is the cause.
        (75, False, [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_task_that_dies_at_once_has_growing_delays_though_the_run_makes_progress(
    code: int, is_ps_worker: bool, delays: list[float]
) -> None:
    run = Run()
    restarts = run.restarts(max_restarts=1)
    found = []
    for seconds in (9.0, 9.0, 9.0, 9.0, 11.0, 9.0, 9.0):
        run.progress = (0, run.progress[1] + 1)
        end = replace(DEATH, exit_code=code, is_ps_worker=is_ps_worker, seconds=seconds)
        found.append(restarts.next_delay_secs(end))
    assert found == delays


def test_longest_delay_of_a_task_that_dies_at_once_is_30_s() -> None:
    run = Run()
    restarts = run.restarts(max_restarts=1)
    delays = []
    for step in range(60):
        run.progress = (0, step + 1)
        delays.append(restarts.next_delay_secs(replace(DEATH, seconds=1.0)))
    assert delays[-1] == max(filter(None, delays)) == 30


def test_loss_of_another_task_keeps_the_count_of_short_lives() -> None:
    run = Run()
    restarts = run.restarts(max_restarts=1)
    found = []
    for code in (75, 75, 75, -9, -9, 75, -9):
        run.progress = (0, run.progress[1] + 1)
        found.append(restarts.next_delay_secs(replace(DEATH, exit_code=code, seconds=1.0)))
    assert found == [0, 0, 0, 0, 1, 2, 2]


def test_restart_that_does_not_count_lengthens_delays_but_has_no_limit() -> None:
    restarts = Run().restarts(max_restarts=2)
    delays = [restarts.next_delay_secs(DEATH, counts=n in (1, 4, 6)) for n in range(7)]
    assert delays == [0, 1, 2, 4, 8, 16, None]


def test_limit_of_zero_allows_no_restart() -> None:
    assert Run().restarts(max_restarts=0).next_delay_secs(DEATH) is None


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
