"""The live view: what it knows, what it shows at each size, and the terminal that it leaves."""

import json
import math
import os
import re
import signal
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.commands import run_python
from tests.terminal import ENTER, HIDE_CURSOR, LEAVE, SHOW_CURSOR, Terminal
from tests.unit.test_goodput import steps, write_process
from trainer.hooks.terminal import COMPILING, progress_line
from trainer.live.screen import ASCII_BLOCKS, BLOCKS, lines_of, sparkline
from trainer.live.status import Curve, Status

TIME = "2100-01-01T00:00:00+00:00"  # Later than the start of this process.
GONE = 2**22 + 1  # Larger than the number of any process of Linux.
CONFIG = {
    "recipe": "/x/digits.py",
    "strategy": "ps",
    "data_dir": "/x",
    "config": {"train_steps": 1000, "batch_size": 64, "data": {"eval_split": "test"}},
}


def report(
    step: int, more: Mapping[str, object] = MappingProxyType({}), split: str = "train"
) -> str:
    values: dict[str, object] = {"step": step, "split": split, "loss": 1 / step, "accuracy": 0.5}
    if split == "train":
        values |= {"epoch": 2.0, "steps_per_sec": 10.0, "examples_per_sec": 640.0, "seconds": 9.0}
    return json.dumps({**values, **more}) + "\n"


def workers(first: int, second: int) -> dict[str, object]:
    total = first + second
    return {
        "worker_steps": {"worker 0": first, "worker 1": second},
        "worker_share": {"worker 0": first / total, "worker 1": second / total},
        "staleness": {"worker 0": {"0": 1, "2": 1}, "worker 1": {}},
    }


def add_report(run: Path, *arguments: Any) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(report(*arguments))


def begin_task(logs: Path, name: str, start: int, pid: int) -> None:
    with open(logs / f"{name.replace(' ', '-')}.log", "a") as log:
        log.write(f"=== {name}, start {start}, process {pid}, {TIME}\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A local cluster of ps with two workers: its files after 200 steps."""
    logs = tmp_path / "tasks"
    logs.mkdir()
    (logs / "worker-7.log").write_text("=== worker 7, start 1, process 1, 2020-01-01T00:00:00Z\n")
    for name in ("chief 0", "ps 0", "worker 0", "worker 1"):
        begin_task(logs, name, 1, os.getpid())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lines = [report(100, workers(50, 50)), report(100, split="eval"), report(200, workers(120, 80))]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


def training(run: Path) -> Status:
    status = Status(str(run), os.getpid(), run / "tasks")
    status.read_line(COMPILING)
    status.read_line(progress_line(210))
    status.poll()
    return status


def states(status: Status) -> dict[str, str]:
    return {task.name: task.state for task in status.tasks}


def shown(status: Status, width: int, height: int, *, is_ascii: bool = False) -> list[str]:
    lines = [line.plain for line in lines_of(status, width, height, is_ascii=is_ascii)]
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines), lines
    return lines


def test_status_follows_the_files_of_a_local_cluster(run: Path) -> None:
    status = Status(str(run), os.getpid(), run / "tasks")
    status.poll()
    assert set(states(status)) == {"chief 0", "ps 0", "worker 0", "worker 1"}  # Not worker 7.
    assert set(states(status).values()) == {"starting"}
    status.read_line(COMPILING)
    status.poll()
    assert states(status)["worker 0"] == "compiling"
    status = training(run)
    trains = dict.fromkeys(("chief 0", "worker 0", "worker 1"), "training")
    assert states(status) == {**trains, "ps 0": "serving"}
    assert (status.step, status.last_step, status.secs_left) == (210, 1000, 79.0)
    assert status.metrics() == ["loss", "accuracy"]
    assert status.curve("train", "loss") == [1 / 100, 1 / 200]
    worker = next(task for task in status.tasks if task.name == "worker 0")
    assert (worker.step, worker.share, worker.staleness) == (120, 0.6, 1.0)
    assert worker.num_bytes
    add_report(run, 300, workers(150, 150))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 40')  # The end is not written yet.
    status.poll()
    assert len(status.curve("train", "loss")) == 3
    # Training went back to a checkpoint: the file is replaced.
    (run / "new").write_text(report(100))
    (run / "new").rename(run / "metrics.jsonl")
    status.poll()
    assert status.curve("train", "loss") == [1 / 100]


