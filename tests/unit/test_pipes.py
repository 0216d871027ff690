"""`command | head` ends without a message, and Ctrl-C with one line."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data.system.pipes import EXIT_INTERRUPTED, EXIT_WITHOUT_READER
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


@pytest.mark.parametrize(
    ("command", "read"),
    [
        (("trainer.runs", "."), "config.json"),
        (("trainer.report", "."), "config.json"),
        (("data.inspect", "--data_dir=."), "features.json"),
    ],
)
def test_command_that_is_interrupted_prints_one_line(
    command: tuple[str, ...], read: str, tmp_path: Path
) -> None:
    (tmp_path / "train.tfrecord").touch()
    os.mkfifo(tmp_path / read)
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with open(tmp_path / read, "wb"):  # Waits until the command opens it.
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=200)
    assert errors == b"\ninterrupted\n"
    assert process.returncode == EXIT_INTERRUPTED == 130
