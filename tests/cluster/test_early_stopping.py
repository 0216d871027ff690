"""A run that stops early is complete under every strategy, and another may begin where it ended."""

from pathlib import Path

import pytest

from tests.cluster.runs import largest_difference, topologies, train

CONFIG = "--config=tests/cluster/configs/linear.py"
# The rate is so small that no evaluation improves: the first evaluation is the best.
IDLE = ("--config.optimizer=sgd", "--learning_rate=1e-12")
PATIENCE = ("--config.early_stopping.patience=2", "--config.early_stopping.min_delta=1e-3")
FLAGS = (CONFIG, *IDLE, *PATIENCE, "--config.eval_every_steps=10")
WARM_FLAGS = (CONFIG, *IDLE, "--train_steps=5", "--config.seed=1")


@pytest.mark.parametrize(
    "topology",
    topologies("multiworker-2", "ps-2+1", nightly=("mirrored-2", "ps-sync-3+1")),
)
def test_run_stops_early_on_all_tasks(topology: str, tmp_path: Path) -> None:
    stopped = train(topology, tmp_path, *FLAGS, "--config.export=True")

    assert stopped.steps("eval") == [10, 20, 30]
    result = stopped.result
    why = "no better loss in 2 evaluations: stopped early"
    assert (result["step"], result["exit_code"], result["why"]) == (30, 0, why)
    assert stopped.checkpoints()[-1] == "step-00000030"
    assert (stopped.model_dir / "export" / "model.keras").exists()


@pytest.mark.nightly
def test_stopped_run_is_finished_and_another_begins_with_its_weights(tmp_path: Path) -> None:
    """The run is of mirrored, and the other of parameter servers; the weights are the same."""
    stopped = train("mirrored-2", tmp_path / "stopped", *FLAGS)
    again = train("mirrored-2", stopped.model_dir, *FLAGS)
    assert "is finished" in again.stdout
    assert again.result == stopped.result

    warm = f"--config.warm_start.path={stopped.model_dir}"
    begun = train("ps-2+1", tmp_path / "warm", *WARM_FLAGS, warm)
    cold = train("mirrored-1", tmp_path / "cold", *WARM_FLAGS)
    assert "warm start from" in begun.stdout
    assert begun.result["step"] == 5
    assert largest_difference(begun.weights(), stopped.weights()) < 1e-6
    assert largest_difference(begun.weights(), cold.weights()) > 1e-2
