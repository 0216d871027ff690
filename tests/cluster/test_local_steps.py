"""config.local_steps: replicas of one process and of several train the same; no average is lost."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.runs import (
    NUM_NUMBERED,
    TOPOLOGIES,
    Run,
    largest_difference,
    read_metrics,
    start,
    train,
)

EVERY = 20
STEPS = 400
CONFIG = "--config=tests/cluster/configs/normalised.py"
MULTIWORKER = TOPOLOGIES["multiworker-2"]


@pytest.fixture(scope="module")
def flags(digits: Path) -> tuple[str, ...]:
    local = f"--config.local_steps.every={EVERY}"
    # Several buckets in each sum; and reports at steps that are no multiples of 20.
    others = ("--bucket_mb=0.25", "--config.log_every_steps=50")
    return (CONFIG, f"--data_dir={digits}", f"--train_steps={STEPS}", local, *others)


@pytest.fixture(scope="module")
def undisturbed(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(MULTIWORKER, tmp_path_factory.mktemp("undisturbed") / "run", *flags)


@pytest.fixture(scope="module")
def overlapped_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Several rounds from one report to the next: all but the last sum are in flight."""
    return (*flags, "--config.local_steps.overlap", "--config.log_every_steps=110")


@pytest.fixture(scope="module")
def overlapped(overlapped_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(MULTIWORKER, tmp_path_factory.mktemp("overlapped") / "run", *overlapped_flags)


def test_overlapped_averages_have_the_same_bits_in_one_process(
    overlapped_flags: tuple[str, ...], overlapped: Run, tmp_path: Path
) -> None:
    run = train(TOPOLOGIES["mirrored-2"], tmp_path / "run", *of_one_process(overlapped_flags))
    assert largest_difference(run.variables(), overlapped.variables()) == 0
    assert [line["step"] for line in run.metrics("train")] == [120, 220, 340, 400]
    assert run.metrics("eval")[-1]["accuracy"] > 0.9


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_after_a_death_overlapped_training_continues_with_the_last_report(
    overlapped_flags: tuple[str, ...], overlapped: Run, tmp_path: Path
) -> None:
    with start(MULTIWORKER, tmp_path / "run", *overlapped_flags) as process:
        process.wait_for_step(120)
        process.task("worker 1").kill()
        run = process.wait()
    assert run.exit_code == 0, process.output()
    [resumed] = process.resumes("worker 0")
    assert resumed in (120, 220, 340)
    assert largest_difference(run.variables(), overlapped.variables()) == 0


def test_replicas_of_one_process_end_in_the_same_bits(
    flags: tuple[str, ...], undisturbed: Run, tmp_path: Path
) -> None:
    run = train(TOPOLOGIES["mirrored-2"], tmp_path / "run", *of_one_process(flags))
    assert largest_difference(run.variables(), undisturbed.variables()) == 0
    assert [line["step"] for line in run.metrics("train")] == [
        -(-step // EVERY) * EVERY for step in range(50, STEPS + 1, 50)
    ]
    assert run.metrics("eval")[-1]["accuracy"] > 0.9


@pytest.mark.timeout(240)
def test_after_a_death_training_continues_with_the_last_average(
    flags: tuple[str, ...], undisturbed: Run, tmp_path: Path
) -> None:
    with start(MULTIWORKER, tmp_path / "run", *flags) as process:
        process.wait_for_step(100)
        reported = read_metrics(process.model_dir)[-1]["step"]
        time.sleep(0.2)
        process.task("worker 1").kill()
        run = process.wait()
    assert run.exit_code == 0, process.output()
    [resumed] = process.resumes("worker 0")
    # There is no other checkpoint: the survivor has saved the last average.
    assert resumed >= reported
    assert resumed % EVERY == 0
    assert largest_difference(run.variables(), undisturbed.variables()) == 0
    mark = json.loads((run.model_dir / f"checkpoints/step-{STEPS:08d}/checkpoint.json").read_text())
    assert mark["next_batch"] == STEPS


@pytest.mark.nightly
def test_another_number_of_replicas_resumes(flags: tuple[str, ...], tmp_path: Path) -> None:
    first = train(MULTIWORKER, tmp_path / "run", *flags, "--train_steps=200")
    assert first.result["step"] == 200
    alone = (*of_one_process(flags), "--train_steps=240")
    assert train(TOPOLOGIES["mirrored-1"], tmp_path / "run", *alone).result["step"] == 240


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


def of_one_process(flags: tuple[str, ...]) -> list[str]:
    return [flag for flag in flags if not flag.startswith("--bucket_mb")]
