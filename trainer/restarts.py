"""How often a run may be started again.

    restarts = Restarts(3, lambda: progress_of(model_dir))     # trainer/progress.py
    delay_secs = restarts.next_delay_secs(0)    # None: too often without progress

A restart is worth it as long as the run gets further. Progress is a checkpoint of a step that had
none, or a report of a step beyond all that were reported before: a run that is always killed at the
same step makes none, however much it repeats.
"""

import time
from collections import deque
from collections.abc import Callable

from trainer.progress import Progress

# How long a restart without progress is held against a run.
_WINDOW_SECS = 600.0
# The first of a row comes at once.
_FIRST_DELAY_SECS = 1.0
_MAX_DELAY_SECS = 30.0


class Restarts:
    """Counts restarts in which nothing was gained.

    Attributes:
        max_restarts: How many there may be within 10 minutes.
    """

    def __init__(
        self,
        max_restarts: int,
        progress: Callable[[], Progress],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`progress` looks at the run, now and whenever a restart is due; `clock` gives seconds."""
        self.max_restarts = max_restarts
        self._progress = progress
        self._clock = clock
        self._best = progress()
        self._times: deque[float] = deque()

    def next_delay_secs(self, num_short_lives: int) -> float | None:
        """Counts the restart that is due, and says in how many seconds; None if it is too much.

        `num_short_lives`: how often in a row the task has died soon after its start before. The run
        may get further without it, but it should not be started over and over.
        """
        now, (saved, reported) = self._clock(), self._progress()
        if saved > self._best[0] or reported > self._best[1]:
            self._times.clear()
            self._best = (max(saved, self._best[0]), max(reported, self._best[1]))
        while self._times and now - self._times[0] > _WINDOW_SECS:
            self._times.popleft()
        num_before = len(self._times)
        if num_before >= self.max_restarts:
            return None
        self._times.append(now)
        in_a_row = max(num_before, num_short_lives)
        if not in_a_row:
            return 0.0
        return min(_MAX_DELAY_SECS, _FIRST_DELAY_SECS * 2.0 ** min(10, in_a_row - 1))
