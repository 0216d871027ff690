"""config.virtual_replicas: one run has the same bits on any topology, also through deaths."""

import signal
from pathlib import Path

import pytest

from tests.cluster.runs import Run, TrainOnce, last_step, start, train
from trainer.compare import compare
from trainer.hooks.digest import OPTIMIZER
from trainer.run_files import DIGESTS, PART_DIGESTS

STEPS = 120
FOUR = "mirrored-4"
CONFIG = "--config=tests/cluster/configs/same_bits.py"


@pytest.fixture
def alone(train_once: TrainOnce) -> Run:
    """The run of one replica and two threads, which the other runs must equal."""
    return train_once("mirrored-1", CONFIG, "--num_threads=2")


def assert_equal(left: Run, right: Run) -> None:
    found = compare(str(left.model_dir), str(right.model_dir))
    assert found.is_equal, found
    assert found.num_reports == 16
    assert found.checkpoint_steps[-1] == STEPS
    reports = [run.metrics("train") for run in (left, right)]
    for ours, theirs in zip(*reports, strict=True):
        assert ours[DIGESTS] == theirs[DIGESTS]
        assert ours[PART_DIGESTS] == theirs[PART_DIGESTS]
        assert len(set(ours[PART_DIGESTS].values())) == len(ours[PART_DIGESTS]) == 4
    names = {"conv2d/kernel", "batch_normalization/moving_mean", OPTIMIZER}
    assert names <= reports[0][-1][DIGESTS].keys()


@pytest.mark.parametrize(
    ("topology", "num_threads"),
    [("ps-sync-2+2", 2), pytest.param("multiworker-4", 1, marks=pytest.mark.nightly)],
)
def test_weights_and_reports_have_the_bits_of_one_replica(
    topology: str, num_threads: int, alone: Run, tmp_path: Path
) -> None:
    run = train(topology, tmp_path / "run", CONFIG, f"--num_threads={num_threads}")
    assert_equal(alone, run)


def test_killed_run_continues_on_other_topologies_with_the_same_bits(
    alone: Run, tmp_path: Path
) -> None:
    killed = (FOUR, 30), ("multiworker-2", 60), ("mirrored-1", 90)
    for topology, step in killed:
        with start(topology, tmp_path / "run", CONFIG, "--config.steps_per_call=1") as process:
            process.wait_for_step(step)
            for each in process.family():
                each.send_signal(signal.SIGKILL)
            process.wait_for_family_to_end()
            assert process.popen.wait() == -signal.SIGKILL
        assert step <= last_step(tmp_path / "run") < STEPS
    run = train(FOUR, tmp_path / "run", CONFIG)
    assert "resuming from step" in run.stdout
    assert_equal(alone, run)


def test_flipped_bit_of_a_gradient_is_in_the_next_report_with_the_part_and_the_variables(
    alone: Run, tmp_path: Path
) -> None:
    run = train(FOUR, tmp_path / "run", CONFIG, "--config.flip_step=20")
    found = compare(str(alone.model_dir), str(run.model_dir))
    assert found.reports is not None
    assert (found.reports.equal_step, found.reports.step) == (10, 20)
    part, *names = found.reports.differ
    assert part == "gradients of part 3 of the batch"  # That of the last replica.
    assert "embedding/embeddings" in names
    assert found.variables is not None  # Of the oldest checkpoint that is left.
