"""What Linux does for processes, and Python has no function for: prctl(2).

signal_when_parent_ends(signal.SIGTERM)
"""

import ctypes
import os

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def signal_when_parent_ends(signum: int) -> None:
    """The kernel sends this process `signum` when its parent ends; not if it has ended before."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper() -> None:
    """The descendants of this process become its children when their own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
