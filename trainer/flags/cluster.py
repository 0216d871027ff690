"""The cluster that TF_CONFIG, flags or a scheduler describe, or one on this machine.

    cluster = described_cluster(is_launched=False) or cluster_here()

`start.read_cluster` calls the first, unless one process trains. TensorFlow is not imported, and
gRPC only if a cluster is described.
"""

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence

from data.system.files import is_url
from strategies.cluster.ports import free_ports
from strategies.cluster.sources import finding
from strategies.cluster.sources.base import Found, Wanted
from strategies.cluster.sources.finding import is_described
from strategies.cluster.sources.hosts import entries_of, from_hosts, here
from strategies.cluster.tf_config import Cluster, local_cluster, parse_hosts, parse_tf_config
from strategies.transfer import Transfer
from trainer import flags
from trainer.config import ConfigError, Recipe
from trainer.flags.checks import check_pairs, serves
from trainer.guards.fingerprint import shared_settings

log = logging.getLogger(__name__)


def described_cluster(*, is_launched: bool) -> Cluster | None:
    """Returns the cluster that TF_CONFIG, flags or a scheduler describe; None if there is none.

    Errors, and `is_launched`, are as of `start.read_cluster`.
    """
    found = None
    if not is_launched:  # Otherwise the launcher has chosen, and sets TF_CONFIG.
        _check_source()
        found = _cluster_of_source()
    is_local = flags.CLUSTER.value == "local" and not is_launched
    cluster = found.cluster if found else None if is_local else _cluster_of_tf_config(is_launched)
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
    if source not in ("auto", "tf_config", "hosts") and (given := _given(flags.HOSTS_OF_TASKS)):
        raise ConfigError(
            f"--cluster={source} is a description of the cluster, and --{given[0]} is of another. "
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
    by_tasks = flags.HOST_LIST.value is None and _given(flags.HOSTS_OF_TASKS)
    is_elsewhere = source in ("local", "tf_config") or by_tasks or strategy == "mirrored"
    if is_elsewhere or (source == "auto" and is_described(os.environ)):
        return None
    wanted = Wanted(
        strategy,
        num_ps=flags.PS.value if strategy == "ps" else 0,
        num_workers=flags.WORKERS.value if flags.WORKERS.present else None,
        port=flags.PORT.value,
    )
    if flags.HOST_LIST.value is not None:
        job = flags.JOB_NAME.value
        task = None if job is None else (job, flags.TASK_INDEX.value)
        return from_hosts(flags.HOST_LIST.value, wanted, task, here())
    return finding.find(source, os.environ, wanted)


def _cluster_of_tf_config(is_launched: bool) -> Cluster | None:
    text, strategy = os.environ.get("TF_CONFIG"), flags.STRATEGY.value
    hosts = {job: flag.value for job, flag in flags.HOSTS.items() if flag.value is not None}
    if text is None or not is_described(os.environ):
        return _cluster_of_flags(hosts, strategy)
    # A launcher has made TF_CONFIG of these flags.
    if not is_launched and (given := _given(flags.HOSTS_OF_TASKS)):
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
    servers = parse_hosts(hosts, "worker", 0, strategy)
    from strategies.cluster.peers import own_host  # Imports gRPC.

    # The servers get the address when this process connects, so any port will do.
    return servers.with_chief(f"{own_host(servers.address)}:{free_ports(1)[0]}")


def _given(where: str) -> list[str]:
    return _given_of(name for name, scope in flags.SCOPES.items() if scope.where == where)


def _given_of(names: Iterable[str]) -> list[str]:
    return [name for name in names if flags.FLAGS[name].present]


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
    check_pairs()
    if cluster is not None:
        _check_role_flags(cluster)
        if not flags.ALLOW_PUBLIC_ADDRESS.value:
            from strategies.cluster.peers import check_private  # Imports gRPC.

            check_private(cluster)


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


def cluster_here() -> Cluster:
    """Returns the cluster on this machine that --workers and --ps describe."""
    strategy = flags.STRATEGY.value
    num_workers = flags.WORKERS.value if strategy != "mirrored" else 1
    return local_cluster(strategy, num_workers, flags.PS.value)


def most_workers() -> int:
    """Returns the number of workers that there may be with --min_workers, as it was typed."""
    if flags.HOST_LIST.value is None:
        return int(flags.WORKERS.value)
    num_ps = flags.PS.value if flags.STRATEGY.value == "ps" else 0
    return len(entries_of(flags.HOST_LIST.value)) - num_ps


def read_shared_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that must be equal in all tasks of this run."""
    return shared_settings(recipe, Transfer(**flags.values_of(Transfer)))
