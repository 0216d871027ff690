"""Launchers: of a cluster on this machine, and of this host's task of a cluster of several hosts.

    exit_code = launch(recipe, view)                # --strategy=ps, without TF_CONFIG
    exit_code = supervise(recipe, cluster)          # --max_restarts or --min_workers

Both first run the checks in a fork, so that TensorFlow and its memory stay out of this process;
in this process only if it cannot fork.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from data.system.cores import cpu_groups, num_cores
from data.system.files import absolute, is_url
from strategies.cluster.peers import host_of
from strategies.cluster.tf_config import Cluster, Task
from trainer import flags
from trainer.config import ConfigError, Recipe, data_dir
from trainer.config_checks import check_replicas
from trainer.exit_codes import EXIT_RESTART
from trainer.flags import checks, start
from trainer.flags.cluster import cluster_here, read_shared_settings
from trainer.flags.continued import print_next
from trainer.flags.start import READY
from trainer.guards import run_lock
from trainer.guards.fingerprint import as_number, software
from trainer.guards.parent_watch import ParentWatch
from trainer.hooks.tracker_names import reached_over_network
from trainer.local.deaths import Restarts
from trainer.local.elastic import ElasticPolicy, run_elastic
from trainer.local.fork_server import ForkServer
from trainer.local.group_rules import Rules
from trainer.local.membership import Membership
from trainer.local.network_namespace import IsolationError, Namespace, open_namespace
from trainer.local.policy import FixedPolicy, ResizingPolicy
from trainer.local.supervisor import Supervisor
from trainer.local.task_logs import say
from trainer.local.task_process import TARGET, TaskStarter
from trainer.run_files import directory_of_logs, point_latest_to, progress_of
from trainer.run_record.report_upload import uploading_reports


def launch(recipe: Recipe, view: Callable[[str], AbstractContextManager[None]]) -> int:
    """Starts a cluster on this machine, and runs it to its end; returns the exit code.

    `view` shows the run in a directory while its context is open.
    """
    strategy, cluster = flags.STRATEGY.value, cluster_here()
    network_needed = _network_needed(recipe)
    workers = cluster.num("worker")
    checks.check_sizes(recipe, workers, cluster.num("ps"))
    if strategy != "ps":
        check_replicas(recipe.config, flags.REPLICAS.value or workers)
    num_threads = flags.NUM_THREADS.value or max(1, num_cores() // workers)
    cores = _cores(cluster, num_threads) if strategy == "multiworker" else {}
    model_dir = start.model_dir_of(recipe)
    with contextlib.ExitStack() as stack:
        if listener := checks.metrics_listener(is_chief=True):
            stack.enter_context(listener)
        forks = _forks(model_dir, stack)
        _tell("checking the config, the data and the model")
        exit_code = stack.enter_context(_checked_and_locked(model_dir, recipe, forks, cluster))
        if exit_code != READY:
            return exit_code
        task_argv, namespace = _task_argv(model_dir), None
        if strategy != "mirrored":
            task_argv.append(f"--num_threads={num_threads}")
            namespace = _namespace(network_needed)
        if cores:
            fewest = min(map(len, cores.values()))
            _tell(f"CPU affinity: each worker has at least {fewest} core(s) for itself.")
        if namespace:
            stack.enter_context(namespace)
        starter = TaskStarter(
            task_argv, cores=cores, namespace=namespace, fork_server=forks, listener=listener
        )
        policy = FixedPolicy(cluster, cluster.tasks())
        if flags.MIN_WORKERS.present:
            run_dir = directory_of_logs(model_dir).parent
            policy = ResizingPolicy(cluster, run_dir, least=flags.MIN_WORKERS.value)
        supervisor = _supervisor(policy, starter, model_dir)
        if start.is_default_dir():
            point_latest_to(model_dir)
        stack.enter_context(uploading_reports(model_dir, ["tasks"]))
        stack.enter_context(view(model_dir))
        exit_code = supervisor.run().exit_code
    if not flags.QUIET.value:
        print_next(exit_code, model_dir)
    return exit_code


def supervise(recipe: Recipe, cluster: Cluster) -> int:
    """Starts, supervises and restarts this host's task of a cluster of several hosts."""
    checks.check_sizes(recipe, start.num_workers(cluster), cluster.num("ps"))
    model_dir = start.model_dir_of(recipe)
    with contextlib.ExitStack() as stack:
        forks = _forks(model_dir, stack)
        # A server gets the config from the chief. Of an elastic cluster it may be the next chief.
        if not checks.serves(cluster) or flags.MIN_WORKERS.present:
            exit_code = stack.enter_context(_checked_and_locked(model_dir, recipe, forks, cluster))
            if exit_code != READY:
                return exit_code
        starter, label = TaskStarter(_task_argv(model_dir), fork_server=forks), _label_of(cluster)
        if flags.MIN_WORKERS.present:
            addresses = [cluster.address_of(task) for task in cluster.trainers]  # Workers, then ps.
            servers = frozenset(range(cluster.num("worker"), len(addresses)))
            own = cluster.trainers.index(cluster.task)
            policy = ElasticPolicy(
                Membership(directory_of_logs(model_dir).parent, addresses, own),
                Rules(
                    flags.MIN_WORKERS.value,
                    flags.REJOIN_SECS.value,
                    servers,
                    powers_of_two=recipe.config.virtual_replicas > 0 and not servers,
                ),
                # The code, the config and the flags that must be equal on all hosts of a run.
                identity=str(as_number({**software(), **read_shared_settings(recipe)})),
                saves_regularly=recipe.config.checkpoint_every_steps > 0,
            )
            report = run_elastic(_supervisor(policy, starter, model_dir, label), policy)
        else:
            fixed = FixedPolicy(cluster, [cluster.task])
            report = _supervisor(fixed, starter, model_dir, label).run()
        exit_code = report.exit_code
    if cluster.is_chief and not flags.QUIET.value:
        print_next(exit_code, model_dir, cluster)
    return exit_code


