"""The command line: every flag, and what flags and TF_CONFIG say together, checked.

    argv = parse(sys.argv)
    recipe = read_recipe()
    cluster = read_cluster(is_launched=False)

TensorFlow is not imported: `--help` and a mistyped flag should not wait for it.
"""

import difflib
import itertools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from absl import flags
from ml_collections import config_flags

from strategies.cluster import Cluster, parse_hosts, parse_tf_config
from strategies.ports import free_ports
from trainer.config import (
    Config,
    ConfigError,
    Recipe,
    check,
    check_shares,
    explain_unknown_field,
    flatten,
    load_recipe,
)
from trainer.exits import EXIT_USAGE

STRATEGIES = ("mirrored", "multiworker", "ps")

FLAGS = flags.FLAGS
STRATEGY = flags.DEFINE_enum(
    "strategy",
    "mirrored",
    STRATEGIES,
    "mirrored: one process, all its GPUs. multiworker: many processes, gradients summed over a "
    "ring. ps: parameter servers and workers that do not wait for each other.",
)
_DEFAULT_CONFIG = "configs/digits.py"
_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,  # _parse_flags gives it: a default would be read, with its mistakes, at import.
    f"What to train; by default {_DEFAULT_CONFIG}. Fields: --config.FIELD=VALUE, after --config.",
    lock_config=False,
)
MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Where the run is kept; the same directory resumes. By default a new one under runs/. "
    "A task of a cluster on many hosts must be given it, on a file system that all tasks see.",
)
CHECK = flags.DEFINE_boolean(
    "check",
    False,
    "Check flags, config, data, model and checkpoints, say what would be trained and where its "
    "variables would be, and end. Starts nothing, and writes nothing but data that is to be "
    "prepared or indexed anyway.",
)
DOWNLOAD_ONLY = flags.DEFINE_boolean(
    "download_only",
    False,
    "Prepare the data set that the config names, or open and index what is in --data_dir; then "
    "end, without training.",
)
WORKERS = flags.DEFINE_integer("workers", 2, "Workers of a cluster on this machine.")
PS = flags.DEFINE_integer("ps", 1, "Parameter servers of a cluster on this machine.")
MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts",
    3,
    "How often tasks of a cluster on this machine that died are started again within 10 minutes "
    "that bring neither a new checkpoint nor a later step; 0 is never. mirrored: only if given, "
    "the one process is supervised too.",
    lower_bound=0,
)
ISOLATE = flags.DEFINE_enum(
    "isolate",
    "auto",
    ("auto", "on", "off"),
    "Whether a cluster on this machine runs in a network namespace of its own, where nothing "
    "outside reaches its ports and it reaches nothing outside. auto: where the kernel lets it, and "
    "--model_dir and --data_dir are no URLs.",
)
_JOB_NAME = flags.DEFINE_string(
    "job_name",
    None,
    "In place of TF_CONFIG, with --worker_hosts: this task's job, chief, worker or ps.",
)
_TASK_INDEX = flags.DEFINE_integer(
    "task_index", None, "In place of TF_CONFIG: this task's place in the hosts of its job."
)
_TASK_ID = flags.DEFINE_integer("task_id", None, "Another name of --task_index.")
_HOSTS = {
    "ps": flags.DEFINE_string(
        "ps_hosts", None, "In place of TF_CONFIG: host:port of each ps, with commas between them."
    ),
    "worker": flags.DEFINE_string("worker_hosts", None, "The same of the workers."),
    "chief": flags.DEFINE_string(
        "chief_hosts",
        None,
        "The same of the chief. Without one, under ps, worker 0's process also coordinates.",
    ),
}
_EXISTING_SERVERS = flags.DEFINE_boolean(
    "existing_servers",
    False,
    "ps, with --ps_hosts and --worker_hosts: this process is the chief of servers that run "
    "already, each started with --keep_serving, and leaves them up.",
)
KEEP_SERVING = flags.DEFINE_boolean(
    "keep_serving", False, "ps, in worker and ps tasks: serve one chief after another."
)
CHIEF_TIMEOUT_SECS = flags.DEFINE_float(
    "chief_timeout_secs",
    600.0,
    "Worker and ps tasks, and an evaluator, end with 75 when the chief has not answered for this "
    "long: while it is still to come, or when it is gone.",
    lower_bound=1.0,
)
ALLOW_PUBLIC_ADDRESS = flags.DEFINE_boolean(
    "allow_public_address",
    False,
    "Serve at an address of the public internet. TensorFlow's servers let everybody in: only where "
    "a firewall does not.",
)
GRACE_SECS = flags.DEFINE_float(
    "grace_secs",
    30.0,
    "A task that is asked to stop (SIGTERM, Ctrl-C) stops the run, its state saved; one that has "
    "not ended after this long ends at once, and the run goes on from the checkpoint before.",
    lower_bound=0.0,
)
STALL_TIMEOUT_SECS = flags.DEFINE_float(
    "stall_timeout_secs",
    300.0,
    "A task that trains and does not move for so long writes where it stands to its log, and ends "
    "with 75; before its first steps it has four times as long. Another task that does not answer "
    "for half of it passes for lost. 0 waits for ever.",
    lower_bound=0.0,
)
UNKNOWN_HOST_SECS = flags.DEFINE_float(
    "unknown_host_secs",
    60.0,
    "How long the host name of another task may be unknown: some schedulers make names as tasks "
    "start.",
    lower_bound=0.0,
)
MAX_STALENESS = flags.DEFINE_integer(
    "max_staleness",
    None,
    "ps without --sync_replicas: a gradient is dropped, and its batch handed out again, if more "
    "steps than this were applied since it read the variables.",
    lower_bound=0,
)
SYNC_REPLICAS = flags.DEFINE_boolean(
    "sync_replicas", False, "ps: a step sums gradients computed on the same variables."
)
_REPLICAS_TO_AGGREGATE = flags.DEFINE_integer(
    "replicas_to_aggregate",
    None,
    "With --sync_replicas: gradients of a step, the first to arrive; the other workers are backups "
    "for slow ones. By default as many as workers.",
)
REPLICAS = flags.DEFINE_integer(
    "replicas", 0, "mirrored: replicas; 0 is one for each GPU, or one CPU. On CPUs, logical ones."
)
NUM_GPUS = flags.DEFINE_integer("num_gpus", None, "GPUs that each process uses; all by default.")
COMMUNICATION = flags.DEFINE_enum(
    "communication", "auto", ("auto", "ring", "nccl"), "multiworker: how gradients are summed."
)
WIRE_DTYPE = flags.DEFINE_enum(
    "wire_dtype",
    "float32",
    ("float32", "float16", "bfloat16"),
    "multiworker, ps: in what gradients travel. 16 bits are half the bytes; what rounding takes "
    "from a gradient is added to the next one. A resumed run is then no more the same bit for bit.",
)
NUM_THREADS = flags.DEFINE_integer(
    "num_threads",
    0,
    "Threads of TensorFlow in each process; 0 lets TensorFlow choose, and in a cluster on this "
    "machine divides the cores among the workers.",
)
LOG_DEVICE_PLACEMENT = flags.DEFINE_boolean(
    "log_device_placement", False, "Log where each op runs."
)
# Flags that mean nothing under other strategies, and are refused there.
_ONLY_FOR = {
    "allow_public_address": ("multiworker", "ps"),
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
_OF_LOCAL_CLUSTERS = ("isolate", "max_restarts", "ps", "workers")
_OF_HOSTS = ("job_name", "task_index", "task_id", "existing_servers")
_OF_DESCRIBED_CLUSTERS = (
    "allow_public_address",
    "keep_serving",
    "chief_timeout_secs",
    "unknown_host_secs",
)
# The config fields that people change most.
_SHORTCUTS = {
    "batch_size": flags.DEFINE_integer("batch_size", None, "Short for --config.batch_size."),
    "learning_rate": flags.DEFINE_float("learning_rate", None, "Short for --config.learning_rate."),
    "train_steps": flags.DEFINE_integer("train_steps", None, "Short for --config.train_steps."),
    "data_dir": flags.DEFINE_string("data_dir", None, "Short for --config.data_dir."),
}


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line, or ends with one message and exit code 2."""
    paths = _config_paths(argv)
    if len(paths) > 1:
        _end_with(f"--config is given {len(paths)} times: {', '.join(paths)}. Leave one.")
    path = paths[0] if paths else _DEFAULT_CONFIG
    if not paths:
        argv = [argv[0], f"--config={path}", *argv[1:]]
    try:
        config = load_recipe(path).config
    except ConfigError as error:
        _end_with(str(error))
    try:
        return FLAGS(argv)  # type: ignore[no-any-return]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(FLAGS), n=1, cutoff=0.6)
        hint = f" Did you mean --{near[0]}?" if near else " --help lists all."
        message = f"There is no flag --{error.flagname}.{hint}"
    except (AttributeError, KeyError, flags.Error) as error:
        message = _explain_flag_error(argv, config, error)
    _end_with(message)


def _end_with(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


def _config_paths(argv: Sequence[str]) -> list[str]:
    """What --config=PATH or --config PATH says, each time."""
    paths = []
    for argument, following in itertools.zip_longest(argv[1:], argv[2:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config"):
            paths.append(value if equals else following)
    return paths


def _explain_flag_error(argv: Sequence[str], config: Config, error: Exception) -> str:
    """Names the nearest field where a config field is the mistake."""
    overrides = [a.lstrip("-").split("=")[0] for a in argv if a.lstrip("-").startswith("config.")]
    known = flatten(config)
    for override in overrides:
        if override.removeprefix("config.") not in known:
            return explain_unknown_field(override.removeprefix("config."), config)
    return str(error)


def read_recipe() -> Recipe:
    """The recipe that --config names, with the fields that flags set.

    Raises:
        ConfigError: a field has a value that cannot be.
    """
    config = _CONFIG.value
    for name, flag in _SHORTCUTS.items():
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
    hosts = {job: flag.value for job, flag in _HOSTS.items() if flag.value is not None}
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
    index = _TASK_INDEX.value if _TASK_INDEX.value is not None else _TASK_ID.value
    if _TASK_ID.value not in (None, index):
        raise ConfigError(
            f"--task_index={index} and --task_id={_TASK_ID.value} are two names of one thing. "
            "Leave one of them out."
        )
    job = _JOB_NAME.value
    if _EXISTING_SERVERS.value:
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
    needs_model_dir = not serves(cluster) and not _JOB_NAME.value and not _EXISTING_SERVERS.value
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
    wanted = _REPLICAS_TO_AGGREGATE.value
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
