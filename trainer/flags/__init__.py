"""The flags of `python -m trainer`, each declared once with its scope; how they are checked.

    from trainer import flags
    flags.STRATEGY.value

`parsing.py` parses a command line, `checks.py` turns flags into a checked config, and `cluster.py`
turns flags, TF_CONFIG or a scheduler's variables into a cluster. `continued.py` continues a run.
`start.py` has the task that the flags describe, its directory, and the checks before it begins.

A flag that would be ignored, because of the strategy or of the source of the cluster, is an error;
`checks.py` and `cluster.py` find it by the flag's scope. This module imports nothing slow: `--help`
is fast.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags
from ml_collections import config_flags

if TYPE_CHECKING:
    from trainer.config import Config

FLAGS = flags.FLAGS
STRATEGIES = ("mirrored", "multiworker", "ps")
_CLUSTERS = ("multiworker", "ps")
_MULTIWORKER, _PS = ("multiworker",), ("ps",)
_DTYPES, _AUTO = ("float32", "float16", "bfloat16"), ("auto", "on", "off")
# As in strategies/cluster/sources/finding.py, which reads their environments.
SCHEDULERS = ("slurm", "jobset", "indexed_job", "skypilot", "sagemaker")

# Where a flag applies: anywhere; in a cluster on this machine; in a task of a cluster that
# TF_CONFIG or --worker_hosts describes; as a part of that description; or in the choice of it.
ANYWHERE, LOCAL, DESCRIBED, HOSTS_OF_TASKS = "anywhere", "local", "described", "hosts"
SOURCE = "source"
LOCAL_OR_HOSTS = "local or hosts"  # In a cluster on this machine, or of --hosts.


class Scope(NamedTuple):
    """The strategies that use a flag, and where it applies."""

    strategies: Sequence[str]
    where: str = ANYWHERE


SCOPES: dict[str, Scope] = {}  # By the name of the flag. A flag that is not here applies always.

# The help of each flag. Entries are in the order of the definitions below.
_HELP_TEXT = """\
strategy: mirrored: one process, all its GPUs. multiworker: many processes, gradients summed over a
    ring. ps: parameter servers, and workers that do not wait for each other.
model_dir: The directory of the run; a run in the same directory resumes, and without --config it
    resumes with its own config and strategy. By default a new directory under runs/, which
    runs/latest points to. A cluster on many hosts needs it, on a file system that all tasks see.
verbose: Print the whole config, and the placement of variables on parameter servers.
quiet: Print warnings, errors and the last line of a run only.
plain: Print lines also on a terminal, in place of the live view. So do NO_COLOR, CI and TERM=dumb.
traceback: Print a traceback also for an error that a user can cause.
completion: Print a script that completes flags, their values and config fields in this shell, and
    end: source <(python -m trainer --completion=bash)
check: Check flags, config, data, model and checkpoints; print what would be trained and the
    placement of its variables; and end. Starts no task, and writes only data that must be prepared
    or indexed anyway.
download_only: Prepare the data set that the config names, or open and index what is in --data_dir;
    then end, without training.
grace_secs: A task that is asked to stop (SIGTERM, Ctrl-C) saves the state of the run and stops it.
    After this time it ends at once, and the run resumes from an earlier checkpoint. By default it
    fits into the 30 s after which Slurm (KillWait) and Kubernetes kill a task.
stall_timeout_secs: A task that trains but makes no progress for this time writes the Python stacks
    to a file, and ends with 75; before the first steps it has four times as long. Another task
    that does not answer for half of this time is considered lost. 0 has no limit.
num_gpus: GPUs that each process uses; all by default.
num_threads: Threads of TensorFlow in each process (servers of ps, and workers of multiworker on
    several hosts, run at least 4 ops at a time). 0: TensorFlow chooses; in a cluster on this
    machine, the workers share the cores equally.
log_device_placement: Write the device of each op to placement.txt in --model_dir; in a cluster, to
    tasks/.
metrics_port: The chief serves its metrics to Prometheus at this port, at /metrics. By default it
    does not.
metrics_host: With --metrics_port: the address of this machine to listen at, without
    authentication. 0.0.0.0: all addresses.
epochs: Epochs of a run, in place of --train_steps: as many steps as cover the training examples
    this often.
