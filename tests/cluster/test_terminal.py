"""A user's session at a terminal: start, Ctrl-C, and the command that the last line names."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from tests.cluster.runs import ROOT, TIMEOUT_SECS

SLOW = ROOT / "tests" / "cluster" / "configs" / "slow.py"
COLUMNS = 72
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command whose terminal is a pseudo-terminal of 30 lines and COLUMNS columns."""

    def __init__(self, argv: list[str], cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
        self.popen = subprocess.Popen(
            [sys.executable, *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
            start_new_session=True,
            # So that Ctrl-C, typed at the terminal, reaches the command.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.output = ""

    def read_until(self, text: str) -> None:
        """Reads until `text` was printed, or to the end if it is empty."""
        deadline = time.monotonic() + TIMEOUT_SECS
        while not (text and text in self.output):
            assert time.monotonic() < deadline, self.output
            try:
                self.output += os.read(self._ours, 4096).decode(errors="replace")
            except OSError:  # The command has closed its terminal.
                assert not text, f"ended before {text!r}: {self.output}"
                break

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        self.read_until("")
        os.close(self._ours)
        return self.popen.wait(TIMEOUT_SECS)

    @property
    def lines(self) -> list[str]:
        """The lines that stay on the screen; a progress bar does not."""
        text = _ESCAPES.sub("", self.output).replace("\r\n", "\n")
        return [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]


def test_interrupted_run_is_continued_by_the_command_of_its_last_line(
    digits: Path, tmp_path: Path
) -> None:
    argv = ["-m", "trainer", f"--config={SLOW}", f"--data_dir={digits}", "--epochs=4.5"]
    argv += ["--strategy=multiworker", "--workers=2", "--num_threads=1", "--log_device_placement"]
    first = Terminal(argv, tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(first.popen.kill)
        first.read_until("step 20/")
        first.type("\x03")
        assert first.end() == 75, first.output
    last = [line for line in first.lines if line][-1]
    assert last.startswith("continue: python -m trainer --model_dir=runs/slow-multiworker-")
    reports = [line for line in first.lines if line.startswith("step ")]
    assert reports, first.output
    assert all(len(line) <= COLUMNS for line in reports), reports
    assert any("compiling the first step" in line for line in first.lines)
    shown = [line for line in first.lines if line and not line.startswith("step ")]
    assert len(shown) <= 14, shown
    assert '"batch_size"' not in first.output
    (model_dir,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert (tmp_path / "runs" / "latest").resolve() == model_dir
    placed = (model_dir / "tasks" / "worker-0.placement.txt").read_text()
    assert placed.count("device:CPU:0") > 100
    assert "device:CPU:0" not in first.output

    # Another last step, so that the test is short; all else is that of the run.
    command = shlex.split(last.removeprefix("continue: python "))
    saved = json.loads((model_dir / "result.json").read_text())["step"]
    second = Terminal([*command, f"--train_steps={saved + 20}"], tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(second.popen.kill)
        assert second.end() == 0, second.output
    assert f"resuming from step {saved}" in second.output
    assert "multiworker: 2 replica(s)" in second.output
    document = json.loads((model_dir / "config.json").read_text())
    assert document["recipe"] == str(SLOW)
    assert "--workers=2" in document["flags"]
    assert json.loads((model_dir / "result.json").read_text())["step"] == saved + 20
    last = [line for line in second.lines if line][-1]
    assert last.startswith(f"next: python -m trainer.evaluate {command[-1].partition('=')[2]}")
