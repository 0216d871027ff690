"""Reads and checks flags and TF_CONFIG together: the recipe, the cluster, the aggregation.

    recipe = read_recipe()
    cluster = read_cluster(is_launched=False)

TensorFlow is not imported: a mistake is reported at once.
"""

import math
import os
import shlex
import sys
from collections.abc import Mapping

from data.system import object_store
from data.system.files import is_s3
from strategies.cluster.ports import free_ports
from strategies.cluster.tf_config import Cluster, parse_hosts, parse_tf_config
from trainer.cli import flags
from trainer.config import (
    Config,
    ConfigError,
    Recipe,
    check,
    check_sub_batches,
    data_dir,
    load_recipe,
)
from trainer.hooks.trackers.names import reached_over_network


def read_recipe() -> Recipe:
    """The recipe that --config names, with the fields that flags set, checked."""
    config = flags.CONFIG.value
    _check_epochs()
    for name, flag in flags.SHORTCUTS.items():
        if flag.value is not None:
            setattr(config, name, flag.value)
    check(config)
    if _at_s3(config):
        try:
            object_store.require()
        except object_store.MissingObstoreError as error:
            raise ConfigError(str(error.strerror)) from None
    return load_recipe(flags.FLAGS["config"].config_filename, config)


def _check_epochs() -> None:
    epochs = flags.EPOCHS.value
    if epochs is None:
        return
    if not 0 < epochs < math.inf:
        raise ConfigError(f"--epochs must be above 0. Received: {epochs}. Type --epochs=10.")
    names = ("train_steps", "config.train_steps")
    if any(name in flags.FLAGS and flags.FLAGS[name].present for name in names):
        raise ConfigError(
            f"--epochs={epochs:g} and --train_steps both say when training ends. Leave one out."
        )


def check_isolation(recipe: Recipe) -> None:
    """Refuses `--isolate=on` if tasks need the network to read or to write."""
    urls = [*_at_s3(recipe.config), reached_over_network(recipe.config.trackers)]
    if flags.ISOLATE.value == "on" and (urls := list(filter(None, urls))):
        raise ConfigError(
            f"--isolate=on separates the tasks from the network, but {urls[0]} is reached over "
            "the network. Use --isolate=auto, or local directories."
        )


def _at_s3(config: Config) -> list[str]:
    return list(filter(is_s3, (flags.MODEL_DIR.value or "", data_dir(config))))


def read_cluster(*, is_launched: bool) -> Cluster | None:
    """The cluster that TF_CONFIG or flags describe; None if this machine is the cluster.

    With `is_launched`, a launcher has checked the flags of local clusters.

    Raises:
        ConfigError: a flag would be ignored, or a needed flag is missing.
        ClusterError: the description is wrong.
    """
    _check_strategy_of_flags()
    cluster = _described_cluster()
    _check_flags(cluster, is_launched)
    return cluster


def _described_cluster() -> Cluster | None:
    text, strategy = os.environ.get("TF_CONFIG"), flags.STRATEGY.value
    hosts = {job: flag.value for job, flag in flags.HOSTS.items() if flag.value is not None}
    if text is None:
        return _cluster_of_flags(hosts, strategy)
    if given := [*(f"{job}_hosts" for job in hosts), *_given(flags.HOSTS_OF_TASKS)]:
        raise ConfigError(
            f"TF_CONFIG is set, and --{given[0]} is given: two descriptions of the cluster. Leave "
            f"--{given[0]} out, or `unset TF_CONFIG`."
        )
    cluster = parse_tf_config(text, strategy)
    if strategy != "mirrored":
        return cluster
    if cluster.task.job == "evaluator":
        raise ConfigError(
            f"TF_CONFIG says that this task is {cluster.task}, but one process that trains "
            "evaluates too (--config.eval_every_steps). Start no evaluator."
        )
    return None


def _cluster_of_flags(hosts: Mapping[str, str], strategy: str) -> Cluster | None:
    job, index = flags.JOB_NAME.value, flags.TASK_INDEX.value
    if not hosts:
        if given := _given(flags.HOSTS_OF_TASKS):
            raise ConfigError(
                f"--{given[0]} says which task this process is, but no flag says where the tasks "
                "are. Add --worker_hosts=host:port,... and, under ps, --ps_hosts=host:port,..."
            )
        return None
    if not flags.EXISTING_SERVERS.value:
        return parse_hosts(hosts, job, index, strategy)
    if job not in (None, "chief") or index not in (None, 0):
        raise ConfigError(
            f"--existing_servers makes this process the chief. Received: --job_name={job}, "
            f"--task_index={index}. Leave them out, or leave --existing_servers out."
        )
    if "chief" in hosts:
        return parse_hosts(hosts, "chief", 0, strategy)
    from strategies.cluster.peers import own_host

    servers = parse_hosts(hosts, "worker", 0, strategy)
    # The servers get the address when this process connects, so any port will do.
    return servers.with_chief(f"{own_host(servers.address)}:{free_ports(1)[0]}")


def _given(where: str) -> list[str]:
    scopes = flags.SCOPES.items()
    return [name for name, scope in scopes if scope.where == where and flags.FLAGS[name].present]


