"""Which faults come when: a plan that a seed decides, and the signals that carry it out."""

import dataclasses
import random
from collections.abc import Sequence

KINDS = ("kill", "stop", "stall", "term")
LAUNCHER = "launcher"

# Of a run that must find stalled tasks.
STALL_TIMEOUT_SECS = 30
# While tasks start, or before anything has recovered.
_SHARE_AT_ANY_TIME = 0.25
_ANY_TIME_SECS = 10.0
# Longer than some of TensorFlow's patience, shorter than all of it.
_STOP_SECS = (0.5, 5.0)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to `task`, `worker 1` or the launcher, and when.

    Attributes:
        kind: kill is SIGKILL; stop is SIGSTOP, and SIGCONT after `stop_secs`; stall is SIGSTOP for
            good; term is SIGTERM.
        after_step: The first step after which it comes; 0 waits for none.
        delay_secs: How long after that step, or else after the former fault.
        stop_secs: Of a stop.
    """

    kind: str
    task: str
    after_step: int
    delay_secs: float
    stop_secs: float = 0.0


def plan(
    tasks: Sequence[str], kinds: Sequence[str], num_faults: int, every_steps: int, seed: str
) -> list[Fault]:
    """`num_faults` faults of `kinds` that meet `tasks` and the launcher; the last at the end.

    A run of `num_faults * every_steps` steps lasts until they are over. Most faults wait until it
    has made progress; the others come whenever they come.
    """
    chance = random.Random(seed)
    faults = []
    for number in range(1, num_faults + 1):
        kind = chance.choice(kinds)
        # A signal to the launcher ends the run for good, or is not its own to survive.
        task = chance.choice([*tasks, LAUNCHER] if kind == "kill" else tasks)
        step, secs = number * every_steps - every_steps // 2, chance.uniform(0, 1)
        if number == num_faults:
            step = number * every_steps - 5
        elif chance.random() < _SHARE_AT_ANY_TIME:
            step, secs = 0, chance.uniform(0, _ANY_TIME_SECS)
        stop_secs = chance.uniform(*_STOP_SECS) if kind == "stop" else 0.0
        faults.append(Fault(kind, task, step, secs, stop_secs))
    return faults
