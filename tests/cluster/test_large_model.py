"""A model of 87 MB reaches limits of TensorFlow; its weights equal those of mirrored."""

from pathlib import Path

import pytest

from tests.cluster.runs import TOPOLOGIES, Run, largest_difference, train

pytestmark = pytest.mark.nightly

LARGE = "--config=tests/cluster/configs/large.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(TOPOLOGIES["mirrored-1"], tmp_path_factory.mktemp("alone") / "run", LARGE)


@pytest.mark.parametrize("name", ["multiworker-2", "ps-sync-3+1"])
def test_large_model_trains_as_under_mirrored(name: str, alone: Run, tmp_path: Path) -> None:
    run = train(TOPOLOGIES[name], tmp_path / "cluster", LARGE)
    assert sum(value.nbytes for value in run.weights().values()) > 80e6, "the model is small"
    assert largest_difference(run.weights(), alone.weights()) < 1e-5
