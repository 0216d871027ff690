"""The width of the launcher's terminal, for its tasks: they print to a pipe.

start(command, env={**os.environ, **width_env()})       # in the launcher
console_width = passed_width()                          # in a task
"""

import os
import shutil
import sys

_WIDTH = "TRAINER_WIDTH"


def width_env() -> dict[str, str]:
    """What a task needs in its environment; empty if standard output is not a terminal."""
    if not sys.stdout.isatty():
        return {}
    return {_WIDTH: str(shutil.get_terminal_size().columns)}


def passed_width() -> int | None:
    """The width that a launcher has passed on; None without a launcher or its terminal."""
    given = os.environ.get(_WIDTH, "")
    return int(given) if given.isdecimal() else None
