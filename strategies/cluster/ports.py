"""Ports of this machine: finds free ones, and holds one until a server takes it over.

first, second = free_ports(2)
with held(first):                # other tasks can connect, and see that this task exists
    prepare()
"""

import contextlib
import random
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data.system.background import repeating
from data.system.ports import when_released

_ACCEPT_SECS = 0.05  # The end of `held` waits for it.
_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def bind(port: int, *, may_share: bool = True) -> socket.socket:
    """A socket bound to `port` as TensorFlow's server binds: on every interface, IPv6 and IPv4.

    If `port` is 0, it is bound to any free port. With `may_share` other sockets may be bound to the
    port, if they allow it too and do not listen. Without it, connections of an earlier run in
    TIME_WAIT block the port for a minute.
    """
    try:
        bound = socket.socket(socket.AF_INET6)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:  # A kernel without IPv6.
        bound = socket.socket(socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, may_share)
    try:
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def held(port: int, greeting: bytes | Callable[[], bytes] = b"") -> Iterator[None]:
    """In the context, `port` accepts connections, sends `greeting` and closes them immediately.

    `greeting` may be a function, which another thread calls for each connection. A port in use is
    waited for, as in `when_released`.

    Raises:
        OSError: the port is in use.
    """

    def greet() -> None:
        with (
            contextlib.suppress(OSError),  # Nobody has connected, or the other side has ended.
            listener.accept()[0] as connection,
        ):
            connection.sendall(greeting() if callable(greeting) else greeting)

    with when_released(lambda: bind(port)) as listener:
        listener.listen()
        listener.settimeout(_ACCEPT_SECS)
        with repeating(greet, every_secs=0):
            yield


def free_ports(num_ports: int) -> list[int]:
    """Ports without a listener, below the range that the kernel uses for outgoing connections.

    A port of that range, such as binding to port 0 gives, may be taken by any connection before the
    task listens. A task that retries to connect to a dead peer may even get the peer's own port and
    connect to itself, so that the peer cannot restart. Ports of the range are returned only if it
    leaves fewer than 100 ports from 10,000 on for each port asked for.

    On Linux the ports are reserved while this process or a fork of it lives. So clusters that start
    at the same time, and listen some seconds later, use different ports.

    Raises:
        OSError: there are too few free ports.
    """
    first_outgoing, *_ = outgoing_ports() or [0]
    candidates = range(10_000, first_outgoing)
    tries: Iterable[int] = [0] * num_ports
    if len(candidates) >= 100 * num_ports:
        # Randomness from the system: launchers with equal seeds must choose different ports.
        tries = random.SystemRandom().sample(candidates, 50 * num_ports)
    with contextlib.ExitStack() as stack:
        bound: list[socket.socket] = []
        for port in tries:
            with contextlib.suppress(OSError):
                bound.append(stack.enter_context(bind(port, may_share=False)))
            if len(bound) == num_ports:
                break
        else:
            raise OSError(f"This machine has no {num_ports} free ports")
        ports = [reservation.getsockname()[1] for reservation in bound]
        if sys.platform == "linux":
            # Linux lets sockets share a port if all of them allow it and none listens. A server
            # allows it, and so do the reservations from now on. The next call of this function does
            # not, and so finds the ports taken.
            for reservation in bound:
                reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                reservation.detach()
        return ports


def outgoing_ports() -> list[int]:
    """The first and the last port of outgoing connections; empty if this is not Linux."""
    try:
        return [int(number) for number in _PORT_RANGE_FILE.read_text().split()]
    except OSError:
        return []
