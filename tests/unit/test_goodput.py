"""Every second of every task has one cause, also where processes were killed or stopped."""

import datetime
import itertools
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from data.system.stopwatch import CAUSES, SERVING, Stopwatch
from strategies.metrics import Metrics
from trainer.run_record import recorder as recorder_module
from trainer.run_record.goodput import goodput, total
from trainer.run_record.recorder import LINE_BYTES, Recorder

BEGAN = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write_process(
    run: Path,
    pid: int,
    after: float,
    lines: Sequence[Mapping[str, object]],
    *,
    task: str = "worker-0",
    ended: bool = False,
) -> None:
    """Appends the lines of a process that began `after` seconds; each has the seconds so far."""
    path, began = run / "tasks" / f"{task}.time.jsonl", BEGAN + after
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for index, line in enumerate(lines):
            seconds = line["seconds"]
            assert isinstance(seconds, dict)
            document = {
                "process": pid,
                "began": began,
                "time": began + sum(seconds.values()),
                "begins": 0,
                "first_step": None,
                "step": None,
                "cause": "compute",
                "ended": ended and index == len(lines) - 1,
                **line,
            }
            file.write(json.dumps(document).ljust(LINE_BYTES - 1).encode() + b"\n")


def steps(first: int, last: int, **seconds: float) -> Mapping[str, object]:
    named = {name.replace("_", " "): value for name, value in seconds.items()}
    return {"begins": 1, "first_step": first, "step": last, "seconds": named}


def write_restart(run: Path, **restart: object) -> None:
    """And a damaged line behind it."""
    (run / "tasks" / "restarts.jsonl").write_text(json.dumps(restart) + "\n{damaged")


def found(run: Path, name: str = "worker-0") -> dict[str, float]:
    """The causes of a task that took time."""
    (task,) = [task for task in goodput(str(run)) if task.name == name]
    assert set(task.seconds) == set(CAUSES)
    return {cause: round(value, 3) for cause, value in task.seconds.items() if round(value, 3)}


def test_stopwatch_divides_the_age_of_the_process() -> None:
    clock = Clock()
    stopwatch = Stopwatch(2.0, clock)
    with stopwatch.spend("sum wait"):  # Before training begins, all is "start".
        clock.now += 1.0
    stopwatch.begin(20)
    stopwatch.switch("graph")
    clock.now += 5.0
    stopwatch.switch("compute")
    clock.now += 3.0
    stopwatch.carve("input wait", 0.5)
    stopwatch.carve("input wait", 100.0)  # More than there was: a clock is not exact.
    stopwatch.switch("compute")
    with stopwatch.spend("evaluate"):
        clock.now += 1.0
        with stopwatch.spend("checkpoint"):
            clock.now += 2.0
    clock.now += 4.0
    stopwatch.reach(30)
    reading = stopwatch.read()
    assert {cause: value for cause, value in reading.seconds.items() if value} == {
        "start": 3.0,
        "graph": 5.0,
        "input wait": 3.0,
        "evaluate": 1.0,
        "checkpoint": 2.0,
        "compute": 4.0,
    }
    assert reading.cause == "compute"
    assert (reading.begins, reading.first_step, reading.step) == (1, 20, 30)
    stopwatch.relabel("stalled")
    assert stopwatch.read().seconds["stalled"] == 4.0


def test_run_without_these_files_has_no_goodput(tmp_path: Path) -> None:
    assert goodput(str(tmp_path)) == []
    (tmp_path / "tasks").mkdir()
    assert goodput(str(tmp_path)) == []