def test_reports_of_an_evaluator_task_are_shown_whichever_file_is_replaced(run: Path) -> None:
    (run / "metrics.jsonl").write_text(report(100) + report(200))
    (run / "evaluator").mkdir()
    (run / "evaluator" / "metrics.jsonl").write_text(report(100, split="eval"))
    status = training(run)
    assert status.curve("eval", "loss") == [1 / 100]
    for path in ("metrics.jsonl", "evaluator/metrics.jsonl"):
        (run / "new").write_text(report(50, split="train" if path == "metrics.jsonl" else "eval"))
        (run / "new").rename(run / path)
        status.poll()
        assert status.curve("train", "loss") == [1 / 50]
        assert status.curve("eval", "loss") == [1 / (100 if path == "metrics.jsonl" else 50)]


def test_the_evaluations_of_the_latest_step_are_shown(run: Path) -> None:
    """The run was resumed with an evaluator task, or without."""
    (run / "evaluator").mkdir()
    (run / "evaluator" / "metrics.jsonl").write_text(report(150, split="eval"))
    status = training(run)
    assert status.curve("eval", "loss") == [1 / 150]
    with open(run / "metrics.jsonl", "a") as file:
        file.write(report(200, split="eval"))
    status.poll()
    assert status.curve("eval", "loss") == [1 / 100, 1 / 200]


def test_worker_that_the_run_gave_up_is_not_shown(run: Path) -> None:
    status = training(run)
    status.read_line("1 worker(s) train from now on, not 2: membership/workers says 1.")
    status.poll()
    assert "worker 1" not in states(status)
    assert "worker 0" in states(status)


def test_dead_worker_is_shown_until_its_restart_has_trained(run: Path) -> None:
    status = training(run)
    begin_task(run / "tasks", "worker 1", 2, GONE)
    status.poll()
    assert states(status)["worker 1"] == "dead"
    status.read_line("worker 1 (process 5) died: signal 9 (Killed). Restarting worker 1 in 2 s.")
    status.poll()
    assert states(status)["worker 1"] == "restarting"
    begin_task(run / "tasks", "worker 1", 3, os.getpid())
    status.poll()
    assert states(status)["worker 1"] == "starting"
    add_report(run, 300, workers(200, 81))
    status.poll()
    assert states(status)["worker 1"] == "training"
    assert next(task for task in status.tasks if task.name == "worker 1").restarts == 2
    # A restart of the chief begins from a checkpoint, where workers have fewer steps.
    begin_task(run / "tasks", "worker 1", 4, os.getpid())
    begin_task(run / "tasks", "chief 0", 2, os.getpid())
    status.poll()
    assert states(status)["worker 1"] == "starting"
    status.read_line(COMPILING)
    status.read_line(progress_line(110))
    status.poll()
    assert states(status)["worker 1"] == "training"
    assert status.step == 110


def test_screen_of_80_columns_has_everything(run: Path) -> None:
    status = training(run)
    status.read_line("WARNING the disk is full")
    lines = shown(status, 80, 24)
    text = "\n".join(lines)
    assert lines[0].startswith("digits.py  ps  batch 64")
    assert re.match(r"step 210/1,000  ━+  21%  0:01:19 left  epoch 2\.0  after 0:00:09", lines[1])
    for line in (
        r"^loss +0\.0050  eval 0\.0100 +█▁$",
        r"^examples/s +640 ",
        r"^task +state +step +share +staleness +restarts +memory +CPU$",
        r"^worker 0 +training +120 +60% +1\.0 +0 +[\d,]+ MiB +\d+%$",
    ):
        assert re.search(line, text, re.MULTILINE)
    assert lines[-1] == "WARNING the disk is full"
    assert "".join(shown(status, 80, 24, is_ascii=True)).isascii()


def test_traceback_does_not_hide_the_last_warning(run: Path) -> None:
    status = training(run)
    died = "worker 1 (process 7) died: signal 9 (Killed). Restarting it now.\n"
    for line in (died, *(f"  File of a traceback, line {i}\n" for i in range(300))):
        status.read_line(line)
    lines = shown(status, 80, 24)
    assert died.strip() in "\n".join(lines)
    assert "line 299" in lines[-1]


