"""One task of a run, from a checked command line to an exit code: connect, build, resume, train.

plan = Plan(strategy="mirrored", recipe=recipe, cluster=None, model_dir="runs/a", ...)
preflight(recipe, model_dir)        # everything that can be known before anything starts
with StopSignals() as signals:
    exit_code = run_task(plan, signals)
"""

import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from data.records import DataError
from strategies.base import DataFaultError, Executor, PeerLostError, Position, PositionError
from strategies.cluster import Cluster, ClusterError, check_port_free
from strategies.mirrored import DeviceError, MirroredExecutor, replica_devices, use_gpus
from strategies.multiworker import MultiWorkerExecutor
from strategies.ps import ParameterServerExecutor, serve
from strategies.ps_sync import SynchronousParameterServerExecutor
from trainer import config as config_lib
from trainer.build import build_checkpointer, build_hooks, build_learner
from trainer.checkpoint import Checkpointer, ModelDirError, Saved
from trainer.config import ConfigError, Recipe, check_replicas
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
from trainer.signals import StopSignals
from trainer.writers import Console, without_nan

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
    PositionError,
)


@dataclass(frozen=True)
class Plan:
    """What one task was asked to do.

    Attributes:
        strategy: mirrored, multiworker or ps.
        recipe: The config and the functions of its file.
        cluster: The cluster and this task's place in it; None for a process alone.
        model_dir: Where the run is kept.
        replicas: Replicas of mirrored; 0 for one on each GPU, or one CPU.
        num_gpus: How many GPUs to use; None for all.
        communication: auto, ring or nccl.
        num_threads: Of TensorFlow in this process; 0 leaves it to TensorFlow.
        log_device_placement: Whether TensorFlow logs where each op runs.
        replicas_to_aggregate: ps: gradients of a step, or 0 for asynchronous steps.
        max_staleness: ps, asynchronous: steps after which a gradient is too old; None for never.
    """

    strategy: str
    recipe: Recipe
    cluster: Cluster | None
    model_dir: str
    replicas: int = 0
    num_gpus: int | None = None
    communication: str = "auto"
    num_threads: int = 0
    log_device_placement: bool = False
    replicas_to_aggregate: int = 0
    max_staleness: int | None = None

    @property
    def is_chief(self) -> bool:
        """Whether this task writes."""
        return self.cluster is None or self.cluster.is_chief


def hide_gpus() -> None:
    """For a process that only checks: the GPUs' memory is for those that train."""
    use_gpus(0)


def preflight(recipe: Recipe, model_dir: str) -> None:
    """Trains and changes nothing, but finds what would fail later.

    Parses the first batch of each split and puts it through the model, and compares what the newest
    checkpoint in `model_dir` is of.

    Raises:
        DataError, ConfigError, ModelDirError, OptimizerError: as one message.
    """
    inputs = open_inputs(recipe)
    learner = build_learner(recipe)
    check_batches(inputs, learner, recipe)
    build_checkpointer(recipe, model_dir, inputs, learner).check()


def finished_result(model_dir: str, config: config_lib.Config) -> dict[str, Any] | None:
    """The result of a complete run of at least `train_steps` in `model_dir`, if there is one."""
    path = f"{model_dir}/result.json"
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path) as file:
        result: dict[str, Any] = json.loads(file.read())
    done = result["exit_code"] == EXIT_DONE and result["step"] >= config.train_steps
    return result if done else None


def check_model_dir(model_dir: str) -> None:
    """Makes `model_dir`, and returns if a file can be written to it.

    Raises:
        ModelDirError: it cannot.
    """
    probe = f"{model_dir}/.writable-{os.getpid()}"
    try:
        tf.io.gfile.makedirs(model_dir)
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except (tf.errors.OpError, OSError) as error:
        raise ModelDirError(
            f"--model_dir={model_dir} cannot be written: {first_line(error)}. "
            "Give a directory that this user may write to."
        ) from error


def run_task(plan: Plan, signals: StopSignals) -> int:
    """Runs this task to its end; returns its exit code.

    Raises:
        ConfigError, ClusterError, DataError, DeviceError, ModelDirError, OptimizerError: a user's
            mistake.
        NonFiniteLossError: training diverged.
    """
    if plan.cluster is not None:
        check_port_free(plan.cluster.address)
    _configure_tensorflow(plan)
    num_gpus = use_gpus(plan.num_gpus)
    if plan.cluster is not None and plan.cluster.is_server:
        serve(plan.cluster)
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


def _train(plan: Plan, inputs: Inputs, executor: Executor) -> int:
    config = plan.recipe.config
    started = time.monotonic()
    check_replicas(config, executor.replicas_a_step)
    with executor.scope():
        learner = build_learner(plan.recipe)
    check_batches(inputs, learner, plan.recipe)
    checkpointer = build_checkpointer(
        plan.recipe, plan.model_dir, inputs, learner, executor.io_device
    )
    saved = _restore(checkpointer, learner)
    _check_agreement(executor, saved.step if saved else 0)
    # From here on files of a former run are written over: all that can be refused has been.
    if plan.is_chief:
        _write_config(plan, inputs)
        _remove_result(plan)
    position = saved.position if saved else Position()
    executor.start(learner, inputs.train, inputs.evaluation, position)
    console = Console(config.train_steps) if plan.is_chief else None
    if console:
        _say_start(console, plan, inputs, executor, learner, saved.step if saved else 0)
    hooks, evaluate = build_hooks(
        plan.recipe, plan.model_dir, inputs, executor, learner, checkpointer, console
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
        "eval": evaluate.latest,
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


def _check_agreement(executor: Executor, step: int) -> None:
    """Returns if all tasks that run the loop have restored the same step.

    Raises:
        ModelDirError: they do not see the same checkpoints.
    """
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
        return MultiWorkerExecutor.connect(plan.cluster, plan.communication)
    if plan.replicas_to_aggregate:
        return SynchronousParameterServerExecutor.connect(
            plan.cluster, replicas_to_aggregate=plan.replicas_to_aggregate
        )
    return ParameterServerExecutor.connect(plan.cluster, max_staleness=plan.max_staleness)


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
    _write_json(f"{plan.model_dir}/config.json", document)


def _write_result(plan: Plan, result: Mapping[str, Any]) -> None:
    if plan.is_chief:
        _write_json(f"{plan.model_dir}/result.json", result)


def _remove_result(plan: Plan) -> None:
    """A former run's result says nothing about this one."""
    path = f"{plan.model_dir}/result.json"
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


def _write_json(path: str, document: Mapping[str, Any]) -> None:
    with tf.io.gfile.GFile(f"{path}.tmp", "w") as file:
        file.write(json.dumps(without_nan(document), indent=2, allow_nan=False) + "\n")
    tf.io.gfile.rename(f"{path}.tmp", path, overwrite=True)


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
