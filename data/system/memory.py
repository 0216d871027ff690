"""How much memory is free.

free_memory_bytes()     # also inside a container with a limit
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
# The files with a control group's limit, its use, and the part of the use that caches files:
# version 2, and version 1.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory_bytes(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the free memory of the machine, or of a control group that limits this process."""
    free = int(psutil.virtual_memory().available)
    for group in _memory_groups(cgroups, own):
        for limit, used, cached in _MEMORY_FILES:
            with contextlib.suppress(OSError, ValueError):  # No limit, or the other version.
                rest = int((group / limit).read_text()) - int((group / used).read_text())
                # The kernel takes back the memory that caches files.
                stat = (group / "memory.stat").read_text()
                found = re.search(rf"^{cached} (\d+)$", stat, re.MULTILINE)
                free = min(free, rest + int(found[1] if found else 0))
    return max(0, free)


def _memory_groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """The control groups of memory, versions 1 and 2, of this process, and all above them."""
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "" or "memory" in controllers.split(","):
            top = cgroups / "memory" if controllers else cgroups
            group = top / path.lstrip("/")
            yield group
            yield from (above for above in group.parents if above.is_relative_to(top))