@pytest.mark.parametrize(
    ("width", "height", "parts", "missing"),
    [
        (40, 10, ["step 210/1,000", "loss", "accuracy", "worker 1"], ["staleness", "eval"]),
        (40, 5, ["step 210/1,000", "loss", "4 task(s): 3 training, 1 serving"], ["accuracy"]),
        (20, 2, ["step 210/1,000  21%", "loss"], ["task"]),
        (1, 1, ["s"], []),
    ],
)
def test_small_screen_leaves_out_what_matters_least(
    run: Path, width: int, height: int, parts: list[str], missing: list[str]
) -> None:
    text = "\n".join(shown(training(run), width, height))
    assert [part for part in parts if part not in text] == [], text
    assert [part for part in missing if part in text] == [], text


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"loss": 0.0000418}, r"^loss +4\.18e-05 "),
        ({"examples_per_sec": 0.0314}, r"^examples/s +0\.031 "),
        ({"accuracy": 0.0}, r"^accuracy +0\.0000 "),
        ({"gpu_peak_bytes": 13 << 29}, r"after 0:00:09  GPU 6\.5 GiB at most"),
    ],
)
def test_newest_report_is_shown(values: dict[str, float], line: str, run: Path) -> None:
    assert not re.search(line, "\n".join(shown(training(run), 120, 24)), re.MULTILINE)
    add_report(run, 300, values)
    assert re.search(line, "\n".join(shown(training(run), 120, 24)), re.MULTILINE)


def test_goodput_so_far_is_shown(run: Path) -> None:
    assert "goodput 75%" not in "\n".join(shown(training(run), 80, 24))
    write_process(run, 7, 0.0, [steps(0, 200, start=10.0, compute=30.0)])
    assert "0:01:19 left  goodput 75%  epoch" in "\n".join(shown(training(run), 80, 24))


def test_many_tasks_become_one_line_and_a_dead_one_is_named(run: Path) -> None:
    for index in range(2, 40):
        pid = GONE if index == 30 else os.getpid()
        begin_task(run / "tasks", f"worker {index}", 1, pid)
    lines = shown(training(run), 80, 24)
    assert any(line.startswith("worker 30  dead") for line in lines), lines
    assert any(re.match(r"and \d+ task\(s\): \d+ training$", line) for line in lines), lines


