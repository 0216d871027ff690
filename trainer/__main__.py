"""`python -m trainer`: flags -> cluster -> config -> executor -> train; exit codes.

    python -m trainer --strategy=mirrored
    python -m trainer --strategy=multiworker --workers=2 --config=configs/mnist_replica.py
    TF_CONFIG='{...}' python -m trainer --strategy=ps --model_dir=/shared/run

| exit code | meaning |
| --- | --- |
| 0 | done |
| 2 | bad usage, config or data; one message says what to type |
| 75 | a peer was lost or this task was asked to stop: state is saved, start it again |
| 1 | a bug, or training diverged |
"""

import difflib
import itertools
import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# TensorFlow is imported where it is needed: `--help` and a mistyped flag should not wait for it.
from absl import app, flags
from ml_collections import config_flags

from strategies.cluster import Cluster, ClusterError, local_cluster, parse_tf_config
from trainer.config import (
    Config,
    ConfigError,
    Recipe,
    check,
    check_replicas,
    check_shares,
    explain_unknown_field,
    flatten,
    load_recipe,
)
from trainer.exits import EXIT_BUG, EXIT_RESTART, EXIT_USAGE
from trainer.launch import LocalCluster, watch_lifeline
from trainer.signals import StopSignals

STRATEGIES = ("mirrored", "multiworker", "ps")

FLAGS = flags.FLAGS
_STRATEGY = flags.DEFINE_enum(
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
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Where the run is kept; the same directory resumes. By default a new one under runs/. "
    "With TF_CONFIG it must be given, on a file system that all tasks see.",
)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers of a cluster on this machine.")
_PS = flags.DEFINE_integer("ps", 1, "Parameter servers of a cluster on this machine.")
_MAX_STALENESS = flags.DEFINE_integer(
    "max_staleness",
    None,
    "ps without --sync_replicas: a gradient is dropped, and its batch handed out again, if more "
    "steps than this were applied since it read the variables.",
    lower_bound=0,
)
_SYNC_REPLICAS = flags.DEFINE_boolean(
    "sync_replicas", False, "ps: a step sums gradients computed on the same variables."
)
_REPLICAS_TO_AGGREGATE = flags.DEFINE_integer(
    "replicas_to_aggregate",
    None,
    "With --sync_replicas: gradients of a step, the first to arrive; the other workers are backups "
    "for slow ones. By default as many as workers.",
)
_REPLICAS = flags.DEFINE_integer(
    "replicas", 0, "mirrored: replicas; 0 is one for each GPU, or one CPU. On CPUs, logical ones."
)
_NUM_GPUS = flags.DEFINE_integer("num_gpus", None, "GPUs that each process uses; all by default.")
_COMMUNICATION = flags.DEFINE_enum(
    "communication", "auto", ("auto", "ring", "nccl"), "multiworker: how gradients are summed."
)
_NUM_THREADS = flags.DEFINE_integer(
    "num_threads",
    0,
    "Threads of TensorFlow in each process; 0 lets TensorFlow choose, and in a cluster on this "
    "machine divides the cores among the workers.",
)
_LOG_DEVICE_PLACEMENT = flags.DEFINE_boolean(
    "log_device_placement", False, "Log where each op runs."
)
_DOWNLOAD_ONLY = flags.DEFINE_boolean(
    "download_only",
    False,
    "Prepare the data set that the config names, or open and index what is in --data_dir; then "
    "end, without training.",
)
# Flags that mean nothing under other strategies, and are refused there.
_ONLY_FOR = {
    "communication": ("multiworker",),
    "max_staleness": ("ps",),
    "ps": ("ps",),
    "replicas": ("mirrored",),
    "replicas_to_aggregate": ("ps",),
    "sync_replicas": ("ps",),
    "workers": ("multiworker", "ps"),
}
_OF_LOCAL_CLUSTERS = ("ps", "workers")
# The config fields that people change most.
_SHORTCUTS = {
    "batch_size": flags.DEFINE_integer("batch_size", None, "Short for --config.batch_size."),
    "learning_rate": flags.DEFINE_float("learning_rate", None, "Short for --config.learning_rate."),
    "train_steps": flags.DEFINE_integer("train_steps", None, "Short for --config.train_steps."),
    "data_dir": flags.DEFINE_string("data_dir", None, "Short for --config.data_dir."),
}


