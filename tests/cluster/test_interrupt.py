"""One Ctrl-C ends a run in seconds with its state saved; the same command then finishes it."""

import signal
from pathlib import Path

import pytest

from tests.cluster.runs import Topology, start, topologies, train

SLOW = "--config=tests/cluster/configs/slow.py"
SECONDS = 20.0


@pytest.mark.parametrize("topology", topologies("mirrored-2", "ps-2+1", nightly=("multiworker-2",)))
def test_interrupted_training_is_saved(topology: Topology, tmp_path: Path) -> None:
    flags = (SLOW, "--train_steps=120")
    with start(topology, tmp_path, *flags) as process:
        process.wait_for_step(20)
        process.send(signal.SIGINT)
        run = process.wait(SECONDS, exit_code=75)
    step = run.result["step"]
    assert 20 <= step < 120
    assert run.checkpoints() == [f"step-{step:08d}"]
    assert "Traceback" not in run.stderr
    if topology.strategy != "ps":
        return  # test_determinism finishes runs of synchronous strategies.

    finished = train(topology, tmp_path, *flags)

    assert finished.result["step"] >= 120
    assert finished.result["examples"] == finished.result["step"] * 64
    reports = finished.steps("train")
    assert reports == sorted(set(reports))
    assert step in reports


@pytest.mark.parametrize("topology", topologies("mirrored-2", "multiworker-2", nightly=("ps-2+1",)))
@pytest.mark.parametrize("moment", ["the import of TensorFlow", "the start of tasks"])
def test_interrupt_before_training_ends_all_processes(
    topology: Topology, moment: str, tmp_path: Path
) -> None:
    def is_reached() -> bool:
        if moment == "the start of tasks" and topology.tasks:
            logs = tmp_path / "tasks"
            return all((logs / f"{task}.log").exists() for task in topology.tasks)
        return any("tensorflow" in m.path for p in process.family() for m in p.memory_maps())

    with start(topology, tmp_path, SLOW) as process:
        process.wait_until(is_reached, moment)
        process.send(signal.SIGINT)
        run = process.wait(SECONDS, exit_code=75)
    assert not (tmp_path / "checkpoints").exists(), "was not early"
    assert "Traceback" not in run.stderr + run.stdout
