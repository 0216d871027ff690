"""Exit codes, which a scheduler can act on, and the one line that says why."""

import os
import re
import signal

EXIT_DONE = 0
# A bug, or training diverged.
EXIT_BUG = 1
# Bad usage, config or data: starting again would end in the same way.
EXIT_USAGE = 2
# A peer was lost, this task was asked to stop, or a disk did not take the last state: what was
# saved is whole, start it again.
EXIT_RESTART = 75

_STYLE = re.compile("\x1b\\[[0-9;]*m")


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, or its type if it says nothing.

    Not the one with which Keras begins: it names a layer, and the reason, in bold, comes after it.
    """
    lines = [line.strip() for line in _STYLE.sub("", str(error)).splitlines()]
    told = [line for line in lines if line and not line.startswith("Exception encountered when")]
    return (told or lines or [""])[0] or type(error).__name__


def end_at_once(signum: int, frame: object) -> None:
    """A signal handler, for as long as there is no state to save."""
    # Not an exception, which would come in the middle of an import.
    message = f"{signal.Signals(signum).name}: ending; nothing has begun.\n"
    os.write(2, message.encode())
    os._exit(EXIT_RESTART)
