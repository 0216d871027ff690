"""After a loss of NaN training goes back, skips the batches that led to it, and counts them."""

from pathlib import Path

import numpy as np
import pytest

from data.order import Order
from tests.cluster.runs import Run, Topology, largest_difference, topologies, train, train_here
from trainer.config import load_recipe
from trainer.inputs import open_inputs

CONFIG = "tests/cluster/configs/poisoned.py"
# With a backup worker: an older gradient is in flight when training goes back.
BACKED_UP = Topology("ps-sync-3+1")
STEPS = 14


def train_order(numbered: Path) -> Order:
    recipe = load_recipe(CONFIG)
    recipe.config.data_dir = str(numbered)
    return open_inputs(recipe).train.order


def poison_of(numbered: Path) -> int:
    """An example of batch 9. The records are written in the order of their numbers."""
    return int(train_order(numbered).records(9, 1)[0, 0])


@pytest.fixture(scope="module")
def alone(numbered: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    model_dir = tmp_path_factory.mktemp("alone") / "run"
    poison = poison_of(numbered)
    given = {"data_dir": numbered, "poison": poison, "recover_from_nan": 1}
    return train_here(CONFIG, model_dir, **given)


@pytest.mark.parametrize(
    "topology", topologies("mirrored-2", BACKED_UP, nightly=("multiworker-2", "ps-2+1"))
)
def test_training_continues_after_the_batches_that_led_to_nan_and_counts_them(
    topology: Topology, numbered: Path, tmp_path: Path, alone: Run
) -> None:
    poison = f"--config.poison={poison_of(numbered)}"
    flags = [f"--config={CONFIG}", f"--data_dir={numbered}", poison, "--config.recover_from_nan=1"]
    flags += ["--replicas_to_aggregate=2"] if topology == BACKED_UP else []
    run = train(topology, tmp_path / "run", *flags)

    assert "The loss became nan" in run.stdout + run.stderr, "the fault did not happen"
    result = run.result
    assert result["step"] == STEPS
    assert result["examples"] == STEPS * 32
    assert result["nan_recoveries"] == 1
    num_skipped = result["examples_skipped"] // 32
    assert result["examples_skipped"] == num_skipped * 32 > 0
    mark = run.mark()
    assert mark["skipped"] == [result["examples_skipped"]]
    open_lanes = sum(last + 1 - first for _, first, last in mark["open_shares"])
    assert mark["next_batch"] * 32 - open_lanes == (STEPS + num_skipped) * 32

    reports = run.metrics("train")
    assert run.steps("train") == list(range(1, STEPS + 1))
    assert all(np.isfinite(report["loss"]) for report in reports)
    skipped_from = [r["step"] for r in reports if r.get("examples_skipped") == num_skipped * 32]
    assert skipped_from == list(range(skipped_from[0], STEPS + 1))
    if topology == BACKED_UP:
        # Its gradient may have been too late for one or two steps, and was computed again.
        assert skipped_from[0] in (9, 13)
        return
    # After the checkpoint of step 8.
    assert skipped_from[0] == 9
    assert num_skipped == alone.result["examples_skipped"] // 32 == 2
    order = train_order(numbered)
    for report, batch in zip(reports, [*range(8), *range(10, STEPS + 2)], strict=True):
        assert round(report["number"] * 32) == order.records(batch, 1).sum()
    assert largest_difference(run.weights(), alone.weights()) < 1e-5
