"""`tests.chaos.times` compares recorded times with those of the kernel."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.system.stopwatch import CAUSES
from tests.chaos.chaos import tasks_of
from tests.chaos.faults import LAUNCHER
from tests.chaos.times import _MODES, Clock, differences, faults_of
from trainer.run_record.goodput import TaskTime


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
    (found,) = differences([task(2 * most)], clock)
    assert found.part == pytest.approx(1.0)
    (found,) = differences([task(least / 2)], clock)
    assert found.part == pytest.approx(-0.5)
    (found,) = differences([task((least + most) / 2)], clock)
    assert found.part == 0.0
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