def test_recorder_writes_one_line_of_a_process_anew_until_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_TICK_SECS", 0.02)
    monkeypatch.setattr(recorder_module, "_LEAST_KEPT_SECS", math.inf)
    path = tmp_path / "tasks" / "worker-0.time.jsonl"
    with Recorder(str(tmp_path), "worker-0") as recorder:
        assert not path.parent.exists(), "a run that must not write yet"
        recorder.open(makes_directory=True)
        recorder.begin(40)
        recorder(50, Metrics())
        deadline = time.monotonic() + 60
        while b'"step": 50' not in path.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert path.stat().st_size == LINE_BYTES
    with Recorder(str(tmp_path), "worker-0"):
        pass  # A task that is refused: it leaves the file as it is.
    with Recorder(str(tmp_path), "worker-0") as recorder:
        recorder.open()
        recorder.begin(50)
        recorder.close_stalled()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len(lines) == 2
    assert all(line["ended"] and line["process"] == os.getpid() for line in lines)
    assert lines[0]["first_step"] == 40
    assert lines[1]["cause"] == "stalled"
    for line in lines:
        assert sum(line["seconds"].values()) == pytest.approx(
            line["time"] - line["began"], abs=0.02
        )


def test_recorder_survives_a_deleted_file_and_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks" / "worker-0.time.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"half a li")
    with Recorder(str(tmp_path), "worker-0") as recorder:
        recorder.open()
        recorder.begin(0)
    assert len(goodput(str(tmp_path))[0].starts) == 1
    with Recorder(str(tmp_path), "worker-0") as recorder:
        recorder.open()
        path.unlink()
        recorder.begin(0)
    (task,) = goodput(str(tmp_path))
    assert len(task.starts) == 1
    assert task.total_secs > 0


def test_time_between_processes_is_dead_and_repeated_steps_are_lost(tmp_path: Path) -> None:
    first = [
        {"seconds": {"start": 4.0}},
        steps(0, 100, start=4.0, compute=10.0),
        # The last call, after step 200, does not finish: 1 s.
        steps(0, 200, start=4.0, compute=21.0, input_wait=1.0, checkpoint=1.0),
    ]
    write_process(tmp_path, 7, 0.0, first)
    second = [steps(150, 200, start=3.0, compute=6.0), steps(150, 300, start=3.0, compute=18.0)]
    write_process(tmp_path, 8, 30.0, second, ended=True)

    # Steps 150 to 200 are half of what the first process did between its last two lines.
    assert found(tmp_path) == {
        "start": 7.0,
        "compute": 10.0 + 5.5 + 18.0,
        "input wait": 0.5,
        "checkpoint": 1.0,
        "lost steps": 6.0,
        "dead": 3.0,
    }
    (task,) = goodput(str(tmp_path))
    assert task.total_secs == pytest.approx(51.0)
    assert task.starts == [BEGAN, BEGAN + 30.0]
    assert task.goodput == pytest.approx(33.5 / 51.0)
    assert all(one.end == next_one.begin for one, next_one in itertools.pairwise(task.pieces))


def test_time_of_a_process_that_was_killed_before_it_wrote_is_dead(tmp_path: Path) -> None:
    write_process(tmp_path, 8, 0.0, [steps(0, 10, start=2.0, compute=6.0)], ended=True)
    began = datetime.datetime.fromtimestamp(BEGAN - 3.0).astimezone().isoformat(timespec="seconds")
    log = tmp_path / "tasks" / "worker-0.log"
    log.write_text(f"=== worker 0, start 1, process 7, {began}\nmore\n")
    assert found(tmp_path) == {"dead": 3.0, "start": 2.0, "compute": 6.0}
    log.write_text(f"=== worker 0, start 1, process 8, {began}\n")
    assert found(tmp_path) == {"start": 2.0, "compute": 6.0}


def test_stopped_process_was_stalled_until_the_launcher_ended_it(tmp_path: Path) -> None:
    for index, last in ((0, 50.0), (1, 20.0)):
        task, second = f"worker-{index}", [steps(90, 99, start=5.0)]
        write_process(tmp_path, 10 + index, 0.0, [steps(0, 90, compute=last)], task=task)
        write_process(tmp_path, 20 + index, 60.0, second, task=task, ended=True)
    both, why = ["worker 0", "worker 1"], "unresponsive for 30 s (--stall_timeout_secs)"
    write_restart(tmp_path, started_again=both, task=both[1], process=11, seconds=50.0, why=why)
    expected = {"compute": 20.0, "stalled": 30.0, "dead": 10.0, "start": 5.0}
    assert found(tmp_path, "worker-0") == {"compute": 50.0, "dead": 10.0, "start": 5.0}
    assert found(tmp_path, "worker-1") == expected


