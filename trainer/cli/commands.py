"""What a command line asks for: a task, --keep_serving, a local cluster, --check, --download_only.

    outcome = main(sys.argv)        # an exit code, or the TaskSpec of the task to run

`trainer.__main__` imports this module only after the flags are parsed, so `--help` is fast.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data.system.cores import num_cores
from data.system.files import is_url
from strategies.cluster.peers import host_of
from strategies.cluster.ports import free_ports
from strategies.cluster.tf_config import Cluster, Task, local_cluster
from trainer import tf_setup
from trainer.cli import flag_checks, flags, run_names
from trainer.cli.continued import print_next
from trainer.config import ConfigError, Recipe, data_dir, to_json
from trainer.config_checks import check_replicas
from trainer.exit_codes import EXIT_DONE, EXIT_RESTART, end_at_once
from trainer.guards import run_lock
from trainer.guards.fingerprint import as_number, software
from trainer.guards.signals import SignalThread, stop_signals
from trainer.hooks.trackers.names import reached_over_network
from trainer.live.view import can_show, live_view
from trainer.local.cpu_affinity import cpu_groups, pin_to_cpus
from trainer.local.elastic import ElasticCluster
from trainer.local.fork_server import ForkServer
from trainer.local.group_rules import Rules
from trainer.local.keep_serving import keep_serving
from trainer.local.launcher import LocalCluster
from trainer.local.network_namespace import IsolationError, Namespace, open_namespace
from trainer.local.parent_watch import ParentWatch, watch_parent
from trainer.local.restarts import Restarts
from trainer.local.task_logs import say
from trainer.program import python_command
from trainer.run_files import point_latest_to, progress_of
from trainer.run_record.report_upload import uploading_reports
from trainer.task_spec import TaskSpec

if TYPE_CHECKING:
    from trainer.preflight import Findings

# Exit code of `check_before_launch` if the cluster must be launched: unlikely from a user's code.
_READY = 113
# The variable with the default --model_dir that `trainer.train` chose for a cluster.
DEFAULT_DIR = "TRAINER_DEFAULT_DIR"


def main(argv: Sequence[str]) -> int | TaskSpec:
    """Does what the command line asks for; returns the exit code, or the task to run.

    The caller runs the task, to keep the call stack of training short.
    """
    pin_to_cpus()
    is_launched = watch_parent()
    recipe, cluster = _read(argv, is_launched=is_launched)
    if flags.DOWNLOAD_ONLY.value:
        tf_setup.import_tensorflow()
        from trainer.inputs import prepare_inputs

        prepare_inputs(recipe)
        return EXIT_DONE
    # With --max_restarts the launcher also starts, and restarts, a single process.
    is_one = flags.STRATEGY.value == "mirrored" and not flags.MAX_RESTARTS.present
    if cluster is None and not is_one and not is_launched:
        return _launch(recipe)
    is_supervised = flags.MAX_RESTARTS.present or flags.MIN_WORKERS.present
    if cluster is not None and is_supervised and not is_launched:
        return _supervise(recipe, cluster)
    if cluster is not None and flags.KEEP_SERVING.value and not is_launched:
        return keep_serving(cluster.task, [*python_command("-m", "trainer"), *sys.argv[1:]])
    return _task(recipe, cluster, is_launched=is_launched)


def check_before_launch(argv: Sequence[str]) -> int:
    """Finds all mistakes that can be found before tasks are started.

    Called in a fork: TensorFlow and its memory stay out of the launcher, which checks in its own
    process only if it cannot fork. Returns _READY if the cluster must be launched.
    """
    watch_parent()
    recipe, cluster = _read(argv, is_launched=False)
    return _check_before_launch(recipe, cluster or _local_cluster())


def _read(argv: Sequence[str], *, is_launched: bool) -> tuple[Recipe, Cluster | None]:
    """The checked command line; also sets up logging and the environment of TensorFlow."""
    tf_setup.configure_logging(is_quiet=flags.QUIET.value)
    if len(argv) > 1:
        raise ConfigError(f"Unexpected arguments: {' '.join(argv[1:])}. Options start with --.")
    recipe = flag_checks.read_recipe()
    cluster = flag_checks.read_cluster(is_launched=is_launched)
    tf_setup.set_environment()
    tf_setup.keep_freed_memory()
    return recipe, cluster


def _local_cluster(choose_ports: Callable[[int], list[int]] = free_ports) -> Cluster:
    strategy = flags.STRATEGY.value
    num_workers = flags.WORKERS.value if strategy != "mirrored" else 1
    return local_cluster(strategy, num_workers, flags.PS.value, choose_ports)


def _launch(recipe: Recipe) -> int:
    flag_checks.check_isolation(recipe)
    strategy, cluster = flags.STRATEGY.value, _local_cluster()
    num_workers = cluster.num("worker")
    flag_checks.check_sizes(recipe, num_workers, cluster.num("ps"))
    if strategy != "ps":
        check_replicas(recipe.config, flags.REPLICAS.value or num_workers)
    num_threads = flags.NUM_THREADS.value or max(1, num_cores() // num_workers)
    cores = _cores(cluster, num_threads) if strategy == "multiworker" else {}
    model_dir = model_dir_of(recipe)
    argv = [*sys.argv[1:], f"--model_dir={model_dir}"]
    with contextlib.ExitStack() as stack:
        forks = None
        if sys.platform == "linux":
            forks = stack.enter_context(fork_server(f"--model_dir={model_dir}"))
        _tell("checking the config, the data and the model")
        exit_code = stack.enter_context(
            _checked_and_locked(model_dir, recipe, argv, forks, cluster)
        )
        if exit_code != _READY:
            return exit_code
        namespace = None
        if strategy != "mirrored":
            argv = [*argv, f"--num_threads={num_threads}"]
            namespace = _namespace(recipe, model_dir)
        if cores:
            fewest = min(map(len, cores.values()))
            each = f"at least {fewest} cores" if fewest > 1 else "one core"
            _tell(f"CPU affinity: each worker has {each} for itself.")
        if namespace:
            stack.enter_context(namespace)
            cluster = _local_cluster(namespace.free_ports)
        launched = LocalCluster(
            cluster,
            argv,
            model_dir,
            restarts=Restarts(flags.MAX_RESTARTS.value, lambda: progress_of(model_dir)),
            namespace=namespace,
            cores=cores,
            grace_secs=flags.GRACE_SECS.value,
            stall_timeout_secs=flags.STALL_TIMEOUT_SECS.value,
            fork_server=forks,
        )
        if _is_default_dir():
            point_latest_to(model_dir)
        stack.enter_context(uploading_reports(model_dir, ["tasks"]))
        if shows_live_view(model_dir):
            stack.enter_context(live_view(model_dir, is_launcher=True))
        exit_code = launched.run().exit_code
    if not flags.QUIET.value:
        print_next(exit_code, model_dir)
    return exit_code


def _supervise(recipe: Recipe, cluster: Cluster) -> int:
    """Starts, supervises and restarts this host's task of a cluster of several hosts."""
    flag_checks.check_sizes(recipe, _num_workers(cluster), cluster.num("ps"))
    model_dir = model_dir_of(recipe)
    argv = [*sys.argv[1:], f"--model_dir={model_dir}"]
    with contextlib.ExitStack() as stack:
        forks = None
        if sys.platform == "linux":
            forks = stack.enter_context(fork_server(f"--model_dir={model_dir}"))
        if not flag_checks.serves(cluster):  # Otherwise the chief has the config.
            exit_code = stack.enter_context(
                _checked_and_locked(model_dir, recipe, argv, forks, cluster)
            )
            if exit_code != _READY:
                return exit_code
        launch: Callable[..., LocalCluster] = LocalCluster
        if flags.MIN_WORKERS.present:
            launch = partial(
                ElasticCluster,
                rules=Rules(flags.MIN_WORKERS.value, flags.REJOIN_SECS.value),
                identity=_identity(recipe),
                saves_regularly=recipe.config.checkpoint_every_steps > 0,
            )
        launched = launch(
            cluster,
            argv,
            model_dir,
            restarts=Restarts(flags.MAX_RESTARTS.value, lambda: progress_of(model_dir)),
            host=_label_of(cluster),
            grace_secs=flags.GRACE_SECS.value,
            stall_timeout_secs=flags.STALL_TIMEOUT_SECS.value,
            fork_server=forks,
        )
        exit_code = launched.run().exit_code
    if cluster.is_chief and not flags.QUIET.value:
        print_next(exit_code, model_dir, cluster)
    return exit_code


