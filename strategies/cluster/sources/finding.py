"""The schedulers that describe a cluster by variables, and the choice of one of them.

    found = find("auto", os.environ, Wanted("multiworker"))

| scheduler | one task of the cluster for each | name of its host |
| --- | --- | --- |
| Slurm | task of `srun`, which numbers them node after node by default | from the node list |
| JobSet | pod | JOBSET-JOB-0-i.JOBSET, the default of JobSet's network |
| an indexed Job | pod | JOB-i.SERVICE; SERVICE is a headless Service of the Job's name |
| SkyPilot, SageMaker | machine | from the list of machines |

A pod knows its index and its own host name. It does not know the number of pods, so --workers and
--ps give it. JobSet sets no variables: its pod template must set JOBSET_NAME and
REPLICATED_JOB_NAME from the pod's annotations (deploy/kubernetes has them).
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from strategies.cluster.sources.base import (
    DEFAULT_PORT,
    Found,
    Variables,
    Wanted,
    first_port,
    found_by_rank,
)
from strategies.cluster.tf_config import ClusterError, object_without_repeats

# Variables of Slurm, Kubernetes and SageMaker.
_NODES, _TASKS_PER_NODE = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_INDEX, _JOBSET, _REPLICATED_JOB = "JOB_COMPLETION_INDEX", "JOBSET_NAME", "REPLICATED_JOB_NAME"
_RESOURCE_CONFIG = "SM_RESOURCE_CONFIG"
# SageMaker writes it in every container. The images with its toolkit set the variable, too.
RESOURCE_CONFIG_FILE = Path("/opt/ml/input/config/resourceconfig.json")
# The syntax of Slurm's node lists.
_RANGE = "[0-9]{1,9}(?:-[0-9]{1,9})?"
_RANGES = rf"\[{_RANGE}(?:,{_RANGE})*\]"
_NAME = rf"(?:[^\s,\[\]]|{_RANGES})+"


def is_described(environment: Mapping[str, str]) -> bool:
    """Returns True if TF_CONFIG has a cluster; an empty one is TensorFlow's for one process."""
    try:
        text = environment.get("TF_CONFIG", "{}")
        config = json.loads(text, object_pairs_hook=object_without_repeats)
    except (json.JSONDecodeError, ClusterError):
        return True  # Whoever parses it says what is wrong.
    return not isinstance(config, dict) or (bool(config) and config.get("cluster") != {})


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
    node, local = variables.number("SLURM_NODEID"), variables.number("SLURM_LOCALID")
    if sum(counts[:node]) + local != rank:
        raise variables.error(
            f"task {rank} is task {local} of node {node}, so tasks are not numbered node after "
            "node",
            "Type srun --distribution=block,",
        )
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


