"""The faults of a run and their times: a plan that is a function of a seed."""

import dataclasses
import random
from collections.abc import Sequence

KINDS = ("kill", "stop", "stall", "term")
LAUNCHER = "launcher"

# The timeout of a run that must find stalled tasks.
STALL_TIMEOUT_SECS = 30
# The fraction of faults that come at any time: while tasks start, or before a recovery.
_SHARE_AT_ANY_TIME = 0.25
_ANY_TIME_SECS = 10.0
# Longer than some of TensorFlow's timeouts, shorter than the longest.
_STOP_SECS = (0.5, 5.0)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of `task` (`worker 1`, or the launcher), and its time.

    Attributes:
        kind: kill is SIGKILL; stop is SIGSTOP, and SIGCONT after `stop_secs`; stall is SIGSTOP
            without SIGCONT; term is SIGTERM.
        after_step: The fault comes after this step; 0 waits for no step.
        delay_secs: The delay after that step, or after the fault before.
        stop_secs: The duration of a stop.
    """

    kind: str
    task: str
    after_step: int
    delay_secs: float
    stop_secs: float = 0.0


def plan(
    tasks: Sequence[str], kinds: Sequence[str], num_faults: int, every_steps: int, seed: str
) -> list[Fault]:
    """Plans `num_faults` faults of `kinds` for `tasks` and the launcher; the last near the end.

    A run of `num_faults * every_steps` steps is long enough for all of them. Most faults wait for
    progress since the fault before; the others come at any time.
    """
    chance = random.Random(seed)
    faults = []
    for number in range(1, num_faults + 1):
        kind = chance.choice(kinds)
        # Only SIGKILL goes to the launcher: any other signal to it asks the complete run to stop.
        task = chance.choice([*tasks, LAUNCHER] if kind == "kill" else tasks)
        step, secs = number * every_steps - every_steps // 2, chance.uniform(0, 1)
        if number == num_faults:
            step = number * every_steps - 5
        elif chance.random() < _SHARE_AT_ANY_TIME:
            step, secs = 0, chance.uniform(0, _ANY_TIME_SECS)
        stop_secs = chance.uniform(*_STOP_SECS) if kind == "stop" else 0.0
        faults.append(Fault(kind, task, step, secs, stop_secs))
    return faults
