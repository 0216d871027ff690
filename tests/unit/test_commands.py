"""The values that a command line passes to the launcher and to a task."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.guards.parent_watch import ParentWatch

ALONE = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}}
# Each runs in a new process, because a process parses its flags once.
HANDED_TO_LAUNCHER = """
from trainer.local import launching

class Launcher:
    exit_code = 0

    def __init__(self, policy, starter, model_dir, restarts, **options):
        print(options["stall_timeout_secs"], options["grace_secs"], *starter.argv)

    def run(self):
        return self

launching.Supervisor = Launcher
launching._run_check_before_launch = lambda *arguments: launching.READY
"""
HANDED_TO_TASK = """
from trainer import task

def run(spec):
    print(spec.is_checked, spec.stall_timeout_secs, spec.num_threads)
    return 0

task.run = run
"""


def run_with(patch: str, *argv: str, is_launched: bool = False, **env: str) -> list[str]:
    """Runs a command line after `patch`, which replaces a class; returns the printed words."""
    program = f"import sys\nsys.argv = {['trainer', *argv]}\n{patch}"
    program += "\nfrom trainer.__main__ import run_from_command_line\nrun_from_command_line()"
    with ParentWatch() as watch:
        # A descriptor without the environment variable makes no difference.
        told = watch.env if is_launched else {}
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, **env, **told},
            pass_fds=(watch.fd,),
        )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_launcher_gets_the_time_after_which_a_task_is_considered_stalled(tmp_path: Path) -> None:
    words = run_with(
        HANDED_TO_LAUNCHER,
        *("--strategy=multiworker", "--workers=2", "--isolate=off", f"--model_dir={tmp_path}"),
        *("--stall_timeout_secs=41", "--grace_secs=17"),
    )
    assert words[:2] == ["41.0", "17.0"]
    assert "--stall_timeout_secs=41" in words, "the tasks are told, too"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_launched", "words", "handed"),
    [
        (True, ("--model_dir=run", "--num_threads=3", "--stall_timeout_secs=41"), "True 41.0 3"),
        # A value that looks like a request for help.
        (False, ("--model_dir", "help"), "False 300.0 0"),
    ],
)
def test_launched_task_does_not_repeat_the_checks_of_the_launcher(
    is_launched: bool, words: tuple[str, ...], handed: str
) -> None:
    argv = ("--strategy=multiworker", *words)
    printed = run_with(HANDED_TO_TASK, *argv, is_launched=is_launched, TF_CONFIG=json.dumps(ALONE))
    assert printed[-3:] == handed.split()