def _check_strategy_of_flags() -> None:
    strategy = flags.STRATEGY.value
    for name, scope in flags.SCOPES.items():
        flag = flags.FLAGS[name]
        if flag.present and strategy not in scope.strategies:
            raise ConfigError(
                f"--{name}={flag.value} is for --strategy={' or '.join(scope.strategies)}, and "
                f"would be ignored under {strategy}. Leave it out."
            )


def _check_flags(cluster: Cluster | None, is_launched: bool) -> None:
    """Refuses flags that would be ignored. A launcher has checked those of `is_launched` tasks."""
    model_dir = flags.MODEL_DIR.value
    if flags.DOWNLOAD_ONLY.value and cluster is not None:
        raise ConfigError(
            "--download_only is for a process that is no task of a cluster, but TF_CONFIG or "
            "--worker_hosts makes this process a task. Leave it out, or type it without them: "
            f"env -u TF_CONFIG python -m trainer {shlex.join(sys.argv[1:])}"
        )
    if flags.DOWNLOAD_ONLY.value and model_dir is not None:
        raise ConfigError(
            f"--download_only trains nothing, so that --model_dir={model_dir} would stay empty. "
            "Leave one of the two out."
        )
    if flags.DOWNLOAD_ONLY.value and flags.CHECK.value:
        raise ConfigError("--download_only and --check are two ways to end early. Leave one out.")
    if cluster is not None and not is_launched and (given := _given(flags.LOCAL)):
        raise ConfigError(
            f"--{given[0]} is for a cluster on this machine, but TF_CONFIG or --worker_hosts "
            f"describes a cluster already. Leave --{given[0]} out, or remove the description."
        )
    if cluster is None and (given := _given(flags.DESCRIBED)):
        raise ConfigError(
            f"--{given[0]} is for the tasks of a cluster, but there is no TF_CONFIG and no "
            f"--worker_hosts. Leave --{given[0]} out, or describe the cluster."
        )
    if cluster is not None:
        _check_role_flags(cluster)
        if not flags.ALLOW_PUBLIC_ADDRESS.value:
            from strategies.cluster.peers import check_private

            check_private(cluster)


def _check_role_flags(cluster: Cluster) -> None:
    task = cluster.task
    if flags.KEEP_SERVING.value and not cluster.is_server:
        raise ConfigError(f"--keep_serving is for worker and ps tasks, but this task is {task}.")
    if flags.KEEP_SERVING.value and flags.CHIEF_TIMEOUT_SECS.present:
        raise ConfigError(
            "--keep_serving waits for the next chief without a limit, so --chief_timeout_secs="
            f"{flags.CHIEF_TIMEOUT_SECS.value:g} would be ignored. Leave one out."
        )
    if flags.CHECK.value and serves(cluster):
        raise ConfigError(
            f"--check needs the config, which {task} gets from the chief. Use --check in the "
            f"command of {cluster.chief}."
        )
    is_described_by_flags = flags.JOB_NAME.value or flags.EXISTING_SERVERS.value
    needs_model_dir = not serves(cluster) and not is_described_by_flags
    if flags.MODEL_DIR.value is None and (needs_model_dir or flags.STRATEGY.value == "multiworker"):
        raise ConfigError(
            f"{task} needs --model_dir: a directory that all tasks see, on a shared file system."
        )


def check_wire(num_senders: int) -> None:
    """Refuses `--wire_dtype` if no gradient is sent, because there is one worker."""
    wire_dtype = flags.WIRE_DTYPE.value
    if wire_dtype != "float32" and flags.STRATEGY.value == "multiworker" and num_senders == 1:
        raise ConfigError(
            f"--wire_dtype={wire_dtype} is for gradients that are sent to other workers, but there "
            "is one worker. Leave it out, or give --workers=2."
        )


def serves(cluster: Cluster) -> bool:
    """Returns True if this task only executes what a chief in another process sends."""
    return cluster.is_server and (flags.KEEP_SERVING.value or not cluster.is_chief)


def num_to_aggregate(recipe: Recipe, num_workers: int) -> int:
    """The checked number of gradients of a synchronous step; 0 for asynchronous steps."""
    wanted, max_staleness = flags.REPLICAS_TO_AGGREGATE.value, flags.MAX_STALENESS.value
    if not flags.SYNC_REPLICAS.value:
        if wanted is not None:
            raise ConfigError(
                f"--replicas_to_aggregate={wanted} needs --sync_replicas: asynchronous steps "
                "aggregate nothing."
            )
        return 0
    if max_staleness is not None:
        raise ConfigError(
            f"--max_staleness={max_staleness} is for asynchronous steps; with --sync_replicas "
            "every applied gradient has staleness 0. Leave one of the two out."
        )
    wanted = num_workers if wanted is None else wanted
    if not 1 <= wanted <= num_workers:
        raise ConfigError(
            f"--replicas_to_aggregate must be from 1 to the number of workers, {num_workers}. "
            f"Received: {wanted}. A step cannot wait for more gradients than there are workers."
        )
    check_sub_batches(recipe.config, wanted, num_workers)
    return int(wanted)
