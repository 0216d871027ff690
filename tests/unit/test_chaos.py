"""The plan of a disturbed run is decided by its seed, and fits into it."""

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.faults import KINDS, LAUNCHER, plan

TASKS = ("chief 0", "worker 0", "ps 0")


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, unique=True),
    num_faults=st.integers(1, 60),
    every_steps=st.integers(12, 500),
    seed=st.text(max_size=5),
)
def test_plan_fits_into_the_run_and_is_the_seeds(
    kinds: list[str], num_faults: int, every_steps: int, seed: str
) -> None:
    faults = plan(TASKS, kinds, num_faults, every_steps, seed)
    assert faults == plan(TASKS, kinds, num_faults, every_steps, seed)
    assert len(faults) == num_faults
    steps = [fault.after_step for fault in faults if fault.after_step]
    assert steps == sorted(set(steps))
    assert steps[-1] < num_faults * every_steps
    assert {fault.kind for fault in faults} <= set(kinds)
    assert all(fault.kind == "kill" for fault in faults if fault.task == LAUNCHER)


def test_every_task_has_its_faults() -> None:
    faults = plan(TASKS, KINDS, 100, 40, "0")
    assert {fault.task for fault in faults} == {*TASKS, LAUNCHER}
    assert {fault.kind for fault in faults} == set(KINDS)
