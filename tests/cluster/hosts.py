"""Places the tasks of a cluster on hosts with their own addresses.

with hosts(2) as (first, second):
    cluster, commands = cluster_on(
        {Task("chief", 0): first, Task("ps", 0): first, Task("worker", 0): second}
    )
    with by_hand(cluster, model_dir, under=commands) as tasks:
        ...
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.hosts import Host, reason_why_not
from strategies.cluster.tf_config import Cluster, Task

_FIRST_PORT = 2222
needs_hosts = pytest.mark.skipif(bool(reason_why_not()), reason=reason_why_not() or "they exist")


def cluster_on(places: Mapping[Task, Host]) -> tuple[Cluster, dict[Task, tuple[str, ...]]]:
    """The cluster, seen from the first task; and for each task the command that runs it there."""
    jobs: dict[str, dict[int, str]] = {}
    for number, (task, host) in enumerate(places.items()):
        jobs.setdefault(task.job, {})[task.index] = f"{host.address}:{_FIRST_PORT + number}"
    commands = {task: host.command for task, host in places.items()}
    return Cluster(jobs, next(iter(places))), commands


@contextlib.contextmanager
def etc(host: Host, files: Mapping[str, str]) -> Iterator[None]:
    """Processes that start on `host` while the context lasts see these texts in /etc."""
    directory = Path("/etc/netns") / host.name  # `ip netns exec` mounts the files there.
    directory.mkdir(parents=True)
    try:
        for name, text in files.items():
            (directory / name).write_text(text)
        yield
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def named(names: Mapping[str, Host]) -> Iterator[None]:
    """The hosts know each other by these names while the context lasts."""
    lines = "".join(f"{host.address} {name}\n" for name, host in names.items())
    with contextlib.ExitStack() as stack:
        for host in names.values():
            stack.enter_context(etc(host, {"hosts": f"127.0.0.1 localhost\n{lines}"}))
        yield
