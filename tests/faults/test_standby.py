"""`--ps_standby`: when a ps dies, the next chief saves the last copy of all variables."""

import re
from pathlib import Path

import pytest

from tests.cluster.runs import Run, Topology, largest_difference, start, steps_in, train

EVERY = 20
SYNC = Topology(
    "ps-sync-2+2", "ps", ("--workers=2", "--ps=2", "--sync_replicas", "--num_threads=1")
)
LOST = re.compile(r"the (\d+ step\(s\)|steps) after this copy are lost")


@pytest.fixture(scope="module")
def flags(digits: Path) -> tuple[str, ...]:
    reports = f"--config.log_every_steps={EVERY}"
    return f"--data_dir={digits}", "--train_steps=160", "--config.export=False", reports


@pytest.fixture(scope="module")
def undisturbed(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(SYNC, tmp_path_factory.mktemp("undisturbed") / "run", *flags)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["ps 0", "ps 1"])
def test_death_of_a_ps_costs_only_the_steps_since_the_last_copy(
    victim: str, flags: tuple[str, ...], undisturbed: Run, tmp_path: Path
) -> None:
    standby = f"--ps_standby={EVERY}"
    with start(SYNC, tmp_path / "run", *flags, standby) as process:
        process.wait_for_step(4 * EVERY)
        process.task(victim).kill()
        process.wait_for_resume("chief 0")
        run = process.wait()
    assert run.exit_code == 0, process.output()

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
    assert largest_difference(run.variables(), undisturbed.variables()) == 0
    assert run.result["examples"] == undisturbed.result["examples"]
