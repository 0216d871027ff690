"""When a worker of multiworker dies, the others save the last complete step; none is lost."""

import json
import time
from pathlib import Path

import pytest

from tests.cluster.runs import (
    Process,
    Run,
    Topology,
    largest_difference,
    read_metrics,
    start,
    steps_in,
    train,
)

CONFIG = "--config=tests/cluster/configs/normalised.py"
STEPS = 300
THREE = Topology(
    "multiworker-3",
    "multiworker",
    ("--workers=3", "--num_threads=1"),
    ("worker-0", "worker-1", "worker-2"),
)
LAST = "[Ss]tep STEP, the last that this task completed"


@pytest.fixture(scope="module")
def flags(digits: Path) -> tuple[str, ...]:
    # Several buckets: without care some have changed their variables when a worker dies.
    here = (f"--data_dir={digits}", f"--train_steps={STEPS}")
    return (CONFIG, *here, "--bucket_mb=0.25", "--config.log_every_steps=50")


@pytest.fixture(scope="module")
def undisturbed(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(THREE, tmp_path_factory.mktemp("undisturbed") / "run", *flags)


def kill(process: Process, victim: int, after_step: int) -> int:
    """Kills a worker some steps after a report; returns the step at which training continues."""
    process.wait_for_step(after_step)
    reported = read_metrics(process.model_dir)[-1]["step"]
    number = len(process.resumes("worker 0")) + 1
    time.sleep(0.3)
    process.task(f"worker {victim}").kill()
    resumed = process.wait_for_resume("worker 0", number)
    assert resumed >= reported > 0
    return resumed


@pytest.mark.timeout(240)
def test_no_complete_step_is_lost_whichever_worker_dies(
    flags: tuple[str, ...], undisturbed: Run, tmp_path: Path
) -> None:
    with start(THREE, tmp_path / "run", *flags) as process:
        resumed = [kill(process, 1, 50), kill(process, 0, 150)]
        run = process.wait()
    assert run.exit_code == 0, process.output()

    # There are no other checkpoints: each restart would begin anew.
    of_0, of_1, of_2 = (steps_in(process.log(f"worker {index}"), LAST) for index in range(3))
    assert (len(of_0), len(of_1), len(of_2)) == (1, 1, 2)
    for step, completed in zip(resumed, ([of_0[0], of_2[0]], [of_1[0], of_2[1]]), strict=True):
        assert step == max(completed)
        assert max(completed) - min(completed) <= 1
    assert any(step % 50 for step in resumed), "both died between two calls"
    assert largest_difference(run.variables(), undisturbed.variables()) == 0
    steps = [line["step"] for line in run.metrics("train")]
    assert steps == [line["step"] for line in undisturbed.metrics("train")]
    mark = json.loads((run.model_dir / f"checkpoints/step-{STEPS:08d}/checkpoint.json").read_text())
    assert mark["next_batch"] == STEPS
    assert not (run.model_dir / "checkpoints/claims").exists()
