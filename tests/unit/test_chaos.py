"""The plan of a disturbed run is decided by its seed, and fits into it."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.faults import DIRECTIONS, KINDS, LAUNCHER, NETWORK, plan

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
    of_launcher = {fault.kind for fault in faults if fault.task == LAUNCHER}
    assert of_launcher <= {"kill", "interrupt"}


def test_every_task_has_its_faults() -> None:
    faults = plan(TASKS, KINDS, 200, 40, "0")
    assert {fault.task for fault in faults} == {*TASKS, LAUNCHER}
    assert {fault.kind for fault in faults} == set(KINDS)


def test_network_faults_have_every_direction_and_durations_around_the_timeouts() -> None:
    faults = plan(TASKS, NETWORK, 200, 40, "0", has_launcher=False)
    assert {fault.task for fault in faults} == set(TASKS)
    drops = [fault for fault in faults if fault.kind == "drop"]
    assert {fault.direction for fault in drops} == set(DIRECTIONS)
    assert min(drop.secs for drop in drops) >= 5
    assert max(drop.secs for drop in drops) <= 60
    assert 0.3 < sum(drop.secs < 15 for drop in drops) / len(drops) < 0.6
    cuts = [fault for fault in faults if fault.kind == "cut"]
    assert {frozenset((cut.task, cut.peer)) for cut in cuts} == {
        frozenset(pair) for pair in itertools.combinations(TASKS, 2)
    }
    assert all(math.isinf(fault.secs) for fault in faults if fault.kind == "lose")
