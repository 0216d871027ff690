"""Tells a task about its launcher's terminal: the width, and if a live view draws on it.

start(command, env={**os.environ, **terminal_env()})       # in the launcher
console_width = passed_width()                             # in a task, which prints to a pipe
print(progress_line(step))                                 # in a task, if has_live_view()
"""

import os
import shutil
import sys

COMPILING = "compiling the first step"  # What a chief prints when it begins to train.
_WIDTH, _LIVE_VIEW = "TRAINER_WIDTH", "TRAINER_LIVE_VIEW"
# An escape sequence (APC) that terminals ignore. Only the live view reads these lines.
_PROGRESS = "\x1b_step "


def terminal_env(*, has_view: bool = False) -> dict[str, str]:
    """Returns variables for the environment of a task; none if stdout is not a terminal.

    `has_view`: a live view is about to take over the terminal.
    """
    if has_live_view():
        return {name: os.environ[name] for name in (_WIDTH, _LIVE_VIEW)}
    if not sys.stdout.isatty():
        return {}
    env = {_WIDTH: str(shutil.get_terminal_size().columns)}
    return {**env, _LIVE_VIEW: "1"} if has_view else env


def passed_width() -> int | None:
    """The width that a launcher has passed on; None without a launcher or its terminal."""
    given = os.environ.get(_WIDTH, "")
    return int(given) if given.isdecimal() else None


def has_live_view() -> bool:
    """Returns True if a live view reads what this process prints."""
    return _LIVE_VIEW in os.environ


def progress_line(step: int) -> str:
    """A line for the live view alone: the run is at `step`."""
    return f"{_PROGRESS}{step}"


def progress_in(line: str) -> int | None:
    """The step in a line of `progress_line`; None for any other line."""
    number = line.removeprefix(_PROGRESS).strip()
    return int(number) if line.startswith(_PROGRESS) and number.isdecimal() else None
