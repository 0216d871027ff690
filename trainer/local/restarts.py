"""Limits how often the tasks of a run are restarted.

    restarts = Restarts(3, lambda: progress_of(model_dir))     # trainer/run_files.py
    delay_secs = restarts.next_delay_secs(num_short_lives=0)   # None: too often without progress

A run that makes progress is always restarted. Progress is a checkpoint, or a report, of a later
step than all before. A run that is always killed at the same step makes none.
"""

import time
from collections import deque
from collections.abc import Callable

from trainer.run_files import Progress

_WINDOW_SECS = 600.0  # A restart without progress counts for this long.
_FIRST_DELAY_SECS = 1.0  # The delay of the second restart. The first has none; later ones double.
_MAX_DELAY_SECS = 30.0


class Restarts:
    """Counts restarts without progress.

    Attributes:
        num_without_progress: The restarts since the last progress, with the one counted last.
    """

    def __init__(
        self,
        max_restarts: int,
        progress: Callable[[], Progress],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allows `max_restarts` within 10 minutes. Calls `progress` now and before each restart."""
        self.max_restarts = max_restarts
        self._progress = progress
        self._clock = clock
        self._best = progress()
        self._times: deque[tuple[float, bool]] = deque()  # And whether it counts.
        self.num_without_progress = 0

    def next_delay_secs(self, num_short_lives: int, *, counts: bool = True) -> float | None:
        """Counts a restart and returns its delay; returns None if the limit is reached.

        `num_short_lives` says how many times in a row, before this, the task died soon after its
        start. It lengthens the delay even if the run makes progress without the task. Without
        `counts` the restart lengthens later delays, but the limit is not for it.
        """
        now, (saved, reported) = self._clock(), self._progress()
        if saved > self._best[0] or reported > self._best[1]:
            self._times.clear()
            self._best = (max(saved, self._best[0]), max(reported, self._best[1]))
        while self._times and now - self._times[0][0] > _WINDOW_SECS:
            self._times.popleft()
        num_before = len(self._times)
        if counts and sum(counted for _, counted in self._times) >= self.max_restarts:
            return None
        self._times.append((now, counts))
        self.num_without_progress = num_before + 1
        num_consecutive = min(10, max(num_before, num_short_lives))
        delay_secs = _FIRST_DELAY_SECS * 2.0 ** (num_consecutive - 1)
        return min(_MAX_DELAY_SECS, delay_secs) if num_consecutive else 0.0
