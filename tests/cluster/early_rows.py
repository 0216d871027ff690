"""Trains tables with rows that are read one step before they are used; and the same by hand.

    python -m tests.cluster.early_rows mirrored-1 DATA TO       # writes TO/mirrored-1.npz
    python -m tests.cluster.early_rows ps-sync-2 DATA TO

On one device each step is done by hand, at the rows of the step before: the change of the rows is
added to the newest ones. In the first step of each call no row is old.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from strategies.base import Executor, Position
from strategies.mirrored import MirroredExecutor
from strategies.ps.sync import executor as executor_module
from strategies.ps.sync.executor import SynchronousExecutor
from tests.cluster import parity
from trainer.build import build_learner
from trainer.config import Config, Recipe
from trainer.embeddings import SGD, Adagrad, ShardedEmbedding
from trainer.embeddings.dynamic import DynamicTable
from trainer.learner import Learner

# The steps of each call. The last is long enough for an unrolled loop.
CALLS = (1, 4, 35)
NUM_IDS, WIDTH = 9, 4

Found = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained; `is_dynamic` if ids of the second table get their rows in training."""

    micro_batches: int
    is_dynamic: bool


CASES = {"fixed": Case(1, is_dynamic=False), "dynamic": Case(2, is_dynamic=True)}


class OneCall(SynchronousExecutor):
    """Makes all steps of `run` in one call, so it is known in which steps rows are old."""

    @override
    def _steps_of_call(self, num_steps: int) -> int:
        return num_steps


def recipe_of(case: Case) -> Recipe:
    """Two lookups in one table, and one in another. Which ids an example has is drawn."""

    def build_model(config: Config) -> keras.Model:
        layers = keras.layers
        inputs = keras.Input((3,))
        bins = layers.Discretization(bin_boundaries=[-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5])
        ids = bins(layers.Dropout(0.2)(inputs))
        first = ShardedEmbedding(NUM_IDS, WIDTH, optimizer=SGD(0.5), clip_norm=0.05, name="first")
        second = ShardedEmbedding(
            None if case.is_dynamic else NUM_IDS,
            WIDTH,
            optimizer=Adagrad(0.1),
            initializer=keras.initializers.Constant(0.1),
            name="second",
        )
        found = [first(ids), first(ids[:, :2]), second(ids)]
        rows = layers.Concatenate()([layers.Flatten()(of_ids) for of_ids in found])
        return keras.Model(inputs, layers.Dense(parity.CLASSES)(rows))

    config = Config(learning_rate=0.2, micro_batches=case.micro_batches)
    return parity.recipe(config, parity.with_momentum, build_model)


def start(executor: Executor, case: Case, data: Path) -> Learner:
    """Builds the learner, and starts `executor`."""
    learner = executor.build(lambda: build_learner(recipe_of(case)))
    reader = parity.open_reader(data)
    source = dataclasses.replace(reader, gives_seeds=learner.needs_seeds)
    executor.start(learner, source, reader, Position())
    return learner


def found_in(learner: Learner) -> Found:
    """The dense weights, and the rows of each table. Ids without a row have the initial one."""
    found = {f"dense {i}": np.asarray(v.numpy()) for i, v in enumerate(learner.dense_variables)}
    for layer in learner.tables:
        if isinstance(layer.table, DynamicTable):
            values = layer.table.numpy()
            found[layer.name] = np.full([NUM_IDS, WIDTH], 0.1, np.float32)
            found[layer.name][values["ids"]] = values["rows"]
        else:
            found[layer.name] = layer.table.numpy()
    return found


def train_by_hand(executor: Executor, case: Case, data: Path) -> Found:
    """The updates of SGD and Adagrad do not depend on the value of a row."""
    learner = start(executor, dataclasses.replace(case, is_dynamic=False), data)
    tables = [layer.table for layer in learner.tables]
    for num_steps in CALLS:
        old = [table.numpy() for table in tables]
        for _ in range(num_steps):
            newest = [table.numpy() for table in tables]
            for table, rows in zip(tables, old, strict=True):
                table.assign(rows)
            executor.run(1)
            for table, rows, new in zip(tables, old, newest, strict=True):
                table.assign(new + (table.numpy() - rows))
            old = newest
    return found_in(learner)


def train(executor: Executor, case: Case, data: Path) -> Found:
    learner = start(executor, case, data)
    for num_steps in CALLS:
        executor.run(num_steps)
    return found_in(learner)


def main(name: str, data: Path, to: Path) -> None:
    # A loop that ends in a call, because nothing moved for a time, would read rows once more.
    vars(executor_module).update(_PATIENCE_SECS=60.0)
    first = parity.executors(name)()
    found: Found = {}
    for kind, case in CASES.items():
        if isinstance(first, SynchronousExecutor):
            of_strategy = first.strategy, first._cluster, first.num_replicas
            trained = train(OneCall(*of_strategy, embedding_staleness=1), case, data)
        else:
            trained = train_by_hand(MirroredExecutor(first.strategy), case, data)
        found |= {f"{kind}/{key}": value for key, value in trained.items()}
    with (to / f"{name}.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    # Servers cannot be stopped, and would prevent the end of the process.
    sys.stdout.flush()
    os._exit(0)
