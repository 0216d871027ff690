"""A model of 87 MB reaches limits of TensorFlow; its weights equal those of mirrored."""

from pathlib import Path

import pytest

from tests.cluster.runs import TrainOnce, largest_difference, train

pytestmark = pytest.mark.nightly

LARGE = "--config=tests/cluster/configs/large.py"


@pytest.mark.parametrize("name", ["multiworker-2", "ps-sync-3+1"])
def test_large_model_trains_as_under_mirrored(
    name: str, train_once: TrainOnce, tmp_path: Path
) -> None:
    run = train(name, tmp_path, LARGE)
    assert sum(value.nbytes for value in run.weights().values()) > 80e6, "the model is small"
    assert largest_difference(run.weights(), train_once("mirrored-1", LARGE).weights()) < 1e-5
