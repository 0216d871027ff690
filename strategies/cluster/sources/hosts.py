"""The cluster of a list of hosts, the same on every host: --hosts=a,b,c.

    found = from_hosts("a,b,c", Wanted("multiworker"), own_task=None, is_here=here())

A host that is named n times has n tasks. Each task finds itself by the addresses of its machine;
where a host has several tasks, `own_task` says which of them it is.
"""

import contextlib
import socket
from collections.abc import Callable

import psutil

from strategies.cluster.sources.base import DEFAULT_PORT, Found, Wanted, numbered_jobs
from strategies.cluster.tf_config import ClusterError, Task, check_cluster


def from_hosts(
    text: str,
    wanted: Wanted,
    own_task: tuple[str, int | None] | None,
    is_here: Callable[[str], bool],
) -> Found:
    """The cluster of the hosts in `text`, each with a port or without one.

    `own_task` is --job_name and --task_index. `is_here` returns True for a name or address of this
    machine. Raises ClusterError if this machine is not in the list, or if its task is unclear.
    """
    entries = entries_of(text)
    if not all(entries):
        raise ClusterError(
            f"--hosts is {text!r}, with an empty name. Type --hosts=a,b,c, the same on every host."
        )
    more = "name more hosts, or a host more than once"
    jobs = numbered_jobs(entries, wanted, DEFAULT_PORT, more)
    hosts = {
        Task(job, index): address.rpartition(":")[0].strip("[]")
        for job, addresses in jobs.items()
        for index, address in enumerate(addresses)
    }
    here = {host for host in set(hosts.values()) if is_here(host)}
    own = [task for task, host in hosts.items() if host in here]
    where = f"--hosts={text}"
    if own_task is not None:
        job, index = own_task
        own = [task for task in own if task.job == job and index in (None, task.index)]
    if not own:
        of_task = f" as {own_task[0]} {own_task[1]}" if own_task else ""
        raise ClusterError(
            f"None of the hosts in {where} is this machine{of_task}: {describe_own_host()}. Write "
            "its name or one of its addresses in --hosts, or correct --job_name and --task_index."
        )
    if len(own) > 1:
        raise ClusterError(
            f"{where} gives this machine {len(own)} tasks: {', '.join(map(str, own))}. Say which "
            f"of them this process is: --job_name={own[0].job} --task_index={own[0].index}."
        )
    return Found("hosts", where, check_cluster(jobs, own[0], wanted.strategy, "--hosts"))


def entries_of(text: str) -> list[str]:
    """The value of --hosts as a list: one entry for each task."""
    return [entry.strip() for entry in text.rstrip(", ").split(",")]


def here() -> Callable[[str], bool]:
    """Returns a function that returns True for a name or an address of this machine."""
    names = {socket.gethostname().lower()}
    names |= {name.partition(".")[0] for name in names}
    addresses = set(_own_addresses())

    def is_here(host: str) -> bool:
        if host.lower() in names:
            return True
        with contextlib.suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return any(str(sockaddr[0]).partition("%")[0] in addresses for *_, sockaddr in found)
        return False

    return is_here


def describe_own_host() -> str:
    """The name and the addresses of this machine, for messages."""
    inward = ("127.", "::1", "fe80:")
    outward = [address for address in _own_addresses() if not address.startswith(inward)]
    return f"it is {socket.gethostname()}, with {', '.join(outward) or 'no address'}"


def _own_addresses() -> list[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        address.address.partition("%")[0]
        for listed in psutil.net_if_addrs().values()
        for address in listed
        if address.family in families
    ]
