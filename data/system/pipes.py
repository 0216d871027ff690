"""Output that nobody reads any more: of a program such as `head` or a pager, of a closed terminal.

    with ends_with_reader():
        app.run(main)
    with outlives_terminal():
        train()

With `ends_with_reader` the command ends without a message, and with the exit code that a shell
gives to SIGPIPE; after Ctrl-C with one line, and the exit code of SIGINT. With `outlives_terminal`
it goes on.
"""

import contextlib
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from typing_extensions import override

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXIT_WITHOUT_READER = 128 + signal.SIGPIPE
EXIT_INTERRUPTED = 128 + signal.SIGINT


@contextlib.contextmanager
def ends_with_reader() -> Iterator[None]:
    """Ends this process if what it prints cannot be read any more, and after Ctrl-C."""
    try:
        try:
            yield
        except SystemExit:
            if sys.stdout is not None:
                sys.stdout.flush()  # Otherwise the exit of Python does it, and prints a message.
            raise
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
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


@contextlib.contextmanager
def outlives_terminal() -> Iterator[None]:
    """Within it, writes of Python to a terminal that was closed have no effect and raise no error.

    The terminal may be closed at any moment, also before this process gets SIGHUP.
    """
    former = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = former


class _Terminal(io.FileIO):
    @override
    def write(self, content: "ReadableBuffer") -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(memoryview(content))


def _outliving(stream: TextIO | Any) -> TextIO | Any:  # None if it is closed.
    if stream is None or not stream.isatty():
        return stream
    buffer = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
