"""The CPU cores of this process, and CPU affinity: each worker has its own set of cores.

    env = affinity_env(cpu_groups(num_workers)[0])     # in the launcher, for the first task
    pin_to_cpus()                                      # in the task, before anything else

A multiworker step ends when the slowest worker's does. The kernel's scheduler often puts a worker
that a message has woken on the core of the sender for a while, and all workers wait for these two.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Collection

_VARIABLE = "TRAINER_CORES"


def cores() -> list[int]:
    """Sorted numbers of the cores that this process may run on; all cores if there is no limit.

    A container's CPU set is respected. A container's limit of CPU time is not.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_cores() -> int:
    """The number of cores that this process may run on."""
    return len(cores())


def cpu_groups(num_tasks: int) -> list[list[int]]:
    """Divides the cores of this process between tasks; empty lists if there are fewer cores.

    A group has consecutive numbers: on most machines these cores share a socket or a cache.
    """
    ours = cores()
    if len(ours) < num_tasks:
        return [[] for _ in range(num_tasks)]
    ends = [index * len(ours) // num_tasks for index in range(num_tasks + 1)]
    return [ours[first:end] for first, end in itertools.pairwise(ends)]


def affinity_env(cores: Collection[int]) -> dict[str, str]:
    """The environment variable that pins a task to `cores`; none if `cores` is empty."""
    return {_VARIABLE: ",".join(map(str, cores))} if cores else {}


def pin_to_cpus() -> None:
    """Pins this process, with its existing and future threads, to the CPUs in TRAINER_CORES."""
    variable = os.environ.pop(_VARIABLE, None)  # Removed: it is not for the task's children.
    if variable is None:
        return
    ours = [int(core) for core in variable.split(",")]
    try:
        os.sched_setaffinity(0, ours)
    except OSError as error:  # The cores were taken away since the launcher looked.
        print(f"CPU affinity not set to cores {variable}: {error}", file=sys.stderr)
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # The thread has ended.
            os.sched_setaffinity(int(thread), ours)
