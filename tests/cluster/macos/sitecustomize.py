"""Takes away what macOS lacks: Python imports this first if its directory is on PYTHONPATH.

Modules of the standard library that choose by `sys.platform`, and psutil, are imported before, and
stay those of Linux. So does TensorFlow.
"""

import asyncio  # noqa: F401
import builtins
import ctypes
import errno
import io
import multiprocessing.util  # noqa: F401
import os
import select
import signal
import socket
import subprocess  # noqa: F401
import sys
import sysconfig
import time
import urllib.request  # noqa: F401
import uuid  # noqa: F401
from collections.abc import Callable
from typing import Any

import psutil

sysconfig.get_config_vars()
_OF_LINUX = {
    os: (
        *("sched_", "pidfd_", "memfd_", "eventfd", "posix_fa", "setns", "unshare", "splice"),
        *("copy_file_range", "getrandom", "pipe2"),
        "waitid",  # From Python 3.13 on, macOS has it.
    ),
    signal: ("pidfd_", "sigtimedwait", "sigwaitinfo"),
    socket: ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "SOCK_SEQPACKET", "SOCK_CLOEXEC", "MSG_NOSIGNAL"),
    select: ("epoll", "EPOLL"),
    time: ("CLOCK_BOOTTIME",),
}
_OF_GLIBC = ("prctl", "mallopt", "unshare", "setns")

for _module, _beginnings in _OF_LINUX.items():
    for _name in dir(_module):
        if _name.startswith(_beginnings):
            delattr(_module, _name)


def _without_files_of_linux(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_path = isinstance(path, str | os.PathLike)
        if is_path and os.fspath(path).startswith(("/proc", "/sys")) and "psutil" not in caller:
            raise FileNotFoundError(errno.ENOENT, "no such file on macOS", path)
        return function(path, *arguments, **keywords)

    return call


builtins.open = io.open = _without_files_of_linux(io.open)
os.listdir = _without_files_of_linux(os.listdir)
os.stat = _without_files_of_linux(os.stat)


def _symbol(library: ctypes.CDLL, name: str) -> Any:
    if name in _OF_GLIBC:
        raise AttributeError(f"dlsym({library}, {name}): symbol not found")
    return _find_symbol(library, name)


_find_symbol = ctypes.CDLL.__getattr__
ctypes.CDLL.__getattr__ = _symbol  # type: ignore[method-assign]


def _killpg(group: int, signum: int) -> None:
    """As XNU: a group of which only zombies are left cannot be signalled."""
    if group and psutil.Process(group).status() == psutil.STATUS_ZOMBIE:
        raise PermissionError(errno.EPERM, "Operation not permitted")
    _kill_group(group, signum)


_kill_group = os.killpg
os.killpg = _killpg


class _Socket(socket.socket):
    def shutdown(self, how: int) -> None:
        """As XNU: a listening socket cannot be shut down, and `accept` goes on waiting."""
        if self.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(errno.ENOTCONN, "Socket is not connected")
        super().shutdown(how)


socket.socket = _Socket  # type: ignore[misc]
sys.platform = "darwin"
