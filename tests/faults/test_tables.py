"""A worker and a ps of a run with tables are killed; the run ends with the same bits."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import Process, assert_same_bits, read_metrics, start, train
from tests.faults.test_chief_of_ps import SYNC

CONFIG = "--config=tests/cluster/configs/tables.py"
STEPS, EVERY = 400, 50
pytestmark = pytest.mark.timeout(300)


def kill(process: Process, task: str, after_step: int) -> dict[str, Any]:
    """Kills a task between two reports; returns the last report before."""
    process.wait_for_step(after_step)
    number = len(process.starts(task)) + 1
    report = process.kill_task(task, after_step)
    process.wait_until(lambda: len(process.starts(task)) >= number, f"another start of {task}")
    return report


def test_rows_have_the_same_bits_after_the_deaths_of_a_worker_and_of_a_ps(tmp_path: Path) -> None:
    changes_only = ("--config.complete_checkpoint_every=4", "--config.export=False")
    flags = (CONFIG, *changes_only, f"--train_steps={STEPS}")
    often = (f"--config.log_every_steps={EVERY}", f"--config.checkpoint_every_steps={EVERY}")
    with start(SYNC, tmp_path / "run", *flags, *often) as process:
        before = kill(process, "worker 1", EVERY)

        def trains_again() -> bool:
            report = read_metrics(process.model_dir)[-1]
            more = report["worker_steps"]["worker 1"] - before["worker_steps"]["worker 1"]
            # More than its steps before its death that were not reported yet.
            return bool(more > EVERY)

        process.wait_until(trains_again, "steps of worker 1 after its death")
        assert process.resumes("chief 0") == [], "the worker alone is started again"
        last = kill(process, "ps 1", 0)
        resumed = process.wait_for_resume("chief 0")
        run = process.wait(200)

    assert "worker 1 died: signal 9 (Killed); restarted worker 1\n" in run.stderr
    assert "ps 1 died: signal 9 (Killed); restarted chief 0 and ps 1\n" in run.stderr
    assert process.resumes("chief 0") == [resumed]
    # The rows of the ps are lost: the run continues from the last checkpoint.
    assert last["step"] - EVERY <= resumed < STEPS
    expected = train(SYNC, tmp_path / "undisturbed", *flags)
    num_ids = [len(value) for name, value in run.variables().items() if name.endswith("/ids")]
    assert len(num_ids) == 2
    assert min(num_ids) > 0
    assert_same_bits(run, expected)
    assert run.result["step"] == expected.result["step"] == STEPS
    assert run.result["examples"] == expected.result["examples"]
