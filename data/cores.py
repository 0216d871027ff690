"""The cores of this process."""

import os


def cores() -> list[int]:
    """The numbers of those it may run on, in order; of all there are where nobody says which.

    A container's CPU set counts, but not a limit of its CPU time.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_cores() -> int:
    """How many it may run on."""
    return len(cores())
