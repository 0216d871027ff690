"""Workers on one machine that wait for each other keep to cores of their own.

    shares = core_shares(num_workers)                   # in the launcher
    start(command, env={**env, **core_env(shares[0])})
    keep_to_cores()                                     # in the task, first of all

A step of multiworker ends when the slowest worker's does. Left to the scheduler, a worker that was
woken by another's message often runs on that one's core for a while, and all wait for these two.
"""

import contextlib
import os
from collections.abc import Collection, Mapping

from data.cores import cores
from data.order import share

_VARIABLE = "TRAINER_CORES"


def core_shares(num_tasks: int) -> list[list[int]]:
    """The cores of this process, neighbours together, divided; empty lists if they do not go round.

    By numbers: on most machines those of one socket, or of one cache, are neighbours.
    """
    ours = cores()
    if len(ours) < num_tasks:
        return [[] for _ in range(num_tasks)]
    shares = (share(len(ours), index, num_tasks) for index in range(num_tasks))
    return [ours[mine.start : mine.stop] for mine in shares]


def core_env(cores: Collection[int]) -> Mapping[str, str]:
    """What the environment of a task must have that is to keep to `cores`; of none, to any."""
    return {_VARIABLE: ",".join(map(str, cores))} if cores else {}


def keep_to_cores() -> None:
    """Does so if the environment says it; before threads are started, whose cores are their own."""
    variable = os.environ.pop(_VARIABLE, None)  # Popped: it is not for the task's own children.
    if variable is not None:
        # A core that was taken away meanwhile is no reason not to train.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, map(int, variable.split(",")))
