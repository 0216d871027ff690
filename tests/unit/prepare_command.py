"""`python -m data.prepare ...` in a fork of one process, so that its imports are paid for once."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import ROOT

SERVER = """
import json, os, sys
from absl import app
from data.prepare.__main__ import _main
from data.system.flags import parse_flags

for line in sys.stdin:
    directory, sys.argv, output = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(directory)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        app.run(_main, flags_parser=parse_flags("data.prepare", {"out": "data_dir"}))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Run = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def run_prepare(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    """A function that runs the command in `tmp_path`: the exit code, and standard error."""

    def run(words: str) -> tuple[int, str]:
        output = tmp_path.parent / f"{tmp_path.name}.err"
        argv = ["data.prepare", *shlex.split(words)]
        assert server.stdin
        assert server.stdout
        print(json.dumps([str(tmp_path), argv, str(output)]), file=server.stdin, flush=True)
        return int(server.stdout.readline()), output.read_text()

    return run