batch_size: Short for --config.batch_size.
learning_rate: Short for --config.learning_rate.
train_steps: Steps of a run. Short for --config.train_steps.
deterministic: Equal bits in each run. Short for --config.deterministic.
data_dir: Directory with TFRecord files. Short for --config.data_dir.
data_cache_dir: With --data_dir at s3://: a local directory for copies of what is read. Short for
    --config.data_cache_dir.
data_cache_bytes: The most bytes of all copies in it. Short for --config.data_cache_bytes.
workers: Workers of a cluster on this machine, of an indexed Job or of a JobSet.
isolate: Runs a cluster on this machine in a separate network namespace: no other host reaches its
    ports, and it reaches no other host. auto: if the kernel allows it, and neither --model_dir,
    --data_dir nor config.warm_start.path is a URL.
ps: Parameter servers of a cluster on this machine, or of --hosts or a scheduler: the last tasks.
max_restarts: How often tasks of a cluster on this machine are restarted within 10 minutes without
    a new checkpoint or a later step; 0 is never. mirrored, and a task of a cluster of several
    hosts: if given, the task is supervised too.
min_workers: With --hosts: hosts that are lost do not stop the others, as long as this many workers
    are left, and hosts that come are taken in. Each host has a launcher, as with --max_restarts.
    ps on this machine: MODEL_DIR/membership/workers says how many workers train, from this number
    to --workers; it may change at any time.
rejoin_secs: With --min_workers: how long the others wait for a lost host before they continue
    without it.
cpu_affinity: multiworker: pins each worker of a cluster on this machine to different cores. auto:
    if there are at least as many cores as workers, and no worker has more threads (--num_threads)
    than cores. Use off if other programs keep some of the cores busy.
cluster: What describes the cluster. auto: TF_CONFIG or flags such as --hosts, if they are given;
    otherwise the environment of the scheduler that has started this task; otherwise a cluster on
    this machine, as with local.
hosts: The hosts of the cluster, joined by commas, the same on every host: each task finds itself
    by its addresses. A host that is named twice has two tasks.
port: With --hosts or a scheduler's environment: the port of the first task on each host; later
    tasks have the next ports.
ps_hosts: In place of TF_CONFIG: host:port of each ps, joined by commas.
chief_hosts: In place of TF_CONFIG: host:port of the chief. Without a chief, the process of worker
    0 also coordinates.
worker_hosts: In place of TF_CONFIG: host:port of each worker, joined by commas.
job_name: In place of TF_CONFIG, with --worker_hosts: this task's job, chief, worker or ps.
task_index: In place of TF_CONFIG: this task's index in the hosts of its job.
existing_servers: ps, with --ps_hosts and --worker_hosts: this process is the chief of servers that
    already run, each started with --keep_serving, and does not end them.
keep_serving: ps, in worker and ps tasks: serve one chief after another.
chief_timeout_secs: Worker and ps tasks of ps, and an evaluator, end with 75 when the chief does
    not answer for this time, before or after it has started.
allow_public_address: Serve at an address of the public internet. TensorFlow's servers have no
    authentication: use this only behind a firewall.
max_staleness: ps without --sync_replicas: a gradient is dropped, and its batch handed out again,
    if more steps than this were applied since it read the variables.
ps_standby: ps, with two ps tasks or more: every n steps each copies its variables to the next.
    Then the death of one of them costs at most the steps since the last copy. 0 copies nothing.
sync_replicas: ps: a step sums gradients computed on the same variables.
replicas_to_aggregate: With --sync_replicas: how many gradients a step sums, the first to arrive.
    The other workers are backups for slow workers. By default the number of workers.
replicas: mirrored: replicas; 0 is one per GPU, or one CPU. More than there are: logical devices.
communication: multiworker: how gradients are summed.
bucket_mb: multiworker: gradients are summed in buckets of about this many MiB, each as soon as the
    backward pass has computed it. By default measured at the start of a run, and kept when the run
    resumes. More than the size of all gradients: one sum after the backward pass.
wire_dtype: multiworker, ps: the type in which gradients are sent. 16 bits halve the bytes; the
    rounding error of a gradient is added to the next gradient, but not that of rows of embeddings,
    which are bfloat16. A resumed run is then not bit for bit the same.
read_dtype: ps: the type in which the servers send variables to the workers, which compute
    gradients at the rounded values. 16 bits halve the bytes. The servers keep float32. Tables of
    Keras' Embedding layers are not rounded; rows of a ShardedEmbedding are.
