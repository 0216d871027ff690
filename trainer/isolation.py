"""A network namespace for the tasks of one machine: only they reach the ports that they open.

    with open_namespace() as namespace:
        ports = namespace.free_ports(2)
        subprocess.Popen(namespace.command(command), pass_fds=namespace.fds)

TensorFlow's servers take orders from whoever can connect, and listen on every interface. Inside
the namespace the only interface is a loopback of its own. Who may not make a network namespace
makes it in a user namespace, in which the user is who they were: files stay readable and keep
their owner.

A process enters a user namespace only while it has one thread, so this file is also a program that
makes a namespace, or enters one and becomes another program. No process stays to keep it: open
descriptors do, and with the last of them and the last task it is gone.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
# Nothing but the standard library is needed, so nothing else is looked for.
_PROGRAM = (sys.executable, "-I", "-S", os.path.abspath(__file__))
_FREE_PORTS = """
import sys
from strategies.ports import free_ports
print(*free_ports(int(sys.argv[1])))
"""


class IsolationError(OSError):
    """This machine has no network namespaces for this user; says why."""


class Namespace:
    """A network namespace, kept by open descriptors until the context is left.

    Attributes:
        fds: What a process that is to enter must inherit.
    """

    def __init__(self, fds: Iterable[int]) -> None:
        """Owns `fds`: of a user namespace, if there is one of its own, then of the network."""
        self.fds = tuple(fds)

    def __enter__(self) -> Self:
        """Does nothing."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Lets go of it; processes that are in it stay in it."""
        for fd in self.fds:
            os.close(fd)

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, run inside: by a process that enters and becomes it, under the same id."""
        return [*_PROGRAM, "enter", ",".join(map(str, self.fds)), *command]

    def free_ports(self, num_ports: int) -> list[int]:
        """As strategies.ports.free_ports, inside."""
        command = self.command([sys.executable, "-c", _FREE_PORTS, str(num_ports)])
        found = subprocess.run(command, pass_fds=self.fds, stdout=subprocess.PIPE, check=True)
        return [int(port) for port in found.stdout.split()]


def open_namespace() -> Namespace:
    """A new network namespace whose loopback is up.

    Raises:
        IsolationError: the kernel, a container's rules or the lack of either forbid it.
    """
    if sys.platform != "linux":
        raise IsolationError(f"{sys.platform} has no network namespaces")
    with subprocess.Popen(
        [*_PROGRAM, "make"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        kinds = maker.stdout.readline().split()
        if not kinds:
            raise IsolationError("what makes namespaces ended without a word")
        if kinds[0] == "error":
            raise IsolationError(" ".join(kinds[1:]))
        # It ends when its standard input is closed, as leaving this context does.
        return Namespace([os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY) for kind in kinds])


def _make() -> None:
    """Makes the namespaces, says which, and keeps them until standard input ends."""
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
            # Root reads all files because it is root of the namespace that they belong to.
            raise IsolationError(
                "root without CAP_SYS_ADMIN would lose access to the files of others"
            ) from None
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
    # Without the second the kernel refuses the third (user_namespaces(7)).
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
        request = struct.pack("16sH22x", b"lo", 0)  # struct ifreq
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, request), 16)
        request = struct.pack("16sH22x", b"lo", flags | _IS_UP)
        fcntl.ioctl(any_socket, _SET_FLAGS, request)


def enter(fds: Iterable[int]) -> None:
    """Enters namespaces by their descriptors, which are closed; this process has one thread.

    Raises:
        OSError: the kernel refuses.
    """
    for fd in fds:
        _call("setns", fd, 0)
        os.close(fd)


def _call(function: str, *arguments: int) -> None:
    """A system call that Python has from 3.12 on."""
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
