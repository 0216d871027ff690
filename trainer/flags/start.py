"""The cluster or the task that the flags describe, its directory, and the checks before it starts.

    model_dir_of(recipe)    # "runs/digits-ps-batch_size=128-20261126-204142-3f2a9c"
    cluster = read_cluster(is_launched=False)               # None: one process
    exit_code = check_before_launch(recipe, cluster)        # READY: the tasks can be started
    spec = task_spec(recipe, cluster, model_dir_of(recipe))

The name of a new directory says what was changed on the command line. Fields that say where things
are, and how often they are written, are left out: they do not change what is learnt.

TensorFlow, and what imports it, is imported in the functions: a launcher checks in a fork, and its
own process stays without TensorFlow. What only a cluster needs is imported there, too.
"""

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from strategies.transfer import Transfer
from trainer import flags, tf_setup
from trainer.config import Recipe, flatten, overridden_fields, to_json
from trainer.config_checks import check_replicas
from trainer.exit_codes import EXIT_DONE
from trainer.flags import checks
from trainer.run_files import metric_words
from trainer.task_spec import TaskSpec

if TYPE_CHECKING:
    from strategies.cluster.tf_config import Cluster
    from trainer.preflight import Findings

# Exit code of `check_before_launch` if the cluster must be launched: unlikely from a user's code.
READY = 113
# The variable with which a launcher has a fork run `check_before_launch` alone.
ONLY_CHECKS = "TRAINER_ONLY_CHECKS"
# The variable with the default --model_dir that `trainer.train` chose for a cluster.
DEFAULT_DIR = "TRAINER_DEFAULT_DIR"
_MAX_WORDS, _MAX_BYTES = 3, 40
_OMITTED = re.compile(
    r"dataset|data_.*|data\..*_split|data\.(cache|prefetch).*|.*_every_steps|keep_checkpoints|"
    r"complete_checkpoint_every|steps_per_call|eval_batch_size|export|profile_.*|train_steps"
)
_UNSAFE = re.compile(r"[^\w.+=-]+")  # In a path, or in a shell.


def is_default_dir() -> bool:
    """Returns True if the user gave no --model_dir; a default of `trainer.train` does not count."""
    return flags.MODEL_DIR.value in (None, os.environ.get(DEFAULT_DIR))


def model_dir_of(recipe: Recipe) -> str:
    """Returns --model_dir, or a new name under runs/, which no run of the same second has."""
    if flags.MODEL_DIR.value is not None:
        given = str(flags.MODEL_DIR.value)
        # Not the link, which will point to another run while this one goes on.
        return os.path.realpath(given) if os.path.islink(given.rstrip("/")) else given
    name = Path(recipe.files[0]).stem if recipe.files else "python"
    words = [name, flags.STRATEGY.value, *changes(recipe)]
    words += [time.strftime("%Y%m%d-%H%M%S"), os.urandom(3).hex()]
    return str(Path("runs") / "-".join(words))


def changes(recipe: Recipe) -> list[str]:
    """Returns the fields that differ from the config file, as `field=value`; at most three.

    A value that is too long is left out: a part of it would be another value.
    """
    words, values = [], flatten(recipe.config)
    for field in overridden_fields(recipe):
        if _OMITTED.fullmatch(field):
            continue
        value = values[field]
        text = f"{value:.12g}" if isinstance(value, float) else str(value)
        word = f"{field}={_UNSAFE.sub('_', text).strip('_')}"
        words.append(word if len(os.fsencode(word)) <= _MAX_BYTES else field)
    return words[:_MAX_WORDS]


def read_cluster(*, is_launched: bool) -> "Cluster | None":
    """Returns the cluster that TF_CONFIG, flags or a scheduler describe; None if there is none.

    If `is_launched`, a launcher has already checked the flags of local clusters.

    Raises:
        ConfigError: a flag would be ignored, or a needed flag is missing.
        ClusterError: the description is wrong.
    """
    checks.check_strategy_of_flags()
    if flags.STRATEGY.value == "mirrored" and "TF_CONFIG" not in os.environ:
        checks.check_pairs()
        return None
    from trainer.flags.cluster import described_cluster

    return described_cluster(is_launched=is_launched)


def num_workers(cluster: "Cluster | None") -> int:
    """Returns the number of tasks that compute gradients; 1 if there is no cluster."""
    if cluster is None:
        return 1
    return cluster.num("worker") if cluster.num("ps") else len(cluster.trainers)


