import errno

import pytest

from data.system.linux import limit_reached
from trainer.exit_codes import first_line

IN_KERAS = (
    "Exception encountered when calling Dense.call().\n\n\x1b[1mbad shape\x1b[0m\n\nArguments"
)
BROKEN = "\nObject Two was created by passing\nvalues in `__init__()`. Please\nmend it.\n\nExample:"
IN_A_GRAPH = (
    "Graph execution error:\n\nDetected at node Assert defined at (most recent call last):\n"
    '  File "/a.py", line 11, in f\n\nassertion failed: [bad n] [2]\n\t [[{{node Assert}}]]'
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo", "one"),
        ("", "ValueError"),
        (" \n", "ValueError"),
        ("No room\nHint: make some", "No room"),
        (IN_KERAS, "bad shape"),
        (BROKEN, "Object Two was created by passing values in `__init__()`. Please mend it."),
        (IN_A_GRAPH, "assertion failed: [bad n] [2]"),
    ],
)
def test_first_line_is_the_complete_reason(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line


@pytest.mark.parametrize(
    ("error", "is_limit"),
    [
        (RuntimeError("can't start new thread"), True),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), True),
        (BlockingIOError(errno.EINPROGRESS, "connecting"), False),
        (BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 0), False),
        (RuntimeError("another"), False),
    ],
)
def test_limit_of_threads_or_processes_says_what_to_raise(error: Exception, is_limit: bool) -> None:
    found = limit_reached(error)
    assert (found is not None) == is_limit
    assert found is None or ("ulimit -u" in str(found) and found.exit_code == 2)
