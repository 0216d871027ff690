import errno

import pytest

from data.system.linux import limit_reached
from trainer.exit_codes import first_line


def test_first_line_is_the_reason() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError(" \n")) == "ValueError"


def test_first_line_of_a_keras_error_is_its_reason() -> None:
    text = (
        "Exception encountered when calling Dense.call().\n\n\x1b[1mbad shape\x1b[0m\n\nArguments"
    )
    assert first_line(ValueError(text)) == "bad shape"


def test_sentence_that_is_broken_into_lines_is_complete() -> None:
    text = (
        "\nObject Two was created by passing\nvalues in `__init__()`. Please\nmend it.\n\nExample:"
    )
    whole = "Object Two was created by passing values in `__init__()`. Please mend it."
    assert first_line(ValueError(text)) == whole
    assert first_line(ValueError("No room\nHint: make some")) == "No room"


def test_first_line_of_an_error_of_a_graph_is_its_reason() -> None:
    text = (
        "Graph execution error:\n\nDetected at node Assert defined at (most recent call last):\n"
        '  File "/a.py", line 11, in f\n\nassertion failed: [bad n] [2]\n\t [[{{node Assert}}]]'
    )
    assert first_line(ValueError(text)) == "assertion failed: [bad n] [2]"


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
