"""Opens a port that a process which is just ending may still have.

listener = when_released(lambda: socket.create_server(("127.0.0.1", 9100)))
"""

import errno
import socket
import time
from collections.abc import Callable

_FORMER_USER_SECS = 3.0


def when_released(open_port: Callable[[], socket.socket]) -> socket.socket:
    """Returns the socket of `open_port`, which is tried anew for some seconds if a port is in use.

    A process that was killed a moment ago, such as the one before a restart, may still have it.

    Raises:
        OSError: the port is in use, or cannot be used.
    """
    deadline = time.monotonic() + _FORMER_USER_SECS
    while True:
        try:
            return open_port()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
