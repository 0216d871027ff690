"""Runs Python in a new process: a program, or a command of this project."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(
    *argv: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] = os.environ,
    input: str | None = None,
    check: bool = False,
    **added: str,
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGV`, which finds the packages of this project; `added` are added to `env`.

    With `check`, an exit code other than 0 fails the test, which then shows standard error.
    """
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env={**env, "PYTHONPATH": str(ROOT), **added},
        stdin=subprocess.DEVNULL if input is None else None,
        input=input,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0 or not check, done.stderr
    return done
