"""Reads and checks flags and TF_CONFIG together: the recipe, the cluster, the aggregation.

    recipe = read_recipe()
    cluster = read_cluster(is_launched=False)

TensorFlow is not imported: a mistake is reported at once.
"""

import logging
import math
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence

from data.system import object_store
from data.system.files import is_s3, is_url
from strategies.cluster.ports import free_ports
from strategies.cluster.sources import finding
from strategies.cluster.sources.base import Found, Wanted
from strategies.cluster.sources.finding import is_described
from strategies.cluster.tf_config import Cluster, parse_hosts, parse_tf_config
from strategies.transfer import Transfer
from trainer import flags
from trainer.config import ConfigError, Recipe, data_dir, load_recipe
from trainer.config_checks import check, check_sub_batches, check_virtual_replicas
from trainer.guards.fingerprint import shared_settings
from trainer.hooks.tracker_names import reached_over_network

log = logging.getLogger(__name__)

# Pairs of flags that exclude each other, and pairs of which the first one needs the second one.
_EXCLUSIVE = (
    ("download_only", "model_dir", "trains nothing, so that {} would stay empty"),
    ("download_only", "check", "and {} are two ways to end early"),
    ("quiet", "verbose", "prints none of the lines that {} adds"),
    ("keep_serving", "max_restarts", "restarts this task without a limit, and would ignore {}"),
    ("keep_serving", "chief_timeout_secs", "waits without a limit, and would ignore {}"),
    ("sync_replicas", "max_staleness", "gives all gradients the staleness 0, and would ignore {}"),
)
_NEEDED = (
    ("rejoin_secs", "min_workers", "without it the others wait for a lost host without a limit"),
    ("metrics_host", "metrics_port", "without it nothing is served"),
    ("replicas_to_aggregate", "sync_replicas", "asynchronous steps aggregate nothing"),
)
METRICS_FD = "TRAINER_METRICS_FD"  # Names the descriptor of a socket that a launcher has made.


def read_recipe() -> Recipe:
    """Returns the recipe that --config names, with the fields that flags set, after all checks."""
    config = flags.CONFIG.value
    _check_epochs()
    for name, flag in flags.SHORTCUTS.items():
        if flag.value is not None:
            setattr(config, name, flag.value)
    check(config)
    if any(map(is_s3, (flags.MODEL_DIR.value or "", data_dir(config)))):
        try:
            object_store.require()
        except object_store.MissingObstoreError as error:
            raise ConfigError(str(error.strerror)) from None
    return load_recipe(flags.FLAGS["config"].config_filename, config)