def _identity(recipe: Recipe) -> str:
    """A hash of the code, the config and the flags that must be equal on all hosts of a run."""
    return str(as_number({**software(), **flag_checks.read_shared_settings(recipe)}))


def _label_of(cluster: Cluster) -> str:
    """The host of this task, with its port if the host has other tasks, too."""
    host = host_of(cluster.address)
    is_alone = all(host_of(cluster.address_of(t)) != host for t in cluster.other_trainers)
    return host if is_alone else cluster.address


def shows_live_view(model_dir: str) -> bool:
    """Returns True if this run is shown as one screen, not as lines."""
    return not flags.PLAIN.value and not flags.QUIET.value and can_show(model_dir)


def _tell(text: str) -> None:
    if not flags.QUIET.value:
        say(text)


def fork_server(label: str) -> ForkServer:
    """A process that has imported all that a task needs, but has run no TensorFlow op."""
    steps = ("configure_logging", "set_environment", "keep_freed_memory", "import_tensorflow")
    return ForkServer(
        label,
        setup=[f"trainer.tf_setup:{step}" for step in steps],
        preload=["trainer.__main__", "trainer.cli.commands", "trainer.preflight", "trainer.task"],
    )


def _run_check_before_launch(
    recipe: Recipe, argv: Sequence[str], forks: ForkServer | None, cluster: Cluster
) -> int:
    if forks is None:
        return _check_before_launch(recipe, cluster)
    with ParentWatch() as parent_watch:
        fds = {1: 1, 2: 2, parent_watch.fd: parent_watch.fd}
        try:
            target = "trainer.__main__:check_before_launch"
            child = forks.spawn(target, "preflight", argv, parent_watch.env, fds)
        except OSError:  # Perhaps TensorFlow cannot be imported: then this process says why.
            return _check_before_launch(recipe, cluster)

        received: list[int] = []

        def stop(signum: int) -> None:
            received.append(signum)
            child.kill()

        with SignalThread(stop_signals(), stop):
            exit_code = child.wait()
        if received:
            end_at_once(received[0], None)
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        say(f"error: {name} ended the process that checks before the launch.")
        return EXIT_RESTART
    return exit_code


