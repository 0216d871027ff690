"""One task of a run, from a checked command line to an exit code: connect, build, resume, train.

plan = Plan(strategy="mirrored", recipe=recipe, cluster=None, model_dir="runs/a", ...)
with StopSignals() as signals:
    exit_code = run_task(plan, signals)
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from data.files import DataError
from strategies.base import DataFaultError, Executor, PeerLostError, Position, PositionError
from strategies.cluster import Cluster, ClusterError
from strategies.mirrored import DeviceError, MirroredExecutor, replica_devices, use_gpus
from strategies.multiworker import MultiWorkerExecutor
from strategies.peers import check_own_address, port_of
from strategies.placement import PlacementError
from strategies.ports import held
from strategies.ps import ParameterServerExecutor
from strategies.ps_server import ask_chief_to_stop, serve, start_server
from strategies.ps_sync import SynchronousParameterServerExecutor
from trainer import config as config_lib
from trainer.build import build_checkpointer, build_hooks, build_learner
from trainer.checkpoint import Checkpointer, ModelDirError
from trainer.config import ConfigError, check_replicas
from trainer.evaluator import follow
from trainer.exits import EXIT_BUG, EXIT_DONE, EXIT_RESTART, EXIT_USAGE, first_line
from trainer.fingerprint import as_number, fingerprint, versions
from trainer.hooks import Export, Hook
from trainer.inputs import (
    Inputs,
    check_batches,
    data_errors_explained,
    open_inputs,
    records_skipped,
    with_seeds,
)
from trainer.learner import Learner
from trainer.optimizers import OptimizerError
from trainer.plan import Plan
from trainer.preflight import check_model_dir
from trainer.resume import restore_together, train_recovering
from trainer.signals import StopSignals
from trainer.storage import STORAGE_ERRORS
from trainer.watchdog import Watchdog
from trainer.writers import Console, write_json

log = logging.getLogger(__name__)

# Unavailable: a parameter server was lost while a hook read a variable.
_LOST = (PeerLostError, tf.errors.UnavailableError)

# A user's mistakes: one message, exit code 2.
USER_ERRORS = (
    ClusterError,
    ConfigError,
    DataError,
    DeviceError,
    ModelDirError,
    OptimizerError,
    PlacementError,
    PositionError,
)


def run_task(plan: Plan, signals: StopSignals) -> int:
    """Runs this task to its end; returns its exit code.

    Raises:
        ConfigError, ClusterError, DataError, DeviceError, ModelDirError, OptimizerError: a user's
            mistake.
        NonFiniteLossError: training diverged.
    """
    if plan.cluster is not None:
        if plan.cluster.num("evaluator") and plan.recipe.config.early_stopping.patience:
            raise ConfigError(
                "config.early_stopping is for a run that evaluates, but TF_CONFIG names an "
                "evaluator, and what it finds comes too late for those that train. Leave one of "
                "the two out."
            )
        check_own_address(plan.cluster)
    _configure_tensorflow(plan)
    if plan.cluster is not None and plan.evaluates_alone:
        # So that a second evaluator of this machine is told of the first.
        with held(port_of(plan.cluster.address)):
            return follow(plan, signals)
    num_gpus = use_gpus(plan.num_gpus)
    if plan.cluster is not None and plan.serves:
        cluster = plan.cluster
        signals.on_stop(lambda: _leave(cluster), plan.grace_secs)
        serve(
            cluster,
            plan.num_threads,
            plan.chief_timeout_secs,
            versions=versions(),
            on_gone=_end_without_chief,
            on_end=lambda exit_code: os._exit(exit_code),
        )
    with _answering(plan):
        # Before the first connection, so that a mistake in them costs nobody a wait.
        inputs = open_inputs(plan.recipe, plan.num_threads)
        check_model_dir(plan.model_dir)
    try:
        executor = _connect(plan, num_gpus)
    except PeerLostError as error:
        log.error("%s", error)
        return EXIT_RESTART
    signals.on_stop(executor.request_stop, plan.grace_secs)
    # Peers first: who they are says more than that nothing moves.
    finished: list[int] = []  # The exit code, when there is one.
    on_stall = functools.partial(_end_stalled, plan, finished)
    if plan.stall_timeout_secs:
        executor.watch_peers(plan.stall_timeout_secs / 2, on_stall)
    with Watchdog(plan.stall_timeout_secs, on_stall) as watchdog:
        executor.on_progress = watchdog.moved
        return _train_and_close(plan, inputs, executor, finished)


def _train_and_close(plan: Plan, inputs: Inputs, executor: Executor, finished: list[int]) -> int:
    try:
        exit_code = _train(plan, inputs, executor)
        finished.append(exit_code)
    except _LOST as error:
        log.error("%s. What was saved is whole: start me again.", first_line(error))
        executor.close_after_error(lost=True)
        return EXIT_RESTART
    except Exception:
        executor.close_after_error(lost=False)
        raise
    try:
        executor.close(exit_code)
    except PeerLostError as error:
        log.warning("%s; all was done and saved before.", error)
    return exit_code


def _leave(cluster: Cluster) -> None:
    """A server was asked to end: the chief saves what it holds, and ends it."""
    if not ask_chief_to_stop(cluster):
        log.warning("no chief is there: ending.")
        os._exit(EXIT_RESTART)
    log.info("%s: the chief saves, and then ends all tasks.", cluster.task)


def _end_stalled(plan: Plan, finished: list[int], message: str) -> None:
    if finished:
        log.warning("%s; all was done and saved before.", message)
        os._exit(finished[0])
    log.error("%s: ending. What was saved is whole: start me again.", message)
    # The step is on devices that may not answer.
    _write_result(plan, {"step": None, "exit_code": EXIT_RESTART, "why": message})
    os._exit(EXIT_RESTART)


def _end_without_chief(message: str) -> None:
    log.error("%s: ending. Start me again when there is one.", message)
    os._exit(EXIT_RESTART)


def _answering(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """While in it, servers that watch their chief see that it is there, if this task is one."""
    if plan.cluster is None or "ps" not in plan.cluster.jobs:
        return contextlib.nullcontext()
    if plan.cluster.is_server:
        start_server(plan.cluster, plan.num_threads)
        return contextlib.nullcontext()
    return held(port_of(plan.cluster.address))


def _train(plan: Plan, inputs: Inputs, executor: Executor) -> int:
    config = plan.recipe.config
    started = time.monotonic()
    check_replicas(config, executor.replicas_a_step)
    learner = executor.build(lambda: build_learner(plan.recipe))
    if not plan.is_checked:
        check_batches(inputs, learner, plan.recipe)
    inputs = with_seeds(inputs, learner)
    checkpointer = build_checkpointer(
        plan.recipe, plan.model_dir, inputs, learner, executor.io_device
    )
    _check_agreement(plan, executor)
    saved = restore_together(executor, checkpointer, learner)
    # From here on files of a former run are written over: all that can be refused has been.
    if plan.is_chief:
        _write_config(plan, inputs)
        _remove_result(plan)
    position = saved.position if saved else Position()
    with data_errors_explained(inputs):  # What is kept is parsed here.
        executor.start(learner, inputs.train, inputs.evaluation, position)
    executor.go_on_counting(saved.counts if saved else {})
    console = Console(config.train_steps) if plan.is_chief else None
    if console:
        _say_start(console, plan, inputs, executor, learner, saved.step if saved else 0)
    hooks, evaluate = build_hooks(
        plan.recipe,
        plan.model_dir,
        inputs,
        executor,
        learner,
        checkpointer,
        console,
        evaluates=not _has_evaluator(plan),
    )
    if plan.is_chief and config.recover_from_nan and saved is None:
        checkpointer.save(0, Position(), executor.counts())  # To go back to.
    try:
        step = _train_explained(inputs, executor, learner, checkpointer, hooks, config)
    except Exception as error:
        failed = {
            "step": int(learner.step.numpy()) if not isinstance(error, _LOST) else None,
            "seconds": round(time.monotonic() - started, 3),
            "exit_code": _exit_code(error),
            "why": first_line(error),
        }
        _write_result(plan, failed)  # If it can be: what the run died of says more.
        raise
    finally:
        # A write that is under way is finished, whatever has happened.
        checkpointer.wait()
        if console:
            console.stop()
    stopped_early = next((hook.done for hook in hooks if hook.done), "")
    complete = step >= config.train_steps or bool(stopped_early)
    failures = _failures(checkpointer, hooks, step) if plan.is_chief else []
    result: dict[str, Any] = {
        "step": step,
        "examples": executor.position.num_examples(inputs.train.order),
        "eval": evaluate.latest if evaluate else {},
        "seconds": round(time.monotonic() - started, 3),
        "exit_code": EXIT_DONE if complete and not failures else EXIT_RESTART,
        "why": "; ".join(failures) or ((stopped_early or "done") if complete else "asked to stop"),
    }
    if stopped_early:
        result["stopped_early_by"] = dataclasses.asdict(config.early_stopping)
    if (skipped := records_skipped(inputs, plan.recipe)) is not None:
        result["records_skipped"] = skipped
    if skips := executor.position.skipped:
        result |= {"nan_recoveries": len(skips), "examples_skipped": sum(skips)}
    result |= {name: dict(by_worker) for name, by_worker in executor.counts().items()}
    if failure := _write_result(plan, result):
        failures.append(failure)
    if console:
        _say_end(console, plan, result)
    for failure in failures:
        log.error("%s. Start me again when the disk has room: I go on from what is whole.", failure)
    # The chief's alone can be others than 0; all end as it does.
    num_failures = executor.everyones(len(failures))[0]
    return EXIT_DONE if complete and not num_failures else EXIT_RESTART


def _failures(checkpointer: Checkpointer, hooks: Sequence[Hook], step: int) -> list[str]:
    """What a run must leave behind and could not write."""
    failures = [] if checkpointer.has_saved(step) else [f"Step {step:,} could not be saved"]
    return failures + [hook.failure for hook in hooks if isinstance(hook, Export) and hook.failure]


def _train_explained(
    inputs: Inputs,
    executor: Executor,
    learner: Learner,
    checkpointer: Checkpointer,
    hooks: list[Hook],
    config: config_lib.Config,
) -> int:
    try:
        return train_recovering(
            executor,
            learner,
            checkpointer,
            hooks,
            order=inputs.train.order,
            steps=config.train_steps,
            steps_per_call=config.steps_per_call,
            most_recoveries=config.recover_from_nan,
        )
    except DataFaultError as error:
        with data_errors_explained(inputs):
            raise error.__cause__ or error from None


def _check_agreement(plan: Plan, executor: Executor) -> None:
    """Returns if all tasks that run the loop were started alike.

    Raises:
        ClusterError: they run other code, or were told other things; says which.
    """
    ours = {**fingerprint(plan.recipe), "--wire_dtype": plan.wire_dtype}
    if _differs(executor, dict(ours)):
        # The names first: they may differ too, and then those that both know are compared.
        if _differs(executor, list(ours)):
            ours = dict(versions())
        different = [name for name, value in ours.items() if _differs(executor, [name, value])]
        listed = ", ".join(f"{name} ({ours[name]} here)" for name in different)
        raise ClusterError(
            f"The tasks of this run differ in {listed}. Give all of them the same command, config "
            "file and code, and install the same versions."
        )
    if _differs(executor, _has_evaluator(plan)):
        raise ClusterError(
            "TF_CONFIG names an evaluator in some tasks and none in others, so that some would "
            "wait for the others to evaluate. Give all tasks the same cluster."
        )


def _differs(executor: Executor, value: object) -> bool:
    """Whether the tasks that run the loop have different values; all call it together."""
    return len(set(executor.everyones(as_number(value)))) > 1


def _has_evaluator(plan: Plan) -> bool:
    return plan.cluster is not None and plan.cluster.num("evaluator") > 0


def _connect(plan: Plan, num_gpus: int) -> Executor:
    if plan.cluster is None:
        return MirroredExecutor.on(replica_devices(plan.replicas, num_gpus))
    if plan.strategy == "multiworker":
        return MultiWorkerExecutor.connect(
            plan.cluster, plan.communication, plan.unknown_host_secs, wire_dtype=plan.wire_dtype
        )
    if plan.replicas_to_aggregate:
        return SynchronousParameterServerExecutor.connect(
            plan.cluster,
            plan.unknown_host_secs,
            versions(),
            replicas_to_aggregate=plan.replicas_to_aggregate,
            wire_dtype=plan.wire_dtype,
        )
    return ParameterServerExecutor.connect(
        plan.cluster,
        plan.unknown_host_secs,
        versions(),
        max_staleness=plan.max_staleness,
        wire_dtype=plan.wire_dtype,
    )


def _configure_tensorflow(plan: Plan) -> None:
    if plan.num_threads:
        tf.config.threading.set_intra_op_parallelism_threads(plan.num_threads)
        tf.config.threading.set_inter_op_parallelism_threads(plan.num_threads)
    tf.config.set_soft_device_placement(True)
    tf.debugging.set_log_device_placement(plan.log_device_placement)


def _write_config(plan: Plan, inputs: Inputs) -> None:
    document = {
        "strategy": plan.strategy,
        "recipe": os.path.abspath(plan.recipe.path),
        "data_dir": config_lib.data_dir(plan.recipe.config),
        "config": json.loads(config_lib.to_json(plan.recipe.config)),
        "wire_dtype": plan.wire_dtype,
        "cluster": None if plan.cluster is None else json.loads(plan.cluster.tf_config()),
        "train_examples": inputs.train.split.num_examples,
        "eval_examples": inputs.evaluation.split.num_examples,
        "records_skipped": records_skipped(inputs, plan.recipe),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
    }
    write_json(f"{plan.model_dir}/config.json", document)


def _write_result(plan: Plan, result: Mapping[str, Any]) -> str:
    """Why it could not be written, or empty. The chief's alone."""
    if plan.is_chief:
        try:
            write_json(f"{plan.model_dir}/result.json", result)
        except STORAGE_ERRORS as error:
            return f"result.json could not be written: {first_line(error)}"
    return ""


