"""The errors of this program: a message for the user, and the exit code that the command ends with.

    raise UsageError("--workers must be 1 or more. Received: 0. Type --workers=2.")

| error | exit code | meaning |
| --- | --- | --- |
| UsageError | 2 | a mistake in flags, config, data or model; a restart would end in the same way |
| RunFailed | 1 | training diverged, or a task failed |
| RunFailed | 75 | the last checkpoint is complete: start again to resume |

Each package derives its own errors from these two. `python -m trainer` prints the message and exits
with the code; `trainer.train` raises the error. Any other exception is a bug.
"""

import re
from typing import Any

# What TensorFlow and Keras put around the reason: colours, the failed op, the call that made it
# with the lines of its traceback, and headings. Keras' heading names a layer.
_NOISE = re.compile(
    r"\x1b\[[0-9;]*m|\{\{function_node [^}]*\}\} ?| \[Op:\w+\].*"
    r"|^Detected at node .*\n(?:[ \t].*\n|\n|<stack traces unavailable>\n?)*"
    r"|^(?:Graph execution error:|Node: '.*'|From /job:\S*:|\d+ root error\(s\) found\.|"
    r"Exception encountered when .*)$",
    re.MULTILINE,
)


class TrainerError(Exception):
    """An error of which the message says what to do.

    Attributes:
        exit_code: What the command exits with.
        result: The trainer.Result of what the run has left behind so far, if trainer.train raised
            the error after the run had begun; or None.
    """

    exit_code: int = 1
    result: Any = None  # This package imports nothing of trainer/, so it cannot name the class.


class UsageError(TrainerError, ValueError):
    """A user's mistake, usually found before training starts."""

    exit_code = 2


class RunFailed(TrainerError):
    """A run that ended before its last step; `exit_code` is 75 if it can be continued."""


def reason_lines(error: BaseException) -> list[str]:
    """The lines of what `error` says, without what TensorFlow and Keras put around the reason."""
    lines = (line.strip() for line in _NOISE.sub("", str(error)).splitlines())
    return [line for line in lines if line]
