"""When the chief of ps dies, the next chief saves the last complete step; none is lost."""

from pathlib import Path

import pytest

from tests.cluster.runs import (
    Process,
    Topology,
    largest_difference,
    read_metrics,
    start,
    steps_in,
    train,
)

SYNC = Topology(
    "ps-sync-2+2", "ps", ("--workers=2", "--ps=2", "--sync_replicas", "--num_threads=1")
)
ASYNC = Topology("ps-2+1", "ps", ("--workers=2", "--ps=1", "--num_threads=1"))
SAVED = "Saved step STEP from the memory of the servers"


def kill_chief(process: Process, after_step: int) -> int:
    """Kills the chief between two reports; returns the last step that it has reported."""
    process.wait_for_step(after_step)
    number = len(process.resumes("chief 0")) + 1
    process.task("chief 0").kill()
    reported = int(read_metrics(process.model_dir)[-1]["step"])
    process.wait_for_resume("chief 0", number)
    return reported


@pytest.mark.timeout(240)
def test_no_step_is_lost_when_the_chief_of_synchronous_ps_dies(
    digits: Path, tmp_path: Path
) -> None:
    short = ("--train_steps=300", "--config.log_every_steps=25", "--config.export=False")
    flags = (f"--data_dir={digits}", *short)
    with start(SYNC, tmp_path / "run", *flags) as process:
        process.wait_for_step(25)
        servers = [process.task(name).pid for name in ("ps 0", "ps 1", "worker 0", "worker 1")]
        reported = [kill_chief(process, 50), kill_chief(process, 150)]
        assert servers == [
            process.task(name).pid for name in ("ps 0", "ps 1", "worker 0", "worker 1")
        ]
        run = process.wait()
    assert run.exit_code == 0, process.output()

    # There is no other checkpoint: otherwise each chief would begin anew.
    saved = steps_in(process.log("chief 0"), SAVED)
    assert len(saved) == 2, process.log("chief 0")
    assert saved == process.resumes("chief 0")
    assert all(step >= before for step, before in zip(saved, reported, strict=True))
    undisturbed = train(SYNC, tmp_path / "undisturbed", *flags)
    assert largest_difference(run.variables(), undisturbed.variables()) == 0
    assert run.result["examples"] == undisturbed.result["examples"]
    steps = [line["step"] for line in run.metrics("train")]
    assert steps == [line["step"] for line in undisturbed.metrics("train")]


@pytest.mark.timeout(240)
def test_every_update_is_counted_when_the_chief_of_asynchronous_ps_dies(
    digits: Path, tmp_path: Path
) -> None:
    counting = ("--config=tests/cluster/configs/counting.py", "--train_steps=1500")
    flags = (*counting, f"--data_dir={digits}", "--config.log_every_steps=50")
    with start(ASYNC, tmp_path / "run", *flags) as process:
        reported = kill_chief(process, 100)
        run = process.wait()
    assert run.exit_code == 0, process.output()

    (saved,) = steps_in(process.log("chief 0"), SAVED)
    assert process.resumes("chief 0") == [saved]
    assert saved >= reported
    result = run.result
    (weight,) = run.weights().values()
    assert weight == result["step"] == 1500, "the weight gains 1 by each update that is applied"
    assert sum(result["worker_steps"].values()) == 1500
    assert result["batches"] == {"handed_out": 1500, "finished": 1500, "repeated": 0}
    assert result["examples"] == 1500 * 16