def _remove_result(plan: Plan) -> None:
    """A former run's result says nothing about this one."""
    path = f"{plan.model_dir}/result.json"
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


def _say_start(
    console: Console, plan: Plan, inputs: Inputs, executor: Executor, learner: Learner, step: int
) -> None:
    config = plan.recipe.config
    console.say(f"config {plan.recipe.path}: {config_lib.to_json(config)}")
    console.say(
        f"{plan.strategy}: {executor.num_replicas} replica(s), batch {config.batch_size:,}, "
        f"{inputs.train.split.num_examples:,} training and "
        f"{inputs.evaluation.split.num_examples:,} evaluation examples, "
        f"{learner.model.count_params():,} parameters; {plan.model_dir}"
    )
    if plan.cluster is not None and plan.cluster.num("evaluator"):
        console.say("the evaluator task evaluates; this one does not")
    if table := executor.placement_table():
        console.say(table)
    if step:
        console.say(f"going on from step {step:,}")
    elif learner.origin:
        console.say(learner.origin)


def _say_end(console: Console, plan: Plan, result: Mapping[str, Any]) -> None:
    measured = "  ".join(f"{name} {value:.4f}" for name, value in result["eval"].items())
    what = result["why"]
    console.say(f"{what}: step {result['step']:,}  {measured}  {result['seconds']:.1f} s")
    console.say(f"{Path(plan.model_dir) / 'result.json'}")


def _exit_code(error: Exception) -> int:
    if isinstance(error, _LOST):
        return EXIT_RESTART
    return EXIT_USAGE if isinstance(error, USER_ERRORS) else EXIT_BUG
