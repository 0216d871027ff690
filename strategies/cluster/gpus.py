"""Divides the GPUs of a host among its tasks, before TensorFlow sees them: choose_gpus(cluster)."""

import logging
import os
from collections import Counter
from collections.abc import Mapping, MutableMapping

from strategies.cluster.peers import host_of
from strategies.cluster.tf_config import Cluster
from strategies.gpus import VISIBLE, visible_gpus

log = logging.getLogger(__name__)


def choose_gpus(
    cluster: Cluster, *, is_launched: bool = False, env: MutableMapping[str, str] = os.environ
) -> None:
    """Makes only the GPUs visible that belong to this task, if it shares its host with others.

    All workers get the same number, which TensorFlow needs: that of a host with the most workers.
    A worker of ps computes on one GPU; its chief and parameter servers use none. An evaluator uses
    the last GPU. A list in CUDA_VISIBLE_DEVICES is this task's own, unless other tasks have the
    same: those of a local cluster (`is_launched`), or of Slurm if it has not chosen for each task.
    """
    visible, chosen = visible_gpus(env), _chosen(cluster, is_launched, env)
    if chosen is not None and chosen != visible:
        env[VISIBLE] = ",".join(chosen)
        log.info("CUDA_VISIBLE_DEVICES=%s, of %s.", env[VISIBLE], ",".join(visible))


def gpus_of_host(
    cluster: Cluster, *, is_launched: bool = False, env: Mapping[str, str] = os.environ
) -> dict[str, list[str]]:
    """The GPUs that `choose_gpus` gives to each task of this host that computes, by its name."""
    own = host_of(cluster.address)
    here = (task for task in cluster.tasks() if host_of(cluster.address_of(task)) == own)
    found = {str(task): _chosen(cluster.for_task(task), is_launched, env) for task in here}
    return {name: gpus for name, gpus in found.items() if gpus}


def _chosen(cluster: Cluster, is_launched: bool, env: Mapping[str, str]) -> list[str] | None:
    """The GPUs of this task; None if it does not compute."""
    is_ps = "ps" in cluster.jobs
    if is_ps and cluster.task.job not in ("worker", "evaluator"):
        return None
    visible = visible_gpus(env)
    is_local = is_launched and cluster.num_hosts == 1
    is_of_slurm = "SLURM_PROCID" in env and not _has_slurm_chosen(env)
    chosen = visible
    if cluster.task.job == "evaluator":
        chosen = visible[-1:]
    elif VISIBLE not in env or is_local or is_of_slurm:
        hosts = {
            task: host_of(cluster.address_of(task))
            for task in cluster.trainers
            if not is_ps or task.job == "worker"
        }
        neighbours = [task for task, host in hosts.items() if host == hosts[cluster.task]]
        (_, most), *_ = Counter(hosts.values()).most_common(1)
        chosen = share_of(visible, neighbours.index(cluster.task), most)
    return chosen[:1] if is_ps else chosen


def _has_slurm_chosen(env: Mapping[str, str]) -> bool:
    """Returns True if Slurm gives each task GPUs of its own."""
    return (
        "SLURM_GPUS_PER_TASK" in env
        or "gpu" in env.get("SLURM_TRES_PER_TASK", "")
        or env.get("SLURM_GPU_BIND", "none") != "none"
    )


def share_of(gpus: list[str], place: int, num_places: int) -> list[str]:
    """The part of `gpus` for place `place`: as many for each place, or one for several places."""
    each = len(gpus) // num_places
    if not each:
        return [gpus[place % len(gpus)]] if gpus else []
    return gpus[place * each : (place + 1) * each]
