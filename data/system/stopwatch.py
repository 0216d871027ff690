"""The time of this process, divided into causes: each moment has exactly one.

    stopwatch = Stopwatch(age_of_process())     # its first cause is "start"
    stopwatch.begin(step=0)                     # training begins
    with stopwatch.spend("evaluate"):
        time.sleep(1)
    stopwatch.carve("input wait", 0.2)          # a part of the time since the last change
    reading = stopwatch.read()

Readers of data and executors measure with it, because they know what they wait for.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

# In the order in which people read them.
CAUSES = (
    "start",
    "graph",
    "input wait",
    "compute",
    "sum wait",
    "evaluate",
    "checkpoint",
    "lost steps",
    "dead",
    "stalled",
)
SERVING = "serving"  # Of a server: what the time was spent on follows from the chief's time.


class Reading(NamedTuple):
    """The time of the process so far: `seconds` adds up to its age.

    `cause` is the present cause. Training has begun `begins` times, the last time at `first_step`;
    steps are None before the first time.
    """

    seconds: dict[str, float]
    cause: str
    begins: int
    first_step: int | None
    step: int | None


class Stopwatch:
    """Methods may be called on any thread."""

    def __init__(self, age_secs: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`age_secs` is the age of the process, which counts as "start"."""
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._cause = "start"
        self._since = clock() - age_secs
        self._begins = 0
        self._first_step: int | None = None
        self._step: int | None = None

    def begin(self, step: int | None, cause: str = "compute") -> None:
        """Training begins at `step`, or goes back to it; None in a task that does not train."""
        if not self._begins:
            self.switch(cause)
        self._begins, self._first_step, self._step = self._begins + 1, step, step

    def reach(self, step: int) -> None:
        """Training has done `step` steps."""
        self._step = step

    def switch(self, cause: str) -> str:
        """Begins `cause`; returns the one that ends."""
        with self._lock:
            now, former = self._clock(), self._cause
            self._seconds[former] = self._seconds.get(former, 0.0) + now - self._since
            self._cause, self._since = cause, now
        return former

    @contextlib.contextmanager
    def spend(self, cause: str) -> Iterator[None]:
        """Counts the time in the context as `cause`; before `begin` as "start"."""
        if not self._begins:
            yield
            return
        former = self.switch(cause)
        try:
            yield
        finally:
            self.switch(former)

    def relabel(self, cause: str) -> None:
        """Counts the time since the last change, and from now on, as `cause`."""
        self._cause = cause

    def carve(self, cause: str, seconds: float) -> None:
        """Counts `seconds` of the time since the last change as `cause`."""
        with self._lock:
            seconds = min(max(seconds, 0.0), self._clock() - self._since)
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds
            self._since += seconds

    def read(self) -> Reading:
        """Returns the time so far."""
        with self._lock:
            seconds, cause = dict(self._seconds), self._cause
            seconds[cause] = seconds.get(cause, 0.0) + self._clock() - self._since
            return Reading(seconds, cause, self._begins, self._first_step, self._step)


def age_of_process() -> float:
    """The seconds since this process was made; 0 where the system does not say it."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age: float = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return max(0.0, age)
