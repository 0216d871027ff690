"""Ports of this machine: which are free, and one held while nobody serves at it yet.

first, second = free_ports(2)
with held(first):                    # others can connect to it, and learn that it is there
    prepare()
"""

import contextlib
import errno
import random
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def bind(port: int) -> socket.socket:
    """A socket bound as TensorFlow's server binds: on every interface, IPv6 and IPv4."""
    try:
        bound = socket.socket(socket.AF_INET6)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:  # A kernel without IPv6.
        bound = socket.socket(socket.AF_INET)
    # Without it, connections of a former run in TIME_WAIT would count as a use of the port for a
    # minute.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def held(port: int) -> Iterator[None]:
    """While in it, whoever connects to `port` of this machine gets an answer, and no more.

    Raises:
        OSError: the port is in use.
    """
    with bind(port) as listener:
        listener.listen()
        thread = threading.Thread(target=_accept, args=(listener,), name="held port", daemon=True)
        thread.start()
        try:
            yield
        finally:
            # Wakes the thread up; closing alone would not.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _accept(listener: socket.socket) -> None:
    # Until the listener is shut down.
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def free_ports(num_ports: int) -> list[int]:
    """Ports that nobody listens on, below the range that the kernel gives to outgoing connections.

    A port of that range (what binding to port 0 gives) can be taken by any connection made before
    the task listens, and a task that keeps on trying to connect to a dead peer can even be given
    the peer's own port and connect to itself, so that the peer cannot come back.

    No other process is given such a port here as long as this one, or a fork of it, lives, so that
    clusters which are started at the same time, and listen some seconds later, do not meet.
    """
    try:
        first_outgoing = int(_PORT_RANGE_FILE.read_text().split()[0])
    except OSError:  # Not Linux.
        first_outgoing = 0
    candidates = range(10_000, first_outgoing)
    tries: Iterable[int] = [0] * num_ports
    if len(candidates) >= 100 * num_ports:
        # The system's randomness: two launchers seeded alike must not choose alike.
        tries = random.SystemRandom().sample(candidates, 50 * num_ports)
    with (
        contextlib.ExitStack() as bound_ports
    ):  # All are held until all are chosen, so that none is chosen twice.
        ports: list[int] = []
        for port in tries:
            try:
                bound = bound_ports.enter_context(bind(port))
                if port:
                    _reserve(port)
            except OSError:
                continue
            ports.append(bound.getsockname()[1])
            if len(ports) == num_ports:
                return ports
    raise OSError(f"This machine has no {num_ports} free ports")


def _reserve(port: int) -> None:
    """Takes the port's name among Linux's abstract sockets, which end with the process.

    Where a sandbox forbids them nothing is reserved.

    Raises:
        OSError: another process has it, or this one.
    """
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0trainer-port-{port}")
    except OSError as error:
        reservation.close()
        if error.errno == errno.EADDRINUSE:
            raise
        return
    reservation.detach()  # Open until then.