@pytest.mark.parametrize("number", [8, 9, 10, 100, 1000, 1001])
def test_values_of_a_long_curve_have_equal_distances(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.live.status._MAX_VALUES", 8)
    curve = Curve()
    for value in range(number):
        curve.add(float(value))
    assert len(curve.values) <= 8 + 1
    *distances, last = np.diff(curve.values)
    assert len(set(distances)) == 1
    assert 0 < last <= distances[0]
    assert curve.values[-1] == number - 1


def test_sparkline_has_means_of_the_whole_run() -> None:
    assert sparkline([0, 1], 10) == BLOCKS[0] + BLOCKS[-1]
    assert sparkline(list(range(8)), 8) == BLOCKS
    assert sparkline(list(range(800)), 8) == BLOCKS
    assert sparkline([1.0, math.nan, 1.0], 8, ASCII_BLOCKS) == ASCII_BLOCKS[0] * 2
    assert sparkline([1.0], 8) == ""


def test_sparkline_is_logarithmic_where_the_page_of_a_run_is() -> None:
    for name, values, heights in (
        ("loss", [100.0, 10.0, 1.0], (7, 4, 0)),
        ("loss", [4.0, 2.0, 1.0], (7, 2, 0)),
        ("loss", [100.0, 10.0, 0.0], (7, 1, 0)),
        ("accuracy", [100.0, 10.0, 1.0], (7, 1, 0)),
    ):
        assert sparkline(values, 8, name=name) == "".join(BLOCKS[height] for height in heights)


def test_message_about_compiling_goes_away_when_training_begins(run: Path) -> None:
    status = Status(str(run), os.getpid(), run / "tasks")
    for line in ("batch 64", COMPILING, progress_line(1)):
        status.read_line(line)
    assert list(status.messages) == ["batch 64"]


# A run without TensorFlow: it prints and writes as a task does, and waits for the file `go`.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from types import MappingProxyType
from trainer.live.view import can_show, live_view
from trainer.hooks.terminal import COMPILING, has_live_view, progress_line
model_dir = Path(sys.argv[1])
def report(step):
    print(f"step {step}/100  train  loss 0.5000", flush=True)
    values = {"step": step, "split": "train", "loss": 50 / step, "steps_per_sec": 2.0}
    with open(model_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(values) + "\\n")
    if has_live_view():
        print(progress_line(step), flush=True)
def train():
    print("batch 64", flush=True)
    print(COMPILING, flush=True)
    for step in (10, 20, 30):
        report(step)
    os.write(2, b"WARNING from native code\\n")
    while not (model_dir / "go").exists():
        time.sleep(0.05)
    if (model_dir / "go").read_text():
        os.kill(os.getpid(), signal.SIGKILL)
    report(100)
    print("done: step 100", flush=True)
if can_show(str(model_dir)) and "--plain" not in sys.argv:
    with live_view(str(model_dir), is_launcher=False):
        train()
else:
    train()
print("next: look at it", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return [str(tmp_path / "program.py"), str(tmp_path)]


def assert_restored(terminal: Terminal) -> None:
    assert terminal.output.count(ENTER) == terminal.output.count(LEAVE) == 1
    assert terminal.output.rindex(SHOW_CURSOR) > terminal.output.rindex(HIDE_CURSOR)


def test_view_leaves_the_last_report_and_all_messages(program: list[str], tmp_path: Path) -> None:
    with Terminal(program, tmp_path, rows=24, columns=80) as terminal:
        terminal.see("step 30/1,000", "loss", "this process  training", "WARNING from native code")
        before, _, _ = terminal.output.partition(ENTER)
        assert before.split() == ["batch", "64", *COMPILING.split()]
        terminal.resize(10, 40)
        terminal.see("step 30/1,000")
        (tmp_path / "go").touch()
        assert terminal.end() == 0, terminal.output
    assert_restored(terminal)
    left = [line for line in terminal.lines_left_behind if line]
    assert left == [
        "WARNING from native code",
        "step 100/100  train  loss 0.5000",
        "done: step 100",
        "next: look at it",
    ]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_terminal_is_restored_when_the_process_is_killed(
    signum: signal.Signals, program: list[str], tmp_path: Path
) -> None:
    with Terminal(program, tmp_path, rows=24, columns=80) as terminal:
        terminal.see("step 30/1,000")
        terminal.popen.send_signal(signum)
        assert terminal.end() == -signum
    assert_restored(terminal)
    assert "step 30/100  train  loss 0.5000" in terminal.lines_left_behind


def test_suspended_view_gives_the_terminal_back(program: list[str], tmp_path: Path) -> None:
    # A shell with job control, as a user's.
    shell = textwrap.dedent(
        """
        import os, signal, subprocess, sys
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        job = subprocess.Popen([sys.executable, *sys.argv[1:]], process_group=0)
        os.tcsetpgrp(0, job.pid)
        os.waitpid(job.pid, os.WUNTRACED)
        os.tcsetpgrp(0, os.getpgrp())
        print("suspended", flush=True)
        input()
        os.tcsetpgrp(0, job.pid)
        os.killpg(job.pid, signal.SIGCONT)
        sys.exit(job.wait())
        """
    )
    (tmp_path / "shell.py").write_text(shell)
    argv = [str(tmp_path / "shell.py"), *program]
    with Terminal(argv, tmp_path, rows=24, columns=80) as terminal:
        terminal.see("step 30/1,000")
        terminal.type("\x1a")
        terminal.wait(lambda: "suspended" in terminal.output and LEAVE in terminal.output)
        terminal.type("\n")
        terminal.wait(lambda: terminal.output.count(ENTER) == 2)
        (tmp_path / "go").touch()
        assert terminal.end() == 0, terminal.output
    assert terminal.output.count(LEAVE) == 2
    assert "done: step 100" in terminal.lines_left_behind


@pytest.mark.parametrize("how", ["--plain", "NO_COLOR", "CI", "TERM", "pipe"])
def test_lines_are_printed_without_a_screen(how: str, program: list[str], tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    if how == "pipe":
        output = run_python(*program).stdout
    else:
        env = {} if how == "--plain" else {how: "dumb" if how == "TERM" else "1"}
        argv = [*program, how] if how == "--plain" else program
        with Terminal(argv, tmp_path, env=env) as terminal:
            assert terminal.end() == 0
        output = terminal.output.replace("\r\n", "\n")
    assert "\x1b" not in output
    printed = [line for line in output.splitlines() if "native" not in line]
    reports = [f"step {step}/100  train  loss 0.5000" for step in (10, 20, 30, 100)]
    assert printed == ["batch 64", COMPILING, *reports, "done: step 100", "next: look at it"]
