"""Calls on a thread that no exit of the process waits for.

arrived = in_background(lambda: summed(changes))
...
arrived.result()
"""

import concurrent.futures
import threading
from collections.abc import Callable
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
