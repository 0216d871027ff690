"""When a worker of multiworker dies, the others save the last complete step; none is lost."""

import time
from pathlib import Path

import pytest

from tests.cluster.runs import Process, largest_difference, last_step, start, steps_in, train

STEPS = 300
THREE = "multiworker-3"
LAST = "[Ss]tep STEP, the last that this task completed"


def kill(process: Process, victim: int, after_step: int) -> int:
    """Kills a worker some steps after a report; returns the step at which training continues."""
    process.wait_for_step(after_step)
    reported = last_step(process.model_dir)
    number = len(process.resumes("worker 0")) + 1
    time.sleep(0.3)
    process.task(f"worker {victim}").kill()
    resumed = process.wait_for_resume("worker 0", number)
    assert resumed >= reported > 0
    return resumed


@pytest.mark.timeout(240)
def test_no_complete_step_is_lost_whichever_worker_dies(tmp_path: Path) -> None:
    # Several buckets: without care some have changed their variables when a worker dies.
    buckets = ("--config=tests/cluster/configs/normalised.py", "--bucket_mb=0.25")
    steps = (f"--train_steps={STEPS}", "--config.log_every_steps=50")
    flags = (*buckets, *steps)
    with start(THREE, tmp_path / "run", *flags) as process:
        resumed = [kill(process, 1, 50), kill(process, 0, 150)]
        run = process.wait()

    # There are no other checkpoints: each restart would begin anew.
    of_0, of_1, of_2 = (steps_in(process.log(f"worker {index}"), LAST) for index in range(3))
    assert (len(of_0), len(of_1), len(of_2)) == (1, 1, 2)
    for step, completed in zip(resumed, ([of_0[0], of_2[0]], [of_1[0], of_2[1]]), strict=True):
        assert step == max(completed)
        assert max(completed) - min(completed) <= 1
    assert any(step % 50 for step in resumed), "both died between two calls"
    undisturbed = train(THREE, tmp_path / "undisturbed", *flags)
    assert largest_difference(run.variables(), undisturbed.variables()) == 0
    assert run.steps("train") == undisturbed.steps("train")
    assert run.mark()["next_batch"] == STEPS
    assert not (run.model_dir / "checkpoints/claims").exists()
