"""The cluster of SkyPilot or SageMaker: one task for each machine.

found = from_skypilot(os.environ, Wanted("multiworker"))
found = from_sagemaker(with_resource_config(os.environ), Wanted("multiworker"))
"""

import json
from collections.abc import Mapping
from pathlib import Path

from strategies.cluster.sources.base import (
    DEFAULT_PORT,
    Found,
    Variables,
    Wanted,
    first_port,
    found_by_rank,
)

# SageMaker writes it in every container; SM_* are set only by the images with its toolkit.
RESOURCE_CONFIG_FILE = Path("/opt/ml/input/config/resourceconfig.json")
_RESOURCE_CONFIG = "SM_RESOURCE_CONFIG"
SAGEMAKER_VARIABLES = ("SM_HOSTS", _RESOURCE_CONFIG)


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


def with_resource_config(
    environment: Mapping[str, str], path: Path = RESOURCE_CONFIG_FILE
) -> Mapping[str, str]:
    """`environment`, with SageMaker's file as SM_RESOURCE_CONFIG if there is one."""
    if any(name in environment for name in SAGEMAKER_VARIABLES) or not path.is_file():
        return environment
    return {**environment, _RESOURCE_CONFIG: path.read_text()}


def from_sagemaker(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of all hosts of this training job.

    Raises ClusterError if the variables are incomplete or contradict each other.
    """
    variables = Variables("SageMaker", environment)
    hosts: object = None
    own: object = None
    if "SM_HOSTS" in environment:
        hosts, own = _json(variables, "SM_HOSTS"), variables.get("SM_CURRENT_HOST")
    else:
        described = _json(variables, _RESOURCE_CONFIG)
        if isinstance(described, dict):
            hosts, own = described.get("hosts"), described.get("current_host")
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise variables.error(f"its hosts are {hosts!r}, not a list of names")
    if own not in hosts:
        raise variables.error(f"this host is {own!r}, and not one of its hosts, {hosts}")
    rank = hosts.index(own)
    return found_by_rank("sagemaker", "SageMaker", hosts, rank, wanted, how_many="instance_count=N")


def _json(variables: Variables, name: str) -> object:
    text = variables.get(name)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise variables.error(f"{name} is not JSON ({error}): {text[:100]!r}") from None
