"""The plan of a disturbed run is decided by its seed, and fits into it."""

import itertools
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.system.stopwatch import CAUSES
from tests.chaos.chaos import tasks_of
from tests.chaos.faults import DIRECTIONS, KINDS, LAUNCHER, NETWORK, plan
from tests.chaos.times import _MODES, Clock, differences, faults_of
from trainer.run_record.goodput import TaskTime

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


def test_every_task_has_its_faults_and_networks_fail_in_every_way() -> None:
    every_kind = plan(TASKS, KINDS, 200, 40, "0")
    assert {fault.task for fault in every_kind} == {*TASKS, LAUNCHER}
    assert {fault.kind for fault in every_kind} == set(KINDS)
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


# `tests.chaos.times` compares recorded times with those of the kernel.


def begin(logs: Path, start: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with (logs / "worker-0.log").open("a") as log:
        log.write(f"=== worker 0, start {start}, process {process.pid}, now\n")
    return process


def task(seconds: float) -> TaskTime:
    return TaskTime("worker-0", {**dict.fromkeys(CAUSES, 0.0), "compute": seconds}, [], [])


def test_clock_measures_from_the_first_start_to_the_last_end(tmp_path: Path) -> None:
    logs = tmp_path / "tasks"
    logs.mkdir()
    with Clock(tmp_path) as clock:
        began = time.time()
        for start in (1, 2):
            process = begin(logs, start)
            time.sleep(0.3)
            process.communicate(b"\n")
            ended = time.time()
            time.sleep(0.3)
    least, most = clock.secs("worker-0")
    assert least - 0.1 < ended - began < most + 0.5
    assert most - least < 0.5
    assert 0.2 < clock.dead["worker-0"] < ended - began - 0.5
    for secs, part in ((2 * most, 1.0), (least / 2, -0.5), ((least + most) / 2, 0.0)):
        (found,) = differences([task(secs)], clock)
        assert found.part == pytest.approx(part)
    with pytest.raises(AssertionError, match="no record"):
        differences([], clock)
    with pytest.raises(AssertionError):
        differences([task(-1.0)], clock)


def test_runs_kill_every_kind_of_task_and_interrupt_in_each_mode() -> None:
    for topology in _MODES:
        faults = [fault for number in range(4) for fault in faults_of(topology, number)[0]]
        killed = {fault.task for fault in faults if fault.kind == "kill"}
        kinds = {name.partition(" ")[0] for name in tasks_of(topology)}
        assert kinds <= {name.partition(" ")[0] for name in killed}
        assert LAUNCHER in killed
        assert {"stop", "interrupt"} <= {fault.kind for fault in faults}
