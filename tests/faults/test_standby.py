"""`--ps_standby`: when a ps dies, the next chief saves the last copy of all variables."""

import re
from pathlib import Path

import pytest

from tests.cluster.runs import TrainOnce, largest_difference, start, steps_in

EVERY = 20
SYNC = "ps-sync-2+2"
LOST = re.compile(r"the (\d+ step\(s\)|steps) after this copy are lost")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["ps 0", "ps 1"])
def test_death_of_a_ps_costs_only_the_steps_since_the_last_copy(
    victim: str, train_once: TrainOnce, tmp_path: Path
) -> None:
    steps = ("--train_steps=160", f"--config.log_every_steps={EVERY}")
    flags = (*steps, "--config.export=False")
    with start(SYNC, tmp_path / "run", *flags, f"--ps_standby={EVERY}") as process:
        process.kill_task(victim, 4 * EVERY)
        process.wait_for_resume("chief 0")
        run = process.wait()

    # There is no other checkpoint: otherwise training would begin anew.
    log = process.log("chief 0")
    (saved,) = steps_in(log, "Saved step STEP from the memory of the servers")
    assert LOST.search(log)
    # The steps that were made before the death, by the reports of the first chief.
    first = log.partition("=== chief 0, start 2")[0]
    reported = max(int(step) for step in re.findall(r"step (\d+)/160", first))
    assert saved % EVERY == 0
    # A report comes before the copy of its step, which waits until the copy before is complete.
    assert saved >= reported - 2 * EVERY
    undisturbed = train_once(SYNC, *flags)
    assert largest_difference(run.variables(), undisturbed.variables()) == 0
    assert run.result["examples"] == undisturbed.result["examples"]
