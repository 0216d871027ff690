"""Tables that are split by row: with P parts, row `id` is row `id // P` of part `id % P`.

    with tables_with(num_parts=3):                  # in the executor, when it builds the model
        with making_part(0, (334, 64)):             # in the layer
            tf.Variable(...)                        # is placed on ps 0

Part p of all tables is on parameter server p, with its optimizer slots. Without parameter servers
a table has one part, which is in the memory of the process, also if the replicas are GPUs: all
replicas of a process share it. A table without a fixed number of rows is split in the same way; its
parts have rows in the order in which ids came, so their gradients have ids in place of row numbers.
Both are int64.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf

from data.system.compat.variables_of_process import variable_of_process

# Ids, and numbers of rows, are int64.
ID_BYTES = 8
# Strategies that make a copy of a variable for each replica.
_WITH_COPIES = tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy


class Part(NamedTuple):
    """The part of a table for which variables are made."""

    number: int
    shape: tuple[int, ...]  # Of the part.


class Settings(NamedTuple):
    """How tables are made and read."""

    num_parts: int = 1  # Of each table that is made.
    has_rows: bool = True  # False in a dry run: tables without rows need no memory.
    # The name of the type in which rows are sent to the process that uses them.
    read_dtype: str = "float32"
    part: Part | None = None  # The part whose variables are made; None outside of `making_part`.


_DEFAULTS = Settings()
_settings: ContextVar[Settings] = ContextVar("settings", default=_DEFAULTS)


def table_settings() -> Settings:
    """The settings at this place of the program."""
    return _settings.get()


@contextlib.contextmanager
def tables_with(**changes: Any) -> Iterator[None]:
    """Inside, the fields of `table_settings` that `changes` names have other values."""
    token = _settings.set(_settings.get()._replace(**changes))
    try:
        yield
    finally:
        _settings.reset(token)


def part_rows(num_rows: int, index: int, num_parts: int) -> int:
    """The number of rows of part `index`."""
    return max(0, -(-(num_rows - index) // num_parts))


@contextlib.contextmanager
def making_part(
    number: int, shape: tuple[int, ...], beside: tf.Variable | None = None
) -> Iterator[None]:
    """Variables that are made inside belong to part `number` of a table, which has `shape`.

    They are on a server, or on the CPU of this process. `beside` is a variable of the same part: an
    optimizer slot is on its device.
    """
    strategy = tf.distribute.get_strategy()
    scope: AbstractContextManager[object] = contextlib.nullcontext()
    if isinstance(strategy, _WITH_COPIES):
        scope = tf.variable_creator_scope(variable_of_process)
    elif beside is not None:
        scope = strategy.extended.colocate_vars_with(beside)
    with tables_with(part=Part(number, shape)), tf.device("CPU:0"), scope:
        yield
