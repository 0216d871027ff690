"""Hosts with their own addresses on this machine: network namespaces on one bridge.

    with hosts(3) as (a, b, c):
        subprocess.run([*a.command, "ping", "-c1", b.address])
        a.limit_rate("500mbit")     # of what a sends
        with b.link_down():
            ...                     # b reaches no host, and no host reaches b
        with dropped((b, c), (c, b)):
            ...                     # packets between b and c are dropped without an error

Creating hosts needs root; `reason_why_not()` says why they cannot be created here.
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_NETWORKS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace with one link."""

    name: str
    address: str
    link: str  # The end of the link on this machine.

    @property
    def command(self) -> tuple[str, ...]:
        """The prefix of a command that runs it on this host."""
        return ("ip", "netns", "exec", self.name)

    def limit_rate(self, rate: str) -> None:
        """Limits the rate at which this host sends, with tc's token bucket: 500mbit, 2gbit."""
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "200ms")
        command = ["tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", *shape]
        subprocess.run(command, check=True, capture_output=True)

    def limit_packets(self, num_bytes: int) -> None:
        """Drops larger packets to this host; neither end of the link notices it."""
        length = ("--match", "length", "--length", f"{num_bytes + 1}:65535")
        _iptables(self, "--append", "INPUT", *length, "--jump", "DROP")

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        """Takes the link down while the context lasts."""
        _ip("link", "set", self.link, "down")
        state = Path(f"/sys/class/net/{self.link}/operstate").read_text().strip()
        assert state == "down", f"the link of {self.name} is {state}"
        try:
            yield
        finally:
            _ip("link", "set", self.link, "up")


@contextlib.contextmanager
def dropped(*directions: tuple[Host, Host]) -> Iterator[None]:
    """Drops the packets of each (sender, receiver) while the context lasts; neither notices it.

    Fails at the end of the context if no packet was dropped.
    """
    for sender, receiver in directions:
        _iptables(receiver, "--append", *_drop_from(sender))
    yield
    number = num_dropped(*directions)
    for sender, receiver in directions:
        _iptables(receiver, "--delete", *_drop_from(sender))
    assert number, "there was no packet to drop"


def num_dropped(*directions: tuple[Host, Host]) -> int:
    """The packets that `dropped` has dropped so far."""
    number = 0
    for sender, receiver in directions:
        counted = _iptables(receiver, "--list", "INPUT", "--verbose", "--exact", "--numeric")
        of_sender = (line for line in counted.splitlines() if f" {sender.address} " in line)
        number += sum(int(line.split()[0]) for line in of_sender)
    return number


def _drop_from(sender: Host) -> tuple[str, ...]:
    return ("INPUT", "--source", sender.address, "--jump", "DROP")


def silent(host: Host, *others: Host) -> contextlib.AbstractContextManager[None]:
    """`dropped`, in both directions between `host` and each of `others`."""
    there = [(host, other) for other in others]
    return dropped(*there, *((other, host) for other in others))


def reason_why_not() -> str:
    """Returns why `hosts` would fail here; empty if it would work."""
    for command, package in (("ip", "iproute2"), ("tc", "iproute2"), ("iptables", "iptables")):
        if shutil.which(command) is None:
            return f"the `{command}` command is missing (package {package})"
    if os.geteuid() != 0:
        return "network namespaces with links need root"
    probe = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"the kernel refuses a network namespace: {made.stderr.strip()}"
    _ip("netns", "delete", probe)
    return ""


@contextlib.contextmanager
def hosts(num_hosts: int) -> Iterator[tuple[Host, ...]]:
    """Creates `num_hosts` hosts on one network, and removes them at the end of the context."""
    # Each test run has its own networks. Names of links have at most 15 characters, and remain in
    # use for a moment after their host is gone.
    mark = f"{os.getpid() % 0x10000:x}{next(_NETWORKS)}"
    bridge = f"br{mark}"
    network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        made = []
        for index in range(num_hosts):
            host = Host(f"host{mark}-{index}", f"{network}.{index + 1}", f"v{mark}-{index}")
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "delete", host.name)  # Its link goes with it.
            _ip("link", "add", host.link, "type", "veth", "peer", "eth0", "netns", host.name)
            _ip("link", "set", host.link, "master", bridge, "up")
            inside = ("-n", host.name)
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            _ip(*inside, "link", "set", "lo", "up")
            made.append(host)
        yield tuple(made)


def _iptables(host: Host, *arguments: str) -> str:
    command = [*host.command, "iptables", "--wait", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
