"""How many cores there are for this process."""

import os


def num_cores() -> int:
    """Cores that this process may run on; a container's share where the system can tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
