"""Runs Python in a new process: a program, or a command of this project."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*argv: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGV`, which finds the packages of this project, with `env` added."""
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=200,
    )
