"""Trains each case of CASES for a few steps on one kind of executor, and saves the results.

    python -m tests.cluster.parity mirrored-2 DATA TO       # writes TO/found.npz

All cases share a process, a cluster and a strategy, because starting those takes longer than
training. The parameter servers are threads of the chief's process, as in TensorFlow's own tests.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.order import Order
from data.reader import Reader
from data.tfrecord.split import Split, open_split
from strategies.base import Executor
from strategies.cluster.tf_config import Task, local_cluster, parse_tf_config
from strategies.mirrored import MirroredExecutor
from strategies.multiworker import MultiWorkerExecutor
from strategies.position import Position
from strategies.ps import asynchronous_steps, closures
from strategies.ps import executor as ps_executor
from strategies.ps.asynchronous import AsynchronousExecutor
from strategies.ps.servers import start_server
from strategies.ps.sync.executor import SynchronousExecutor
from strategies.transfer import Transfer
from tests.shards import write_shards
from trainer.build import build_learner
from trainer.config import Config, Recipe
from trainer.config_checks import check, check_replicas
from trainer.embeddings import ShardedEmbedding
from trainer.embeddings.optimizers import OPTIMIZERS as TABLE_OPTIMIZERS
from trainer.learner.variables import saved_variables
from trainer.step.optimizers import supported_optimizers
from trainer.step.options import (
    ClipConfig,
    EmaConfig,
    LossScaleConfig,
    PenaltyConfig,
    ScheduleConfig,
    WeightDecayConfig,
)

STEPS = 20
BATCH = 12
CLASSES = 5
# Not a multiple of the batch: an epoch ends inside one.
EXAMPLES = 110
OVERFLOWING, OVERFLOWING_EXAMPLE = "overflowing", 77
# 96 bytes: each weight matrix has its own all-reduce.
BUCKET_MB = 96 / 2**20
# Asynchronous parameter servers with --max_staleness.
BOUNDED = "ps-bounded"

OPTIMIZERS = {"momentum": 0.2, "adam": 0.02}


def build_model(config: Config) -> keras.Model:
    """Three floats -> logits."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(8, activation="tanh", name="hidden"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )


def build_random_model(config: Config) -> keras.Model:
    """The same model with random layers."""
    layers = keras.layers
    hidden, logits = build_model(config).layers
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.GaussianNoise(0.2),
            hidden,
            layers.Dropout(0.5),
            logits,
        ]
    )


class Unused(keras.layers.Layer):
    """Has a variable that no output depends on."""

    def build(self, shape: Any) -> None:
        self.unused = self.add_weight(shape=(2,), name="unused")

    def call(self, inputs: Any) -> Any:
        return inputs


def build_model_with_embedding(config: Config, num_rows: int = 8) -> keras.Model:
    """Each of the three floats selects a row of a table, so the gradient consists of rows."""
    layers = keras.layers

    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Discretization(bin_boundaries=[-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]),
            layers.Embedding(num_rows, 4),
            layers.Flatten(),
            Unused(),
            layers.Dense(CLASSES),
        ]
    )


def build_model_with_table(config: Config, **options: Any) -> keras.Model:
    """Two lookups in a table that is split by row: one of each float, one of the first two."""
    layers = keras.layers
    inputs = keras.Input((3,))
    ids = layers.Discretization(bin_boundaries=[-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5])(inputs)
    table = ShardedEmbedding(9, 4, **options)
    found = [layers.Flatten()(table(ids)), layers.Flatten()(table(ids[:, :2]))]
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Concatenate()(found)))


