"""Limits how often the tasks of a run are restarted.

    restarts = Restarts(3, lambda: progress_of(model_dir))     # trainer/run_files.py
    delay_secs = restarts.next_delay_secs(end)                 # None: too often without progress

A run that makes progress is always restarted. Progress is a checkpoint, or a report, of a later
step than all before. A run that is always killed at the same step makes none.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from strategies.cluster.tf_config import Task
from trainer.exit_codes import EXIT_RESTART
from trainer.local.deaths import TaskEnd
from trainer.run_files import Progress

_WINDOW_SECS = 600.0  # A restart without progress counts for this long.
_FIRST_DELAY_SECS = 1.0  # The delay of the second restart. The first has none; later ones double.
_MAX_DELAY_SECS = 30.0
_SHORT_LIFE_SECS = 10.0  # A task that died sooner has not trained.


@dataclass
class Restarts:
    """Counts restarts without progress."""

    max_restarts: int  # That are allowed within 10 minutes.
    progress: Callable[[], Progress]  # Called now and before each restart.
    clock: Callable[[], float] = time.monotonic
    num_without_progress: int = 0  # Restarts since the last progress, including the newest.

    def __post_init__(self) -> None:
        self._best = self.progress()
        self._times: deque[tuple[float, bool]] = deque()  # Of restarts, with `counts`.
        self._num_short_lives: Counter[Task] = Counter()  # Consecutive ones.

    def next_delay_secs(self, end: TaskEnd, *, counts: bool = True) -> float | None:
        """Counts the restart after `end`, and returns its delay; None if the limit is reached.

        A task that repeatedly dies soon after its start is delayed even if the run makes progress
        without it. If `counts` is False, the restart lengthens later delays, but has no limit.
        """
        is_short = end.seconds <= _SHORT_LIFE_SECS
        num_short_lives = self._num_short_lives[end.task] if is_short else 0
        # After an exit with 75 the cause is another task. But a ps worker that often ends with 75
        # is the cause itself: the run makes progress without it.
        is_cause = end.exit_code != EXIT_RESTART or end.is_ps_worker
        self._num_short_lives[end.task] = num_short_lives + (is_short and is_cause)
        now, (saved, reported) = self.clock(), self.progress()
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
