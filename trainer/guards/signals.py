"""SIGTERM and Ctrl-C: the first requests a stop with state saved, a second one ends at once.

    with StopSignals() as signals:
        executor = connect()                    # A signal here ends the process: no state to save.
        signals.on_stop(executor.request_stop, grace_secs=30)   # A signal after this calls it.
        signals.on_peer_lost(executor.abandon_peers)            # SIGUSR1 calls it.

Python runs signal handlers between bytecodes of the main thread, so none runs while TensorFlow
waits there for a peer, or while it waits for a lock or for another process and the kernel has
delivered the signal to another thread. The interpreter's wake-up descriptor is written at once, and
a thread reads it (`SignalThread`).
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Self

from trainer.exit_codes import EXIT_RESTART

log = logging.getLogger(__name__)

_STOP = (signal.SIGTERM, signal.SIGINT)


# Signals this soon after the first one repeat it: a terminal and a wrapper may both send it.
_REPETITION_SECS = 0.5


class Repetitions:
    """Tells signals that repeat the first one from later ones."""

    def __init__(self) -> None:
        self._first: float | None = None

    def includes_now(self) -> bool:
        """Called for each signal: returns True if it repeats the first one."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return now - self._first < _REPETITION_SECS


class SignalThread:
    """While the context is open, `callback` is called on a thread with the number of each signal.

    Used in the main thread. It sets the handlers of `numbers`. Others set the handlers of `more`.
    """

    def __init__(
        self,
        numbers: Collection[int],
        callback: Callable[[int], None],
        more: Collection[int] = (),
    ) -> None:
        self._numbers = numbers
        self._callback = callback
        self._more = more

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno())
        self._previous_handlers = {number: signal.getsignal(number) for number in self._numbers}
        self.set_handlers()
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._writer.close()

    def set_handlers(self) -> None:
        """Sets handlers that do nothing, since the thread acts."""
        for number in self._numbers:
            signal.signal(number, lambda *_: None)

    def _read(self) -> None:
        while numbers := self._reader.recv(1):
            if numbers[0] in self._numbers or numbers[0] in self._more:
                self._callback(numbers[0])
        self._reader.close()


class StopSignals:
    """Handles stop signals while the context is open. Used in the main thread."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._peer_lost: Callable[[], object] | None = None
        self._repetitions = Repetitions()
        self._grace_secs = 0.0
        self._overdue: threading.Timer | None = None
        self._is_stop_requested = False
        self._thread = SignalThread(_STOP, self._on_signal, more=[signal.SIGUSR1])

    def on_stop(self, stop: Callable[[], None], grace_secs: float) -> None:
        """From now on, the first signal calls `stop` on another thread.

        The process ends `grace_secs` after that signal, even if the stop is not complete.
        """
        self._stop, self._grace_secs = stop, grace_secs
        # Again, because the coordination service of a multiworker cluster replaces SIGTERM's.
        self._thread.set_handlers()

    def on_peer_lost(self, callback: Callable[[], object] | None) -> None:
        """From now on, SIGUSR1 calls `callback` on another thread.

        None, as at first: SIGUSR1 ends the process at once.
        """
        self._peer_lost = callback
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if callback is None else lambda *_: None)

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        self._thread.__exit__(*exc_info)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            if callback := self._peer_lost:
                threading.Thread(target=callback, name="peer lost", daemon=True).start()
            return
        if self._repetitions.includes_now():
            return
        name = signal.Signals(number).name
        if self._is_stop_requested or self._stop is None:
            log.warning("%s: this task ends at once.", name)
            os._exit(EXIT_RESTART)
        log.warning(
            "%s: this task saves and ends after the steps in flight. Send the signal again to "
            "end it at once.",
            name,
        )
        self._is_stop_requested = True
        self._overdue = threading.Timer(self._grace_secs, self._end_overdue, [name])
        self._overdue.daemon = True
        self._overdue.start()
        threading.Thread(target=self._stop, name="stop", daemon=True).start()

    def _end_overdue(self, name: str) -> None:
        log.warning(
            "The stop was not complete %g s after %s (--grace_secs), so this task ends now. "
            "Checkpoints that were saved before are complete.",
            self._grace_secs,
            name,
        )
        os._exit(EXIT_RESTART)
