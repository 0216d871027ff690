"""Ports of this machine: finds free ones, and holds one until a server takes it over.

first, second = free_ports(2)
with held(first):                    # other tasks can connect, and see that this task exists
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
    # Otherwise connections of an earlier run in TIME_WAIT would block the port for a minute.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def held(port: int) -> Iterator[None]:
    """Within it, `port` of this machine accepts connections, and closes them at once.

    Raises:
        OSError: the port is in use.
    """

    def accept() -> None:
        with contextlib.suppress(OSError):  # Until the listener is shut down.
            while True:
                listener.accept()[0].close()

    with bind(port) as listener:
        listener.listen()
        thread = threading.Thread(target=accept, name="held port", daemon=True)
        thread.start()
        try:
            yield
        finally:
            # Shutting down wakes the thread; closing alone does not.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def free_ports(num_ports: int) -> list[int]:
    """Ports without a listener, below the range that the kernel uses for outgoing connections.

    A port of that range, such as binding to port 0 gives, may be taken by any connection before the
    task listens. A task that retries to connect to a dead peer may even get the peer's own port and
    connect to itself, so that the peer cannot restart.

    The ports are reserved while this process or a fork of it lives. So clusters that start at the
    same time, and listen some seconds later, use different ports.

    Raises:
        OSError: there are too few free ports.
    """
    try:
        first_outgoing = int(_PORT_RANGE_FILE.read_text().split()[0])
    except OSError:  # Not Linux.
        first_outgoing = 0
    candidates = range(10_000, first_outgoing)
    tries: Iterable[int] = [0] * num_ports
    if len(candidates) >= 100 * num_ports:
        # Randomness from the system: launchers with equal seeds must choose different ports.
        tries = random.SystemRandom().sample(candidates, 50 * num_ports)
    # All stay bound until all are chosen, so that none is chosen twice.
    with contextlib.ExitStack() as bound_ports:
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
    """Reserves the port until this process ends, by binding a Linux abstract socket named for it.

    Raises OSError if the port is reserved. If a sandbox forbids such sockets, nothing is reserved.
    """
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0trainer-port-{port}")
    except OSError as error:
        reservation.close()
        if error.errno == errno.EADDRINUSE:
            raise
        return
    reservation.detach()  # It stays open until the process ends.
