"""prctl(2) of Linux, which Python has no function for.

signal_when_parent_ends(signal.SIGTERM)
"""

import contextlib
import ctypes
import os

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def signal_when_parent_ends(signum: int) -> None:
    """The kernel sends this process `signum` when its parent ends; not if it has ended before.

    Does nothing where the kernel forbids it.
    """
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper() -> None:
    """The descendants of this process become its children when their own parents end.

    Raises OSError where the kernel forbids it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