def test_second_death_at_the_same_checkpoint_loses_no_time_twice(tmp_path: Path) -> None:
    write_process(tmp_path, 7, 0.0, [steps(0, 100, compute=10.0)])
    write_process(tmp_path, 8, 10.0, [steps(50, 50, start=2.0, compute=1.0)])
    write_process(tmp_path, 9, 13.0, [steps(50, 100, start=2.0, compute=5.0)], ended=True)
    assert found(tmp_path) == {"compute": 10.0, "lost steps": 6.0, "start": 4.0}


def test_training_that_goes_back_after_a_nan_loses_its_steps(tmp_path: Path) -> None:
    later = [{**steps(50, to, compute=secs), "begins": 2} for to, secs in ((80, 16.0), (200, 30.0))]
    write_process(tmp_path, 7, 0.0, [steps(0, 100, compute=10.0), *later], ended=True)
    assert found(tmp_path) == {"compute": 25.0, "lost steps": 5.0}


def test_time_from_the_last_line_to_a_known_death_has_the_last_cause(tmp_path: Path) -> None:
    lines = [{**steps(0, 90, compute=20.0, checkpoint=1.0), "cause": "checkpoint"}]
    write_process(tmp_path, 10, 0.0, lines)
    write_process(tmp_path, 20, 24.0, [steps(95, 99, start=5.0)], ended=True)
    write_restart(tmp_path, started_again=["worker 0"], process=10, seconds=22.5)
    expected = {"compute": 20.0, "checkpoint": 2.5, "dead": 1.5, "start": 5.0}
    assert found(tmp_path) == expected


def test_task_that_died_for_good_is_dead_to_the_end_of_the_run(tmp_path: Path) -> None:
    write_process(tmp_path, 1, 0.0, [steps(0, 9, compute=60.0)], task="chief-0")
    lines = [{"seconds": {"start": 2.0, SERVING: 18.0}, "begins": 1, "cause": SERVING}]
    write_process(tmp_path, 2, 0.0, lines, task="worker-0")
    assert found(tmp_path) == {"start": 2.0, "compute": 18.0, "dead": 40.0}


def test_server_did_what_the_chief_did_meanwhile(tmp_path: Path) -> None:
    chief = [
        steps(0, 0, start=10.0),
        steps(0, 50, start=10.0, compute=10.0),
        steps(0, 50, start=10.0, compute=10.0, evaluate=10.0),
    ]
    write_process(tmp_path, 1, 0.0, chief, task="chief-0")
    # The chief is dead for 10 s, and repeats 25 steps.
    lines = [steps(25, 99, start=5.0, compute=15.0)]
    write_process(tmp_path, 2, 40.0, lines, task="chief-0", ended=True)
    servers: list[Mapping[str, object]] = [
        {"seconds": {"start": 3.0}},
        {"seconds": {"start": 3.0, SERVING: 52.0, "stalled": 5.0}, "begins": 1},
    ]
    write_process(tmp_path, 3, 0.0, servers, task="ps-0", ended=True)
    served = 52.0 / 57.0  # The part of the time after the start in which it was not stopped.
    expected = {
        "start": 3.0 + served * (7.0 + 5.0),
        "compute": served * (5.0 + 15.0),
        "lost steps": served * 5.0,
        "evaluate": served * 10.0,
        "dead": served * 10.0,
        "stalled": 5.0,
    }
    assert found(tmp_path, "ps-0") == pytest.approx(expected, abs=0.002)
    summed = total(goodput(str(tmp_path)))
    assert sum(summed.values()) == pytest.approx(120.0)
    assert summed["stalled"] == pytest.approx(5.0)
