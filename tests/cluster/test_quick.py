"""One short run of each mode: what a newcomer's `make test` shows of complete clusters.

The other files of this folder look closer. All runs here are of the same small config.
"""

from pathlib import Path

import pytest

from tests.cluster.runs import Run, TrainOnce, assert_same_bits, largest_difference, start, train

pytestmark = pytest.mark.quick

MIRRORED = "mirrored-2"
STEPS = 60


SGD = ("--config.optimizer=sgd", "--learning_rate=0.1")
FLAGS = ("--config=tests/cluster/configs/linear.py", *SGD)


@pytest.fixture
def mirrored(train_once: TrainOnce) -> Run:
    return train_once(MIRRORED, *FLAGS, f"--train_steps={STEPS}")


def test_mirrored_training_learns(mirrored: Run) -> None:
    assert mirrored.result["step"] == STEPS
    assert mirrored.result["eval"]["accuracy"] > 0.7
    assert mirrored.checkpoints()[-1] == f"step-{STEPS:08d}"


@pytest.mark.parametrize("topology", ["multiworker-2", "ps-sync-2+1"])
def test_synchronous_cluster_ends_in_the_weights_of_mirrored(
    topology: str, mirrored: Run, tmp_path: Path
) -> None:
    run = train(topology, tmp_path, *FLAGS, f"--train_steps={STEPS}")
    assert run.result["step"] == STEPS
    assert largest_difference(run.weights(), mirrored.weights()) < 1e-5


def test_run_resumes_and_ends_bit_for_bit_as_an_uninterrupted_one(
    mirrored: Run, tmp_path: Path
) -> None:
    half = train(MIRRORED, tmp_path, *FLAGS, "--train_steps=25")
    assert largest_difference(half.weights(), mirrored.weights()) > 1e-3
    resumed = train(MIRRORED, tmp_path, *FLAGS, f"--train_steps={STEPS}")
    assert_same_bits(resumed, mirrored)


def test_asynchronous_training_finishes_without_a_killed_worker_which_is_restarted(
    tmp_path: Path,
) -> None:
    steps = ("--train_steps=300", "--config.pause_secs=0.01")
    slow = ("--config=tests/cluster/configs/slow.py", *SGD, *steps)
    with start("ps-2+1", tmp_path, *slow) as process:
        process.kill_task("worker 1", 20)
        run = process.wait()
    assert run.result["step"] >= 300
    assert "signal 9" in run.stderr, "worker 1 was not killed"
    restarts = (tmp_path / "tasks" / "restarts.jsonl").read_text()
    assert "worker 1" in restarts
