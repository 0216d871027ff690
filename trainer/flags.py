"""The command line: every flag, and their parsing.

`--help` should not wait: what else is needed is imported where it is.
"""

import difflib
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import flags
from ml_collections import config_flags

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
_HELP = ("help", "helpshort", "helpfull", "helpxml")
_DEFAULT_CONFIG = "configs/digits.py"
CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,  # `parse` gives it: a default would be read, with its mistakes, at import.
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
BIND_CORES = flags.DEFINE_enum(
    "bind_cores",
    "auto",
    ("auto", "on", "off"),
    "multiworker: whether each worker of a cluster on this machine keeps to cores of its own. "
    "auto: where there are as many cores as workers, or more, and no worker has more threads "
    "(--num_threads) than cores. Give off where other programs keep some of the cores busy.",
)
JOB_NAME = flags.DEFINE_string(
    "job_name",
    None,
    "In place of TF_CONFIG, with --worker_hosts: this task's job, chief, worker or ps.",
)
TASK_INDEX = flags.DEFINE_integer(
    "task_index", None, "In place of TF_CONFIG: this task's place in the hosts of its job."
)
TASK_ID = flags.DEFINE_integer("task_id", None, "Another name of --task_index.")
HOSTS = {
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
EXISTING_SERVERS = flags.DEFINE_boolean(
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
REPLICAS_TO_AGGREGATE = flags.DEFINE_integer(
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
    "Threads of TensorFlow in each process (servers of ps run at least 4 ops beside each other); 0 "
    "lets TensorFlow choose, and in a cluster on this machine divides the cores among the workers.",
)
LOG_DEVICE_PLACEMENT = flags.DEFINE_boolean(
    "log_device_placement", False, "Log where each op runs."
)
# The config fields that people change most.
SHORTCUTS = {
    "batch_size": flags.DEFINE_integer("batch_size", None, "Short for --config.batch_size."),
    "learning_rate": flags.DEFINE_float("learning_rate", None, "Short for --config.learning_rate."),
    "train_steps": flags.DEFINE_integer("train_steps", None, "Short for --config.train_steps."),
    "data_dir": flags.DEFINE_string("data_dir", None, "Short for --config.data_dir."),
}


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line, or ends with one message and exit code 2."""
    for argument in argv[1:]:
        if argument.startswith("-") and argument.lstrip("-") in _HELP:
            FLAGS([argv[0], argument])  # It prints, and ends.
    from trainer.config import ConfigError, load_recipe

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


def _explain_flag_error(argv: Sequence[str], config: Any, error: Exception) -> str:
    """Names the nearest field where a config field is the mistake."""
    from trainer.config import explain_unknown_field, flatten

    overrides = [a.lstrip("-").split("=")[0] for a in argv if a.lstrip("-").startswith("config.")]
    known = flatten(config)
    for override in overrides:
        if override.removeprefix("config.") not in known:
            return explain_unknown_field(override.removeprefix("config."), config)
    return str(error)
