"""Training without what only Linux has, as on the Mac of a person who writes a model."""

from pathlib import Path

import pytest

from tests.cluster.runs import Topology, topologies, train

MACOS = Path(__file__).resolve().parent / "macos"
LINEAR = ("--config=tests/cluster/configs/linear.py", "--train_steps=20")
TIMEOUT_SECS = 250.0  # Each task imports TensorFlow.


@pytest.mark.parametrize("topology", topologies("mirrored-2", "multiworker-2", nightly=("ps-2+1",)))
def test_trains_without_what_only_linux_has(topology: Topology, tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(MACOS)}
    run = train(topology, tmp_path, *LINEAR, env=env, timeout_secs=TIMEOUT_SECS)
    assert run.result["step"] >= 20
    if topology.tasks:
        assert "darwin has no network namespaces" in run.stderr
