"""Ports chosen by programs that start at the same time are different."""

import subprocess
import sys
from pathlib import Path

import pytest

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHOOSE = """
import sys
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
        ports = [*first.stdout.readline().split(), *second.stdout.readline().split()]
    assert len(set(ports)) == len(ports) == 1200
