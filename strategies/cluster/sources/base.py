"""What all sources share: the jobs of numbered tasks, their ports, and the variables they read.

    variables = Variables("Slurm", environment)
    rank = variables.number("SLURM_PROCID")
    jobs = numbered_jobs(["n1", "n1", "n2"], Wanted("ps", num_ps=1), first_port=2222)
    # {"worker": ["n1:2222", "n1:2223"], "ps": ["n2:2222"]}
    found = found_by_rank("slurm", "Slurm job 7", hosts, rank, wanted)

A scheduler numbers its tasks. The first of them are workers, the last `num_ps` are parameter
servers, and worker 0 is the chief. Tasks of one host have consecutive ports.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strategies.cluster.tf_config import Cluster, ClusterError, Task, check_cluster

# For hosts of which a task is the only user: a pod, or an instance of a cloud.
DEFAULT_PORT = 2222
# Below the ports of outgoing connections (32768 on Linux) and of Kubernetes' services (30000).
_FIRST_PORT, _NUM_BLOCKS, _BLOCK_PORTS = 10_000, 1_250, 16


@dataclass(frozen=True)
class Wanted:
    """What the command line says about the cluster."""

    strategy: str
    num_ps: int = 0
    num_workers: int | None = None  # For schedulers that do not tell the number of their tasks.
    port: int | None = None  # The first port of each host; None: as the source chooses.


@dataclass(frozen=True)
class Found:
    """A cluster, and where it was found."""

    source: str  # As in --cluster.
    where: str  # In words.
    cluster: Cluster

    def line(self) -> str:
        """What was found, for the log."""
        counts = ", ".join(f"{len(known)} {job}" for job, known in self.cluster.jobs.items())
        task, address = self.cluster.task, self.cluster.address
        return f"cluster of {self.where}: {counts}; this task is {task} at {address}"


@dataclass(frozen=True)
class Variables:
    """The variables of a scheduler. A missing or malformed one is an error that names it."""

    scheduler: str
    environment: Mapping[str, str]

    def get(self, name: str) -> str:
        """The value of `name`; raises ClusterError if it is not set."""
        if value := self.environment.get(name, "").strip():
            return value
        raise self.error(f"no {name}")

    def number(self, name: str) -> int:
        """`get` as an integer from 0."""
        text = self.get(name)
        if not text.isascii() or not text.isdigit():
            raise self.error(f"{name} is {text!r}, not a number")
        return int(text)

    def error(self, fault: str, advice: str = "") -> ClusterError:
        """An error about this environment: `fault`, what is needed, and what to type."""
        advice = advice or f"Start this command by {self.scheduler} itself, once for each task,"
        return ClusterError(
            f"The environment of {self.scheduler} does not describe a cluster: {fault}. {advice} "
            "or describe the cluster by TF_CONFIG, or type --cluster=local for a cluster on this "
            "machine."
        )


def first_port(job_id: str) -> int:
    """The first port of a job on each of its hosts: 10,000 to 29,984, a multiple of 16.

    Jobs that share a host get the same port with a probability of 1/1,250; --port helps then.
    """
    number = int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big")
    return _FIRST_PORT + number % _NUM_BLOCKS * _BLOCK_PORTS


def numbered_jobs(
    hosts: Sequence[str], wanted: Wanted, first_port: int, how_many: str = ""
) -> dict[str, list[str]]:
    """The addresses by job of the tasks on `hosts`, one entry for each task in its order.

    An entry of `hosts` may have a port, as "a:2222"; the others are numbered from `first_port` on.
    `how_many` says what to type for another number of tasks.
    """
    num_workers = len(hosts) - wanted.num_ps
    if num_workers < 1:
        raise ClusterError(
            f"--ps={wanted.num_ps} makes the last {wanted.num_ps} of the tasks parameter servers, "
            f"but there are {len(hosts)} task(s), and one must be a worker. Give fewer --ps, or "
            f"start more tasks{how_many and f': {how_many}'}."
        )
    first_port = wanted.port or first_port
    before: Counter[str] = Counter()
    addresses = []
    for host in hosts:
        if re.fullmatch(r"(\[.*\]|[^:]*):\d+", host):
            addresses.append(host)
            continue
        if ":" in host and not host.startswith("["):  # An IPv6 address.
            host = f"[{host}]"
        addresses.append(f"{host}:{first_port + before[host]}")
        before[host] += 1
    jobs = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
    return {job: listed for job, listed in jobs.items() if listed}


def found_by_rank(
    source: str,
    where: str,
    hosts: Sequence[str],
    rank: int,
    wanted: Wanted,
    first_port: int = DEFAULT_PORT,
    how_many: str = "",
) -> Found:
    """The cluster of `numbered_jobs`, seen from the task of number `rank`."""
    jobs = numbered_jobs(hosts, wanted, first_port, how_many)
    num_workers = len(jobs["worker"])
    task = Task("worker", rank) if rank < num_workers else Task("ps", rank - num_workers)
    return Found(source, where, check_cluster(jobs, task, wanted.strategy, where))