@dataclass(frozen=True)
class Case:
    """One option, or several together.

    Attributes:
        changes: Fields of the config, with their values.
        overflows: The data has one example with values that float16 cannot hold.
        model: Builds the model.
        like: The weights must differ from those of this case.
        is_bounded: It is also trained with a bound on the staleness.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    overflows: bool = False
    model: Callable[[Config], keras.Model] = build_model
    like: str = "plain"
    is_bounded: bool = False


SCHEDULES = {
    "exponential": ScheduleConfig("exponential", decay_steps=5, decay_rate=0.8, staircase=True),
    "step": ScheduleConfig("step", boundaries=(5, 12), decay_rate=0.3),
    "cosine": ScheduleConfig("cosine", warmup_steps=4, warmup_start=0.1, end_fraction=0.1),
    "polynomial": ScheduleConfig("polynomial", power=2.0, decay_steps=15, warmup_steps=3),
    "linear scaling": ScheduleConfig(base_batch_size=8),
}
# Options that do not depend on the optimizer are tried with one. A schedule is a factor of the
# rate; `cosine` tries a schedule, and warm-up, with both optimizers.
FOR_ANY_OPTIMIZER = {f"schedule: {kind}" for kind in SCHEDULES if kind != "cosine"}
TABLES = [f"plain: table, {name}" for name in TABLE_OPTIMIZERS]
FOR_ANY_OPTIMIZER |= set(TABLES)
FOR_ANY_OPTIMIZER |= {"label_smoothing", "freeze", "dropout", "dropout: compiled in parts"}
# Several devices train these together. Options that scale a gradient, or add to it, are not with
# one that clips, which could hide a wrong factor.
TOGETHER = {
    "together: in parts": ("micro_batches", "penalty", "ema", "schedule: polynomial"),
    "together: clip by value": ("clip.value", "freeze", "schedule: exponential"),
    "together: clip by norm": ("clip.norm", "weight_decay", "schedule: step"),
    "together: compiled": ("jit_compile", "label_smoothing", "schedule: linear scaling"),
}
# Executors of several devices, without the number of their workers.
SHARED_KINDS = ("mirrored-2", "multiworker", "ps-sync", "ps-async")
EMA = EmaConfig(decay=0.9, warmup=True)
DECAY = WeightDecayConfig(rate=0.1, exclude="bias")
PENALTY = PenaltyConfig(l1=1e-3, l2=1e-2)

CASES = {
    "plain": Case(is_bounded=True),
    "clip.value": Case({"clip": ClipConfig(value=0.01)}),
    "clip.norm": Case({"clip": ClipConfig(norm=0.05)}),
    "clip.global_norm": Case({"clip": ClipConfig(global_norm=0.1)}),
    "micro_batches": Case({"micro_batches": 3}),
    "penalty": Case({"penalty": PENALTY}),
    "weight_decay": Case({"weight_decay": DECAY}),
    "ema": Case({"ema": EMA}),
    "label_smoothing": Case({"label_smoothing": 0.2}),
    "freeze": Case({"freeze": "hidden"}),
    "jit_compile": Case({"jit_compile": True}),
    **{f"schedule: {kind}": Case({"schedule": value}) for kind, value in SCHEDULES.items()},
    "all of these": Case(
        {
            "clip": ClipConfig(global_norm=0.1),
            "micro_batches": 2,
            "penalty": PENALTY,
            "weight_decay": DECAY,
            "ema": EMA,
            "label_smoothing": 0.2,
            "jit_compile": True,
            "schedule": SCHEDULES["cosine"],
        },
        is_bounded=True,
    ),
    "dropout": Case(model=build_random_model),
    "dropout: compiled in parts": Case(
        {"jit_compile": True, "micro_batches": 2}, model=build_random_model
    ),
    "plain: embedding": Case(model=build_model_with_embedding),
    # Decays no variable without a gradient.
    "weight_decay: embedding": Case(
        {"weight_decay": WeightDecayConfig(rate=0.1)},
        model=build_model_with_embedding,
        like="plain: embedding",
    ),
    # Of 1.1 MB, so the table stays on its parameter server.
    "plain: large embedding": Case(
        model=functools.partial(build_model_with_embedding, num_rows=70_000)
    ),
    # Micro-batches and two lookups: ids are several times in the gradient of a worker.
    **{
        f"plain: table, {name}": Case(
            {"micro_batches": 1 + index % 2},
            model=functools.partial(
                build_model_with_table, optimizer=kind(0.1), l2=0.01 * (index % 3), clip_norm=0.05
            ),
            is_bounded=index == 0,
        )
        for index, (name, kind) in enumerate(TABLE_OPTIMIZERS.items())
    },
    "clip.global_norm: embedding": Case(
        {"clip": ClipConfig(global_norm=0.1)},
        model=build_model_with_embedding,
        like="plain: embedding",
        is_bounded=True,
    ),
    "mixed_bfloat16": Case({"precision": "mixed_bfloat16"}),
    # The scale is halved by the overflowing example, and doubled after four steps without one.
    "mixed_float16": Case(
        {"precision": "mixed_float16", "loss_scale": LossScaleConfig(2.0**10, 4)},
        overflows=True,
        is_bounded=True,
    ),
}
CASES |= {
    name: Case({field: value for each in names for field, value in CASES[each].changes.items()})
    for name, names in TOGETHER.items()
}
ONLY_TOGETHER = {name for names in TOGETHER.values() for name in names}


def with_momentum(config: Config) -> keras.Optimizer:
    return keras.optimizers.SGD(config.learning_rate, momentum=0.9)


def optimizers_of(name: str, executor: str) -> tuple[str, ...]:
    """The optimizers with which `executor` trains the case `name`.

    On several devices an option is trained with one optimizer, and with the other one under the
    next strategy: all pairs of option, strategy and optimizer are tested, but not all triples.
    """
    if name in FOR_ANY_OPTIMIZER | ONLY_TOGETHER:
        return ("momentum",)
    kinds = [kind for kind in SHARED_KINDS if executor.startswith(kind)]
    if not kinds or name == "plain":
        return tuple(OPTIMIZERS)
    number = list(CASES).index(name) + SHARED_KINDS.index(kinds[0])
    return (tuple(OPTIMIZERS)[number % len(OPTIMIZERS)],)


def recipes(executor: str = "") -> Iterator[tuple[str, Recipe, bool]]:
    """All that `executor` trains: (name, recipe, the data has an overflowing example)."""
    is_bounded = executor.startswith(BOUNDED)
    kinds = [kind for kind in SHARED_KINDS if executor.startswith(kind)]
    for name, case in CASES.items():
        if (is_bounded and not case.is_bounded) or (kinds and name in ONLY_TOGETHER):
            continue
        if kinds and name in TABLES[1:] and kinds[0] != _only_kind(TABLES.index(name)):
            continue
        for optimizer in optimizers_of(name, executor):
            rate = OPTIMIZERS[optimizer]
            config = Config(learning_rate=rate, **case.changes)
            build_optimizer = with_momentum if optimizer == "momentum" else None
            yield (
                f"{name}/{optimizer}",
                _recipe(config, build_optimizer, case.model),
                case.overflows,
            )
    if is_bounded:
        return
    others = sorted(supported_optimizers().keys() - {"adam", "sgd"})
    for number, optimizer in enumerate(others):
        if kinds in ([], [_only_kind(number)]):
            yield f"optimizer/{optimizer}", _recipe(Config(optimizer=optimizer), None), False


def _only_kind(number: int) -> str:
    """The kind that trains optimizer `number` on several devices: all update alike."""
    return SHARED_KINDS[number % len(SHARED_KINDS)]


def _recipe(config: Config, build_optimizer: Any, model: Any = build_model) -> Recipe:
    config.batch_size = BATCH
    config.train_steps = STEPS
    check(config)
    return Recipe("parity", config, model, build_optimizer, parse, None, None, None, None)


def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Three inputs and a label."""
    values = tf.io.decode_raw(serialized, tf.float32, fixed_length=16)
    values = tf.reshape(values, [-1, 4])
    return values[:, :3], tf.cast(values[:, 3], tf.int64)


