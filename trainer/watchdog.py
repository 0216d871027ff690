"""A task that is alive but does not move is found, says where it stands, and ends.

    with Watchdog(300, on_stall=end) as watchdog:
        executor.on_progress = watchdog.moved       # after each call of the graph

Blocked input, a deadlock, a collective that waits for a peer: nothing raises, and without this a
run stands still until somebody looks. TensorFlow mostly waits outside Python, so a thread can
watch; where Python's lock is held and no thread runs, the process ends all the same, with 1.
"""

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

# Before the first steps are done they are traced and compiled.
_START_FACTOR = 4.0
# Of the time that is allowed, when the first warning comes.
_WARN_AT = 0.5
_LOOKS = 20


class Watchdog:
    """A context in which `moved` must be called every now and then."""

    def __init__(self, timeout_secs: float, on_stall: Callable[[str], None]) -> None:
        """After `timeout_secs` without `moved`, calls `on_stall` with a message, on its own thread.

        The first call of `moved` may take 4 times as long. 0 never calls. Half way there is a
        warning; before `on_stall`, the Python stacks of all threads go to standard error.
        """
        self._timeout_secs = timeout_secs
        self._on_stall = on_stall
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._moved_at: float | None = None
        self._since = 0.0

    def __enter__(self) -> Self:
        """Begins to watch."""
        self._since = time.monotonic()
        if self._timeout_secs:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Watches no more."""
        self._done.set()
        if self._thread:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def moved(self) -> None:
        """Says that something was done."""
        self._moved_at = time.monotonic()

    def _watch(self) -> None:
        has_warned = False
        while not self._done.wait(self._timeout_secs / _LOOKS):
            # Its own thread needs no lock. It is set anew at each look, so it never comes to that
            # while this thread runs.
            faulthandler.dump_traceback_later(_START_FACTOR * self._timeout_secs, exit=True)
            moved_at = self._moved_at
            allowed_secs = self._timeout_secs * (_START_FACTOR if moved_at is None else 1.0)
            still_secs = time.monotonic() - (self._since if moved_at is None else moved_at)
            what = "no step was done" if moved_at is None else "nothing moved"
            if still_secs >= allowed_secs:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._on_stall(f"{what} for {still_secs:.0f} s (--stall_timeout_secs)")
                return
            if still_secs < allowed_secs * _WARN_AT:
                has_warned = False
            elif not has_warned:
                has_warned = True
                log.warning(
                    "%s for %.0f s; ending when it is %.0f s.", what, still_secs, allowed_secs
                )
