"""A small real trainer in this process: 110 records on disk, a linear model, one CPU."""

import contextlib
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from data.order import Order
from data.reader import Reader
from data.tfrecord.split import Split
from strategies.base import Executor
from strategies.metrics import Metrics
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from tests.shards import write_shards
from tests.unit.comparing import assert_same
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.marks import Saved
from trainer.config import Config, Recipe
from trainer.hooks.base import Hook
from trainer.hooks.building import Parts
from trainer.hooks.evaluate import Evaluate
from trainer.hooks.export import Export
from trainer.hooks.save import SaveCheckpoint
from trainer.hooks.writers import Writer
from trainer.inputs import Inputs
from trainer.learner import Learner
from trainer.step.losses import accuracy, sparse_categorical_crossentropy
from trainer.task_spec import TaskSpec

NUM_EXAMPLES = 110
BATCH = 8
CLASSES = 3


def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Four floats: three inputs and a label."""
    values = tf.io.decode_raw(serialized, tf.float32, fixed_length=16)
    values = tf.reshape(values, [-1, 4])
    return values[:, :3], tf.cast(values[:, 3], tf.int64)


def write_split(directory: Path) -> Split:
    random = np.random.default_rng(0)
    inputs = random.normal(size=(NUM_EXAMPLES, 3))
    labels = np.argmax(inputs, axis=1)[:, np.newaxis]
    rows = np.concatenate([inputs, labels], axis=1).astype(np.float32)
    examples = [row.tobytes() for row in rows]
    return write_shards(examples, str(directory), "toy", "train", 2, NUM_EXAMPLES)


def make_reader(split: Split, batch_size: int = BATCH) -> Reader:
    order = Order(
        split.shard_lengths,
        split.chunk_examples,
        batch_size,
        lanes=4,
        window_batches=4,
        seed=0,
        shuffle=True,
    )
    return Reader(split, order, parse, num_threads=1)


class Recorded(Writer):
    """A writer that records its reports: (step, split, values)."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, str, Any]] = []

    def write(self, step: int, split: str, values: Any) -> None:
        self.reports.append((step, split, values))

    def values(self) -> list[Any]:
        return [values for _, _, values in self.reports]


class Overshooting(MirroredExecutor):
    """Runs three steps more than asked for, as asynchronous executors may."""

    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        return super()._run(num_steps + 3)


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond that: writes fail, as they do on a full disk."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def parts_of(
    executor: Executor, learner: Learner, checkpointer: Any, reader: Reader, config: Config
) -> Parts:
    """The parts of a task that trains with `config`."""
    recipe = Recipe("mine.py", config, lambda config: learner.model)
    spec = TaskSpec("mirrored", recipe, None, "")
    return Parts(spec, Inputs(reader, reader), None, executor, learner, checkpointer)


class Toy:
    """All the parts of a run; `width` and `optimizer` make another model of it."""

    def __init__(
        self,
        split: Split,
        model_dir: Path | str,
        *,
        executor: type[MirroredExecutor] = MirroredExecutor,
        optimizer: Any = None,
        rate: float = 0.01,
        width: int = CLASSES,
        keep: int = 2,
        seed: int = 0,
    ) -> None:
        self.model_dir = model_dir
        self.reader = make_reader(split)
        self.executor = executor.on(["CPU:0"])

        def make() -> Learner:
            keras.utils.set_random_seed(seed)
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(width)])
            return Learner(
                model,
                optimizer or keras.optimizers.Adam(rate),
                sparse_categorical_crossentropy,
                {"accuracy": accuracy},
                batch_size=BATCH,
            )

        self.learner = self.executor.build(make)
        identity = {"train data": split.fingerprint, "batch_size": BATCH}
        self.checkpointer = Checkpointer(
            f"{model_dir}/checkpoints", self.learner, identity, keep=keep
        )

    def start(self, position: Position | None = None) -> None:
        self.executor.start(self.learner, self.reader, self.reader, position or Position())

    def evaluate(self, writers: Sequence[Writer] = (), **options: Any) -> Evaluate:
        """The hook that evaluates this run."""
        options = {"last_step": 100, "best_metric": "loss", **options}
        return Evaluate(self.executor, self.learner, writers, **options)

    def save(self, every_steps: int, last_step: int = 100) -> SaveCheckpoint:
        """The hook that saves this run."""
        parts = self.executor, self.learner, self.checkpointer
        return SaveCheckpoint(*parts, every_steps=every_steps, last_step=last_step)

    def export(self, directory: Path, last_step: int = 100, stop: Hook | None = None) -> Export:
        """The hook that exports this run's own model after `last_step`, or after `stop`."""
        return Export(
            self.learner,
            lambda: self.learner.model,
            f"{directory}/export",
            path="mine.py",
            is_complete=lambda: self.step >= last_step or bool(stop and stop.done),
        )

    def restore(self, at_most: int | None = None) -> Saved:
        """Restores the newest checkpoint, which must be there."""
        saved = self.checkpointer.restore(at_most)
        assert saved is not None
        return saved

    def train_and_save(self, *steps: int) -> None:
        """Trains from the start, and saves at `steps`."""
        self.start()
        for step in steps:
            self.executor.run(step - self.step)
            self.checkpointer.save(step, self.executor.position, {})
        self.checkpointer.wait()

    def jump_to(self, step: int) -> None:
        """Gives all variables other values at each step. It is faster than training."""
        random = np.random.default_rng(step)
        for variable in (*self.learner.model.variables, *self.learner.optimizer.variables):
            if variable.dtype == "float32":
                variable.assign(random.normal(size=variable.shape))
        self.learner.step.assign(step)

    @property
    def step(self) -> int:
        return int(self.learner.step.numpy())

    def state(self) -> list[np.ndarray]:
        variables = [*self.learner.model.variables, *self.learner.optimizer.variables]
        return [np.array(variable.value.numpy()) for variable in variables]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in Path(self.model_dir, "checkpoints").iterdir())


def assert_restores(split: Split, model_dir: Path | str, step: int, state: Any = None) -> None:
    """The newest checkpoint that is complete is of `step`, and has this `state`."""
    toy = Toy(split, model_dir, seed=1)
    saved = toy.restore()
    assert (saved.step, saved.position, toy.step) == (step, Position(step), step)
    assert_same(state or toy.state(), toy.state())
