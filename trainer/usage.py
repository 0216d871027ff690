"""What flags and TF_CONFIG say together, checked: the recipe, the cluster, numbers.

    recipe = read_recipe()
    cluster = read_cluster(is_launched=False)

TensorFlow is not imported: a mistake should not wait for it.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from strategies.cluster import Cluster, parse_hosts, parse_tf_config
from strategies.ports import free_ports
from trainer.config import ConfigError, Recipe, check, check_shares, load_recipe
from trainer.flags import (
    ALLOW_PUBLIC_ADDRESS,
    CHECK,
    CHIEF_TIMEOUT_SECS,
    CONFIG,
    DOWNLOAD_ONLY,
    EXISTING_SERVERS,
    HOSTS,
    JOB_NAME,
    KEEP_SERVING,
    MAX_STALENESS,
    MODEL_DIR,
    REPLICAS_TO_AGGREGATE,
    SHORTCUTS,
    STRATEGY,
    SYNC_REPLICAS,
    TASK_ID,
    TASK_INDEX,
    WIRE_DTYPE,
)

FLAGS = flags.FLAGS

# Flags that mean nothing under other strategies, and are refused there.
_ONLY_FOR = {
    "allow_public_address": ("multiworker", "ps"),
    "bind_cores": ("multiworker",),
    "chief_hosts": ("ps",),
    "chief_timeout_secs": ("multiworker", "ps"),
    "communication": ("multiworker",),
    "existing_servers": ("ps",),
    "isolate": ("multiworker", "ps"),
    "job_name": ("multiworker", "ps"),
    "keep_serving": ("ps",),
    "max_staleness": ("ps",),
    "ps": ("ps",),
    "ps_hosts": ("ps",),
    "replicas": ("mirrored",),
    "replicas_to_aggregate": ("ps",),
    "sync_replicas": ("ps",),
    "task_id": ("multiworker", "ps"),
    "task_index": ("multiworker", "ps"),
    "unknown_host_secs": ("multiworker", "ps"),
    "worker_hosts": ("multiworker", "ps"),
    "wire_dtype": ("multiworker", "ps"),
    "workers": ("multiworker", "ps"),
}
_OF_LOCAL_CLUSTERS = ("bind_cores", "isolate", "max_restarts", "ps", "workers")
_OF_HOSTS = ("job_name", "task_index", "task_id", "existing_servers")
_OF_DESCRIBED_CLUSTERS = (
    "allow_public_address",
    "keep_serving",
    "chief_timeout_secs",
    "unknown_host_secs",
)


def read_recipe() -> Recipe:
    """The recipe that --config names, with the fields that flags set.

    Raises:
        ConfigError: a field has a value that cannot be.
    """
    config = CONFIG.value
    for name, flag in SHORTCUTS.items():
        if flag.value is not None:
            setattr(config, name, flag.value)
    check(config)
    return load_recipe(FLAGS["config"].config_filename, config)


def read_cluster(*, is_launched: bool) -> Cluster | None:
    """The cluster that TF_CONFIG or flags describe; None for this machine alone.

    `is_launched`: by a launcher, which was checked.

    Raises:
        ConfigError: a flag would be ignored here, or one is missing.
        ClusterError: the description is at fault.
    """
    _check_strategy_of_flags()
    cluster = _described_cluster()
    _check_flags(cluster, is_launched)
    return cluster


def _described_cluster() -> Cluster | None:
    text = os.environ.get("TF_CONFIG")
    hosts = {job: flag.value for job, flag in HOSTS.items() if flag.value is not None}
    if text is None:
        return _cluster_of_flags(hosts)
    given = [*(f"{job}_hosts" for job in hosts), *_present(_OF_HOSTS)]
    if given:
        raise ConfigError(
            f"TF_CONFIG is set, and --{given[0]} is given: two descriptions of the cluster. Leave "
            f"--{given[0]} out, or `unset TF_CONFIG`."
        )
    cluster = parse_tf_config(text, STRATEGY.value)
    if cluster.task.job == "evaluator" and STRATEGY.value == "mirrored":
        raise ConfigError(
            f"TF_CONFIG says that this task is {cluster.task}, but one process that trains "
            "evaluates too (--config.eval_every_steps). Start no process for it."
        )
    return None if STRATEGY.value == "mirrored" else cluster


def _cluster_of_flags(hosts: Mapping[str, str]) -> Cluster | None:
    if not hosts:
        if given := _present(_OF_HOSTS):
            raise ConfigError(
                f"--{given[0]} says which task this process is, but no flag says where the tasks "
                "are. Add --worker_hosts=host:port,... and, under ps, --ps_hosts=host:port,..."
            )
        return None
    index = TASK_INDEX.value if TASK_INDEX.value is not None else TASK_ID.value
    if TASK_ID.value not in (None, index):
        raise ConfigError(
            f"--task_index={index} and --task_id={TASK_ID.value} are two names of one thing. "
            "Leave one of them out."
        )
    job = JOB_NAME.value
    if EXISTING_SERVERS.value:
        if job not in (None, "chief") or index not in (None, 0):
            raise ConfigError(
                f"--existing_servers makes this process the chief. Received: --job_name={job}, "
                f"--task_index={index}. Leave them out, or leave --existing_servers out."
            )
        if "chief" not in hosts:
            from strategies.peers import own_host

            servers = parse_hosts(hosts, "worker", 0, STRATEGY.value)
            # The servers learn of it when this process connects to them, so any port will do.
            return servers.with_chief(f"{own_host(servers.address)}:{free_ports(1)[0]}")
        job, index = "chief", 0
    return parse_hosts(hosts, job, index, STRATEGY.value)


def _present(names: Sequence[str]) -> list[str]:
    return [name for name in names if FLAGS[name].present]


def _check_strategy_of_flags() -> None:
    """Refuses flags of other strategies."""
    for name in _present(list(_ONLY_FOR)):
        if STRATEGY.value not in _ONLY_FOR[name]:
            raise ConfigError(
                f"--{name}={FLAGS[name].value} is for --strategy={' or '.join(_ONLY_FOR[name])}, "
                f"and would be ignored under {STRATEGY.value}. Leave it out."
            )


def _check_flags(cluster: Cluster | None, is_launched: bool) -> None:
    """Refuses flags that would be ignored; `is_launched`: by a launcher, which was checked."""
    if DOWNLOAD_ONLY.value and cluster is not None:
        raise ConfigError(
            "--download_only is for one process before any task is started, but TF_CONFIG or "
            "--worker_hosts says that this is one. Leave it out, or type it without them: "
            f"env -u TF_CONFIG python -m trainer {shlex.join(sys.argv[1:])}"
        )
    if DOWNLOAD_ONLY.value and MODEL_DIR.value is not None:
        raise ConfigError(
            f"--download_only trains nothing, so that --model_dir={MODEL_DIR.value} would stay "
            "empty. Leave one of the two out."
        )
    if DOWNLOAD_ONLY.value and CHECK.value:
        raise ConfigError("--download_only and --check are two ways to end early. Leave one out.")
    if cluster is not None and not is_launched and (given := _present(_OF_LOCAL_CLUSTERS)):
        raise ConfigError(
            f"--{given[0]} is for a cluster on this machine, but TF_CONFIG or --worker_hosts "
            f"describes one already. Leave --{given[0]} out, or take the description away."
        )
    if cluster is None and (given := _present(_OF_DESCRIBED_CLUSTERS)):
        raise ConfigError(
            f"--{given[0]} is for the tasks of a cluster, but there is no TF_CONFIG and no "
            f"--worker_hosts. Leave --{given[0]} out, or describe the cluster."
        )
    if cluster is not None:
        _check_role_flags(cluster)
        if not ALLOW_PUBLIC_ADDRESS.value:
            from strategies.peers import check_private

            check_private(cluster)
    for name in ("replicas", "num_threads", "num_gpus"):
        if (FLAGS[name].value or 0) < 0:
            raise ConfigError(f"--{name} must be at least 0. Received: {FLAGS[name].value}.")


def _check_role_flags(cluster: Cluster) -> None:
    """Refuses what means nothing to this task of a cluster, and asks for what it needs."""
    task = cluster.task
    if KEEP_SERVING.value and not cluster.is_server:
        raise ConfigError(f"--keep_serving is for worker and ps tasks, but this task is {task}.")
    if KEEP_SERVING.value and _present(["chief_timeout_secs"]):
        raise ConfigError(
            "--keep_serving waits for the next chief however long it takes, so "
            f"--chief_timeout_secs={CHIEF_TIMEOUT_SECS.value:g} would be ignored. Leave one out."
        )
    if CHECK.value and serves(cluster):
        raise ConfigError(
            f"--check looks at what is trained, which {task} is told by the chief. Check it in the "
            f"command of {cluster.chief}."
        )
    needs_model_dir = not serves(cluster) and not JOB_NAME.value and not EXISTING_SERVERS.value
    if MODEL_DIR.value is None and (needs_model_dir or STRATEGY.value == "multiworker"):
        raise ConfigError(
            f"{task} needs --model_dir: a directory that all tasks see, on a shared file system."
        )


def check_wire(num_senders: int) -> None:
    """Refuses `--wire_dtype` where one task alone computes gradients and applies them.

    Raises:
        ConfigError: nothing would be sent.
    """
    if WIRE_DTYPE.value != "float32" and STRATEGY.value == "multiworker" and num_senders == 1:
        raise ConfigError(
            f"--wire_dtype={WIRE_DTYPE.value} is for gradients that are sent to other workers, but "
            "there is one worker. Leave it out, or give --workers=2."
        )


def serves(cluster: Cluster) -> bool:
    """Whether this task does what a chief elsewhere says, and no more."""
    return cluster.is_server and (KEEP_SERVING.value or not cluster.is_chief)


def num_to_aggregate(recipe: Recipe, num_workers: int) -> int:
    """Gradients of a synchronous step of `num_workers` ps workers; 0 for asynchronous steps.

    Raises:
        ConfigError: it cannot be what flags say.
    """
    wanted = REPLICAS_TO_AGGREGATE.value
    if SYNC_REPLICAS.value and MAX_STALENESS.value is not None:
        raise ConfigError(
            f"--max_staleness={MAX_STALENESS.value} is for asynchronous steps; with "
            "--sync_replicas every applied gradient has staleness 0. Leave one of the two out."
        )
    if not SYNC_REPLICAS.value:
        if wanted is not None:
            raise ConfigError(
                f"--replicas_to_aggregate={wanted} needs --sync_replicas: asynchronous steps "
                "aggregate nothing."
            )
        return 0
    if wanted is None:
        wanted = num_workers
    if not 1 <= wanted <= num_workers:
        raise ConfigError(
            f"--replicas_to_aggregate must be from 1 to the number of workers, {num_workers}. "
            f"Received: {wanted}. A step cannot wait for more gradients than there are workers."
        )
    check_shares(recipe.config, wanted, num_workers)
    return int(wanted)
