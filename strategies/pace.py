"""How long steps take, and how many of them one call of the graph runs."""

import statistics
from collections import deque
from dataclasses import dataclass, field

# `run` and `evaluate` are cut into calls that take about this long. A stop request is seen between
# two calls.
SECS_PER_CALL = 1.0
_RECENT_CALLS = 20


@dataclass
class CallSize:
    """How many steps (or evaluation units) one call runs, so that it takes `SECS_PER_CALL`.

    Under mirrored and multiworker the duration is that of the previous call: it is summed over the
    tasks in the graph of a call, before the duration of this call is known.
    """

    size: int = 1

    def adapt(self, size: int, seconds: float) -> None:
        """Adapts to a call of `size` that took `seconds`: the same in all tasks.

        Grows only by doubling: the first duration includes tracing and predicts little.
        """
        if seconds < SECS_PER_CALL / 2 and size == self.size:
            self.size *= 2
        elif seconds > SECS_PER_CALL:
            self.size = max(1, size // 2)


@dataclass
class Pace:
    """The steps of this process and the time in them, without the calls that compiled a graph.

    Attributes:
        num_steps: Steps in all other calls.
        seconds: The time in these calls.
        input_secs: The part of `seconds` in which steps waited for input; 0 if it is not known.
        recent: The steps and the time of each of the last calls.
    """

    num_steps: int = 0
    seconds: float = 0.0
    input_secs: float = 0.0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT_CALLS))

    def add(self, num_steps: int, seconds: float, input_secs: float = 0.0) -> None:
        """Counts a call of `num_steps` steps that took `seconds`, with its wait for input."""
        self.num_steps += num_steps
        self.seconds += seconds
        self.input_secs += input_secs
        self.recent.append((num_steps, seconds))

    def secs_per_step(self) -> float | None:
        """The median of the recent calls: a call that waited for a restart does not count."""
        if not self.recent:
            return None
        return statistics.median(seconds / num_steps for num_steps, seconds in self.recent)