"""
_HELP = {
    name: " ".join(text.split())
    for name, _, text in (entry.partition(": ") for entry in re.split(r"\n(?=\w)", _HELP_TEXT))
}


def _with_help(define: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `define` of absl without the argument for the help, and with the flag's scope."""

    def defined(name: str, *values: object, scope: Scope | None = None, **bounds: float) -> Any:
        if scope:
            SCOPES[name] = scope
        return define(name, *values, _HELP[name], **bounds)

    return defined


_DEFINE_boolean = _with_help(flags.DEFINE_boolean)
_DEFINE_enum = _with_help(flags.DEFINE_enum)
_DEFINE_float = _with_help(flags.DEFINE_float)
_DEFINE_integer = _with_help(flags.DEFINE_integer)
_DEFINE_string = _with_help(flags.DEFINE_string)

STRATEGY = _DEFINE_enum("strategy", "mirrored", STRATEGIES)
DEFAULT_CONFIG = "configs/digits.py"
CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,  # `parse` sets it: a default would be read, with its mistakes, at import.
    f"What to train; by default {DEFAULT_CONFIG}. Fields: --config.FIELD=VALUE.",
    lock_config=False,
)


class _ConfigParser(flags.ArgumentParser):
    """Loads the config file as a module; ml_collections would execute it without neighbours."""

    # Fields that are set before those that are typed. Not every value can be written as text.
    fields: Mapping[str, object] = {}

    def parse(self, argument: str) -> "Config":
        from trainer.config import load_recipe, set_fields

        config = load_recipe(argument).config
        set_fields(config, self.fields)
        return config


