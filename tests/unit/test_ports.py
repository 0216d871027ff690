"""Ports chosen by programs that start at the same time are different."""

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strategies.cluster import ports

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHOOSE = """
import sys
import threading
from strategies.cluster.ports import free_ports
print(*(port for _ in range(3) for port in free_ports(200)), flush=True)
sys.stdin.read()
"""


def test_processes_that_live_at_the_same_time_choose_different_ports() -> None:
    if not _RANGE.exists() or int(_RANGE.read_text().split()[0]) < 30_000:
        pytest.skip("the kernel reserves too few ports from outgoing connections")
    command = [sys.executable, "-c", _CHOOSE]
    pipe = subprocess.PIPE
    # Without reservations, two choices of 600 of 20,000 ports would overlap.
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        chosen = [*first.stdout.readline().split(), *second.stdout.readline().split()]
    assert len(set(chosen)) == len(chosen) == 1200


def test_names_that_other_users_take_reserve_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abstract socket names have no owner: any user of the machine could take all of them."""
    if not _RANGE.exists():
        pytest.skip("abstract socket names are Linux's")
    (tmp_path / "range").write_text("10400 60999")
    monkeypatch.setattr(ports, "_PORT_RANGE_FILE", tmp_path / "range")
    with contextlib.ExitStack() as stack:
        for port in range(10_000, 10_400):
            name = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):  # Taken already.
                name.bind(f"\0trainer-port-{port}")
        found = ports.free_ports(4)
    assert set(found) <= set(range(10_000, 10_400))


def test_reserved_port_is_for_a_task_which_may_also_return() -> None:
    (port,) = ports.free_ports(1)
    if _RANGE.exists():
        # A program that knows nothing of reservations does not get the port.
        with socket.socket(socket.AF_INET6) as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
    for _ in range(2):
        with ports.bind(port) as server:
            server.listen()
            with socket.create_connection(("localhost", port)):
                server.accept()[0].close()  # First, so that the port is in TIME_WAIT.


def test_port_of_a_process_that_is_just_ending_is_waited_for() -> None:
    with ports.bind(0) as former:
        former.listen()
        port = former.getsockname()[1]
        timer = threading.Timer(0.3, former.close)
        timer.start()
        with ports.held(port), socket.create_connection(("localhost", port), 10):
            pass
        timer.join()


def test_port_of_another_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.system.ports._FORMER_USER_SECS", 0.1)
    with ports.bind(0) as other:
        other.listen()
        held = ports.held(other.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            held.__enter__()
