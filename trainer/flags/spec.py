"""The cluster on this machine, and the task, that the parsed flags describe.

cluster = read_cluster(is_launched=False) or cluster_here()
spec = task_spec(recipe, cluster, model_dir_of(recipe))
"""

from collections.abc import Callable

from strategies.cluster.ports import free_ports
from strategies.cluster.tf_config import Cluster, local_cluster
from trainer import flags
from trainer.config import Recipe
from trainer.flags.checks import metrics_address, num_to_aggregate, serves
from trainer.flags.model_dir import is_default_dir
from trainer.task_spec import TaskSpec


def cluster_here(choose_ports: Callable[[int], list[int]] = free_ports) -> Cluster:
    """The cluster on this machine, as --workers and --ps say."""
    strategy = flags.STRATEGY.value
    num_workers = flags.WORKERS.value if strategy != "mirrored" else 1
    return local_cluster(strategy, num_workers, flags.PS.value, choose_ports)


def num_workers(cluster: Cluster | None) -> int:
    """The number of tasks that compute gradients; 1 without a cluster."""
    if cluster is None:
        return 1
    return cluster.num("worker") if cluster.num("ps") else len(cluster.trainers)


def task_spec(
    recipe: Recipe, cluster: Cluster | None, model_dir: str, *, is_launched: bool = False
) -> TaskSpec:
    """The task that the parsed flags describe."""
    return TaskSpec(
        strategy=flags.STRATEGY.value,
        recipe=recipe,
        cluster=cluster,
        model_dir=model_dir,
        is_latest=is_default_dir(),
        replicas=flags.REPLICAS.value,
        num_gpus=flags.NUM_GPUS.value,
        communication=flags.COMMUNICATION.value,
        wire_dtype=flags.WIRE_DTYPE.value,
        read_dtype=flags.READ_DTYPE.value,
        bucket_mb=flags.BUCKET_MB.value,
        num_threads=flags.NUM_THREADS.value,
        log_device_placement=flags.LOG_DEVICE_PLACEMENT.value,
        is_verbose=flags.VERBOSE.value,
        is_quiet=flags.QUIET.value,
        flags=flags.strategy_words(),
        replicas_to_aggregate=num_to_aggregate(recipe, num_workers(cluster)),
        max_staleness=flags.MAX_STALENESS.value,
        ps_standby=flags.PS_STANDBY.value,
        is_checked=is_launched,
        serves=cluster is not None and serves(cluster),
        chief_timeout_secs=None if flags.KEEP_SERVING.value else flags.CHIEF_TIMEOUT_SECS.value,
        grace_secs=flags.GRACE_SECS.value,
        stall_timeout_secs=flags.STALL_TIMEOUT_SECS.value,
        metrics_address=metrics_address(listens=cluster is None or cluster.is_chief),
    )
