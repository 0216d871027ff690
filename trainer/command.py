"""What a command line asks for: one task, a whole cluster on this machine, or a look at a config.

Nothing here is imported for `--help` and for a mistyped flag, which should not wait.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data.cores import num_cores
from data.files import is_url
from strategies.cluster import Cluster, Task, local_cluster
from trainer import flags, usage
from trainer.binding import core_shares, keep_to_cores
from trainer.config import ConfigError, Recipe, check_replicas, data_dir
from trainer.exits import EXIT_RESTART, end_at_once
from trainer.heartbeat import send_heartbeats
from trainer.isolation import IsolationError, Namespace, open_namespace
from trainer.keep_serving import keep_serving
from trainer.launch import LocalCluster
from trainer.lifeline import Lifeline, watch_lifeline
from trainer.plan import Plan
from trainer.progress import progress_of
from trainer.restarts import Restarts
from trainer.signals import StopSignals
from trainer.start import (
    configure_logging,
    import_tensorflow,
    keep_freed_memory,
    set_environment,
)
from trainer.template import Template

# In a process that only looks whether all is well: where to say that it is, and there is work.
_ONLY_LOOK = "TRAINER_ONLY_LOOK_FD"


def main(argv: Sequence[str]) -> int:
    """Runs one task, or a whole cluster on this machine; returns the exit code."""
    keep_to_cores()
    is_launched = watch_lifeline()
    send_heartbeats()
    configure_logging()
    if len(argv) > 1:
        raise ConfigError(f"Unexpected arguments: {' '.join(argv[1:])}. Options start with --.")
    recipe = usage.read_recipe()
    cluster = usage.read_cluster(is_launched=is_launched)
    set_environment()
    keep_freed_memory()
    if flags.DOWNLOAD_ONLY.value:
        return _prepare_only(recipe)
    ready = os.environ.pop(_ONLY_LOOK, None)
    if ready is not None:
        exit_code = _before_launch(recipe)
        if exit_code is None:
            os.write(int(ready), b".")
        return exit_code or 0
    # A single process is started by another one only if that is to look after it.
    is_one = flags.STRATEGY.value == "mirrored" and not flags.MAX_RESTARTS.present
    if cluster is None and not is_one and not is_launched:
        return _launch(recipe)
    if cluster is not None and flags.KEEP_SERVING.value and not is_launched:
        return keep_serving(cluster.task, [sys.executable, "-m", "trainer", *sys.argv[1:]])
    return _run(recipe, cluster, is_launched=is_launched)


def _launch(recipe: Recipe) -> int:
    """A cluster on this machine: everything is checked before its tasks are started."""
    strategy, num_ps = flags.STRATEGY.value, flags.PS.value
    num_workers = flags.WORKERS.value if strategy != "mirrored" else 1
    cluster = local_cluster(strategy, num_workers, num_ps)
    usage.check_wire(num_workers)
    if strategy == "ps":
        usage.num_to_aggregate(recipe, num_workers)
    else:
        check_replicas(recipe.config, flags.REPLICAS.value or num_workers)
    num_threads = flags.NUM_THREADS.value or max(1, num_cores() // num_workers)
    cores = _cores(cluster, num_threads) if strategy == "multiworker" else {}
    model_dir = _model_dir(recipe)
    argv = [*sys.argv[1:], f"--model_dir={model_dir}"]
    with contextlib.ExitStack() as stack:
        template = None
        if sys.platform == "linux":
            template = stack.enter_context(Template(f"--model_dir={model_dir}"))
        is_ready, exit_code = _look_first(recipe, argv, template)
        if not is_ready:
            return exit_code
        namespace = None
        if strategy != "mirrored":
            argv = [*argv, f"--num_threads={num_threads}"]
            namespace = _namespace(recipe, model_dir)
        if cores:
            fewest = min(map(len, cores.values()))
            each = f"{fewest} cores or more" if fewest > 1 else "a core"
            print(f"bound: each worker keeps to {each} of its own.", file=sys.stderr)
        if namespace:
            stack.enter_context(namespace)
            cluster = local_cluster(strategy, num_workers, num_ps, namespace.free_ports)
        restarts = Restarts(flags.MAX_RESTARTS.value, lambda: progress_of(model_dir))
        launched = LocalCluster(
            cluster,
            argv,
            model_dir,
            restarts=restarts,
            namespace=namespace,
            cores=cores,
            grace_secs=flags.GRACE_SECS.value,
            stall_timeout_secs=flags.STALL_TIMEOUT_SECS.value,
            template=template,
        )
        return launched.run().exit_code


def _look_first(recipe: Recipe, argv: Sequence[str], template: Template | None) -> tuple[bool, int]:
    """`_before_launch`: whether there is something to launch, and the exit code if there is not.

    In a fork of `template`, if there is one: TensorFlow then stays out of this process.
    """
    read, write = os.pipe()
    with Lifeline() as lifeline, os.fdopen(read, "rb") as ready:
        fds = {1: 1, 2: 2, lifeline.fd: lifeline.fd, write: write}
        env = {**lifeline.env, _ONLY_LOOK: str(write)}
        child = None
        try:
            if template:
                child = template.start("preflight", argv, env, fds)
        except OSError:  # It could not import TensorFlow, perhaps: this process will say why.
            pass
        finally:
            os.close(write)
        if child is None:
            exit_code = _before_launch(recipe)
            return exit_code is None, exit_code or 0

        def stop(signum: int, frame: object) -> None:
            child.kill()
            end_at_once(signum, frame)

        former = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
        code = child.wait()
        for signum, handler in former.items():
            signal.signal(signum, handler)
        if code < 0:
            name = signal.Signals(-code).name
            print(f"error: {name} ended the process that looks first.", file=sys.stderr)
            return False, EXIT_RESTART
        return bool(ready.read()), code


def _before_launch(recipe: Recipe) -> int | None:
    """All that can be known before tasks are started: None to start them, or with what to end.

    Raises:
        ConfigError, ClusterError, DataError, ModelDirError, OptimizerError: a user's mistake.
    """
    strategy = flags.STRATEGY.value
    model_dir = _model_dir(recipe)
    if _say_if_finished(recipe, model_dir):
        return 0
    if flags.CHECK.value:
        num_workers = flags.WORKERS.value if strategy != "mirrored" else 1
        return _check(recipe, model_dir, num_workers, flags.PS.value if strategy == "ps" else 0)
    from trainer import preflight

    preflight.hide_gpus()
    preflight.preflight(recipe, model_dir)
    preflight.check_model_dir(model_dir)
    return None


def _cores(cluster: Cluster, num_threads: int) -> dict[Task, list[int]]:
    """The cores that each task keeps to, if --bind_cores wants it and it can be."""
    tasks = cluster.tasks()
    if flags.BIND_CORES.value == "off" or len(tasks) == 1:  # One has them all.
        return {}
    shares = core_shares(len(tasks))
    fewest = min(map(len, shares))
    if sys.platform != "linux":
        why_not = f"{sys.platform} keeps no process to cores"
    elif fewest == 0:
        why_not = f"there are {len(tasks)} workers, and fewer cores: {num_cores()}"
    elif num_threads > fewest:
        why_not = (
            f"{num_cores()} cores for {len(tasks)} workers, of --num_threads={num_threads} each"
        )
    else:
        return dict(zip(tasks, shares, strict=True))
    if flags.BIND_CORES.value == "on":
        raise ConfigError(
            f"--bind_cores=on, but workers cannot keep to cores of their own: {why_not}. Use "
            "--bind_cores=auto, or fewer --workers or --num_threads."
        )
    return {}


def _namespace(recipe: Recipe, model_dir: str) -> Namespace | None:
    """Where the tasks run by themselves, if --isolate wants it and it can be; says which."""
    urls = [path for path in (model_dir, data_dir(recipe.config)) if is_url(path)]
    if flags.ISOLATE.value == "off":
        why_not = "--isolate=off"
    elif flags.ISOLATE.value == "auto" and urls:
        why_not = f"{urls[0]} is reached over the network"
    else:
        try:
            namespace = open_namespace()
        except IsolationError as error:
            why_not = str(error)
        else:
            print(
                "isolated: the tasks have a network namespace of their own, and are out of reach.",
                file=sys.stderr,
            )
            return namespace
    if flags.ISOLATE.value == "on":
        raise ConfigError(
            f"--isolate=on, but a network namespace cannot be made: {why_not}. Use --isolate=auto, "
            "and let nobody else reach this machine's ports."
        )
    print(
        f"not isolated ({why_not}): whoever reaches this machine's ports can run code in tasks.",
        file=sys.stderr,
    )
    return None


def _run(recipe: Recipe, cluster: Cluster | None, *, is_launched: bool) -> int:
    replicas_to_aggregate = usage.num_to_aggregate(recipe, cluster.num("worker") if cluster else 1)
    usage.check_wire(len(cluster.trainers) if cluster else 1)
    model_dir = _model_dir(recipe)
    serves = cluster is not None and usage.serves(cluster)
    is_evaluator = cluster is not None and cluster.task.job == "evaluator"
    serves_many = serves and (flags.KEEP_SERVING.value or flags.MODEL_DIR.value is None)
    # A server of one run too: no chief will come and end it. An evaluator may have work left.
    if not (serves_many or is_evaluator) and _say_if_finished(recipe, model_dir):
        return 0
    if flags.CHECK.value:
        num_ps = cluster.num("ps") if cluster else 0
        return _check(recipe, model_dir, _num_workers(cluster), num_ps)
    import_tensorflow()
    from trainer import run

    plan = Plan(
        strategy=flags.STRATEGY.value,
        recipe=recipe,
        cluster=cluster,
        model_dir=model_dir,
        replicas=flags.REPLICAS.value,
        num_gpus=flags.NUM_GPUS.value,
        communication=flags.COMMUNICATION.value,
        wire_dtype=flags.WIRE_DTYPE.value,
        num_threads=flags.NUM_THREADS.value,
        log_device_placement=flags.LOG_DEVICE_PLACEMENT.value,
        replicas_to_aggregate=replicas_to_aggregate,
        max_staleness=flags.MAX_STALENESS.value,
        is_checked=is_launched,
        serves=serves,
        chief_timeout_secs=None if flags.KEEP_SERVING.value else flags.CHIEF_TIMEOUT_SECS.value,
        grace_secs=flags.GRACE_SECS.value,
        stall_timeout_secs=flags.STALL_TIMEOUT_SECS.value,
        unknown_host_secs=flags.UNKNOWN_HOST_SECS.value,
    )
    with StopSignals() as signals:
        return run.run_task(plan, signals)


def _num_workers(cluster: Cluster | None) -> int:
    """The tasks that compute gradients."""
    if cluster is None:
        return 1
    return cluster.num("worker") if cluster.num("ps") else len(cluster.trainers)


def _check(recipe: Recipe, model_dir: str, num_workers: int, num_ps: int) -> int:
    """--check: all that can be known before anything starts."""
    from trainer import preflight

    preflight.hide_gpus()
    if flags.STRATEGY.value != "ps":
        check_replicas(recipe.config, flags.REPLICAS.value or num_workers)
    num_staged = num_workers if flags.SYNC_REPLICAS.value else 0
    print(preflight.preflight(recipe, model_dir).describe(num_ps, num_staged))
    return 0


def _prepare_only(recipe: Recipe) -> int:
    """--download_only: prepares and opens the data; starts and makes nothing else."""
    import_tensorflow()
    from trainer.inputs import prepare_inputs

    for line in prepare_inputs(recipe):
        print(line)
    return 0


def _model_dir(recipe: Recipe) -> str:
    if flags.MODEL_DIR.value is not None:
        return str(flags.MODEL_DIR.value)
    now = time.strftime("%Y%m%d-%H%M%S")
    return str(Path("runs") / f"{Path(recipe.path).stem}-{flags.STRATEGY.value}-{now}")


def _say_if_finished(recipe: Recipe, model_dir: str) -> bool:
    import_tensorflow()
    from trainer import preflight

    result = preflight.finished_result(model_dir, recipe.config)
    if result is None:
        return False
    preflight.preflight(recipe, model_dir)  # It may be finished, but another run.
    measured = "  ".join(f"{name} {value:.4f}" for name, value in result["eval"].items())
    print(
        f"{model_dir} is finished: step {result['step']:,}  {measured}. To train further, raise "
        "--train_steps; to train anew, give another --model_dir."
    )
    return True
