"""The CPU cores of this process."""

import os


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
