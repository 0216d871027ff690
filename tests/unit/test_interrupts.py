"""Signals while `trainer.train` runs in the user's process."""

import logging
import os
import signal
import threading

import pytest

from trainer.api import here
from trainer.api.here import Interrupts


def test_first_signal_requests_a_stop_and_does_not_print_in_the_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The handler may have interrupted a print of the main thread: Python refuses a print in it.
    printed = threading.Event()
    threads: list[threading.Thread] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            threads.append(threading.current_thread())
            printed.set()

    monkeypatch.setattr(here.log, "handlers", [Handler()])
    stops: list[None] = []
    with Interrupts() as handlers:
        handlers.on_stop(lambda: stops.append(None), grace_secs=0)
        os.kill(os.getpid(), signal.SIGINT)
        assert printed.wait(60)
        assert len(stops) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert threading.main_thread() not in threads