def read_shared_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that must be equal in all tasks of this run."""
    return shared_settings(recipe, Transfer(**flags.values_of(Transfer)))


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


def network_needed(recipe: Recipe) -> str:
    """Returns what the tasks reach over the network; empty if there is nothing.

    Raises ConfigError if there is something, and --isolate=on.
    """
    urls = [path for path in (flags.MODEL_DIR.value or "", data_dir(recipe.config)) if is_url(path)]
    needed = next(iter(urls), reached_over_network(recipe.config.trackers)) or ""
    if needed and flags.ISOLATE.value == "on":
        raise ConfigError(
            f"--isolate=on separates the tasks from the network, but {needed} is reached over "
            "the network. Use --isolate=auto, or local directories."
        )
    return needed


def metrics_listener(*, is_chief: bool) -> socket.socket | None:
    """Returns a socket for readers of the chief's metrics; None without --metrics_port.

    A launcher listens before it starts the chief, which may be in another network namespace, and
    passes the socket with the variable METRICS_FD.

    Raises ConfigError if nothing can listen at that address.
    """
    host, port = flags.METRICS_HOST.value, flags.METRICS_PORT.value
    if port is None or not is_chief:
        return None
    if inherited := os.environ.pop(METRICS_FD, None):
        return socket.socket(fileno=int(inherited))
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(
            f"--metrics_port={port} cannot be listened at on {host}: {error.strerror}. Give "
            "another --metrics_port, or an address of this machine as --metrics_host."
        ) from None


def read_cluster(*, is_launched: bool) -> Cluster | None:
    """Returns the cluster that TF_CONFIG, flags or a scheduler describe; None if there is none.

    If `is_launched`, a launcher has already checked the flags of local clusters.

    Raises:
        ConfigError: a flag would be ignored, or a needed flag is missing.
        ClusterError: the description is wrong.
    """
    _check_strategy_of_flags()
    found = None
    if not is_launched:  # Otherwise the launcher has chosen, and sets TF_CONFIG.
        _check_source()
        found = _cluster_of_source()
    is_local = flags.CLUSTER.value == "local" and not is_launched
    cluster = found.cluster if found else None if is_local else _described_cluster(is_launched)
    if cluster is None and (given := _given_of(("hosts", "port"))):
        raise ConfigError(
            f"--{given[0]} is for a cluster of several hosts, but --cluster="
            f"{flags.CLUSTER.value} found none: this machine is the cluster. Leave it out."
        )
    _check_flags(cluster, is_launched, finding.size_flags(found.source) if found else ())
    if not is_launched:
        _check_elastic(cluster)
    if found:
        log.info("%s", found.line())
    return cluster


def _check_elastic(cluster: Cluster | None) -> None:
    """Refuses --min_workers where it would be ignored or cannot work."""
    least, model_dir = flags.MIN_WORKERS.value, flags.MODEL_DIR.value
    if least is None:
        return
    given = f"--min_workers={least}"
    is_local = cluster is None and flags.STRATEGY.value == "ps"
    if not is_local and (flags.HOST_LIST.value is None or cluster is None):
        raise ConfigError(
            f"{given} needs the list of all hosts that may take part. Add --hosts=a,b,c, the same "
            "on every host, or leave --min_workers out."
        )
    most = flags.WORKERS.value if cluster is None else cluster.num("worker")
    if least > most:
        what = "workers of --workers" if is_local else "hosts of --hosts that are workers"
        raise ConfigError(
            f"{given} is more than the {most} {what}, so that training would never begin. Type "
            f"--min_workers={most}, or less."
        )
    if not math.isfinite(flags.REJOIN_SECS.value):
        raise ConfigError(
            f"--rejoin_secs={flags.REJOIN_SECS.value}: it must be finite. Type --rejoin_secs=60."
        )
    for name in ("keep_serving", "chief_timeout_secs"):
        if flags.STRATEGY.value == "ps" and flags.FLAGS[name].present:
            raise ConfigError(
                f"{given}: the launchers decide how long a task waits for the chief, and start it "
                f"again for the next one, so that --{name} would be ignored. Leave one out."
            )
    if flags.MAX_RESTARTS.value == 0:
        raise ConfigError(
            f"{given} needs restarts: when the workers that train change, each launcher starts its "
            "tasks again. But --max_restarts=0 allows none. Leave it out."
        )
    if is_url(str(model_dir)):
        where = "a shared file system with hard links, on which the hosts agree who trains"
        if is_local:
            where = "this machine: its file membership/workers says how many workers train"
        raise ConfigError(
            f"{given} needs --model_dir on {where}. Received: --model_dir={model_dir}."
        )


def _check_source() -> None:
    """Refuses flags that describe the cluster twice, or not at all for --cluster."""
    source, is_set = flags.CLUSTER.value, is_described(os.environ)
    by_tasks = [f"{job}_hosts" for job, flag in flags.HOSTS.items() if flag.value is not None]
    if source == "tf_config" and not is_set:
        raise ConfigError(
            "--cluster=tf_config needs the variable TF_CONFIG, which is not set, or is {}. Set it, "
            "as docs/clusters.md shows, or leave --cluster out."
        )
    if source == "hosts" and flags.HOST_LIST.value is None:
        raise ConfigError("--cluster=hosts needs the hosts. Add --hosts=a,b,c.")
    if flags.HOST_LIST.value is not None and source not in ("auto", "hosts"):
        raise ConfigError(
            f"--hosts and --cluster={source} are two descriptions of the cluster. Leave one out."
        )
    if source == "local" and (given := by_tasks or _given(flags.HOSTS_OF_TASKS)):
        raise ConfigError(
            f"--cluster=local is a cluster on this machine, and --{given[0]} describes another. "
            "Leave one out."
        )
    described = ["TF_CONFIG"] * (is_set and source in ("auto", "tf_config"))
    described += [f"--{name}" for name in by_tasks]
    if described and (given := _given_of(("hosts", "port"))):
        raise ConfigError(
            f"{described[0]} describes the cluster, and would ignore --{given[0]}. Leave one out."
        )


def _cluster_of_source() -> Found | None:
    """The cluster of --hosts or of a scheduler's environment; None if that is not the source."""
    source, strategy = flags.CLUSTER.value, flags.STRATEGY.value
    by_tasks = any(flag.value is not None for flag in flags.HOSTS.values())
    is_elsewhere = source in ("local", "tf_config") or by_tasks or strategy == "mirrored"
    if is_elsewhere or (source == "auto" and is_described(os.environ)):
        return None
    from strategies.cluster.sources import clouds, hosts

    wanted = Wanted(
        strategy,
        num_ps=flags.PS.value if strategy == "ps" else 0,
        num_workers=flags.WORKERS.value if flags.WORKERS.present else None,
        port=flags.PORT.value,
    )
    if flags.HOST_LIST.value is not None:
        job = flags.JOB_NAME.value
        task = None if job is None else (job, flags.TASK_INDEX.value)
        return hosts.from_hosts(flags.HOST_LIST.value, wanted, task, hosts.here())
    return finding.find(source, clouds.with_resource_config(os.environ), wanted)


