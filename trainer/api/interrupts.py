"""Ctrl-C, SIGTERM and SIGHUP while `trainer.train` runs in the user's process.

    with Interrupts() as interrupts:
        interrupts.on_stop(executor.request_stop, grace_secs=0)

The first signal stops training at a step, with its state saved; the next one, and any before
training, has its usual effect: KeyboardInterrupt, for example. The process is never ended here, and
the handlers are set back at the end.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from typing_extensions import override

from trainer.guards.signals import StopSignals, stop_signals

log = logging.getLogger(__name__)


class Interrupts(StopSignals):
    """Python's own handlers: they run between two calls of the graph, about once a second.

    In another thread than the main thread signals cannot be handled, and nothing is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self._request: Callable[[], None] | None = None
        self._is_main = threading.current_thread() is threading.main_thread()
        self._former: dict[int, signal._HANDLER] = {}

    @override
    def on_stop(self, stop: Callable[[], None], grace_secs: float) -> None:
        self._request = stop

    @override
    def __enter__(self) -> "Interrupts":
        if self._is_main:
            for number in stop_signals():
                self._former[number] = signal.signal(number, self._handle)
        return self

    @override
    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._is_stop_requested:
            return
        if self._request is None:
            signal.signal(number, self._former[number])
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        text = "%s: training stops after this step, and saves. Again: it ends at once."
        # On a thread: this handler may have interrupted a print, and Python refuses a second one.
        threading.Thread(target=log.warning, args=(text, name)).start()
        self._is_stop_requested = True
        self._request()
        self._request = None
