"""A command on a pseudo-terminal, as a person sees and types."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import pyte

ROOT = Path(__file__).parents[1]
TIMEOUT_SECS = 240.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# They take precedence over what a terminal says of itself.
_NOT_INHERITED = ("CI", "COLUMNS", "LINES", "NO_COLOR")
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"  # The second screen of a terminal.
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal:
    """A Python command whose terminal is a pseudo-terminal; killed at the end of the context."""

    def __init__(
        self,
        argv: list[str],
        cwd: Path,
        *,
        rows: int = 30,
        columns: int = 72,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._ours, theirs = pty.openpty()
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        self._set_size(rows, columns)
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        self.popen = subprocess.Popen(
            [sys.executable, *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            env={**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **env},
            start_new_session=True,
            # So that Ctrl-C, typed at the terminal, reaches the command.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait(TIMEOUT_SECS)

    def read_until(self, text: str) -> None:
        """Reads until `text` was printed, or to the end if it is empty."""
        self.wait(lambda: bool(text) and text in self.output, to_end=not text)

    def see(self, *texts: str) -> list[str]:
        """Reads until the screen shows all `texts`; returns its lines."""
        self.wait(lambda: all(text in "\n".join(self.display()) for text in texts))
        return self.display()

    def wait(self, condition: Callable[[], bool], *, to_end: bool = False) -> None:
        """Reads until `condition()` is true."""
        deadline = time.monotonic() + TIMEOUT_SECS
        while not condition():
            assert time.monotonic() < deadline, (self.output, self.display())
            if not select.select([self._ours], [], [], 1.0)[0]:
                continue
            try:
                content = os.read(self._ours, 65_536).decode(errors="replace")
            except OSError:  # The command has closed its terminal.
                assert to_end, f"ended too early: {self.output}"
                break
            self.output += content
            self._stream.feed(content)

    def type(self, text: str) -> None:
        """Types `text`, for example Ctrl-C."""
        os.write(self._ours, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Changes the size of the window, which sends SIGWINCH."""
        self._set_size(rows, columns)
        self._screen.resize(rows, columns)
        self._screen.reset()

    def end(self) -> int:
        """Reads to the end; returns the exit code."""
        self.read_until("")
        os.close(self._ours)
        return self.popen.wait(TIMEOUT_SECS)

    def hang_up(self) -> int:
        """Closes the terminal, which sends SIGHUP; returns the exit code."""
        os.close(self._ours)
        return self.popen.wait(TIMEOUT_SECS)

    def display(self) -> list[str]:
        """The lines of the screen now."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def lines(self) -> list[str]:
        """All lines that were printed."""
        return _lines_of(self.output)

    @property
    def lines_left_behind(self) -> list[str]:
        """The lines that were printed after the second screen was left."""
        return _lines_of(self.output.rpartition(LEAVE)[2])

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _lines_of(output: str) -> list[str]:
    text = _ESCAPES.sub("", output).replace("\r\n", "\n")
    return [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
