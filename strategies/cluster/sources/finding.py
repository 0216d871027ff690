"""Chooses the source of the cluster: what --cluster names, or what the environment has.

found = find("auto", os.environ, Wanted("multiworker"))
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from strategies.cluster.sources import clouds, kubernetes, slurm
from strategies.cluster.sources.base import Found, Wanted
from strategies.cluster.tf_config import ClusterError


def is_described(environment: Mapping[str, str]) -> bool:
    """Returns True if TF_CONFIG has a cluster; an empty one is TensorFlow's for one process."""
    try:
        config = json.loads(environment.get("TF_CONFIG", "{}"))
    except json.JSONDecodeError:
        return True  # Whoever parses it says what is wrong.
    return not isinstance(config, dict) or (bool(config) and config.get("cluster") != {})


class _Source(NamedTuple):
    words: str
    read: Callable[[Mapping[str, str], Wanted], Found]
    variables: Sequence[str]  # The scheduler sets one of them in each task.
    has_num_tasks: bool = True  # Otherwise --workers gives it.


SCHEDULERS = {
    "slurm": _Source("Slurm", slurm.from_slurm, ["SLURM_JOB_ID"]),
    "jobset": _Source("JobSet", kubernetes.from_jobset, ["JOBSET_NAME"], False),
    "indexed_job": _Source(
        "an indexed Job", kubernetes.from_indexed_job, ["JOB_COMPLETION_INDEX"], False
    ),
    "skypilot": _Source("SkyPilot", clouds.from_skypilot, ["SKYPILOT_NODE_IPS"]),
    "sagemaker": _Source("SageMaker", clouds.from_sagemaker, [clouds.RESOURCE_CONFIG]),
}


def find(source: str, environment: Mapping[str, str], wanted: Wanted) -> Found | None:
    """The cluster of scheduler `source`. With "auto", of the scheduler in `environment`, if any.

    "auto" returns None for a single task: it may start a cluster on its machine.

    Raises ClusterError if the scheduler's variables are missing, incomplete or contradictory, or if
    "auto" finds two schedulers.
    """
    environment = clouds.with_resource_config(environment)
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
    environment = clouds.with_resource_config(environment)
    names = present(environment)
    with contextlib.suppress(ClusterError):
        if len(names) == 1 and _is_single(names[0], environment):
            return None
    return names[0] if names else None


def present(environment: Mapping[str, str]) -> list[str]:
    """The schedulers of which `environment` has variables."""
    found = [
        name
        for name, source in SCHEDULERS.items()
        if any(variable in environment for variable in source.variables)
    ]
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
