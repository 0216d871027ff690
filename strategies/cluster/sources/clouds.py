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

# SageMaker writes the file in every container. The images with its toolkit set the variable, too.
RESOURCE_CONFIG_FILE = Path("/opt/ml/input/config/resourceconfig.json")
RESOURCE_CONFIG = "SM_RESOURCE_CONFIG"


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
    if RESOURCE_CONFIG in environment or not RESOURCE_CONFIG_FILE.is_file():
        return environment
    return {**environment, RESOURCE_CONFIG: RESOURCE_CONFIG_FILE.read_text()}


def from_sagemaker(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of all hosts of this training job.

    Raises ClusterError if the variable is not of SageMaker's form.
    """
    variables = Variables("SageMaker", environment)
    text = variables.get(RESOURCE_CONFIG)
    try:
        described = json.loads(text)
        hosts = described["hosts"]
        rank = hosts.index(described["current_host"])
    except (ValueError, LookupError, TypeError, AttributeError):
        form = '{"current_host": "a", "hosts": ["a", "b"]}'
        raise variables.error(f"{RESOURCE_CONFIG} is {text[:300]}, not as {form}") from None
    return found_by_rank("sagemaker", "SageMaker", hosts, rank, wanted, how_many="instance_count=N")
