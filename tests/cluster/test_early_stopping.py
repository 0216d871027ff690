"""A run that stops early is complete under every strategy, and another may begin where it ended."""

from pathlib import Path

import pytest

from tests.cluster.runs import TOPOLOGIES, Run, Topology, largest_difference, train

NAMES = ("mirrored-2", "multiworker-2", "ps-sync-3+1", "ps-2+1")
CONFIG = "--config=tests/cluster/configs/linear.py"
# The rate is so small that no evaluation improves: the first evaluation is the best.
IDLE = ("--config.optimizer=sgd", "--learning_rate=1e-12")
PATIENCE = ("--config.early_stopping.patience=2", "--config.early_stopping.min_delta=1e-3")
WARM_FLAGS = (CONFIG, *IDLE, "--train_steps=5", "--config.seed=1")


@pytest.fixture(scope="module")
def cold(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without a warm start. Initial weights are the same under every strategy."""
    model_dir = tmp_path_factory.mktemp("cold") / "run"
    return train(TOPOLOGIES["mirrored-1"], model_dir, *WARM_FLAGS, f"--data_dir={digits}")


@pytest.mark.parametrize("topology", [TOPOLOGIES[name] for name in NAMES], ids=str)
def test_run_stops_early_on_all_tasks_and_a_warm_start_continues_from_it(
    topology: Topology, digits: Path, tmp_path: Path, cold: Run
) -> None:
    data = f"--data_dir={digits}"
    flags = (CONFIG, data, *IDLE, *PATIENCE, "--config.eval_every_steps=10")
    stopped = train(topology, tmp_path / "stopped", *flags, "--config.export=True")

    assert stopped.exit_code == 0
    assert [report["step"] for report in stopped.metrics("eval")] == [10, 20, 30]
    result = stopped.result
    assert result["step"] == 30
    assert result["exit_code"] == 0
    assert result["why"] == "no better loss in 2 evaluations: stopped early"
    assert stopped.checkpoints()[-1] == "step-00000030"
    assert (stopped.model_dir / "export" / "model.keras").exists()

    again = train(topology, stopped.model_dir, *flags)
    assert "is finished" in again.stdout
    assert again.result == result

    warm = f"--config.warm_start.path={stopped.model_dir}"
    begun = train(topology, tmp_path / "warm", *WARM_FLAGS, data, warm)
    assert "warm start from" in begun.stdout
    assert begun.result["step"] == 5
    assert largest_difference(begun.weights(), stopped.weights()) < 1e-6
    assert largest_difference(begun.weights(), cold.weights()) > 1e-2
