"""Limits of silence on the TCP connections of a process."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from data.system.compat.connections import limit_new_sockets, limit_silence
from tests.unit.stand_ins import wait_for


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def limits_of(found: socket.socket) -> tuple[int, int, int]:
    """Whether probes are sent, after how many seconds of silence, and the limit in ms."""
    return (
        found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


def test_silence_is_limited_on_both_ends_of_a_connection(listening: socket.socket) -> None:
    with socket.create_connection(listening.getsockname()) as client:
        accepted, _ = listening.accept()
        with accepted:
            limit_new_sockets(set(), 20)
            for end in (listening, client, accepted):
                assert limits_of(end) == (1, 5, 20_000)


def test_later_accepted_connection_inherits_the_limit(listening: socket.socket) -> None:
    limit_new_sockets(set(), 20)
    with socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert limits_of(accepted) == (1, 5, 20_000)


def test_known_sockets_and_other_descriptors_stay_as_they_are(listening: socket.socket) -> None:
    with (
        socket.create_connection(listening.getsockname()) as known,
        contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as datagrams,
    ):
        before = limits_of(known)
        inodes = limit_new_sockets(set(), 30)
        assert limits_of(known) != before
        # Another limit does not reach sockets that are known.
        assert limit_new_sockets(inodes, 20) >= inodes - {0}
        assert limits_of(known) == (1, 7, 30_000)
        assert not datagrams.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_new_sockets_are_limited_within_seconds(listening: socket.socket) -> None:
    limit_silence(40)
    with socket.create_connection(listening.getsockname()) as client:
        wait_for(lambda: limits_of(client) == (1, 10, 40_000), 30)
