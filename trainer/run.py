"""One task of a run, from a checked command line to an exit code: connect, build, resume, train.

plan = Plan(strategy="mirrored", recipe=recipe, cluster=None, model_dir="runs/a", ...)
with StopSignals() as signals:
    exit_code = run_task(plan, signals)
"""

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from data.records import DataError
from strategies.base import DataFaultError, Executor, PeerLostError, Position, PositionError
from strategies.cluster import ClusterError
from strategies.mirrored import DeviceError, MirroredExecutor, replica_devices, use_gpus
from strategies.multiworker import MultiWorkerExecutor
from strategies.peers import check_own_address, port_of
from strategies.placement import PlacementError
from strategies.ports import held
from strategies.ps import ParameterServerExecutor
from strategies.ps_server import serve, start_server
from strategies.ps_sync import SynchronousParameterServerExecutor
from trainer import config as config_lib
from trainer.build import build_checkpointer, build_hooks, build_learner
from trainer.checkpoint import Checkpointer, ModelDirError, Saved
from trainer.config import ConfigError, check_replicas
from trainer.evaluator import follow
from trainer.exits import EXIT_BUG, EXIT_DONE, EXIT_RESTART, EXIT_USAGE, first_line
from trainer.hooks import Hook
from trainer.inputs import (
    Inputs,
    check_batches,
    data_errors_explained,
    open_inputs,
    records_skipped,
)
from trainer.learner import Learner, OptimizerError
from trainer.loop import train
from trainer.plan import Plan
from trainer.preflight import check_model_dir
from trainer.signals import StopSignals
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
        check_own_address(plan.cluster)
    _configure_tensorflow(plan)
    if plan.cluster is not None and plan.evaluates_alone:
        # So that a second evaluator of this machine is told of the first.
        with held(port_of(plan.cluster.address)):
            return follow(plan, signals)
    num_gpus = use_gpus(plan.num_gpus)
    if plan.cluster is not None and plan.serves:
        serve(plan.cluster, plan.chief_timeout_secs, _end_without_chief)
    with _answering(plan):
        # Before the first connection, so that a mistake in them costs nobody a wait.
        inputs = open_inputs(plan.recipe, plan.num_threads)
        check_model_dir(plan.model_dir)
    try:
        executor = _connect(plan, num_gpus)
    except PeerLostError as error:
        log.error("%s", error)
        return EXIT_RESTART
    signals.on_stop(executor.request_stop)
    try:
        exit_code = _train(plan, inputs, executor)
    except _LOST as error:
        log.error("%s. What was saved is whole: start me again.", first_line(error))
        executor.close_after_error(lost=True)
        return EXIT_RESTART
    except Exception:
        executor.close_after_error(lost=False)
        raise
    try:
        executor.close()
    except PeerLostError as error:
        log.warning("%s; all was done and saved before.", error)
    return exit_code


def _end_without_chief(message: str) -> None:
    log.error("%s: ending. Start me again when there is one.", message)
    os._exit(EXIT_RESTART)


def _answering(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """While in it, servers that watch their chief see that it is there, if this task is one."""
    if plan.cluster is None or "ps" not in plan.cluster.jobs:
        return contextlib.nullcontext()
    if plan.cluster.is_server:
        start_server(plan.cluster)
        return contextlib.nullcontext()
    return held(port_of(plan.cluster.address))


def _train(plan: Plan, inputs: Inputs, executor: Executor) -> int:
    config = plan.recipe.config
    started = time.monotonic()
    check_replicas(config, executor.replicas_a_step)
    learner = executor.build(lambda: build_learner(plan.recipe))
    check_batches(inputs, learner, plan.recipe)
    checkpointer = build_checkpointer(
        plan.recipe, plan.model_dir, inputs, learner, executor.io_device
    )
    saved = _restore(checkpointer, learner)
    has_evaluator = plan.cluster is not None and plan.cluster.num("evaluator") > 0
    _check_agreement(executor, saved.step if saved else 0, has_evaluator=has_evaluator)
    # From here on files of a former run are written over: all that can be refused has been.
    if plan.is_chief:
        _write_config(plan, inputs)
        _remove_result(plan)
    position = saved.position if saved else Position()
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
        evaluates=not has_evaluator,
    )
    try:
        step = _train_explained(inputs, executor, learner, hooks, config)
    except Exception as error:
        _write_result(
            plan,
            {
                "step": int(learner.step.numpy()) if not isinstance(error, _LOST) else None,
                "seconds": round(time.monotonic() - started, 3),
                "exit_code": _exit_code(error),
                "why": first_line(error),
            },
        )
        raise
    finally:
        if console:
            console.stop()
    complete = step >= config.train_steps
    result = {
        "step": step,
        "examples": executor.position.num_examples(inputs.train.order),
        "eval": evaluate.latest if evaluate else {},
        "seconds": round(time.monotonic() - started, 3),
        "exit_code": EXIT_DONE if complete else EXIT_RESTART,
        "why": "done" if complete else "asked to stop",
    }
    if (skipped := records_skipped(inputs, plan.recipe)) is not None:
        result["records_skipped"] = skipped
    result |= {name: dict(by_worker) for name, by_worker in executor.counts().items()}
    _write_result(plan, result)
    if console:
        _say_end(console, plan, result)
    return EXIT_DONE if complete else EXIT_RESTART


