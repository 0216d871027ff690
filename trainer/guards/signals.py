"""SIGTERM, Ctrl-C, SIGHUP: the first requests a stop with state saved, a second one ends at once.

    with StopSignals() as signals:
        executor = connect()                    # A signal here ends the process: no state to save.
        signals.on_stop(executor.request_stop, grace_secs=25)   # A signal after this calls it.
        signals.on_peer_lost(lambda: peers.abandon("lost"))     # SIGUSR1 calls it.

SIGHUP says that the terminal was closed or the connection of ssh was lost. It never counts as the
second signal: it may follow a Ctrl-C, and the shell may send it again. Nor does SIGXCPU, which the
kernel sends each second after a limit of CPU time.

Python runs signal handlers between bytecodes of the main thread. So none runs while TensorFlow
waits there for a peer. Nor does one run while the main thread waits for a lock or a process, if the
kernel has given the signal to another thread. But the interpreter's wake-up descriptor is written
at once: a thread reads it (`SignalThread`).
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Self

from typing_extensions import override

from trainer.exit_codes import EXIT_RESTART

log = logging.getLogger(__name__)

# Signals this soon after the first one repeat it: a terminal and a wrapper may both send it.
_REPETITION_SECS = 0.5


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask for a stop. Without SIGHUP if it is ignored, as under `nohup`."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    hangup = () if is_ignored else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, *hangup)


class SignalThread:
    """While the context is open, `callback` is called on a thread with the number of each signal.

    Signals that repeat the first one are left out. Used in the main thread. The callback must not
    wait for that thread. If it raises an error, the process ends with 75, because later signals
    would have no effect.
    """

    def __init__(
        self,
        numbers: Collection[int],
        callback: Callable[[int], None],
        also_read: Collection[int] = (),
    ) -> None:
        """Sets the handlers of `numbers`.

        The caller sets the handlers of `also_read`, of which none is a repetition.
        """
        self._numbers = numbers
        self._callback = callback
        self._also_read = also_read
        self._first_at: float | None = None

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno())
        self._previous_handlers = {number: signal.getsignal(number) for number in self._numbers}
        self.set_handlers()
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        # In this order no signal is lost: each one has a handler that acts, or is read.
        for number, handler in self._previous_handlers.items():
            # None: it was not of Python, which cannot set it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._thread.join()

    def set_handlers(self) -> None:
        """Sets handlers that do nothing, since the thread acts."""
        for number in self._numbers:
            signal.signal(number, lambda *_: None)

    def _read(self) -> None:
        while numbers := self._reader.recv(1):
            if self._is_due(numbers[0]):
                try:
                    self._callback(numbers[0])
                except BaseException:
                    with contextlib.suppress(OSError):  # Nobody may read standard error.
                        traceback.print_exc()
                    os._exit(EXIT_RESTART)
        self._reader.close()

    def _is_due(self, number: int) -> bool:
        """Returns True if the callback is called for the signal `number`, which came now."""
        if number not in self._numbers:
            return number in self._also_read
        if self._first_at is None:
            self._first_at = time.monotonic()
            return True
        is_late = time.monotonic() - self._first_at >= _REPETITION_SECS
        return is_late and number not in (signal.SIGHUP, signal.SIGXCPU)


class StopSignals(SignalThread):
    """Handles stop signals while the context is open. Used in the main thread."""

    def __init__(self) -> None:
        super().__init__(stop_signals(), self._on_signal, also_read=[signal.SIGUSR1])
        self._stop: Callable[[], None] | None = None
        self._peer_lost: Callable[[], object] | None = None
        self._grace_secs = 0.0
        self._overdue: threading.Timer | None = None
        self._is_stop_requested = False

    def on_stop(self, stop: Callable[[], None], grace_secs: float) -> None:
        """From now on, the first signal calls `stop` on another thread.

        The process ends `grace_secs` after that signal, even if the stop is not complete.
        """
        self._stop, self._grace_secs = stop, grace_secs
        # Again, because the coordination service of a multiworker cluster replaces SIGTERM's.
        self.set_handlers()

    def on_peer_lost(self, callback: Callable[[], object] | None) -> None:
        """From now on, SIGUSR1 calls `callback` on another thread.

        None, as at first: SIGUSR1 ends the process at once.
        """
        self._peer_lost = callback
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if callback is None else lambda *_: None)

    @override
    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if self._overdue is not None:
            self._overdue.cancel()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            if callback := self._peer_lost:
                threading.Thread(target=callback, name="peer lost", daemon=True).start()
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
