"""SIGTERM and Ctrl-C: the first asks for a stop with state saved, the second ends at once.

    with StopSignals() as signals:
        executor = connect()                    # a signal here ends the process: nothing to save
        signals.on_stop(executor.request_stop, grace_secs=30)   # from here on it asks

Python runs signal handlers between bytecodes of the main thread, so never while TensorFlow waits
there for a peer. The interpreter's wake-up descriptor is written at once; a thread reads it.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from trainer.exits import EXIT_RESTART

log = logging.getLogger(__name__)

_STOP = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context in which stop signals are handled; made in the main thread."""

    def __init__(self) -> None:
        """Handles nothing yet."""
        self._stop: Callable[[], None] | None = None
        self._grace_secs = 0.0
        self._overdue: threading.Timer | None = None

    def on_stop(self, stop: Callable[[], None], grace_secs: float) -> None:
        """From now on the first signal calls `stop`, on another thread.

        `grace_secs` later the process ends, whatever it does.
        """
        self._stop = stop
        self._grace_secs = grace_secs
        # Again: the coordination service of a multiworker cluster has taken SIGTERM for itself.
        self._take_over()

    def __enter__(self) -> Self:
        """Takes the signals over."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno())
        self._former = self._take_over()
        threading.Thread(target=self._watch, name="stop signals", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the signals back."""
        if self._overdue is not None:
            self._overdue.cancel()
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._writer.close()

    def _take_over(self) -> dict[signal.Signals, Any]:
        """Handlers that do nothing: what is done follows from the wake-up descriptor."""
        return {number: signal.signal(number, lambda *_: None) for number in _STOP}

    def _watch(self) -> None:
        asked = False
        while numbers := self._reader.recv(1):
            if numbers[0] not in _STOP:
                continue
            name = signal.Signals(numbers[0]).name
            if asked or self._stop is None:
                log.warning("%s: ending at once.", name)
                os._exit(EXIT_RESTART)
            log.warning("%s: stopping after the steps under way; again to end at once.", name)
            asked = True
            self._overdue = threading.Timer(self._grace_secs, self._end_overdue, [name])
            self._overdue.daemon = True
            self._overdue.start()
            threading.Thread(target=self._stop, name="stop", daemon=True).start()
        self._reader.close()

    def _end_overdue(self, name: str) -> None:
        log.warning(
            "not done %g s after %s (--grace_secs): ending; what was saved before is whole.",
            self._grace_secs,
            name,
        )
        os._exit(EXIT_RESTART)