def write_data(directory: Path) -> Split:
    """Writes examples with learnable labels; in directory "overflowing", one of them overflows."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(EXAMPLES, 3))
    labels = np.argmax(inputs @ random.normal(size=(3, CLASSES)), axis=1)
    if directory.name == OVERFLOWING:
        # float16 cannot hold it.
        inputs[OVERFLOWING_EXAMPLE] = 1e6
    rows = np.concatenate([inputs, labels[:, np.newaxis]], axis=1).astype(np.float32)
    examples = [row.tobytes() for row in rows]
    directory.mkdir()
    return write_shards(examples, str(directory), "parity", "train", 2, EXAMPLES)


def open_reader(directory: Path) -> Reader:
    split = open_split(str(directory), "train")
    lengths = split.shard_lengths, split.chunk_examples
    order = Order(*lengths, BATCH, lanes=4, window_batches=4, seed=0, shuffle=True)
    return Reader(split, order, parse, num_threads=1)


def train(
    recipe: Recipe, executor: Executor, reader: Reader, calls: Sequence[int]
) -> dict[str, npt.NDArray[Any]]:
    """The weights and other results of STEPS steps; `calls` are the steps of each call of `run`."""
    check_replicas(recipe.config, executor.replicas_per_step)
    learner = executor.build(lambda: build_learner(recipe))
    source = dataclasses.replace(reader, gives_seeds=learner.needs_seeds)
    executor.start(learner, source, reader, Position())
    for num_steps in calls:
        executor.run(num_steps)
    assert int(learner.step.numpy()) == STEPS
    variables = saved_variables(learner.model)
    found = {f"weights {i}": np.asarray(v.numpy()) for i, v in enumerate(variables)}
    for kind, slots in learner.state.items():
        if kind == "table_slots":
            found |= {f"{kind} {i}": slot.numpy() for i, slot in enumerate(slots)}
    # Without the state of Keras' generators, which are not used.
    to_export = [w for w in learner.weights() if w.dtype == np.float32]
    found |= {f"to export {i}": w for i, w in enumerate(to_export)}
    found["learning_rate"] = np.array(learner.learning_rate)
    # Elsewhere it follows from the weights, and another graph takes time to build.
    if recipe.config.ema.decay:
        found["evaluation"] = np.array(executor.evaluate()["loss"])
    if learner.loss_scale:
        found["loss_scale"] = np.array([float(v.numpy()) for v in learner.state["loss_scale"]])
    return found


def executors(name: str) -> Callable[[], Executor]:
    """Returns a function that makes executors of one kind.

    They share a strategy, because a process can have only one.
    """
    strategy_name, _, num_workers = name.rpartition("-")
    if strategy_name == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(int(num_workers))]
        tf.config.set_logical_device_configuration(cpu, logical)
        mirrored = MirroredExecutor.on([f"CPU:{i}" for i in range(int(num_workers))]).strategy
        return lambda: MirroredExecutor(mirrored)
    if strategy_name == "multiworker":
        cluster = parse_tf_config(os.environ["TF_CONFIG"], "multiworker")
        ring = MultiWorkerExecutor.connect(cluster, Transfer("ring")).strategy
        return lambda: MultiWorkerExecutor(ring, cluster, {}, Transfer(bucket_mb=BUCKET_MB))
    cluster = local_cluster("ps", int(num_workers), 2)
    for task in cluster.trainers:
        if task.job != "chief":
            start_server(cluster.for_task(task))
    chief = cluster.for_task(Task("chief", 0))
    os.environ["TF_CONFIG"] = chief.training_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    servers = tf.distribute.ParameterServerStrategy(resolver)
    if strategy_name == "ps-sync":
        return lambda: SynchronousExecutor(servers, chief, int(num_workers))
    # A single worker's gradients are never too old; but the graph is another one with a bound.
    max_staleness = 0 if strategy_name == BOUNDED else None
    return lambda: AsynchronousExecutor(servers, chief, max_staleness=max_staleness)


def main(name: str, directory: Path, to: Path) -> None:
    # Of four batches, as windows are here: some closures are unrolled then, and others loops.
    for module in (closures, ps_executor, asynchronous_steps):
        vars(module).update(STEPS_PER_CLOSURE=4)
    make = executors(name)
    found: dict[str, npt.NDArray[Any]] = {}
    # Calls of one step, of several steps, and of more than a window of batches.
    calls = (1, 4, 1, 14)
    for case, recipe, overflows in recipes(name):
        data = directory / (OVERFLOWING if overflows else "data")
        trained = train(recipe, make(), open_reader(data), calls)
        found |= {f"{case}/{key}": value for key, value in trained.items()}
    with (to / "found.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **found)
    if name.startswith("multiworker"):
        make().close()  # A worker that leaves early ends the other one.


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    # Servers cannot be stopped, and would prevent the end of the process.
    sys.stdout.flush()
    os._exit(0)
