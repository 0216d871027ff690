"""Makes the kernel close gRPC's connections to silent peers, which TensorFlow has no option for.

    limit_silence(150)          # once, in each task of a cluster

gRPC could set TCP_USER_TIMEOUT itself. Without it the kernel repeats packets to a host that is
silent for about 15 minutes before it gives up. Calls over such a connection hang meanwhile, some
with Python's interpreter lock held, so that no Python thread can help. TensorFlow 2.21 does not
tell which descriptors are gRPC's. Can be deleted when TensorFlow passes options of keepalive to
gRPC, for servers too.
"""

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Collection, Sequence

import psutil

_POLL_SECS = 1.0


def limit_silence(timeout_secs: float) -> None:
    """The kernel closes connections of this process whose peer is silent for `timeout_secs`.

    Silent means that the peer's kernel acknowledges neither data nor keepalive probes. Calls that
    wait for an answer then fail with UnavailableError. Returns at once: a thread sets the limit of
    all TCP sockets, and each second of the new ones. An accepted connection inherits the limit of
    the listening socket. On systems other than Linux nothing is limited.
    """
    if sys.platform != "linux":
        return

    def limit() -> None:
        known: set[int] = set()
        while True:
            known = limit_new_sockets(known, timeout_secs)
            time.sleep(_POLL_SECS)

    threading.Thread(target=limit, name="limit silence", daemon=True).start()


def limit_new_sockets(known: Collection[int], timeout_secs: float) -> set[int]:
    """Sets the limit of each TCP socket whose inode is not among `known`; returns all inodes."""
    inodes: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # Closed meanwhile.
            descriptor = int(name)
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                inodes.add(status.st_ino)
                if status.st_ino not in known:
                    _limit(descriptor, timeout_secs)
    return inodes


def _limit(descriptor: int, timeout_secs: float) -> None:
    # A duplicate stays this socket, whatever the owner of the descriptor does meanwhile.
    with socket.socket(fileno=os.dup(descriptor)) as found:
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or found.type != socket.SOCK_STREAM:
            return
        # An idle connection has nothing to acknowledge: probes ask the peer's kernel.
        probe_secs = max(1, int(timeout_secs / 4))
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_secs)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_secs)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        millisecs = int(timeout_secs * 1000)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, millisecs)


def cut_connections(host: str, port: int) -> int:
    """Shuts down this process's connections to `port` of `host`; returns their number.

    Calls that wait for an answer over them fail with UnavailableError. gRPC's keepalive would do
    this for an unresponsive peer, but TensorFlow has no setting for it. Connections that are being
    opened are cut, too: where packets are dropped, gRPC would wait 20 s for each.

    Raises:
        socket.gaierror: the name of the host cannot be resolved.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ends = {_host_and_port(sockaddr) for *_, sockaddr in found}
    num_cut = 0
    for found_now in psutil.Process().net_connections("tcp"):
        is_open = found_now.status in (psutil.CONN_ESTABLISHED, psutil.CONN_SYN_SENT)
        if not is_open or _host_and_port(found_now.raddr) not in ends:
            continue
        with (
            contextlib.suppress(OSError),  # Closed meanwhile.
            socket.socket(fileno=os.dup(found_now.fd)) as connection,
        ):
            # Otherwise another connection has got the descriptor meanwhile.
            if connection.getsockname()[1] == found_now.laddr.port:
                connection.shutdown(socket.SHUT_RDWR)
                num_cut += 1
    return num_cut


def _host_and_port(sockaddr: Sequence[object]) -> tuple[str, object]:
    host, port, *_ = sockaddr
    return str(host).partition("%")[0].removeprefix("::ffff:"), port