def _described_cluster(is_launched: bool) -> Cluster | None:
    text, strategy = os.environ.get("TF_CONFIG"), flags.STRATEGY.value
    hosts = {job: flag.value for job, flag in flags.HOSTS.items() if flag.value is not None}
    if text is None or not is_described(os.environ):
        return _cluster_of_flags(hosts, strategy)
    # A launcher has made TF_CONFIG of these flags.
    if not is_launched and (
        given := [*(f"{job}_hosts" for job in hosts), *_given(flags.HOSTS_OF_TASKS)]
    ):
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
    return _given_of(name for name, scope in flags.SCOPES.items() if scope.where == where)


def _given_of(names: Iterable[str]) -> list[str]:
    return [name for name in names if flags.FLAGS[name].present]


def _check_strategy_of_flags() -> None:
    strategy = flags.STRATEGY.value
    for name, scope in flags.SCOPES.items():
        flag = flags.FLAGS[name]
        if flag.present and strategy not in scope.strategies:
            raise ConfigError(
                f"--{name}={flag.value} is for --strategy={' or '.join(scope.strategies)}, and "
                f"would be ignored under {strategy}. Leave it out."
            )


def _check_flags(cluster: Cluster | None, is_launched: bool, sizes: Sequence[str] = ()) -> None:
    """Refuses flags that would be ignored. If `is_launched`, a launcher has checked most of them.

    `sizes` are the flags of local clusters that were used for the size of `cluster`.
    """
    if flags.DOWNLOAD_ONLY.value and cluster is not None:
        raise ConfigError(
            "--download_only is for a process that is no task of a cluster, but TF_CONFIG or "
            "--worker_hosts makes this process a task. Leave it out, or type it without them: "
            f"env -u TF_CONFIG python -m trainer {shlex.join(sys.argv[1:])}"
        )
    ignored = [name for name in _given(flags.LOCAL) if name not in sizes]
    if cluster is not None and not is_launched and ignored:
        what = "the environment or --hosts" if sizes else "TF_CONFIG or --worker_hosts"
        raise ConfigError(
            f"--{ignored[0]} is for a cluster on this machine, but {what} describes a cluster "
            f"already. Leave --{ignored[0]} out, or type --cluster=local without that description."
        )
    if cluster is None and (given := _given(flags.DESCRIBED)):
        raise ConfigError(
            f"--{given[0]} is for the tasks of a cluster, but there is no TF_CONFIG, --hosts or "
            f"--worker_hosts, and no scheduler. Leave --{given[0]} out, or describe the cluster."
        )
    _check_pairs()
    if cluster is not None:
        _check_role_flags(cluster)
        if not flags.ALLOW_PUBLIC_ADDRESS.value:
            from strategies.cluster.peers import check_private

            check_private(cluster)


def _check_pairs() -> None:
    """Refuses two flags of which one would be ignored, and a flag without one that it needs."""
    for name, other, why in _EXCLUSIVE:
        if _is_given(name) and _is_given(other):
            says = why.format(flags.FLAGS[other].serialize())
            raise ConfigError(f"--{name} {says}. Leave one of the two out.")
    for name, other, why in _NEEDED:
        if _is_given(name) and not _is_given(other):
            given = flags.FLAGS[name].serialize()
            raise ConfigError(f"{given} needs --{other}: {why}. Add it, or leave --{name} out.")


