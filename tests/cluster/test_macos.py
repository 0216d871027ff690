"""Training without what only Linux has, as on the Mac of a person who writes a model."""

from pathlib import Path

import pytest

from tests.cluster.runs import Topology, start, topologies

MACOS = Path(__file__).resolve().parent / "macos"
LINEAR = ("--config=tests/cluster/configs/linear.py", "--train_steps=20")
TIMEOUT_SECS = 250.0  # Each task imports TensorFlow.


@pytest.mark.parametrize(
    "topology", topologies("mirrored-2", "multiworker-2", nightly=("ps-2+1",)), ids=str
)
def test_trains_without_what_only_linux_has(
    topology: Topology, digits: Path, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(MACOS)}
    with start(topology, tmp_path, *LINEAR, f"--data_dir={digits}", env=env) as process:
        run = process.wait(TIMEOUT_SECS)
    assert run.exit_code == 0, process.output()
    assert run.result["step"] >= 20
    if topology.tasks:
        assert "darwin has no network namespaces" in run.stderr