def _task_argv(model_dir: str) -> list[str]:
    return [*sys.argv[1:], f"--model_dir={absolute(model_dir)}"]


def _supervisor(
    policy: FixedPolicy, starter: TaskStarter, model_dir: str, host: str = ""
) -> Supervisor:
    return Supervisor(
        policy,
        starter,
        model_dir,
        Restarts(flags.MAX_RESTARTS.value, lambda: progress_of(model_dir)),
        grace_secs=flags.GRACE_SECS.value,
        stall_timeout_secs=flags.STALL_TIMEOUT_SECS.value,
        host=host,
    )


def _forks(model_dir: str, stack: contextlib.ExitStack) -> ForkServer | None:
    is_linux = sys.platform == "linux"
    return stack.enter_context(fork_server(f"--model_dir={model_dir}")) if is_linux else None


def _label_of(cluster: Cluster) -> str:
    """The host of this task, with its port if the host has other tasks, too."""
    host = host_of(cluster.address)
    is_alone = all(host_of(cluster.address_of(t)) != host for t in cluster.other_trainers)
    return host if is_alone else cluster.address


def _tell(text: str) -> None:
    if not flags.QUIET.value:
        say(text)


def fork_server(label: str) -> ForkServer:
    """Returns a server that imports all modules of a task, but runs no TensorFlow op."""
    steps = (
        "trainer.tf_setup:configure_logging",
        "trainer.tf_setup:set_environment",
        "data.system.compat.freed_memory:keep_freed_memory",
        "trainer.tf_setup:import_tensorflow",
    )
    of_tasks = ("__main__", "cli", "flags.cluster", "preflight", "task", "in_cluster")
    of_ps = ("ps.servers", "ps.asynchronous", "ps.sync.executor")
    preload = [f"trainer.{module}" for module in of_tasks]
    preload += [f"strategies.{module}" for module in ("local_steps", "multiworker", *of_ps)]
    return ForkServer(label, setup=steps, preload=preload)


def _run_check_before_launch(
    model_dir: str, recipe: Recipe, forks: ForkServer | None, cluster: Cluster
) -> int:
    if forks is None:
        return start.check_before_launch(recipe, cluster)
    with ParentWatch() as parent_watch:
        fds = {1: 1, 2: 2, parent_watch.fd: parent_watch.fd}
        try:
            argv = [*sys.argv[1:], f"--model_dir={model_dir}"]
            env = {**parent_watch.env, start.ONLY_CHECKS: "1"}
            child = forks.spawn(TARGET, "preflight", argv, env, fds)
        except OSError:  # Perhaps TensorFlow cannot be imported: then this process says why.
            return start.check_before_launch(recipe, cluster)
        exit_code = child.wait()  # A signal ends this process, and then the child ends itself.
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        say(f"error: {name} ended the process that checks before the launch.")
        return EXIT_RESTART
    return exit_code


@contextlib.contextmanager
def _checked_and_locked(
    model_dir: str, recipe: Recipe, forks: ForkServer | None, cluster: Cluster
) -> Iterator[int]:
    """Runs the checks, and keeps other runs from `model_dir` while the context is open.

    Gives the result of the checks: READY, or an exit code.
    """
    exit_code = _run_check_before_launch(model_dir, recipe, forks, cluster)
    # With --min_workers the groups of hosts agree which host has the chief.
    is_elastic = flags.MIN_WORKERS.present and flags.HOST_LIST.value is not None
    if exit_code != READY or not cluster.is_chief or is_elastic:
        yield exit_code
        return
    wait_secs = run_lock.longest_wait_secs(flags.GRACE_SECS.value)
    with run_lock.locked(model_dir, wait_secs, say) as has_waited:
        if has_waited:  # The other run may have made the last step.
            exit_code = _run_check_before_launch(model_dir, recipe, forks, cluster)
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


def _network_needed(recipe: Recipe) -> str:
    """Returns what the tasks reach over the network; empty if there is nothing.

    Raises ConfigError if there is something, and --isolate=on.
    """
    config = recipe.config
    paths = (flags.MODEL_DIR.value or "", data_dir(config), config.warm_start.path)
    needed = next(filter(is_url, paths), reached_over_network(config.trackers)) or ""
    if needed and flags.ISOLATE.value == "on":
        raise ConfigError(
            f"--isolate=on separates the tasks from the network, but {needed} is reached over "
            "the network. Use --isolate=auto, or local directories."
        )
    return needed


def _namespace(network_needed: str) -> Namespace | None:
    wanted = flags.ISOLATE.value
    if wanted == "off":
        why_not = "--isolate=off"
    elif network_needed:
        why_not = f"{network_needed} is reached over the network"
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