def _is_given(name: str) -> bool:
    return flags.FLAGS[name].present and flags.FLAGS[name].value is not False


def _check_role_flags(cluster: Cluster) -> None:
    task = cluster.task
    if flags.KEEP_SERVING.value and not cluster.is_server:
        raise ConfigError(f"--keep_serving is for worker and ps tasks, but this task is {task}.")
    waits_for_chief = flags.STRATEGY.value == "ps" or cluster.num("evaluator")
    if flags.CHIEF_TIMEOUT_SECS.present and not waits_for_chief:
        raise ConfigError(
            f"--chief_timeout_secs={flags.CHIEF_TIMEOUT_SECS.value:g} is for tasks that serve "
            "under --strategy=ps, and for an evaluator, but this cluster has none of them. Use "
            "--stall_timeout_secs, or leave it out."
        )
    if flags.CHECK.value and serves(cluster):
        raise ConfigError(
            f"--check needs the config, which {task} gets from the chief. Use --check in the "
            f"command of {cluster.chief}."
        )
    is_described_by_flags = flags.JOB_NAME.value or flags.EXISTING_SERVERS.value
    needs_model_dir = not serves(cluster) and not is_described_by_flags
    needs_model_dir |= flags.STRATEGY.value == "multiworker" or flags.MIN_WORKERS.present
    if flags.MODEL_DIR.value is None and needs_model_dir:
        raise ConfigError(
            f"{task} needs --model_dir: a directory that all tasks see, on a shared file system."
        )


def check_sizes(recipe: Recipe, num_workers: int, num_ps: int) -> None:
    """Refuses flags that do not fit the number of workers, or of parameter servers."""
    num_summed = num_to_aggregate(recipe, num_workers)
    parts = recipe.config.virtual_replicas
    if (recipe.config.deterministic or parts) and num_ps and num_summed < num_workers:
        option = f"config.virtual_replicas={parts}" if parts else "--deterministic"
        raise ConfigError(
            f"{option}: the steps of ps depend on which workers are fast, unless each step "
            "sums the gradients of all. Add --sync_replicas, without --replicas_to_aggregate."
        )
    secs, limit = recipe.config.local_steps.every_secs, flags.STALL_TIMEOUT_SECS.value
    if limit and secs > limit / 2:
        raise ConfigError(
            f"config.local_steps.every_secs={secs:g}: a task ends after --stall_timeout_secs="
            f"{limit:g} without an average. Type --stall_timeout_secs={4 * secs:g}, for example."
        )
    transfer = Transfer(**flags.values_of(Transfer))
    if parts:
        transfer.check_exact(parts)
        if flags.MIN_WORKERS.present and not num_ps:
            check_virtual_replicas(recipe.config, flags.MIN_WORKERS.value)
    if flags.STRATEGY.value == "multiworker":
        transfer.check_between_workers(num_workers)
    if num_ps and (flags.NUM_GPUS.value or 0) > 1:
        raise ConfigError(
            f"--num_gpus={flags.NUM_GPUS.value}: a worker of ps computes on one GPU. Leave it out, "
            "and start a worker for each GPU: the tasks of a host divide its GPUs."
        )
    if flags.PS_STANDBY.value and num_ps < 2:
        raise ConfigError(
            f"--ps_standby={flags.PS_STANDBY.value} copies the variables of each ps to another ps, "
            f"but the number of ps tasks is {num_ps}. Leave it out, or type --ps=2."
        )


def serves(cluster: Cluster) -> bool:
    """Returns True if this task only executes the ops that a chief in another process sends."""
    return cluster.is_server and (flags.KEEP_SERVING.value or not cluster.is_chief)


def num_to_aggregate(recipe: Recipe, num_workers: int) -> int:
    """Returns the number of gradients of a synchronous step, after checks; 0 if asynchronous."""
    wanted = flags.REPLICAS_TO_AGGREGATE.value
    if not flags.SYNC_REPLICAS.value:
        return 0
    wanted = num_workers if wanted is None else wanted
    if not 1 <= wanted <= num_workers:
        raise ConfigError(
            f"--replicas_to_aggregate must be from 1 to the number of workers, {num_workers}. "
            f"Received: {wanted}. A step cannot wait for more gradients than there are workers."
        )
    check_sub_batches(recipe.config, wanted, num_workers)
    return int(wanted)