FLAGS["config"].parser = _ConfigParser()
MODEL_DIR = _DEFINE_string("model_dir", None)
VERBOSE = _DEFINE_boolean("verbose", False)
QUIET = _DEFINE_boolean("quiet", False)
PLAIN = _DEFINE_boolean("plain", False)
TRACEBACK = _DEFINE_boolean("traceback", False)
COMPLETION = _DEFINE_enum("completion", None, ("bash", "zsh", "fish"))
CHECK = _DEFINE_boolean("check", False)
DOWNLOAD_ONLY = _DEFINE_boolean("download_only", False)
GRACE_SECS = _DEFINE_float("grace_secs", 25.0, lower_bound=0.0)
STALL_TIMEOUT_SECS = _DEFINE_float("stall_timeout_secs", 300.0, lower_bound=0.0)
NUM_GPUS = _DEFINE_integer("num_gpus", None, lower_bound=0)
NUM_THREADS = _DEFINE_integer("num_threads", 0, lower_bound=0)
LOG_DEVICE_PLACEMENT = _DEFINE_boolean("log_device_placement", False)
METRICS_PORT = _DEFINE_integer("metrics_port", None, lower_bound=1, upper_bound=65535)
METRICS_HOST = _DEFINE_string("metrics_host", "127.0.0.1")
EPOCHS = _DEFINE_float("epochs", None)
# The config fields that users change most.
SHORTCUTS = {
    "batch_size": _DEFINE_integer("batch_size", None),
    "learning_rate": _DEFINE_float("learning_rate", None),
    "train_steps": _DEFINE_integer("train_steps", None),
    "deterministic": _DEFINE_boolean("deterministic", None),
    "data_dir": _DEFINE_string("data_dir", None),
    "data_cache_dir": _DEFINE_string("data_cache_dir", None),
    "data_cache_bytes": _DEFINE_integer("data_cache_bytes", None),
}
WORKERS = _DEFINE_integer("workers", 2, scope=Scope(_CLUSTERS, LOCAL))
ISOLATE = _DEFINE_enum("isolate", "auto", _AUTO, scope=Scope(_CLUSTERS, LOCAL))
PS = _DEFINE_integer("ps", 1, scope=Scope(_PS, LOCAL))
MAX_RESTARTS = _DEFINE_integer("max_restarts", 3, lower_bound=0, scope=Scope(STRATEGIES))
MIN_WORKERS = _DEFINE_integer(
    "min_workers", None, lower_bound=1, scope=Scope(_CLUSTERS, LOCAL_OR_HOSTS)
)
REJOIN_SECS = _DEFINE_float("rejoin_secs", 60.0, lower_bound=5.0, scope=Scope(_CLUSTERS, DESCRIBED))
CPU_AFFINITY = _DEFINE_enum("cpu_affinity", "auto", _AUTO, scope=Scope(_MULTIWORKER, LOCAL))
CLUSTER = _DEFINE_enum(
    "cluster",
    "auto",
    ("auto", "local", "tf_config", *SCHEDULERS, "hosts"),
    scope=Scope(_CLUSTERS, SOURCE),
)
HOST_LIST = _DEFINE_string("hosts", None, scope=Scope(_CLUSTERS, SOURCE))
PORT = _DEFINE_integer(
    "port", None, lower_bound=1, upper_bound=65535, scope=Scope(_CLUSTERS, SOURCE)
)
HOSTS = {
    "ps": _DEFINE_string("ps_hosts", None, scope=Scope(_PS, HOSTS_OF_TASKS)),
    "chief": _DEFINE_string("chief_hosts", None, scope=Scope(_PS, HOSTS_OF_TASKS)),
    "worker": _DEFINE_string("worker_hosts", None, scope=Scope(_CLUSTERS, HOSTS_OF_TASKS)),
}
JOB_NAME = _DEFINE_string("job_name", None, scope=Scope(_CLUSTERS, HOSTS_OF_TASKS))
TASK_INDEX = _DEFINE_integer("task_index", None, scope=Scope(_CLUSTERS, HOSTS_OF_TASKS))
EXISTING_SERVERS = _DEFINE_boolean("existing_servers", False, scope=Scope(_PS, HOSTS_OF_TASKS))
KEEP_SERVING = _DEFINE_boolean("keep_serving", False, scope=Scope(_PS, DESCRIBED))
CHIEF_TIMEOUT_SECS = _DEFINE_float(
    "chief_timeout_secs", 600.0, lower_bound=1.0, scope=Scope(_CLUSTERS, DESCRIBED)
)
ALLOW_PUBLIC_ADDRESS = _DEFINE_boolean(
    "allow_public_address", False, scope=Scope(_CLUSTERS, DESCRIBED)
)
MAX_STALENESS = _DEFINE_integer("max_staleness", None, lower_bound=0, scope=Scope(_PS))
PS_STANDBY = _DEFINE_integer("ps_standby", 0, lower_bound=0, scope=Scope(_PS))
SYNC_REPLICAS = _DEFINE_boolean("sync_replicas", False, scope=Scope(_PS))
REPLICAS_TO_AGGREGATE = _DEFINE_integer("replicas_to_aggregate", None, scope=Scope(_PS))
REPLICAS = _DEFINE_integer("replicas", 0, lower_bound=0, scope=Scope(("mirrored",)))
COMMUNICATION = _DEFINE_enum(
    "communication", "auto", ("auto", "ring", "nccl"), scope=Scope(_MULTIWORKER)
)
BUCKET_MB = _DEFINE_float("bucket_mb", None, lower_bound=0.001, scope=Scope(_MULTIWORKER))
WIRE_DTYPE = _DEFINE_enum("wire_dtype", "float32", _DTYPES, scope=Scope(_CLUSTERS))
READ_DTYPE = _DEFINE_enum("read_dtype", "float32", _DTYPES, scope=Scope(_PS))
DEFINED = frozenset(flag.name for flag in FLAGS.get_flags_for_module(__name__))


def own_flags() -> list[flags.Flag]:
    """Returns the flags of the command, without those of absl, by their names."""
    modules = FLAGS.flags_by_module_dict().items()
    own = [defined for module, defined in modules if not module.startswith("absl.")]
    return sorted(itertools.chain(*own), key=lambda flag: str(flag.name))


def values_of(group: type) -> dict[str, Any]:
    """Returns the values of the flags that are named like fields of the dataclass `group`."""
    names = (field.name for field in dataclasses.fields(group))
    return {name: FLAGS[name].value for name in names if name in FLAGS}


def strategy_words() -> list[str]:
    """Returns --strategy, and the given flags of its options, as words of a command line."""
    kept = [ANYWHERE, LOCAL] + [LOCAL_OR_HOSTS] * (HOST_LIST.value is None)
    given = [name for name in SCOPES if FLAGS[name].present and SCOPES[name].where in kept]
    return [FLAGS[name].serialize() for name in ("strategy", *given)]
