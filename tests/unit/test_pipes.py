"""`command | head` ends without a message."""

import subprocess
import sys
from pathlib import Path

import pytest

from data.system.pipes import EXIT_WITHOUT_READER
from tests.cluster.runs import ROOT

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("command", "env"),
    [
        (("trainer", "--help"), {}),
        (("trainer", "--help"), UNBUFFERED),
        (("trainer", "--version"), {}),
        (("trainer.doctor", "--help"), {}),
        (("trainer.evaluate", "--help"), {}),
        (("trainer.runs", ".", "--json"), {}),
        (("trainer.runs", ".", "--json"), UNBUFFERED),
        (("data.inspect", "--help"), {}),
        (("data.prepare", "--help"), {}),
    ],
)
def test_command_whose_reader_has_ended_prints_nothing(
    command: tuple[str, ...], env: dict[str, str], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env},
    )
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=200)
    assert errors == b""
    assert process.returncode == EXIT_WITHOUT_READER