def _check_before_launch(recipe: Recipe, cluster: Cluster) -> int:
    model_dir = model_dir_of(recipe)
    set_train_steps(recipe)
    if _say_if_finished(recipe, model_dir):
        return EXIT_DONE
    if flags.CHECK.value:
        return _check(recipe, model_dir, cluster)
    from trainer import preflight

    if flags.MIN_WORKERS.present:  # Otherwise the task finds it, before it trains.
        num_replicas = preflight.num_replicas_here(flags.NUM_GPUS.value)
        check_replicas(recipe.config, _num_workers(cluster) * num_replicas)
    _preflight(recipe, model_dir, cluster)
    preflight.check_model_dir(model_dir)
    return _READY


def _preflight(recipe: Recipe, model_dir: str, cluster: Cluster | None) -> "Findings":
    from trainer.build import check_for_strategy, check_standby
    from trainer.preflight import preflight

    found = preflight(recipe, model_dir)
    check_for_strategy(
        found.learner,
        recipe,
        strategy=flags.STRATEGY.value,
        num_workers=_num_workers(cluster),
        read_dtype=flags.READ_DTYPE.value,
    )
    check_standby(found.checkpointer, recipe.path, flags.PS_STANDBY.value)
    return found


@contextlib.contextmanager
def _checked_and_locked(
    model_dir: str,
    recipe: Recipe,
    argv: Sequence[str],
    forks: ForkServer | None,
    cluster: Cluster,
) -> Iterator[int]:
    """Checks before a launch, and keeps other runs from `model_dir` within the context.

    The value is that of the check: _READY, or an exit code.
    """
    exit_code = _run_check_before_launch(recipe, argv, forks, cluster)
    # With --min_workers the groups of hosts agree which host has the chief.
    if exit_code != _READY or not cluster.is_chief or flags.MIN_WORKERS.present:
        yield exit_code
        return
    wait_secs = run_lock.longest_wait_secs(flags.GRACE_SECS.value)
    with run_lock.locked(model_dir, wait_secs, say) as has_waited:
        if has_waited:  # The other run may have made the last step.
            exit_code = _run_check_before_launch(recipe, argv, forks, cluster)
        yield exit_code


