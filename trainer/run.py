"""One task of a run, from a checked command line to an exit code: connect, build, resume, train.

plan = Plan(strategy="mirrored", recipe=recipe, cluster=None, model_dir="runs/a", ...)
preflight(recipe, model_dir)        # everything that can be known before anything starts
with StopSignals() as signals:
    exit_code = run_task(plan, signals)
"""

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from data.features import default_parse, read_features
from data.order import Order, default_lanes
from data.pipeline import Reader
from data.records import DataError, open_split, verify
from strategies.base import Executor, PeerLostError, Position, PositionError
from strategies.cluster import Cluster, ClusterError, check_port_free
from strategies.mirrored import DeviceError, MirroredExecutor, replica_devices, use_gpus
from strategies.multiworker import MultiWorkerExecutor
from strategies.ps import ParameterServerExecutor, serve
from strategies.ps_sync import SynchronousParameterServerExecutor
from trainer import config as config_lib
from trainer import hooks as hooks_lib
from trainer import learner as learner_lib
from trainer.checkpoint import Checkpointer, ModelDirError
from trainer.config import ConfigError, Recipe
from trainer.learner import Learner, OptimizerError
from trainer.loop import train
from trainer.signals import EXIT_RESTART, StopSignals
from trainer.writers import Console, JsonLines, TensorBoard

log = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USAGE = 2


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


@dataclass(frozen=True)
class Inputs:
    """The two splits, each in its order."""

    train: Reader
    evaluation: Reader


def open_inputs(recipe: Recipe) -> Inputs:
    """Opens the data of `recipe`, preparing it first if that needs no more than this machine.

    Raises:
        DataError: it is not there, not whole, or cannot be parsed without a `parse`.
    """
    config = recipe.config
    directory = config_lib.data_dir(config)
    # Not where --data_dir says: a mistyped directory must not be made.
    if config.dataset == "digits" and not config.data_dir and not tf.io.gfile.exists(directory):
        from data.prepare import prepare  # It imports tensorflow_datasets.

        prepare("digits", directory)
    train_split = open_split(directory, config.data.train_split)
    eval_split = open_split(directory, config.data.eval_split)
    parse = recipe.parse or default_parse(read_features(directory))
    eval_batch_size = config.eval_batch_size or config.batch_size
    train_order = Order(
        shard_lengths=train_split.shard_lengths,
        chunk_examples=train_split.chunk_examples,
        batch_size=config.batch_size,
        lanes=config_lib.num_lanes(config),
        window_batches=config.data.window_batches,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    eval_order = Order(
        shard_lengths=eval_split.shard_lengths,
        chunk_examples=eval_split.chunk_examples,
        batch_size=eval_batch_size,
        lanes=default_lanes(eval_batch_size),
        window_batches=config.data.window_batches,
        seed=0,
        shuffle=False,
    )
    return Inputs(Reader(train_split, train_order, parse), Reader(eval_split, eval_order, parse))


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
    _checkpointer(recipe, model_dir, inputs, learner).check()


def check_batches(inputs: Inputs, learner: Learner, recipe: Recipe) -> None:
    """Returns if the first batch of each split goes through `learner`'s model and loss.

    Raises:
        DataError: it cannot be read or parsed, labels are out of range, or shapes do not fit.
    """
    for reader in (inputs.train, inputs.evaluation):
        where = f"The first batch of split {reader.split.name!r}"
        with data_errors_explained(inputs):
            batch = _batch_at(reader, 0)
            try:
                examples, labels = batch
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{where}: parse() must return (inputs, labels), but returned "
                    f"{tf.nest.map_structure(lambda t: t.shape, batch)}."
                ) from error
        try:
            outputs = learner.model(examples, training=False)
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            shapes = tf.nest.map_structure(lambda t: f"{t.dtype.name}{t.shape}", examples)
            raise DataError(
                f"{where} does not fit the model of {recipe.path}: inputs are {shapes}, the model "
                f"takes {recipe_inputs(learner)}. {_first_line(error)}"
            ) from error
        if recipe.loss is None:
            _check_labels(where, labels.numpy(), outputs.shape[-1])


def recipe_inputs(learner: Learner) -> str:
    """What the model takes, as text."""
    return str(tf.nest.map_structure(lambda t: f"{t.dtype}{t.shape}", learner.model.inputs))


