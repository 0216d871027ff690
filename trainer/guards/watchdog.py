"""Ends a task that is alive but makes no progress, and writes down where it is stuck.

    with Watchdog(300, on_stall=end) as watchdog:
        executor.on_progress = watchdog.moved       # after each call of the graph

Blocked input, a deadlock or a collective that waits for a peer raises no error, and the run would
hang until somebody looks. TensorFlow mostly waits outside Python, so a Python thread can watch. If
native code holds Python's interpreter lock, so that no thread runs, the process ends with 1.
"""

import contextlib
import faulthandler
import logging
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)

_START_FACTOR = 4.0  # The first steps take longer: their graph is traced and compiled.
_WARN_AT = 0.5  # The fraction of the time-out after which a warning is logged.
_POLLS_PER_TIMEOUT = 20
_KEPT_FILES = 10


class Watchdog:
    """Watches while its context is open; `moved` must be called after each piece of progress."""

    def __init__(self, timeout_secs: float, on_stall: Callable[[str], None]) -> None:
        """Calls `on_stall` with a message if `moved` was not called for `timeout_secs`; 0: never.

        The first call of `moved` may take 4 times as long. After half of the time a warning is
        logged. Before `on_stall`, which runs on the watchdog's thread, the Python stacks of all
        threads are written to a file, which is logged.
        """
        self._timeout_secs = timeout_secs
        self._on_stall = on_stall
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._moved_at: float | None = None

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        if self._timeout_secs:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        if self._timeout_secs:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def moved(self) -> None:
        """Reports progress. Called on any thread."""
        self._moved_at = time.monotonic()

    def _watch(self) -> None:
        has_warned = False
        while not self._done.wait(self._timeout_secs / _POLLS_PER_TIMEOUT):
            # faulthandler ends the process from a native thread, without the interpreter lock.
            # Each call replaces the one before, so this happens only if this thread cannot run.
            faulthandler.dump_traceback_later(_START_FACTOR * self._timeout_secs, exit=True)
            if (moved_at := self._moved_at) is None:
                what, since, factor = "no step was completed", self._since, _START_FACTOR
            else:
                what, since, factor = "no progress", moved_at, 1.0
            allowed_secs, idle_secs = self._timeout_secs * factor, time.monotonic() - since
            if idle_secs >= allowed_secs:
                _write_stacks()
                self._on_stall(f"{what} for {idle_secs:.0f} s (--stall_timeout_secs)")
                return
            if idle_secs < allowed_secs * _WARN_AT:
                has_warned = False
            elif not has_warned:
                has_warned = True
                log.warning(
                    "%s for %.0f s. This task ends after %.0f s (--stall_timeout_secs).",
                    what,
                    idle_secs,
                    allowed_secs,
                )


def _write_stacks() -> None:
    """Writes a file, and removes those of earlier stalls: the newest _KEPT_FILES stay."""
    # A local file: the file system of the run may be what does not answer.
    prefix = "trainer-stacks-"
    try:
        earlier = list(Path(tempfile.gettempdir()).glob(f"{prefix}*.txt"))
        with contextlib.suppress(OSError):  # Removed meanwhile, or of another user.
            earlier.sort(key=lambda path: path.stat().st_mtime, reverse=True)
            for path in earlier[_KEPT_FILES - 1 :]:
                path.unlink()
        with tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=".txt", delete=False) as out:
            out.write(_stacks())
    except OSError as error:  # The disk is full.
        log.warning("The stacks of the threads could not be written: %s", error)
    else:
        log.error("The stacks of the threads of this task are in %s", out.name)


def _stacks() -> str:
    """The Python stack of each thread, the main thread first.

    faulthandler's own list has no names, and ends after 100 threads: the main thread, which is
    the oldest, would be missing in the chief of a large cluster.
    """
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"Thread {names.get(ident, ident)} (most recent call last):\n"
        + "".join(traceback.format_stack(frame))
        for ident, frame in frames
    )
