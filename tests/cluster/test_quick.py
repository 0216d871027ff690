"""One short run of each mode: what a newcomer's `make test` shows of complete clusters.

The other files of this folder look closer. All runs here are of the same small config.
"""

import signal
from pathlib import Path

import pytest

from tests.cluster.runs import (
    TOPOLOGIES,
    Run,
    Topology,
    largest_difference,
    start,
    topologies,
    train,
)

pytestmark = pytest.mark.quick

MIRRORED = TOPOLOGIES["mirrored-2"]
PS = TOPOLOGIES["ps-2+1"]
STEPS = 60


@pytest.fixture(scope="module")
def flags(digits: Path) -> tuple[str, ...]:
    config = "--config=tests/cluster/configs/linear.py"
    sgd = ("--config.optimizer=sgd", "--learning_rate=0.1")
    return (config, f"--data_dir={digits}", *sgd)


@pytest.fixture(scope="module")
def mirrored(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    model_dir = tmp_path_factory.mktemp("mirrored") / "run"
    return train(MIRRORED, model_dir, *flags, f"--train_steps={STEPS}")


def test_mirrored_training_learns(mirrored: Run) -> None:
    assert mirrored.result["step"] == STEPS
    assert mirrored.result["eval"]["accuracy"] > 0.7
    assert mirrored.checkpoints()[-1] == f"step-{STEPS:08d}"


@pytest.mark.parametrize("topology", topologies("multiworker-2", "ps-sync-2+1"), ids=str)
def test_synchronous_cluster_ends_in_the_weights_of_mirrored(
    topology: Topology, flags: tuple[str, ...], mirrored: Run, tmp_path: Path
) -> None:
    run = train(topology, tmp_path, *flags, f"--train_steps={STEPS}")
    assert run.result["step"] == STEPS
    assert largest_difference(run.weights(), mirrored.weights()) < 1e-5


def test_run_resumes_and_ends_bit_for_bit_as_an_uninterrupted_one(
    flags: tuple[str, ...], mirrored: Run, tmp_path: Path
) -> None:
    half = train(MIRRORED, tmp_path, *flags, "--train_steps=25")
    assert largest_difference(half.weights(), mirrored.weights()) > 1e-3
    resumed = train(MIRRORED, tmp_path, *flags, f"--train_steps={STEPS}")
    assert largest_difference(resumed.variables(), mirrored.variables()) == 0


def test_asynchronous_training_finishes_without_a_killed_worker_which_is_restarted(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    steps = ("--train_steps=300", "--config.pause_secs=0.01")
    slow = ("--config=tests/cluster/configs/slow.py", *flags[1:], *steps)
    with start(PS, tmp_path, *slow) as process:
        process.wait_for_step(20)
        process.task("worker 1").send_signal(signal.SIGKILL)
        run = process.wait()
        assert run.exit_code == 0, process.output()
    assert run.result["step"] >= 300
    assert "signal 9" in run.stderr, "worker 1 was not killed"
    restarts = (tmp_path / "tasks" / "restarts.jsonl").read_text()
    assert "worker 1" in restarts
