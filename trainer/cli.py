"""What a command line asks for: a task, --keep_serving, a local cluster, --check, --download_only.

    outcome = main(sys.argv)        # an exit code, or the TaskSpec of the task to run

`trainer.__main__` imports this module only after the flags are parsed, so `--help` is fast.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from data.system.compat.freed_memory import keep_freed_memory
from data.system.cores import pin_to_cpus
from trainer import flags, tf_setup
from trainer.config import ConfigError, Recipe
from trainer.exit_codes import EXIT_DONE
from trainer.flags import start
from trainer.flags.checks import check_sizes, read_recipe, serves
from trainer.flags.start import model_dir_of, num_workers, read_cluster, task_spec
from trainer.guards.parent_watch import watch_parent
from trainer.program import python_command
from trainer.task_spec import TaskSpec

if TYPE_CHECKING:
    from strategies.cluster.tf_config import Cluster


def main(argv: Sequence[str]) -> int | TaskSpec:
    """Does what the command line asks for; returns the exit code, or the task to run.

    The caller runs the task, to keep the call stack of training short. Only a launcher imports
    trainer.local: a task starts without it.
    """
    pin_to_cpus()
    has_parent = watch_parent()
    only_checks = os.environ.pop(start.ONLY_CHECKS, None) is not None
    is_launched = has_parent and not only_checks
    recipe, cluster = _read(argv, is_launched=is_launched)
    if only_checks:
        from trainer.flags.cluster import cluster_here

        return start.check_before_launch(recipe, cluster or cluster_here())
    if flags.DOWNLOAD_ONLY.value:
        tf_setup.import_tensorflow()
        from trainer.inputs import prepare_inputs

        prepare_inputs(recipe)
        return EXIT_DONE
    # With --max_restarts the launcher also starts, and restarts, a single process.
    is_one = flags.STRATEGY.value == "mirrored" and not flags.MAX_RESTARTS.present
    if cluster is None and not is_one and not is_launched:
        from trainer.local.launching import launch

        return launch(recipe, partial(view, is_launcher=True))
    is_supervised = flags.MAX_RESTARTS.present or flags.MIN_WORKERS.present
    if cluster is not None and is_supervised and not is_launched:
        from trainer.local.launching import supervise

        return supervise(recipe, cluster)
    if cluster is not None and flags.KEEP_SERVING.value and not is_launched:
        from trainer.local.keep_serving import keep_serving

        return keep_serving(cluster.task, [*python_command("-m", "trainer"), *sys.argv[1:]])
    return _task(recipe, cluster, is_launched=is_launched)


def view(model_dir: str, *, is_launcher: bool) -> AbstractContextManager[None]:
    """Shows this run as one screen where that is possible and wanted; otherwise it prints lines."""
    is_there = importlib.util.find_spec("trainer.live") is not None  # A run does not need it.
    if flags.PLAIN.value or flags.QUIET.value or not is_there:
        return nullcontext()
    from trainer.live.view import can_show, live_view

    return live_view(model_dir, is_launcher=is_launcher) if can_show(model_dir) else nullcontext()


def _read(argv: Sequence[str], *, is_launched: bool) -> tuple[Recipe, "Cluster | None"]:
    """The checked command line; also sets up logging and the environment of TensorFlow."""
    tf_setup.configure_logging(is_quiet=flags.QUIET.value)
    if len(argv) > 1:
        raise ConfigError(f"Unexpected arguments: {' '.join(argv[1:])}. Options start with --.")
    recipe = read_recipe()
    cluster = read_cluster(is_launched=is_launched)
    tf_setup.set_environment()
    keep_freed_memory()
    return recipe, cluster


def _task(recipe: Recipe, cluster: "Cluster | None", *, is_launched: bool) -> int | TaskSpec:
    if not is_launched:  # A launcher has checked them for all hosts, which may not all be here.
        num_ps = cluster.num("ps") if cluster else 0
        check_sizes(recipe, num_workers(cluster), num_ps)
    model_dir = model_dir_of(recipe)
    is_server = cluster is not None and serves(cluster)
    is_evaluator = cluster is not None and cluster.task.job == "evaluator"
    serves_many = is_server and (flags.KEEP_SERVING.value or flags.MODEL_DIR.value is None)
    if not is_server:
        start.set_train_steps(recipe)
    # If the run is finished, no chief would end its server. An evaluator may have work left.
    is_last = not (serves_many or is_evaluator)
    if is_last and start.says_finished(recipe, model_dir):
        return EXIT_DONE
    if flags.CHECK.value:
        return start.check(recipe, model_dir, cluster)
    tf_setup.import_tensorflow()
    return task_spec(recipe, cluster, model_dir, is_launched=is_launched)