def task_spec(
    recipe: Recipe, cluster: "Cluster | None", model_dir: str, *, is_launched: bool = False
) -> TaskSpec:
    """Returns the task that the flags describe; its fields have the values of equal names."""
    workers = num_workers(cluster)
    if is_launched and flags.MIN_WORKERS.present:
        # A step has the same sub-batches, however many workers train.
        from trainer.flags.cluster import most_workers

        workers = most_workers()
    values = flags.values_of(TaskSpec) | {
        "transfer": Transfer(**flags.values_of(Transfer)),
        "recipe": recipe,
        "cluster": cluster,
        "model_dir": model_dir,
        "is_latest": is_default_dir(),
        "is_verbose": flags.VERBOSE.value,
        "is_quiet": flags.QUIET.value,
        "flags": flags.strategy_words(),
        "replicas_to_aggregate": checks.num_to_aggregate(recipe, workers),
        "is_checked": is_launched,
        "serves": cluster is not None and checks.serves(cluster),
        "metrics_listener": checks.metrics_listener(is_chief=cluster is None or cluster.is_chief),
    }
    # The launchers of an elastic cluster look for the chief themselves.
    if flags.KEEP_SERVING.value or (cluster is not None and cluster.generation is not None):
        values["chief_timeout_secs"] = None
    return TaskSpec(**values)


def check_before_launch(recipe: Recipe, cluster: "Cluster") -> int:
    """Finds mistakes before tasks are started; returns READY, or an exit code if it must end."""
    model_dir = model_dir_of(recipe)
    set_train_steps(recipe)
    if says_finished(recipe, model_dir):
        return EXIT_DONE
    if flags.CHECK.value:
        return check(recipe, model_dir, cluster, is_launched=True)
    from trainer import preflight
    from trainer.model_dir import check_model_dir

    # Without --min_workers the task finds it, before it trains.
    if flags.MIN_WORKERS.present and not cluster.num("ps"):
        num_replicas = preflight.num_replicas_here(flags.NUM_GPUS.value)
        check_replicas(recipe.config, num_workers(cluster) * num_replicas)
    _preflight(recipe, model_dir, cluster)
    check_model_dir(model_dir)
    return READY


def set_train_steps(recipe: Recipe) -> None:
    """Computes train_steps from --epochs, if it is given, and the size of the data."""
    if flags.EPOCHS.value is not None:
        tf_setup.import_tensorflow()
        from trainer.inputs import num_steps_of

        recipe.config.train_steps = num_steps_of(recipe, flags.EPOCHS.value)


def says_finished(recipe: Recipe, model_dir: str, *, hides_gpus: bool = True) -> bool:
    """Returns True, and prints the result, if the run in `model_dir` is finished.

    `hides_gpus`: as of preflight.
    """
    tf_setup.import_tensorflow()
    from trainer.model_dir import finished_result

    result = finished_result(model_dir, recipe.config)
    if result is None:
        return False
    from trainer import preflight  # Most runs are not finished, and do without it.

    # The finished run may be of another config.
    preflight.preflight(recipe, model_dir, hides_gpus=hides_gpus)
    measured = "  ".join(metric_words(result["eval"]))
    print(
        f"{model_dir} is finished: step {result['step']:,}  {measured}. To train further, raise "
        "--train_steps; to train anew, give another --model_dir."
    )
    return True


def check(
    recipe: Recipe, model_dir: str, cluster: "Cluster | None", *, is_launched: bool = False
) -> int:
    """Prints what would be trained, for --check; returns the exit code.

    `is_launched`: the tasks of `cluster` would be started on this host.
    """
    workers, num_ps = num_workers(cluster), cluster.num("ps") if cluster else 0
    if not num_ps:
        check_replicas(recipe.config, flags.REPLICAS.value or workers)
    found = _preflight(recipe, model_dir, cluster)
    if flags.VERBOSE.value:
        print(f"config {recipe.path}: {to_json(recipe.config)}")
    print(found.describe(num_ps, workers if flags.SYNC_REPLICAS.value else 0))
    if cluster:
        from strategies.cluster.gpus import gpus_of_host  # One process needs nothing of it.

        gpus = gpus_of_host(cluster, is_launched=is_launched)
        named = [f"{task} {','.join(names)}" for task, names in gpus.items()]
        if named:
            print("GPUs:", "; ".join(named))
    return EXIT_DONE


def _preflight(recipe: Recipe, model_dir: str, cluster: "Cluster | None") -> "Findings":
    from trainer.build import check_for_strategy, check_standby
    from trainer.preflight import preflight

    found = preflight(recipe, model_dir)
    check_for_strategy(
        found.learner,
        recipe,
        strategy=flags.STRATEGY.value,
        num_workers=num_workers(cluster),
        read_dtype=flags.READ_DTYPE.value,
    )
    check_standby(found.checkpointer, recipe.path, flags.PS_STANDBY.value)
    return found