def main(argv: Sequence[str]) -> int:
    """Runs one task, or a whole cluster on this machine; returns the exit code."""
    is_launched = watch_lifeline()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    # TensorFlow sets its loggers' levels when it is imported, so this is for the handler to do.
    logging.getLogger().handlers[0].addFilter(
        lambda record: record.name not in ("absl", "tensorflow") or record.levelno > logging.INFO
    )
    if len(argv) > 1:
        raise ConfigError(f"Unexpected arguments: {' '.join(argv[1:])}. Options start with --.")
    recipe = _recipe()
    cluster = _cluster_from_environment()
    _check_flags(cluster, is_launched)
    _set_environment()
    if _DOWNLOAD_ONLY.value:
        return _prepare_only(recipe)
    if cluster is None and _STRATEGY.value != "mirrored":
        return _launch(recipe)
    return _run(recipe, cluster)


def _recipe() -> Recipe:
    config = _CONFIG.value
    for name, flag in _SHORTCUTS.items():
        if flag.value is not None:
            setattr(config, name, flag.value)
    check(config)
    return load_recipe(FLAGS["config"].config_filename, config)


def _cluster_from_environment() -> Cluster | None:
    text = os.environ.get("TF_CONFIG")
    if text is None:
        return None
    cluster = parse_tf_config(text, _STRATEGY.value)
    if cluster.task.job == "evaluator":
        raise ConfigError(
            f"TF_CONFIG says that this task is {cluster.task}, but the tasks that train evaluate "
            "too (--config.eval_every_steps). Start no process for it; its address may stay."
        )
    return None if _STRATEGY.value == "mirrored" else cluster


def _check_flags(cluster: Cluster | None, is_launched: bool) -> None:
    """Refuses flags that would be ignored; `is_launched`: by a launcher, which was checked."""
    for name, strategies in _ONLY_FOR.items():
        flag = FLAGS[name]
        if flag.present and _STRATEGY.value not in strategies:
            raise ConfigError(
                f"--{name}={flag.value} is for --strategy={' or '.join(strategies)}, and would be "
                f"ignored under {_STRATEGY.value}. Leave it out."
            )
        if flag.present and name in _OF_LOCAL_CLUSTERS and cluster is not None and not is_launched:
            raise ConfigError(
                f"--{name} is for a cluster on this machine, but TF_CONFIG describes one already. "
                f"Leave --{name} out, or unset TF_CONFIG."
            )
    for name in ("replicas", "num_threads", "num_gpus"):
        if (FLAGS[name].value or 0) < 0:
            raise ConfigError(f"--{name} must be at least 0. Received: {FLAGS[name].value}.")
    if _DOWNLOAD_ONLY.value and "TF_CONFIG" in os.environ:
        raise ConfigError(
            "--download_only is for one process before any task is started, but TF_CONFIG says "
            f"that this is one. Type it without: env -u TF_CONFIG {shlex.join(_typed())}"
        )
    if _DOWNLOAD_ONLY.value and _MODEL_DIR.value is not None:
        raise ConfigError(
            f"--download_only trains nothing, so that --model_dir={_MODEL_DIR.value} would stay "
            "empty. Leave one of the two out."
        )
    if cluster is not None and _MODEL_DIR.value is None:
        raise ConfigError(
            "With TF_CONFIG, --model_dir must be given: a directory that all tasks see, on a "
            "shared file system."
        )


def _num_to_aggregate(recipe: Recipe, num_workers: int) -> int:
    """Gradients of a synchronous step of `num_workers` ps workers; 0 for asynchronous steps."""
    wanted = _REPLICAS_TO_AGGREGATE.value
    if _SYNC_REPLICAS.value and _MAX_STALENESS.value is not None:
        raise ConfigError(
            f"--max_staleness={_MAX_STALENESS.value} is for asynchronous steps; with "
            "--sync_replicas every applied gradient has staleness 0. Leave one of the two out."
        )
    if not _SYNC_REPLICAS.value:
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