def from_indexed_job(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of all pods of this Job: the last --ps of them are parameter servers."""
    variables = Variables("an indexed Job", environment)
    index, host = variables.number(_INDEX), variables.get("HOSTNAME")
    name, dash, number = host.rpartition("-")
    if not dash or number != str(index):
        raise variables.error(
            f"{_INDEX} is {index}, but HOSTNAME is {host!r}, not of the form JOB-{index}",
            "Leave `hostname` and `hostNetwork` out of the pod's template,",
        )
    num_pods = _num_workers(variables, wanted, "spec.completions") + wanted.num_ps
    _check_index(variables, index, num_pods)
    hosts = [f"{name}-{pod}.{name}" for pod in range(num_pods)]
    return found_by_rank("indexed_job", f"indexed Job {name}", hosts, index, wanted)


def from_jobset(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of this JobSet: its job `ps` has the parameter servers, its other job workers.

    A JobSet with one job has all tasks there, the parameter servers last.
    """
    variables = Variables("JobSet", environment)
    jobset, index = variables.get(_JOBSET), variables.number(_INDEX)
    own_job = variables.get(_REPLICATED_JOB)
    host = environment.get("HOSTNAME", "")
    prefix = f"{jobset}-{own_job}-"
    if host.startswith(prefix) and host != f"{prefix}0-{index}":
        raise variables.error(
            f"the pod of index {index} has the name {host!r}, not {prefix}0-{index}",
            "Give the job `replicas: 1`, and the number of its pods as `completions`,",
        )
    num_workers = _num_workers(variables, wanted, "the completions of the workers' job")
    num_pods = {"worker": num_workers, "ps": wanted.num_ps}
    if own_job not in num_pods:
        num_pods = {own_job: num_workers + wanted.num_ps}
    _check_index(variables, index, num_pods[own_job], f" of job {own_job}")
    hosts = [f"{jobset}-{job}-0-{i}.{jobset}" for job, n in num_pods.items() for i in range(n)]
    rank = index + (num_workers if own_job == "ps" else 0)
    return found_by_rank("jobset", f"JobSet {jobset}", hosts, rank, wanted)


def _num_workers(variables: Variables, wanted: Wanted, field: str) -> int:
    if wanted.num_workers is None:
        also = ", without the parameter servers," if wanted.num_ps else ""
        raise variables.error(
            "a pod does not know how many pods there are",
            f"Add --workers=N{also} which must agree with {field},",
        )
    return wanted.num_workers


def _check_index(variables: Variables, index: int, num_pods: int, of: str = "") -> None:
    if index >= num_pods:
        raise variables.error(
            f"this is pod {index}{of}, but --workers and --ps say {num_pods} pod(s){of}, from 0",
            "Correct --workers and --ps, or the completions,",
        )


def from_skypilot(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of all nodes of this task. Their jobs may share a node, so ports follow from it.

    Raises ClusterError if the variables are incomplete or contradict each other.
    """
    variables = Variables("SkyPilot", environment)
    nodes, rank = variables.get("SKYPILOT_NODE_IPS").split(), variables.number("SKYPILOT_NODE_RANK")
    num_nodes = environment.get("SKYPILOT_NUM_NODES", str(len(nodes)))
    if num_nodes != str(len(nodes)) or rank >= len(nodes):
        raise variables.error(
            f"SKYPILOT_NODE_IPS has {len(nodes)} address(es), SKYPILOT_NUM_NODES is {num_nodes}, "
            f"and SKYPILOT_NODE_RANK is {rank}"
        )
    task = environment.get("SKYPILOT_TASK_ID", "")
    where = f"SkyPilot task {task}" if task else "SkyPilot"
    port = first_port(task) if task else DEFAULT_PORT
    how_many = "num_nodes: N in the task's file"
    return found_by_rank("skypilot", where, nodes, rank, wanted, port, how_many)


def with_resource_config(environment: Mapping[str, str]) -> Mapping[str, str]:
    """`environment`, with SageMaker's file as SM_RESOURCE_CONFIG if there is one."""
    if _RESOURCE_CONFIG in environment or not RESOURCE_CONFIG_FILE.is_file():
        return environment
    return {**environment, _RESOURCE_CONFIG: RESOURCE_CONFIG_FILE.read_text()}


def from_sagemaker(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of all hosts of this training job.

    Raises ClusterError if the variable is not of SageMaker's form.
    """
    variables = Variables("SageMaker", environment)
    text = variables.get(_RESOURCE_CONFIG)
    try:
        described = json.loads(text)
        hosts = described["hosts"]
        rank = hosts.index(described["current_host"])
    except (ValueError, LookupError, TypeError, AttributeError):
        form = '{"current_host": "a", "hosts": ["a", "b"]}'
        raise variables.error(f"{_RESOURCE_CONFIG} is {text[:300]}, not as {form}") from None
    return found_by_rank("sagemaker", "SageMaker", hosts, rank, wanted, how_many="instance_count=N")


class _Source(NamedTuple):
    words: str
    read: Callable[[Mapping[str, str], Wanted], Found]
    variable: str  # The scheduler sets it in each task.
    has_num_tasks: bool = True  # Otherwise --workers gives it.


SCHEDULERS = {
    "slurm": _Source("Slurm", from_slurm, "SLURM_JOB_ID"),
    "jobset": _Source("JobSet", from_jobset, _JOBSET, False),
    "indexed_job": _Source("an indexed Job", from_indexed_job, _INDEX, False),
    "skypilot": _Source("SkyPilot", from_skypilot, "SKYPILOT_NODE_IPS"),
    "sagemaker": _Source("SageMaker", from_sagemaker, _RESOURCE_CONFIG),
}


def find(source: str, environment: Mapping[str, str], wanted: Wanted) -> Found | None:
    """The cluster of scheduler `source`. With "auto", of the scheduler in `environment`, if any.

    "auto" returns None for a single task: it may start a cluster on its machine.

    Raises ClusterError if the scheduler's variables are missing, incomplete or contradictory, or if
    "auto" finds two schedulers.
    """
    environment = with_resource_config(environment)
    if source == "auto":
        names = present(environment)
        if len(names) > 1:
            described = " and ".join(SCHEDULERS[name].words for name in names)
            raise ClusterError(
                f"The environment has variables of {described}. Say which of them describes the "
                f"cluster: --cluster={' or --cluster='.join(names)}."
            )
        source = found_by_auto(environment) or ""
    return SCHEDULERS[source].read(environment, wanted) if source else None


def size_flags(source: str) -> tuple[str, ...]:
    """The flags that say how many tasks of each job the cluster of `source` has."""
    is_told = source == "hosts" or SCHEDULERS[source].has_num_tasks
    return ("ps",) if is_told else ("workers", "ps")


def found_by_auto(environment: Mapping[str, str]) -> str | None:
    """The scheduler that `find` with "auto" detects; None if it detects none."""
    environment = with_resource_config(environment)
    names = present(environment)
    with contextlib.suppress(ClusterError):
        if len(names) == 1 and _is_single(names[0], environment):
            return None
    return names[0] if names else None


def present(environment: Mapping[str, str]) -> list[str]:
    """The schedulers of which `environment` has variables."""
    found = [name for name, source in SCHEDULERS.items() if source.variable in environment]
    if "jobset" in found and "indexed_job" in found:  # The Jobs of a JobSet are indexed.
        found.remove("indexed_job")
    return found


def _is_single(source: str, environment: Mapping[str, str]) -> bool:
    """Returns True if the scheduler has started one task only, also in a batch script."""
    if source == "slurm":
        num_tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
        return num_tasks == "1"
    wanted = Wanted("multiworker")
    has_number = SCHEDULERS[source].has_num_tasks
    return has_number and len(SCHEDULERS[source].read(environment, wanted).cluster.tasks()) == 1
