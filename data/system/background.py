"""Calls on a thread that no exit of the process waits for.

arrived = in_background(lambda: summed(changes))
...
arrived.result()

with repeating(upload, every_secs=10.0):
    ...
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

_Result = TypeVar("_Result")


def in_background(function: Callable[[], _Result]) -> concurrent.futures.Future[_Result]:
    """The future result of `function`, on a daemon thread: it does not delay the process's end."""
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextlib.contextmanager
def repeating(action: Callable[[], object], every_secs: float) -> Iterator[None]:
    """Calls `action` every `every_secs` on a daemon thread while the context is open.

    The first call comes after `every_secs`. The end of the context waits for the call in progress.
    """
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_secs):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
