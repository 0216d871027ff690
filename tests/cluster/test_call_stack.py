"""Few frames between the command and the graph: an error's traceback shows where it is."""

from pathlib import Path

from tests.cluster.runs import ROOT, Process

MOST_FRAMES = 8
# `build_learner` runs before the executor is used: it wraps the graph of a step.
RECIPE = """
import os
import sys

from configs.digits import *

def build_learner(config, **parts):
    from strategies.mirrored import MirroredExecutor
    from trainer.learner import Learner

    prepare_run = MirroredExecutor._prepare_run

    def prepare_counted(executor):
        prepare_run(executor)
        graph = executor._run_in_graph

        def call(*arguments):
            frame = sys._getframe(1)
            while frame:
                path = frame.f_code.co_filename
                if path.startswith(tuple(f"{ROOT}/{name}/" for name in ("trainer", "strategies"))):
                    print("FRAME", os.path.relpath(path, ROOT), frame.f_code.co_name)
                frame = frame.f_back
            return graph(*arguments)

        executor._run_in_graph = call

    MirroredExecutor._prepare_run = prepare_counted
    return Learner(**parts)
"""


def test_few_frames_lie_between_the_command_and_the_graph(digits: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"ROOT = {str(ROOT)!r}\n{RECIPE}")
    flags = (f"--config={recipe}", f"--data_dir={digits}", "--train_steps=1")
    model_dir = tmp_path / "run"
    with Process((*flags, f"--model_dir={model_dir}"), model_dir) as process:
        run = process.wait()
    assert run.exit_code == 0, run.stderr
    frames = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("FRAME")]
    assert frames[0] == ["strategies/mirrored.py", "_run"]
    assert ["trainer/loop.py", "train"] in frames
    assert frames[-1] == ["trainer/__main__.py", "<module>"]
    assert len(frames) <= MOST_FRAMES, frames
