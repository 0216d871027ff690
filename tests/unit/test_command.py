"""What a command line hands on, to the launcher and to a task."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.lifeline import Lifeline

ALONE = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}}
# In processes of their own, since flags are of a process.
HANDED_TO_LAUNCHER = """
from trainer import command

class Launcher:
    exit_code = 0

    def __init__(self, cluster, argv, model_dir, **options):
        print(options["stall_timeout_secs"], options["grace_secs"], *argv)

    def run(self):
        return self

command.LocalCluster = Launcher
command._look_first = lambda *arguments: (True, 0)
"""
HANDED_TO_TASK = """
from trainer import command, run

def run_task(plan, signals):
    print(plan.is_checked, plan.stall_timeout_secs, plan.num_threads)
    return 0

run.run_task = run_task
"""


def run_with(patch: str, *argv: str, is_launched: bool = False, **env: str) -> list[str]:
    """The words that `patch` prints where it takes the place of what would act."""
    program = f"import sys\nsys.argv = {['trainer', *argv]}\n{patch}"
    program += "\nfrom trainer.__main__ import run_from_command_line\nrun_from_command_line()"
    with Lifeline() as lifeline:
        # One that is held, but which the process is not told of, makes no difference.
        told = lifeline.env if is_launched else {}
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, **env, **told},
            pass_fds=(lifeline.fd,),
        )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_launcher_is_told_when_a_task_passes_for_stalled(tmp_path: Path) -> None:
    words = run_with(
        HANDED_TO_LAUNCHER,
        "--strategy=multiworker",
        "--workers=2",
        "--isolate=off",
        f"--model_dir={tmp_path}",
        "--stall_timeout_secs=41",
        "--grace_secs=17",
    )
    assert words[:2] == ["41.0", "17.0"]
    assert "--stall_timeout_secs=41" in words, "the tasks are told, too"


@pytest.mark.parametrize("is_launched", [True, False])
def test_task_that_was_launched_does_not_check_again_what_the_launcher_has_checked(
    is_launched: bool, tmp_path: Path
) -> None:
    words = run_with(
        HANDED_TO_TASK,
        "--strategy=multiworker",
        f"--model_dir={tmp_path}",
        "--num_threads=3",
        "--stall_timeout_secs=41",
        is_launched=is_launched,
        TF_CONFIG=json.dumps(ALONE),
    )
    assert words[-3:] == [str(is_launched), "41.0", "3"]


def test_help_shows_all_flags_and_waits_for_nothing_that_acts() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer", "--config=not-there.py", "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert "--strategy:" in ended.stdout
    assert "--stall_timeout_secs:" in ended.stdout
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "absl.flags" in imported
    assert not imported & {"tensorflow", "numpy", "trainer.config", "trainer.command"}


def test_value_that_reads_like_a_request_for_help_is_none() -> None:
    words = run_with(
        HANDED_TO_TASK, "--strategy=multiworker", "--model_dir", "help", TF_CONFIG=json.dumps(ALONE)
    )
    assert words[-3:] == ["False", "300.0", "0"]
