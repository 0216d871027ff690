"""Places the tasks of a cluster on hosts with their own addresses.

with hosts(2) as (first, second):
    cluster, commands = cluster_on(
        {Task("chief", 0): first, Task("ps", 0): first, Task("worker", 0): second}
    )
    with by_hand(cluster, model_dir, under=commands) as tasks:
        ...
"""

from collections.abc import Mapping

from benchmarks.hosts import Host
from strategies.cluster.tf_config import Cluster, Task

_FIRST_PORT = 2222


def cluster_on(places: Mapping[Task, Host]) -> tuple[Cluster, dict[Task, tuple[str, ...]]]:
    """The cluster, seen from the first task; and for each task the command that runs it there."""
    jobs: dict[str, dict[int, str]] = {}
    for number, (task, host) in enumerate(places.items()):
        jobs.setdefault(task.job, {})[task.index] = f"{host.address}:{_FIRST_PORT + number}"
    commands = {task: host.command for task, host in places.items()}
    return Cluster(jobs, next(iter(places))), commands