def _train_explained(
    inputs: Inputs,
    executor: Executor,
    learner: Learner,
    hooks: list[Hook],
    config: config_lib.Config,
) -> int:
    try:
        return train(
            executor,
            learner,
            hooks,
            steps=config.train_steps,
            steps_per_call=config.steps_per_call,
        )
    except DataFaultError as error:
        with data_errors_explained(inputs):
            raise error.__cause__ or error from None


def _restore(checkpointer: Checkpointer, learner: Learner) -> Saved | None:
    """Restores all but the learning rate: that is the command's, which may have changed."""
    rate = learner.optimizer.learning_rate
    given = learner.learning_rate
    saved = checkpointer.restore()
    if saved and isinstance(rate, keras.Variable):
        rate.assign(given)
    return saved


def _check_agreement(executor: Executor, step: int, *, has_evaluator: bool) -> None:
    """Returns if all tasks that run the loop have restored the same step, and evaluate or do not.

    Raises:
        ModelDirError: they do not see the same checkpoints.
        ClusterError: some know an evaluator, and others none.
    """
    if len(set(executor.everyones(int(has_evaluator)))) > 1:
        raise ClusterError(
            "TF_CONFIG names an evaluator in some tasks and none in others, so that some would "
            "wait for the others to evaluate. Give all tasks the same cluster."
        )
    steps = executor.everyones(step)
    if len(set(steps)) > 1:
        raise ModelDirError(
            f"The tasks found checkpoints of different steps in --model_dir: {steps}, by replica. "
            "It must be one directory that all of them see, on a shared file system."
        )


def _connect(plan: Plan, num_gpus: int) -> Executor:
    if plan.cluster is None:
        return MirroredExecutor.on(replica_devices(plan.replicas, num_gpus))
    if plan.strategy == "multiworker":
        return MultiWorkerExecutor.connect(plan.cluster, plan.communication, plan.unknown_host_secs)
    if plan.replicas_to_aggregate:
        return SynchronousParameterServerExecutor.connect(
            plan.cluster,
            plan.unknown_host_secs,
            replicas_to_aggregate=plan.replicas_to_aggregate,
        )
    return ParameterServerExecutor.connect(
        plan.cluster, plan.unknown_host_secs, max_staleness=plan.max_staleness
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


def _write_result(plan: Plan, result: Mapping[str, Any]) -> None:
    if plan.is_chief:
        write_json(f"{plan.model_dir}/result.json", result)


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


def _say_end(console: Console, plan: Plan, result: Mapping[str, Any]) -> None:
    measured = "  ".join(f"{name} {value:.4f}" for name, value in result["eval"].items())
    what = result["why"]
    console.say(f"{what}: step {result['step']:,}  {measured}  {result['seconds']:.1f} s")
    console.say(f"{Path(plan.model_dir) / 'result.json'}")


def _exit_code(error: Exception) -> int:
    if isinstance(error, _LOST):
        return EXIT_RESTART
    return EXIT_USAGE if isinstance(error, USER_ERRORS) else EXIT_BUG
