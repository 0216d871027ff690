"""config.local_steps: replicas of one process and of several train the same; no average is lost."""

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.runs import (
    NUM_NUMBERED,
    TrainOnce,
    assert_same_bits,
    largest_difference,
    last_step,
    start,
    train,
)

EVERY = 20
STEPS = 400
BUCKETS = "--bucket_mb=0.25"  # Several in each sum.
LOCAL = f"--config.local_steps.every={EVERY}"
# Reports at steps that are no multiples of 20.
FLAGS = (
    "--config=tests/cluster/configs/normalised.py",
    f"--train_steps={STEPS}",
    LOCAL,
    "--config.log_every_steps=50",
)
MULTIWORKER = "multiworker-2"
# Several rounds from one report to the next: all but the last sum are in flight.
OVERLAP = ("--config.local_steps.overlap", "--config.log_every_steps=110")


@pytest.mark.parametrize(
    ("overlap", "reports"),
    [((), [60, 100, 160, 200, 260, 300, 360, 400]), (OVERLAP, [120, 220, 340, 400])],
    ids=["", "overlap"],
)
def test_replicas_of_one_process_end_in_the_same_bits(
    overlap: tuple[str, ...],
    reports: list[int],
    train_once: TrainOnce,
    tmp_path: Path,
) -> None:
    run = train("mirrored-2", tmp_path / "run", *FLAGS, *overlap)
    workers = train_once(MULTIWORKER, *FLAGS, BUCKETS, *overlap)
    assert_same_bits(run, workers)
    assert run.steps("train") == reports
    assert run.metrics("eval")[-1]["accuracy"] > 0.9


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "overlap", [(), pytest.param(OVERLAP, marks=pytest.mark.nightly)], ids=["", "overlap"]
)
def test_after_a_death_training_continues_with_the_last_average(
    overlap: tuple[str, ...], train_once: TrainOnce, tmp_path: Path
) -> None:
    flags = (*FLAGS, BUCKETS, *overlap)
    with start(MULTIWORKER, tmp_path / "run", *flags) as process:
        process.wait_for_step(100)
        reported = last_step(process.model_dir)
        time.sleep(0.2)
        process.task("worker 1").kill()
        run = process.wait()
    [resumed] = process.resumes("worker 0")
    # There is no other checkpoint: the survivor has saved the last average.
    assert resumed >= reported
    if overlap:  # With sums in flight, the average is that of a report.
        assert resumed in (120, 220, 340)
    assert resumed % EVERY == 0
    assert largest_difference(run.variables(), train_once(MULTIWORKER, *flags).variables()) == 0
    assert run.mark()["next_batch"] == STEPS


@pytest.mark.nightly
def test_another_number_of_replicas_resumes(tmp_path: Path) -> None:
    first = train(MULTIWORKER, tmp_path / "run", *FLAGS, BUCKETS, "--train_steps=200")
    assert first.result["step"] == 200
    alone = train("mirrored-1", tmp_path / "run", *FLAGS, "--train_steps=240")
    assert alone.result["step"] == 240


def test_a_slow_worker_makes_fewer_steps_and_each_example_comes_once_an_epoch(
    numbered: Path, tmp_path: Path
) -> None:
    config = "--config=tests/cluster/configs/uneven.py"
    flags = (config, f"--data_dir={numbered}", "--config.local_steps.every_secs=1")
    run = train(MULTIWORKER, tmp_path / "run", *flags, env={"TRAINED": str(tmp_path / "trained")})
    fast, slow = ((tmp_path / f"trained.{i}").read_text().splitlines() for i in (0, 1))
    # A step is a batch over both workers.
    assert (run.result["step"], len(fast) + len(slow)) == (150, 300)
    # In the first two rounds, of 11 steps, both make as many.
    assert 11 < len(slow) < 75
    counts = Counter(int(number) for step in (*fast, *slow) for number in step.split())
    assert set(counts.values()) == {150 * 32 // NUM_NUMBERED}
    assert len(counts) == NUM_NUMBERED