def _set_environment() -> None:
    """What TensorFlow reads when it is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # Otherwise a call to a task that is not up yet fails instead of waiting for it.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")


def _launch(recipe: Recipe) -> int:
    """A cluster on this machine: everything is checked here, before its tasks are started."""
    from trainer import run

    cluster = local_cluster(_STRATEGY.value, _WORKERS.value, _PS.value)
    model_dir = _model_dir(recipe)
    if _STRATEGY.value == "multiworker":
        check_replicas(recipe.config, _WORKERS.value)
    else:
        _num_to_aggregate(recipe, _WORKERS.value)
    if _say_if_finished(recipe, model_dir):
        return 0
    run.hide_gpus()
    run.preflight(recipe, model_dir)
    run.check_model_dir(model_dir)
    num_threads = _NUM_THREADS.value or max(1, (os.cpu_count() or 1) // _WORKERS.value)
    argv = [*sys.argv[1:], f"--num_threads={num_threads}"]
    return LocalCluster(cluster, argv, Path(model_dir)).run().exit_code


def _run(recipe: Recipe, cluster: Cluster | None) -> int:
    from trainer import run

    model_dir = _model_dir(recipe)
    # Servers too: no chief will come and end them.
    if _say_if_finished(recipe, model_dir):
        return 0
    plan = run.Plan(
        strategy=_STRATEGY.value,
        recipe=recipe,
        cluster=cluster,
        model_dir=model_dir,
        replicas=_REPLICAS.value,
        num_gpus=_NUM_GPUS.value,
        communication=_COMMUNICATION.value,
        num_threads=_NUM_THREADS.value,
        log_device_placement=_LOG_DEVICE_PLACEMENT.value,
        replicas_to_aggregate=_num_to_aggregate(recipe, cluster.num("worker") if cluster else 1),
        max_staleness=_MAX_STALENESS.value,
    )
    with StopSignals() as signals:
        return run.run_task(plan, signals)


def _prepare_only(recipe: Recipe) -> int:
    """Prepares and opens the data; starts and makes nothing else."""
    from trainer.inputs import prepare_inputs

    for line in prepare_inputs(recipe):
        print(line)
    return 0


def _typed() -> list[str]:
    return ["python", "-m", "trainer", *sys.argv[1:]]


def _model_dir(recipe: Recipe) -> str:
    if _MODEL_DIR.value is not None:
        return str(_MODEL_DIR.value)
    now = time.strftime("%Y%m%d-%H%M%S")
    return str(Path("runs") / f"{Path(recipe.path).stem}-{_STRATEGY.value}-{now}")


def _say_if_finished(recipe: Recipe, model_dir: str) -> bool:
    from trainer import run

    result = run.finished_result(model_dir, recipe.config)
    if result is None:
        return False
    run.preflight(recipe, model_dir)  # It may be finished, but another run.
    measured = "  ".join(f"{name} {value:.4f}" for name, value in result["eval"].items())
    print(
        f"{model_dir} is finished: step {result['step']:,}  {measured}. To train further, raise "
        "--train_steps; to train anew, give another --model_dir."
    )
    return True


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line, or ends with one message and exit code 2."""
    path = _config_path(argv)
    if path is None:
        path = _DEFAULT_CONFIG
        argv = [argv[0], f"--config={path}", *argv[1:]]
    try:
        config = load_recipe(path).config
    except ConfigError as error:
        sys.exit(_say_usage_error(str(error)))
    try:
        return FLAGS(argv)  # type: ignore[no-any-return]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(FLAGS), n=1, cutoff=0.6)
        hint = f" Did you mean --{near[0]}?" if near else " --help lists all."
        message = f"There is no flag --{error.flagname}.{hint}"
    except (AttributeError, KeyError, flags.Error) as error:
        message = _explain_flag_error(argv, config, error)
    sys.exit(_say_usage_error(message))


def _config_path(argv: Sequence[str]) -> str | None:
    """What --config=PATH or --config PATH says; None without it."""
    for argument, following in itertools.zip_longest(argv[1:], argv[2:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config"):
            return value if equals else following
    return None


def _explain_flag_error(argv: Sequence[str], config: Config, error: Exception) -> str:
    """Names the nearest field where a config field is the mistake."""
    overrides = [a.lstrip("-").split("=")[0] for a in argv if a.lstrip("-").startswith("config.")]
    known = flatten(config)
    for override in overrides:
        if override.removeprefix("config.") not in known:
            return explain_unknown_field(override.removeprefix("config."), config)
    return str(error)


def _say_usage_error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _main(argv: Sequence[str]) -> NoReturn:
    exit_code = _exit_code_of(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: TensorFlow's destructors would call peers that have ended, and may hang.
    os._exit(exit_code)


def _exit_code_of(argv: Sequence[str]) -> int:
    try:
        return main(argv)
    except (ConfigError, ClusterError) as error:
        return _say_usage_error(str(error))
    except Exception as error:
        from trainer import run
        from trainer.hooks import NonFiniteLossError

        if isinstance(error, run.USER_ERRORS):
            return _say_usage_error(str(error))
        if isinstance(error, NonFiniteLossError):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return EXIT_BUG


def _end_at_once(signum: int, frame: object) -> None:
    # Not an exception, which would come in the middle of an import.
    message = f"{signal.Signals(signum).name}: ending; nothing has begun.\n"
    os.write(2, message.encode())
    os._exit(EXIT_RESTART)


if __name__ == "__main__":
    # Until the launcher or the run takes them over there is no state to save.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, _end_at_once)
    app.run(_main, flags_parser=_parse_flags)
