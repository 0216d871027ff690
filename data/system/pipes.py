"""Standard output into a program that ends first, such as `head` or a pager.

    with ends_with_reader():
        app.run(main)

The command then ends without a message, and with the exit code that a shell gives to SIGPIPE.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

EXIT_WITHOUT_READER = 128 + signal.SIGPIPE


@contextlib.contextmanager
def ends_with_reader() -> Iterator[None]:
    """Ends this process if what it prints cannot be read any more."""
    try:
        try:
            yield
        except SystemExit:
            if sys.stdout is not None:
                sys.stdout.flush()  # Otherwise the exit of Python does it, and prints a message.
            raise
    except BrokenPipeError:
        if not is_reader_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_WITHOUT_READER)


def is_reader_gone() -> bool:
    """Returns True if standard output is a pipe that has no reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
