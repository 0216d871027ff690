"""Which process trains in a MODEL_DIR: the one that has written config.json last.

    owner.wait_until_free(model_dir, say)         # before a run starts on this machine
    config = {..., "process": owner.this_process()}
    owner.is_replaced(model_dir)                  # while it trains

Two processes that train in one directory would mix their reports. A process of this machine that is
alive keeps the directory. Whether a process of another machine is alive cannot be known, so there
the newest process gets the directory, and the former one ends when it sees that.
"""

import functools
import os
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from data.system.errors import UsageError
from trainer.run_files import Document, RunFiles

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The tasks of a launcher that was killed end within seconds.
_WAIT_SECS = 30.0
_POLL_SECS = 0.2
_CLOCK_ERROR_SECS = 10.0  # The recorded start of a process changes when the clock is set.


class ReplacedError(UsageError):
    """Another process trains in this MODEL_DIR. Exit code 2: a restart would disturb it."""


@functools.cache
def machine_id() -> str:
    """The same for all processes of a machine until it is started again."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()


def this_process() -> Document:
    """Identifies this process among those of all machines."""
    return _process(os.getpid())


def wait_until_free(model_dir: str, say: Callable[[str], None]) -> None:
    """Returns when no other process of this machine trains in `model_dir`; says that it waits.

    Raises ReplacedError if it still does after half a minute.
    """
    deadline = time.monotonic() + _WAIT_SECS
    is_said = False
    while pid := _trains_here(model_dir):
        if time.monotonic() > deadline:
            raise ReplacedError(
                f"Process {pid} of this machine trains in {model_dir}. Wait until it ends, stop it "
                f"with: kill {pid}  or give another --model_dir."
            )
        if not is_said:
            say(f"process {pid} still trains in {model_dir}: waiting up to {_WAIT_SECS:.0f} s.")
            is_said = True
        time.sleep(_POLL_SECS)


def is_replaced(model_dir: str) -> bool:
    """Returns True if another process has begun to train in `model_dir` after this one."""
    # A file that is missing, or cannot be read now, names no process.
    recorded = RunFiles(model_dir).recorded("process")
    return bool(recorded) and recorded != this_process()


def described(model_dir: str) -> str:
    """The process that trains in `model_dir`, as messages name it."""
    recorded = RunFiles(model_dir).recorded("process")
    return f"process {recorded.get('pid')} of host {recorded.get('host')}"


@functools.cache  # The clock may be set while it runs.
def _process(pid: int) -> Document:
    return {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "pid": pid,
        "started": psutil.Process(pid).create_time(),
    }


def _trains_here(model_dir: str) -> int:
    """The other process of this machine that trains in `model_dir`, or 0."""
    files = RunFiles(model_dir)
    recorded = files.recorded("process")
    pid = recorded.get("pid")
    if recorded.get("machine") != machine_id() or not isinstance(pid, int) or pid == os.getpid():
        return 0
    if files.read_result() is not None:  # Its run has ended, as in a notebook.
        return 0
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - recorded["started"]) < _CLOCK_ERROR_SECS
        is_dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, KeyError, TypeError, ValueError):
        return 0
    return pid if is_same and not is_dead else 0
