"""A user's session at a terminal: start, Ctrl-C, and the command that the last line names."""

import contextlib
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from strategies.cluster.tf_config import local_cluster
from tests.cluster.runs import ROOT, Process, Run, by_hand, last_step
from tests.cluster.runs import run as run_trainer
from tests.terminal import ENTER, LEAVE, SHOW_CURSOR, Terminal

SLOW = ROOT / "tests" / "cluster" / "configs" / "slow.py"
COLUMNS = 72
# The slow config, with a hook that prints, as those of users do.
TALKS = """
from tests.cluster.configs import slow
from tests.cluster.configs.slow import build_model, get_config
from trainer.hooks.base import Hook

class Talk(Hook):
    def __call__(self, step, metrics):
        print("hello from step", step, flush=True)

def build_hooks(config, model_dir):
    return [Talk(), *slow.build_hooks(config, model_dir)]
"""


def test_interrupted_run_is_continued_by_the_command_of_its_last_line(
    digits: Path, tmp_path: Path
) -> None:
    argv = ["-m", "trainer", f"--config={SLOW}", f"--data_dir={digits}", "--epochs=4.5"]
    argv += ["--strategy=multiworker", "--workers=2", "--num_threads=1", "--log_device_placement"]
    with Terminal([*argv, "--plain"], tmp_path, columns=COLUMNS) as first:
        first.read_until("step 20/")
        first.type("\x03")
        assert first.end() == 75, first.output
    last = [line for line in first.lines if line][-1]
    assert last.startswith("continue: python -m trainer --model_dir=runs/slow-multiworker-")
    reports = [line for line in first.lines if line.startswith("step ")]
    assert reports, first.output
    assert all(len(line) <= COLUMNS for line in reports), reports
    assert any("compiling the first step" in line for line in first.lines)
    # On a busy machine tasks say that they wait for each other, and TensorFlow's runtime that
    # another task has ended a moment earlier.
    not_counted = ("step ", "INFO ", "WARNING ", "E0000 ")
    shown = [line for line in first.lines if line and not line.startswith(not_counted)]
    assert len(shown) <= 14, "\n".join(shown)
    assert '"batch_size"' not in first.output
    (model_dir,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert (tmp_path / "runs" / "latest").resolve() == model_dir
    placed = (model_dir / "tasks" / "worker-0.placement.txt").read_text()
    assert placed.count("device:CPU:0") > 100
    assert "device:CPU:0" not in first.output

    # Another last step, so that the test is short; all else is that of the run. With the live view.
    command = shlex.split(last.removeprefix("continue: python "))
    saved = json.loads((model_dir / "result.json").read_text())["step"]
    with Terminal([*command, f"--train_steps={saved + 20}"], tmp_path) as second:
        assert second.end() == 0, second.output
    left_behind = "\n".join(second.lines_left_behind)
    assert f"resuming from step {saved}" in left_behind
    assert "multiworker: 2 replica(s)" in left_behind
    assert f"step {saved + 20}/{saved + 20}  train  loss" in left_behind
    assert f"done: step {saved + 20}" in left_behind
    document = json.loads((model_dir / "config.json").read_text())
    assert document["recipe"] == str(SLOW)
    assert "--workers=2" in document["flags"]
    assert json.loads((model_dir / "result.json").read_text())["step"] == saved + 20
    last = [line for line in second.lines if line][-1]
    assert last.startswith(f"next: python -m trainer.evaluate {command[-1].partition('=')[2]}")


def test_live_view_shows_a_cluster_of_ps_and_its_restarted_worker(
    digits: Path, tmp_path: Path
) -> None:
    argv = ["-m", "trainer", f"--config={SLOW}", f"--data_dir={digits}", "--train_steps=100000"]
    argv += ["--strategy=ps", "--workers=2", "--num_threads=1", f"--model_dir={tmp_path / 'run'}"]
    with Terminal(argv, tmp_path, rows=24, columns=80) as terminal:
        terminal.see("slow.py  ps  batch 64", "chief 0 ", "ps 0 ", "worker 0", "worker 1")
        terminal.see("/100,000  ", "loss", "accuracy", "examples/s", "share", "staleness", "MiB")
        lines = terminal.see("chief 0   training", "ps 0      serving", "worker 1  training")
        assert all("dead" not in line for line in lines)
        log = (tmp_path / "run" / "tasks" / "worker-1.log").read_text()
        assert "\x1b_" not in log + (tmp_path / "run" / "tasks" / "chief-0.log").read_text()
        os.kill(int(log.partition("process ")[2].partition(",")[0]), signal.SIGKILL)
        terminal.see("worker 1 (process ", "died: signal 9")
        restarted = re.compile(r"worker 1  training .* 1  +[\d,]+ MiB")  # One restart.
        terminal.wait(lambda: any(map(restarted.match, terminal.display())))
        terminal.resize(10, 40)
        terminal.see("/100,000", "loss", "worker 1")
        terminal.type("\x03")
        assert terminal.end() == 75, terminal.output
    assert terminal.output.count(ENTER) == terminal.output.count(LEAVE) == 1
    assert SHOW_CURSOR in terminal.output.rpartition(LEAVE)[0][-200:]
    left = [line for line in terminal.lines_left_behind if line]
    assert sum("  train  loss" in line for line in left) == 1
    assert any(line.startswith("SIGINT: the tasks are asked to save") for line in left)
    assert any(line.startswith("asked to stop: step ") for line in left)
    assert left[-1].startswith("continue: python -m trainer --model_dir=")


def test_live_view_shows_one_process_and_quiet_prints_the_last_line_alone(
    digits: Path, tmp_path: Path
) -> None:
    flags = ["-m", "trainer", f"--config={SLOW}", f"--data_dir={digits}"]
    long = [*flags, "--train_steps=100000", "--model_dir=a"]
    with Terminal(long, tmp_path, rows=24, columns=80) as shown:
        shown.see("/100,000  ", "loss", "this process  training", "MiB")
        shown.type("\x03")
        assert shown.end() == 75, shown.output
    before, _, _ = shown.output.partition(ENTER)
    assert "mirrored: 1 replica(s), batch 64, 100,000 steps" in before
    left = [line for line in shown.lines_left_behind if line]
    assert any("SIGINT: this task saves and ends" in line for line in left)
    assert left[-1] == "continue: python -m trainer --model_dir=a"

    short = [*flags, "--train_steps=60", "--model_dir=b"]
    with Terminal([*short, "--quiet"], tmp_path) as quiet:
        assert quiet.end() == 0, quiet.output
    (line,) = [line for line in quiet.lines if line]
    assert line.startswith("done: step 60  loss ")


@pytest.mark.parametrize(
    ("strategy", "view"),
    [
        ("mirrored", ["--plain"]),
        pytest.param("mirrored", [], marks=pytest.mark.nightly),
        pytest.param("multiworker", ["--plain"], marks=pytest.mark.nightly),
    ],
    ids=["mirrored", "mirrored with the live view", "multiworker, started by hand"],
)
def test_run_whose_terminal_is_closed_is_saved(
    strategy: str, view: list[str], digits: Path, tmp_path: Path
) -> None:
    config, model_dir = tmp_path / "talks.py", tmp_path / "run"
    config.write_text(TALKS)
    flags = (f"--config={config}", f"--data_dir={digits}", "--num_threads=1")
    argv = [f"--strategy={strategy}", f"--model_dir={model_dir}", *flags]
    cluster = local_cluster("multiworker", 2, 0)
    envs: list[dict[str, str]] = [{}]
    if strategy == "multiworker":
        envs = [{"TF_CONFIG": cluster.for_task(task).tf_config()} for task in cluster.tasks()]
    with contextlib.ExitStack() as stack:
        chief, *others = (
            stack.enter_context(Terminal(["-m", "trainer", *argv, *view], tmp_path, env=env))
            for env in envs
        )
        chief.wait(lambda: last_step(model_dir) >= 20)
        assert chief.hang_up() == 75
        assert [other.end() for other in others] == [75] * len(others)
    result = Run(75, "", "", model_dir).result
    assert (result["why"], result["exit_code"]) == ("asked to stop", 75)
    step = result["step"]
    argv = [*argv, f"--train_steps={step + 20}"]
    if strategy == "multiworker":
        with by_hand(cluster, model_dir, *flags, argv[-1]) as tasks:
            tasks.start_all()
            (run, _) = tasks.wait().values()
    else:
        run = run_trainer(argv, model_dir)
    assert f"resuming from step {step}" in run.stdout
    assert run.result["examples"] == (step + 20) * 64


def test_closed_terminal_does_not_stop_a_run_under_nohup(digits: Path, tmp_path: Path) -> None:
    argv = (f"--config={SLOW}", f"--data_dir={digits}", "--train_steps=60", "--num_threads=1")
    with Process((*argv, f"--model_dir={tmp_path}"), tmp_path, under=("nohup",)) as process:
        process.wait_for_step(20)
        process.send(signal.SIGHUP)
        run = process.wait()
    assert run.result["step"] == 60
