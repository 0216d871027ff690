"""A user's session at a terminal: start, Ctrl-C, and the command that the last line names."""

import json
import shlex
from pathlib import Path

from tests.cluster.runs import ROOT
from tests.terminal import ENTER, Terminal

SLOW = ROOT / "tests" / "cluster" / "configs" / "slow.py"
COLUMNS = 72


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
    # On a busy machine tasks say that they wait for each other.
    not_counted = ("step ", "INFO ", "WARNING ")
    shown = [line for line in first.lines if line and not line.startswith(not_counted)]
    assert len(shown) <= 14, shown
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


def test_live_view_shows_one_process_and_quiet_prints_the_last_line_alone(
    digits: Path, tmp_path: Path
) -> None:
    flags = ["-m", "trainer", f"--config={SLOW}", f"--data_dir={digits}", "--train_steps=60"]
    with Terminal([*flags, "--model_dir=a"], tmp_path, rows=24, columns=80) as shown:
        shown.see("/60  ", "loss", "this process  training", "MiB")
        shown.type("\x03")
        assert shown.end() == 75, shown.output
    before, _, _ = shown.output.partition(ENTER)
    assert "mirrored: 1 replica(s), batch 64, 60 steps" in before
    left = [line for line in shown.lines_left_behind if line]
    assert any("SIGINT: this task saves and ends" in line for line in left)
    assert left[-1] == "continue: python -m trainer --model_dir=a"

    with Terminal([*flags, "--model_dir=a", "--quiet"], tmp_path) as quiet:
        assert quiet.end() == 0, quiet.output
    (line,) = [line for line in quiet.lines if line]
    assert line.startswith("done: step 60  loss ")
