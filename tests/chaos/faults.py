"""The faults of a run and their times: a plan that is a function of a seed."""

import dataclasses
import math
import random
from collections.abc import Sequence

SIGNALS = ("kill", "stop", "stall", "term", "interrupt")
# They need hosts with their own addresses.
NETWORK = ("drop", "lose", "cut")
KINDS = (*SIGNALS, *NETWORK, "disk")
LAUNCHER = "launcher"

# The timeout of a run that must find stalled tasks.
STALL_TIMEOUT_SECS = 30
# The fraction of faults that come at any time: while tasks start, or before a recovery.
_SHARE_AT_ANY_TIME = 0.25
_ANY_TIME_SECS = 10.0
# Longer than some of TensorFlow's timeouts, shorter than the longest.
_STOP_SECS = (0.5, 5.0)
_NETWORK_SECS = (5.0, 60.0)
_DISK_SECS = (2.0, 10.0)

# The directions in which packets are dropped, seen from the task.
DIRECTIONS = ("from", "to", "both")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of `task` (`worker 1`, or the launcher), and its time.

    Attributes:
        kind: kill is SIGKILL; stop is SIGSTOP, and SIGCONT after `secs`; stall is SIGSTOP without
            SIGCONT; term is SIGTERM; interrupt is Ctrl-C, for the launcher. drop drops the packets
            of a task's host without an error for `secs`; lose does so until that task has ended by
            itself; cut drops the packets between the hosts of two tasks, in both directions, for
            `secs`. disk fills up the file system of the run for `secs`.
        after_step: The fault comes after this step; 0 waits for no step.
        delay_secs: The delay after that step, or after the fault before.
        secs: The duration; infinite for lose, 0 for signals other than stop.
        direction: One of DIRECTIONS, of packets that are dropped; empty for other faults.
        peer: The other task of a cut; empty for other faults.
    """

    kind: str
    task: str
    after_step: int
    delay_secs: float
    secs: float = 0.0
    direction: str = ""
    peer: str = ""


def plan(
    tasks: Sequence[str],
    kinds: Sequence[str],
    num_faults: int,
    every_steps: int,
    seed: str,
    *,
    has_launcher: bool = True,
) -> list[Fault]:
    """Plans `num_faults` faults of `kinds` for `tasks` and the launcher; the last near the end.

    A run of `num_faults * every_steps` steps is long enough for all of them, if it makes no step
    during a fault. Most faults wait for progress since the fault before; the others come at any
    time.
    """
    chance = random.Random(seed)
    faults = []
    for number in range(1, num_faults + 1):
        kind = chance.choice(kinds)
        # Of the other signals to the launcher, each asks the complete run to stop: interrupt does.
        may_be_launcher = has_launcher and kind == "kill"
        task = chance.choice([*tasks, LAUNCHER] if may_be_launcher else tasks)
        if kind == "interrupt":
            task = LAUNCHER
        step, secs = number * every_steps - every_steps // 2, chance.uniform(0, 1)
        if number == num_faults:
            step = number * every_steps - 5
        elif chance.random() < _SHARE_AT_ANY_TIME:
            step, secs = 0, chance.uniform(0, _ANY_TIME_SECS)
        duration, direction, peer = 0.0, "", ""
        if kind == "stop":
            duration = chance.uniform(*_STOP_SECS)
        elif kind == "disk":
            duration = chance.uniform(*_DISK_SECS)
        elif kind in NETWORK:
            # As many between 5 and 10 s as between 30 and 60 s: timeouts are in between.
            duration = math.exp(chance.uniform(*map(math.log, _NETWORK_SECS)))
            direction = chance.choice(DIRECTIONS)
        if kind == "lose":
            duration = math.inf
        elif kind == "cut":
            direction, peer = "both", chance.choice([other for other in tasks if other != task])
        faults.append(Fault(kind, task, step, secs, duration, direction, peer))
    return faults