def _cores(cluster: Cluster, num_threads: int) -> dict[Task, list[int]]:
    tasks = cluster.tasks()
    if flags.CPU_AFFINITY.value == "off" or len(tasks) == 1:  # One task has all cores.
        return {}
    groups = cpu_groups(len(tasks))
    fewest = min(map(len, groups))
    if sys.platform != "linux":
        why_not = f"{sys.platform} has no CPU affinity"
    elif fewest == 0:
        why_not = f"{len(tasks)} workers are more than the {num_cores()} core(s)"
    elif num_threads > fewest:
        why_not = (
            f"{num_cores()} cores for {len(tasks)} workers, of --num_threads={num_threads} each"
        )
    else:
        return dict(zip(tasks, groups, strict=True))
    if flags.CPU_AFFINITY.value == "on":
        raise ConfigError(
            f"--cpu_affinity=on, but workers cannot have cores for themselves: {why_not}. Use "
            "--cpu_affinity=auto, or fewer --workers or --num_threads."
        )
    return {}


def _namespace(recipe: Recipe, model_dir: str) -> Namespace | None:
    wanted = flags.ISOLATE.value
    urls = [path for path in (model_dir, data_dir(recipe.config)) if is_url(path)]
    urls += filter(None, [reached_over_network(recipe.config.trackers)])
    if wanted == "off":
        why_not = "--isolate=off"
    elif wanted == "auto" and urls:
        why_not = f"{urls[0]} is reached over the network"
    elif wanted == "auto" and flags.METRICS_PORT.present:
        why_not = f"--metrics_port={flags.METRICS_PORT.value} is reached over the network"
    else:
        try:
            namespace = open_namespace()
        except IsolationError as error:
            why_not = str(error)
        else:
            _tell(
                "isolated: the tasks have a separate network namespace, unreachable from outside."
            )
            return namespace
    if wanted == "on":
        raise ConfigError(
            f"--isolate=on, but a network namespace cannot be made: {why_not}. Use --isolate=auto, "
            "and close this machine's ports to other hosts."
        )
    say(f"not isolated ({why_not}): hosts that reach these ports can run code in tasks.")
    return None


def _task(recipe: Recipe, cluster: Cluster | None, *, is_launched: bool) -> int | TaskSpec:
    if not is_launched:  # A launcher has checked them for all hosts, which may not all be here.
        num_ps = cluster.num("ps") if cluster else 0
        flag_checks.check_sizes(recipe, _num_workers(cluster), num_ps)
    model_dir = model_dir_of(recipe)
    serves = cluster is not None and flag_checks.serves(cluster)
    is_evaluator = cluster is not None and cluster.task.job == "evaluator"
    serves_many = serves and (flags.KEEP_SERVING.value or flags.MODEL_DIR.value is None)
    if not serves:
        set_train_steps(recipe)
    # If the run is finished, no chief would end its server. An evaluator may have work left.
    if not (serves_many or is_evaluator) and _say_if_finished(recipe, model_dir):
        return EXIT_DONE
    if flags.CHECK.value:
        return _check(recipe, model_dir, cluster)
    tf_setup.import_tensorflow()
    return task_spec(recipe, cluster, model_dir, is_launched=is_launched)


