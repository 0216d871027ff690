"""When the chief of ps dies, the next chief saves the last complete step; none is lost."""

from pathlib import Path

import pytest

from tests.cluster.runs import Process, largest_difference, start, steps_in, train

SYNC, ASYNC = "ps-sync-2+2", "ps-2+1"
SAVED = "Saved step STEP from the memory of the servers"


def kill_chief(process: Process, after_step: int) -> int:
    """Kills the chief between two reports; returns the last step that it has reported."""
    number = len(process.resumes("chief 0")) + 1
    reported = process.kill_task("chief 0", after_step)["step"]
    process.wait_for_resume("chief 0", number)
    return int(reported)


@pytest.mark.timeout(240)
def test_no_step_is_lost_when_the_chief_of_synchronous_ps_dies(tmp_path: Path) -> None:
    short = ("--train_steps=300", "--config.log_every_steps=25", "--config.export=False")
    with start(SYNC, tmp_path / "run", *short) as process:
        reported = [kill_chief(process, 50), kill_chief(process, 150)]
        for server in ("ps 0", "ps 1", "worker 0", "worker 1"):
            assert len(process.starts(server)) == 1
        run = process.wait()

    # There is no other checkpoint: otherwise each chief would begin anew.
    saved = steps_in(process.log("chief 0"), SAVED)
    assert len(saved) == 2, process.log("chief 0")
    assert saved == process.resumes("chief 0")
    assert all(step >= before for step, before in zip(saved, reported, strict=True))
    undisturbed = train(SYNC, tmp_path / "undisturbed", *short)
    assert largest_difference(run.variables(), undisturbed.variables()) == 0
    assert run.result["examples"] == undisturbed.result["examples"]
    assert run.steps("train") == undisturbed.steps("train")


@pytest.mark.timeout(240)
def test_every_update_is_counted_when_the_chief_of_asynchronous_ps_dies(tmp_path: Path) -> None:
    counting = ("--config=tests/cluster/configs/counting.py", "--train_steps=1500")
    flags = (*counting, "--config.log_every_steps=50")
    with start(ASYNC, tmp_path / "run", *flags) as process:
        reported = kill_chief(process, 100)
        run = process.wait()

    (saved,) = steps_in(process.log("chief 0"), SAVED)
    assert process.resumes("chief 0") == [saved]
    assert saved >= reported
    result = run.result
    (weight,) = run.weights().values()
    assert weight == result["step"] == 1500, "the weight gains 1 by each update that is applied"
    assert sum(result["worker_steps"].values()) == 1500
    assert result["batches"] == {"handed_out": 1500, "finished": 1500, "repeated": 0}
    assert result["examples"] == 1500 * 16
