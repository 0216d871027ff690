"""The causes of a run with a killed worker add up to its time, and its page shows them."""

import os
import time
from pathlib import Path

import pytest

from data.system.stopwatch import CAUSES
from tests.cluster.runs import ROOT, Topology, start
from tests.commands import run_python
from trainer.run_record.goodput import goodput

pytestmark = pytest.mark.nightly


def started_at(pid: int) -> float:
    """When a process was made. Not psutil's time, which is up to a second early."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


@pytest.mark.parametrize("name", ["multiworker-2", "ps-2+1"])
def test_causes_of_a_run_with_a_killed_worker_add_up_to_its_time(
    name: str, digits: Path, tmp_path: Path
) -> None:
    flags = (
        "--config=tests/cluster/configs/slow.py",
        f"--data_dir={digits}",
        "--train_steps=300",
        # Without the save of the other worker all steps before the death would be lost.
        "--config.checkpoint_every_steps=0",
        "--config.log_every_steps=5",
        "--max_restarts=3",
    )
    model_dir = tmp_path / "run"
    with start(name, model_dir, *flags) as process:
        process.wait_for_step(100)
        began = started_at(process.task("worker 1").pid)
        process.kill_task("worker 1", 100)
        run = process.wait()
    ended = time.time()
    assert run.result["step"] >= 300

    tasks = {task.name: task for task in goodput(str(model_dir))}
    assert set(tasks) == set(Topology(name).tasks)
    for task in tasks.values():
        assert set(task.seconds) == set(CAUSES)
        assert all(value > -0.01 for value in task.seconds.values()), task
    killed = tasks["worker-1"]
    assert len(killed.starts) == 2
    assert killed.starts[0] == pytest.approx(began, abs=1.0)
    # It ends after the chief wrote result.json, and before the launcher ends.
    written = (model_dir / "result.json").stat().st_mtime
    assert 0.99 * (written - began) < killed.total_secs < 1.01 * (ended - began)
    assert killed.seconds["dead"] > 0
    assert killed.seconds["compute"] > 0
    if name == "multiworker-2":
        # The other worker saves the last complete step.
        assert all(task.seconds["lost steps"] < 1.0 for task in tasks.values())
        assert all(task.seconds["sum wait"] > 0 for task in tasks.values())
    else:
        assert len(tasks["chief-0"].starts) == 1
        assert tasks["chief-0"].seconds["dead"] == 0

    done = run_python("-m", "trainer.report", str(model_dir), check=True)
    text = (ROOT / done.stdout.strip()).read_text()
    assert "signal 9 (Killed)" in text
    if name == "multiworker-2":
        assert f"accuracy {run.result['eval']['accuracy']:.4f}." in text
        assert text.count("<img") > 0, "the worst examples"
