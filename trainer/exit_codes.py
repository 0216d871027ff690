"""Exit codes, which a scheduler can act on, and the one line that says why."""

import contextlib
import os
import signal
import sys

from data.system.errors import reason_lines

EXIT_DONE = 0
EXIT_BUG = 1  # Or training diverged.
EXIT_USAGE = 2  # Bad usage, config or data: a restart would end in the same way.
# A peer was lost, this task was asked to stop, made no progress, could not save its last state, or
# another run has its directory: the last checkpoint is complete, restart to resume.
EXIT_RESTART = 75


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, or its type if it says nothing.

    A sentence that is broken into lines is returned as one line.
    """
    told = reason_lines(error)
    first, *others = told or [""]
    for line in others:
        is_sentence = first[:1].isupper() and not first.endswith((".", ":", ";", "!", "?"))
        if not (is_sentence and line[:1].islower()):
            break
        first += f" {line}"
    return first or type(error).__name__


def end_at_once(signum: int, frame: object) -> None:
    """A signal handler for the time when there is no state to save."""
    # Not an exception, which would appear in the middle of an import.
    message = f"{signal.Signals(signum).name}: ending; nothing has started.\n"
    with contextlib.suppress(OSError):  # Nobody may read it.
        os.write(sys.stderr.fileno(), message.encode())
    os._exit(EXIT_RESTART)
