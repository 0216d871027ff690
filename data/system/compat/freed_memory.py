"""Makes glibc keep freed memory for the next tensor.

By default glibc often returns a freed tensor of more than 128 KiB to the system, and the next step
faults each of its pages in again: half of the time of a small model's step. Seen with TensorFlow
2.21 and glibc's mallopt(3). Can be deleted when TensorFlow keeps freed memory itself on CPUs.
"""

import ctypes
import os
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_NEVER, _PAD_BYTES = -1, 64 << 20
_FEW_CORES = 4  # Measured on 2.


def keep_freed_memory() -> None:
    """Sets glibc's options; has no effect with another libc.

    With this setting a process keeps the memory of its peak, or more, because each thread's arena
    keeps its own peak. Arenas of threads cannot hold more than 64 MiB per tensor. So on a few
    cores, where threads rarely wait for each other, all threads share the main arena, which can.
    `MALLOC_*` variables and GLIBC_TUNABLES take precedence.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_TOP_PAD, _PAD_BYTES)
    if len(os.sched_getaffinity(0)) <= _FEW_CORES:
        mallopt(_M_ARENA_MAX, 1)
