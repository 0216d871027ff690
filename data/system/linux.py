"""Limits of Linux on threads, and prctl(2), which Python has no function for.

check_threads()
signal_when_parent_ends(signal.SIGTERM)
"""

import contextlib
import ctypes
import errno
import os
import threading

from data.system.errors import UsageError

# TensorFlow needs more, also with --num_threads=1, and aborts without them.
_LEAST_THREADS = 24
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def check_threads() -> None:
    """Raises UsageError if this process cannot start the threads that TensorFlow needs."""
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(_LEAST_THREADS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise limit_reached(error) or error from None
    finally:
        over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def limit_reached(error: BaseException) -> UsageError | None:
    """What to do if `error` says that no more processes or threads may be started, else None."""
    # A write to a full pipe has another text.
    is_fork = isinstance(error, BlockingIOError) and error.strerror == os.strerror(errno.EAGAIN)
    is_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    if not is_fork and not is_thread:
        return None
    return UsageError(
        "No more processes or threads may be started here. Raise the limit: `ulimit -u 4096`, "
        "--pids-limit=-1 of `docker run`, podPidsLimit of Kubernetes' kubelet, or TasksMax of a "
        "systemd unit. Or end other programs of this user, or start fewer tasks."
    )


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
