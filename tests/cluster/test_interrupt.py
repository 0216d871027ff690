"""One Ctrl-C ends a run in seconds with its state saved; the same command then finishes it."""

import signal
import time
from pathlib import Path

import pytest

from tests.cluster.runs import ONE_OF_EACH_STRATEGY, Process, Topology, start, train

SLOW = "--config=tests/cluster/configs/slow.py"
SECONDS = 20.0


@pytest.mark.parametrize("topology", ONE_OF_EACH_STRATEGY, ids=str)
def test_interrupted_training_is_saved_and_finished_by_the_same_command(
    topology: Topology, digits: Path, tmp_path: Path
) -> None:
    flags = (SLOW, f"--data_dir={digits}")
    with start(topology, tmp_path, *flags) as process:
        process.wait_for_step(20)
        process.send(signal.SIGINT)
        run = process.wait(SECONDS)
    assert run.exit_code == 75, run.stderr
    step = run.result["step"]
    assert 20 <= step < 300
    assert run.checkpoints() == [f"step-{step:08d}"]
    assert "Traceback" not in run.stderr

    finished = train(topology, tmp_path, *flags)

    assert finished.result["step"] >= 300
    assert finished.result["examples"] == finished.result["step"] * 64
    reports = [report["step"] for report in finished.metrics("train")]
    assert reports == sorted(set(reports))
    assert step in reports


@pytest.mark.parametrize("topology", ONE_OF_EACH_STRATEGY, ids=str)
def test_interrupt_while_tasks_are_starting_ends_them_all(
    topology: Topology, digits: Path, tmp_path: Path
) -> None:
    with start(topology, tmp_path, SLOW, f"--data_dir={digits}") as process:
        process.wait_until(lambda: is_starting(process, topology), "task that imports TensorFlow")
        process.send(signal.SIGINT)
        began = time.monotonic()
        run = process.wait(SECONDS)
        assert time.monotonic() - began < SECONDS
    assert run.exit_code == 75, run.stderr
    assert not (tmp_path / "checkpoints").exists(), "was not early"
    assert "Traceback" not in run.stderr + run.stdout


def is_starting(process: Process, topology: Topology) -> bool:
    """Returns True if all tasks have a process, and one of them has begun to load TensorFlow."""
    family = process.family()
    tasks = [p for p in family if p.pid != process.popen.pid] if topology.tasks else family
    if len(tasks) < max(1, len(topology.tasks)):
        return False
    return any("tensorflow" in m.path for task in tasks for m in task.memory_maps())