def check_replicas(config: config_lib.Config, num_replicas: int) -> None:
    """Returns if every replica gets a share of each batch; warns where shares are uneven.

    Raises:
        ConfigError: there are more replicas than examples, or than lanes.
    """
    if config.batch_size < num_replicas:
        raise ConfigError(
            f"batch_size={config.batch_size} is smaller than the {num_replicas} replicas that "
            f"share a batch. Use --batch_size={num_replicas} or more, or fewer replicas."
        )
    lanes = config_lib.num_lanes(config)
    if lanes < num_replicas:
        raise ConfigError(
            f"{num_replicas} replicas need at least as many lanes, but there are {lanes}. Set "
            f"--config.data.lanes to a divisor of batch_size={config.batch_size} from "
            f"{num_replicas} up: {config.batch_size}, for example."
        )
    if lanes % num_replicas:
        log.warning(
            "batch_size=%d is shared unevenly by %d replicas; a multiple of them is faster.",
            config.batch_size,
            num_replicas,
        )


def build_learner(recipe: Recipe) -> Learner:
    """The model and optimizer of `recipe`, with the same initial weights wherever it is called."""
    config = recipe.config
    keras.utils.set_random_seed(config.seed)
    model = recipe.build_model(config)
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigError(
            f"build_model() of {recipe.path} must return a built keras.Model, but returned "
            f"{type(model).__name__}. Give it a keras.Input."
        )
    if recipe.build_optimizer is not None:
        optimizer = recipe.build_optimizer(config)
    else:
        optimizer = _optimizer(config)
    loss = recipe.loss or learner_lib.sparse_categorical_crossentropy
    metrics = {"accuracy": learner_lib.accuracy} if recipe.metrics is None else recipe.metrics
    if config.best_metric not in ("loss", *metrics):
        raise ConfigError(
            f"config.best_metric={config.best_metric!r} is none of the metrics: "
            f"{', '.join(('loss', *metrics))}."
        )
    return Learner(model, optimizer, loss, metrics, batch_size=config.batch_size)


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
            f"--model_dir={model_dir} cannot be written: {_first_line(error)}. "
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
    inputs = open_inputs(plan.recipe)
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
        log.error("%s. What was saved is whole: start me again.", _first_line(error))
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
    checkpointer = _checkpointer(plan.recipe, plan.model_dir, inputs, learner, executor.io_device)
    saved = checkpointer.restore()
    # From here on files of a former run are written over: all that can be refused has been.
    if plan.is_chief:
        _write_config(plan, inputs)
    position = saved.position if saved else Position()
    executor.start(learner, inputs.train, inputs.evaluation, position)
    console = Console(config.train_steps) if plan.is_chief else None
    if console:
        _say_start(console, plan, inputs, executor, learner, saved.step if saved else 0)
    hooks, evaluate = _build_hooks(plan, inputs, executor, learner, checkpointer, console)
    try:
        with data_errors_explained(inputs):
            step = train(
                executor,
                learner,
                hooks,
                steps=config.train_steps,
                steps_per_call=config.steps_per_call,
            )
    except Exception as error:
        _write_result(plan, {"exit_code": _exit_code(error), "why": _first_line(error)})
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
    result |= {name: dict(by_worker) for name, by_worker in executor.counts().items()}
    _write_result(plan, result)
    if console:
        _say_end(console, plan, result)
    return EXIT_DONE if complete else EXIT_RESTART


def _build_hooks(
    plan: Plan,
    inputs: Inputs,
    executor: Executor,
    learner: Learner,
    checkpointer: Checkpointer,
    console: Console | None,
) -> tuple[list[hooks_lib.Hook], hooks_lib.Evaluate]:
    """The hooks of this task, in the order in which they are called. Roles are decided here."""
    config = plan.recipe.config
    last = config.train_steps
    writers: list[hooks_lib.Writer] = []
    hooks: list[hooks_lib.Hook] = [hooks_lib.StopOnNonFinite()]
    if console:
        json_lines = JsonLines(f"{plan.model_dir}/metrics.jsonl")
        tensorboard = TensorBoard(f"{plan.model_dir}/tensorboard")
        writers = [console, json_lines, tensorboard]
        hooks += [
            json_lines,
            console,
            hooks_lib.Report(
                executor,
                learner,
                writers,
                every_steps=config.log_every_steps,
                last_step=last,
                order=inputs.train.order,
            ),
        ]
    evaluate = hooks_lib.Evaluate(
        executor,
        writers,
        every_steps=config.eval_every_steps,
        last_step=last,
        best_metric=config.best_metric,
        checkpointer=checkpointer if console else None,
    )
    hooks.append(evaluate)
    if console:
        if config.histogram_every_steps:
            hooks.append(
                hooks_lib.Histograms(
                    learner,
                    lambda: _batch_at(inputs.train, executor.position.next_batch),
                    tensorboard.writer("train"),
                    every_steps=config.histogram_every_steps,
                )
            )
        if config.profile_first_step:
            hooks.append(
                hooks_lib.Profile(
                    f"{plan.model_dir}/tensorboard/train",
                    first_step=config.profile_first_step,
                    num_steps=config.profile_num_steps,
                )
            )
        if plan.recipe.build_hooks is not None:
            hooks += plan.recipe.build_hooks(config, plan.model_dir)
        hooks.append(
            hooks_lib.SaveCheckpoint(
                executor, checkpointer, every_steps=config.checkpoint_every_steps, last_step=last
            )
        )
        if config.export:
            hooks.append(
                hooks_lib.Export(
                    learner,
                    lambda: plan.recipe.build_model(config),
                    f"{plan.model_dir}/export",
                    last_step=last,
                )
            )
    return hooks, evaluate


