"""The cluster of a Slurm step: one task of the cluster for each task that `srun` starts.

    expand("n[01,09-11],login")     # ["n01", "n09", "n10", "n11", "login"]
    found = from_slurm(os.environ, Wanted("multiworker"))

Slurm numbers the tasks node after node (`srun --distribution=block`, the default). The ports follow
from the job and the step.
"""

import itertools
import re
from collections.abc import Mapping

from strategies.cluster.sources.base import Found, Variables, Wanted, first_port, found_by_rank
from strategies.cluster.tf_config import ClusterError

_NODES, _TASKS_PER_NODE = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
# The syntax of Slurm's node lists.
_RANGE = "[0-9]{1,9}(?:-[0-9]{1,9})?"
_RANGES = rf"\[{_RANGE}(?:,{_RANGE})*\]"
_NAME = rf"(?:[^\s,\[\]]|{_RANGES})+"


def from_slurm(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of this step. Raises ClusterError if the environment has no complete step."""
    variables = Variables("Slurm", environment)
    job = variables.get("SLURM_JOB_ID")
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise variables.error(
            f"job {job} is heterogeneous (SLURM_HET_SIZE={environment['SLURM_HET_SIZE']}), and "
            "each component knows only its own nodes",
            "Give all tasks to one component,",
        )
    if _NODES not in environment:
        raise variables.error(
            f"this process is in job {job}, but in no step: no {_NODES}",
            "Put `srun` before the command,",
        )
    hosts, counts = expand(variables.get(_NODES)), _counts(variables)
    num_tasks, rank = variables.number("SLURM_STEP_NUM_TASKS"), variables.number("SLURM_PROCID")
    if len(hosts) != len(counts) or sum(counts) != num_tasks:
        raise variables.error(
            f"{len(hosts)} node(s) in {variables.get(_NODES)!r}, numbers of tasks for "
            f"{len(counts)} node(s) in {variables.get(_TASKS_PER_NODE)!r}, and {num_tasks} task(s)"
        )
    if rank >= num_tasks:
        raise variables.error(f"SLURM_PROCID is {rank}, but there are {num_tasks} task(s)")
    _check_order(variables, environment, counts, rank)
    listed = [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
    step = environment.get("SLURM_STEP_ID", "0")
    where, port = f"Slurm job {job}, step {step}", first_port(f"{job}.{step}")
    return found_by_rank("slurm", where, listed, rank, wanted, port, "srun --ntasks=N")


def _counts(variables: Variables) -> list[int]:
    """The number of tasks of each node, from the form `2(x3),1`."""
    counts = []
    text = variables.get(_TASKS_PER_NODE)
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip(), re.ASCII)
        if not found:
            raise variables.error(f"{_TASKS_PER_NODE} is {text!r}, not of the form 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _check_order(
    variables: Variables, environment: Mapping[str, str], counts: list[int], rank: int
) -> None:
    """Raises ClusterError if the tasks are not numbered node after node."""
    if not {"SLURM_NODEID", "SLURM_LOCALID"} <= environment.keys():
        return
    node, local = variables.number("SLURM_NODEID"), variables.number("SLURM_LOCALID")
    if sum(counts[:node]) + local != rank:
        raise variables.error(
            f"task {rank} is task {local} of node {node}, so tasks are not numbered node after "
            "node",
            "Type srun --distribution=block,",
        )


def expand(nodes: str) -> list[str]:
    """The names in a node list of Slurm, in its order: `n[01,09-11],login`, `r[1-2]n[1-4]`.

    Numbers keep the zeros before them. Raises ClusterError if the list is malformed.
    """
    names: list[str] = []
    if re.fullmatch(f"{_NAME}(?:,{_NAME})*", nodes):
        for name in re.findall(_NAME, nodes):
            parts = re.findall(rf"[^\[\]]+|{_RANGES}", name)
            choices = [_numbers(part[1:-1]) if part[0] == "[" else [part] for part in parts]
            names += map("".join, itertools.product(*choices))
    if not names:
        raise ClusterError(
            f"Slurm's node list is {nodes[:200]!r}, and not of the form `n[01,09-12],login`: "
            "`scontrol show hostnames` prints the names. Describe the cluster by TF_CONFIG, or "
            "type --cluster=hosts --hosts=NAME,NAME."
        )
    return names


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)]
    return numbers
