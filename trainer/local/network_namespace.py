"""A network namespace for the tasks of one machine: only they can connect to their ports.

    with open_namespace() as namespace:
        subprocess.Popen(namespace.command(command), pass_fds=namespace.fds)

TensorFlow's servers execute what any client sends, and listen on every interface. Inside the
namespace the only interface is its own loopback. A user without the right to make a network
namespace makes it inside a user namespace that maps the user to the same user: files stay readable
and keep their owner.

Only a process with a single thread can enter a user namespace. So this file is also a program: it
makes a namespace, or enters one and then executes another program. Open descriptors keep the
namespace alive, not a process: it ends with the last descriptor and the last task.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SET_FLAGS, _IS_UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
# -I -S: it needs only the standard library, and starts faster without the search for more.
_PROGRAM = (sys.executable, "-I", "-S", os.path.abspath(__file__))


class IsolationError(OSError):
    """This user cannot make a network namespace on this machine; the message says why."""


class Namespace(contextlib.AbstractContextManager["Namespace"]):
    """A network namespace. A process that enters it must inherit `fds`."""

    def __init__(self, fds: Iterable[int]) -> None:
        """Owns `fds`: of the user namespace, if there is one, then of the network namespace."""
        self.fds = tuple(fds)

    def __exit__(self, *exc_info: object) -> None:
        for fd in self.fds:
            os.close(fd)

    def command(self, command: Sequence[str]) -> list[str]:
        """A command that enters the namespace and then executes `command` in the same process."""
        return [*_PROGRAM, "enter", ",".join(map(str, self.fds)), *command]


def open_namespace() -> Namespace:
    """A new network namespace whose loopback is up.

    Raises IsolationError if this is not Linux, or the kernel or the rules of a container forbid it.
    """
    if sys.platform != "linux":
        raise IsolationError(f"{sys.platform} has no network namespaces")
    with subprocess.Popen(
        [*_PROGRAM, "make"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        kinds = maker.stdout.readline().split()
        if not kinds:
            raise IsolationError("the process that makes the namespace ended without an answer")
        if kinds[0] == "error":
            raise IsolationError(" ".join(kinds[1:]))
        # Leaving this context closes its standard input, which ends it.
        return Namespace([os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY) for kind in kinds])


def _make() -> None:
    """Makes the namespaces, prints their kinds, and keeps them until standard input ends."""
    try:
        kinds = _unshare()
        _set_loopback_up()
    except OSError as error:
        print("error", error, flush=True)
    else:
        print(*kinds, flush=True)
        sys.stdin.read()


def _unshare() -> list[str]:
    try:
        _call("unshare", _CLONE_NEWNET)
        return ["net"]
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        if user == 0:
            # Root may read all files only as root of the user namespace that they belong to.
            raise IsolationError(
                "root without CAP_SYS_ADMIN would lose access to the files of others"
            ) from None
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
    # The kernel refuses gid_map until setgroups is denied (user_namespaces(7)).
    for name, text in (
        ("uid_map", f"{user} {user} 1"),
        ("setgroups", "deny"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return ["user", "net"]


def _set_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", _IS_UP)  # struct ifreq
        fcntl.ioctl(any_socket, _SET_FLAGS, request)


def enter(fds: Iterable[int]) -> None:
    """Enters the namespaces of `fds` and closes them. This process must have a single thread.

    Raises OSError if the kernel refuses.
    """
    for fd in fds:
        _call("setns", fd, 0)
        os.close(fd)


def _call(function: str, *arguments: int) -> None:
    """Makes a system call. Python has these two from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        _make()
    else:
        enter(map(int, sys.argv[2].split(",")))
        os.execvp(sys.argv[3], sys.argv[3:])
