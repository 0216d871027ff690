"""Ports of this machine, chosen by programs that start at the same time."""

import subprocess
import sys

import pytest

_CHOOSE = """
import sys
from strategies.ports import free_ports
print(*(port for _ in range(3) for port in free_ports(200)), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_processes_that_live_at_the_same_time_choose_different_ports() -> None:
    command = [sys.executable, "-c", _CHOOSE]
    pipe = subprocess.PIPE
    # Without reservations 600 and 600 of 22,768 would have some in common.
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        ports = [*first.stdout.readline().split(), *second.stdout.readline().split()]
    assert len(set(ports)) == len(ports) == 1200