def _batch_at(reader: Reader, batch: int) -> Any:
    """Batch `batch` whole, read by this task alone."""
    lanes = range(reader.order.lanes)
    return next(iter(reader.batches(batch, lanes, num_batches=1)))


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


@contextlib.contextmanager
def data_errors_explained(inputs: Inputs) -> Iterator[None]:
    """Turns TensorFlow's errors about records into DataErrors that name file and offset.

    Raises:
        DataError: a record is corrupt or cannot be parsed.
    """
    try:
        yield
    except tf.errors.DataLossError as error:
        damages = [d for reader in (inputs.train, inputs.evaluation) for d in verify(reader.split)]
        listed = "\n  ".join(str(damage) for damage in damages[:10]) or _first_line(error)
        raise DataError(f"Records are corrupt:\n  {listed}\nWrite these files anew.") from error
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
        raise DataError(f"A file of the data cannot be read any more: {error.message}") from error
    except tf.errors.InvalidArgumentError as error:
        # The first paragraphs are the trace of the graph.
        reason = error.message.strip().split("\n\n")[-1].splitlines()[0]
        raise DataError(f"The data does not suit the model or its features: {reason}") from error


def _check_labels(where: str, labels: Any, num_classes: int) -> None:
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise DataError(
            f"{where} has labels {labels.dtype}{list(labels.shape)}, but the loss needs one "
            "integer an example. Define `loss` in the config file for other labels."
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"{where} has labels from {labels.min()} to {labels.max()}, but the model has "
            f"{num_classes} outputs. Labels must be 0 to {num_classes - 1}."
        )


def _optimizer(config: config_lib.Config) -> keras.Optimizer:
    try:
        return keras.optimizers.get(
            {"class_name": config.optimizer, "config": {"learning_rate": config.learning_rate}}
        )
    except ValueError as error:
        raise ConfigError(
            f"config.optimizer={config.optimizer!r} is not one of Keras' optimizers: sgd, adam, "
            "adagrad, rmsprop, ..., or define build_optimizer(config) in the config file."
        ) from error


def _checkpointer(
    recipe: Recipe,
    model_dir: str,
    inputs: Inputs,
    learner: Learner,
    io_device: str | None = None,
) -> Checkpointer:
    return Checkpointer(
        f"{model_dir}/checkpoints",
        learner,
        _identity(inputs, recipe.config),
        keep=recipe.config.keep_checkpoints,
        io_device=io_device,
    )


def _identity(inputs: Inputs, config: config_lib.Config) -> Mapping[str, Any]:
    """What decides which example comes at which position; a run goes on only if it is the same."""
    order = inputs.train.order
    return {
        "train data": inputs.train.split.fingerprint,
        "batch_size": order.batch_size,
        "seed": order.seed,
        "data.shuffle": order.shuffle,
        "data.lanes": order.lanes,
        "data.window_batches": order.window_batches,
    }


def _write_config(plan: Plan, inputs: Inputs) -> None:
    document = {
        "strategy": plan.strategy,
        "recipe": os.path.abspath(plan.recipe.path),
        "data_dir": config_lib.data_dir(plan.recipe.config),
        "config": json.loads(config_lib.to_json(plan.recipe.config)),
        "cluster": None if plan.cluster is None else json.loads(plan.cluster.tf_config()),
        "train_examples": inputs.train.split.num_examples,
        "eval_examples": inputs.evaluation.split.num_examples,
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


def _write_json(path: str, document: Mapping[str, Any]) -> None:
    with tf.io.gfile.GFile(f"{path}.tmp", "w") as file:
        file.write(json.dumps(document, indent=2) + "\n")
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


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