def task_spec(
    recipe: Recipe, cluster: Cluster | None, model_dir: str, *, is_launched: bool = False
) -> TaskSpec:
    """The task that the parsed flags describe."""
    return TaskSpec(
        strategy=flags.STRATEGY.value,
        recipe=recipe,
        cluster=cluster,
        model_dir=model_dir,
        is_latest=_is_default_dir(),
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
        replicas_to_aggregate=flag_checks.num_to_aggregate(recipe, _num_workers(cluster)),
        max_staleness=flags.MAX_STALENESS.value,
        ps_standby=flags.PS_STANDBY.value,
        is_checked=is_launched,
        serves=cluster is not None and flag_checks.serves(cluster),
        chief_timeout_secs=None if flags.KEEP_SERVING.value else flags.CHIEF_TIMEOUT_SECS.value,
        grace_secs=flags.GRACE_SECS.value,
        stall_timeout_secs=flags.STALL_TIMEOUT_SECS.value,
        metrics_address=flag_checks.metrics_address(listens=cluster is None or cluster.is_chief),
    )


def _num_workers(cluster: Cluster | None) -> int:
    return (
        1
        if cluster is None
        else cluster.num("worker")
        if cluster.num("ps")
        else len(cluster.trainers)
    )


def _check(recipe: Recipe, model_dir: str, cluster: Cluster | None) -> int:
    num_workers, num_ps = _num_workers(cluster), cluster.num("ps") if cluster else 0
    if not num_ps:
        check_replicas(recipe.config, flags.REPLICAS.value or num_workers)
    found = _preflight(recipe, model_dir, cluster)
    if flags.VERBOSE.value:
        print(f"config {recipe.path}: {to_json(recipe.config)}")
    print(found.describe(num_ps, num_workers if flags.SYNC_REPLICAS.value else 0))
    return EXIT_DONE


def set_train_steps(recipe: Recipe) -> None:
    """Sets train_steps to that of --epochs, if it is given: this needs the data."""
    if flags.EPOCHS.value is not None:
        tf_setup.import_tensorflow()
        from trainer.inputs import num_steps_of

        recipe.config.train_steps = num_steps_of(recipe, flags.EPOCHS.value)


def _is_default_dir() -> bool:
    """Returns True if the user gave no --model_dir. `trainer.train` gives its default one."""
    return flags.MODEL_DIR.value in (None, os.environ.get(DEFAULT_DIR))


def model_dir_of(recipe: Recipe) -> str:
    """The directory of --model_dir, or a new one under runs/."""
    if flags.MODEL_DIR.value is not None:
        given = str(flags.MODEL_DIR.value)
        # Not the link, which will point to another run while this one goes on.
        return os.path.realpath(given) if os.path.islink(given.rstrip("/")) else given
    name = Path(recipe.files[0]).stem if recipe.files else "python"
    words = [name, flags.STRATEGY.value, *run_names.changes(recipe)]
    return str(Path("runs") / "-".join([*words, time.strftime("%Y%m%d-%H%M%S")]))


def _say_if_finished(recipe: Recipe, model_dir: str) -> bool:
    tf_setup.import_tensorflow()
    from trainer import preflight

    result = preflight.finished_result(model_dir, recipe.config)
    if result is None:
        return False
    preflight.preflight(recipe, model_dir)  # The finished run may be of another config.
    values = {name: value for name, value in result["eval"].items() if isinstance(value, float)}
    measured = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
    print(
        f"{model_dir} is finished: step {result['step']:,}  {measured}. To train further, raise "
        "--train_steps; to train anew, give another --model_dir."
    )
    return True
