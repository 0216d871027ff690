"""Workers on one machine that wait for each other keep to cores of their own.

    shares = core_shares(num_workers)                   # in the launcher
    start(command, env={**env, **core_env(shares[0])})
    keep_to_cores()                                     # in the task, first of all

A step of multiworker ends when the slowest worker's does. Left to the scheduler, a worker that was
woken by another's message often runs on that one's core for a while, and all wait for these two.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Collection, Mapping

from data.cores import cores

_VARIABLE = "TRAINER_CORES"


def core_shares(num_tasks: int) -> list[list[int]]:
    """The cores of this process, neighbours together, divided; empty lists if they do not go round.

    By numbers: on most machines those of one socket, or of one cache, are neighbours.
    """
    ours = cores()
    if len(ours) < num_tasks:
        return [[] for _ in range(num_tasks)]
    ends = [index * len(ours) // num_tasks for index in range(num_tasks + 1)]
    return [ours[first:end] for first, end in itertools.pairwise(ends)]


def core_env(cores: Collection[int]) -> Mapping[str, str]:
    """What the environment of a task must have that is to keep to `cores`; of none, to any."""
    return {_VARIABLE: ",".join(map(str, cores))} if cores else {}


def keep_to_cores() -> None:
    """Does so if the environment says it; so do all threads that are there, and those to come."""
    variable = os.environ.pop(_VARIABLE, None)  # Popped: it is not for the task's own children.
    if variable is None:
        return
    ours = [int(core) for core in variable.split(",")]
    try:
        os.sched_setaffinity(0, ours)
    except OSError as error:  # They were taken away: no reason not to train.
        print(f"not bound to cores {variable}: {error}", file=sys.stderr)
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # It has ended.
            os.sched_setaffinity(int(thread), ours)
