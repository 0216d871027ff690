"""Tables that are split by row: with P parts, row `id` is row `id // P` of part `id % P`.

    with split_into(3):                             # in the executor, when it builds the model
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
from typing import NamedTuple, TypeVar

import tensorflow as tf

from data.system.compat.variables_of_process import variable_of_process

# Ids, and numbers of rows, are int64.
ID_BYTES = 8
# Strategies that make a copy of a variable for each replica.
_WITH_COPIES = tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy

Value = TypeVar("Value")


class Part(NamedTuple):
    """The part of a table for which variables are made."""

    number: int
    shape: tuple[int, ...]  # Of the part.


_num_parts: ContextVar[int] = ContextVar("num_parts", default=1)
_has_rows: ContextVar[bool] = ContextVar("has_rows", default=True)
_read_dtype: ContextVar[str] = ContextVar("read_dtype", default="float32")
_part: ContextVar[Part | None] = ContextVar("part", default=None)


def num_parts() -> int:
    """The number of parts of each table that is made now."""
    return _num_parts.get()


def has_rows() -> bool:
    """False in a dry run: tables are made without rows, so they need no memory."""
    return _has_rows.get()


def read_dtype() -> str:
    """The name of the type in which rows are sent to the process that uses them."""
    return _read_dtype.get()


def current_part() -> Part | None:
    """The part whose variables are made now; None outside of `making_part`."""
    return _part.get()


def part_rows(num_rows: int, index: int, num_parts: int) -> int:
    """The number of rows of part `index`."""
    return max(0, -(-(num_rows - index) // num_parts))


def split_into(num_parts: int) -> AbstractContextManager[None]:
    """Tables that are made inside have `num_parts` parts."""
    return _inside(_num_parts, num_parts)


def without_rows() -> AbstractContextManager[None]:
    """Tables that are made inside have no rows."""
    return _inside(_has_rows, False)


def rows_read_as(dtype: str) -> AbstractContextManager[None]:
    """Rows that are looked up inside are sent as the type named `dtype`; "float32": as they are."""
    return _inside(_read_dtype, dtype)


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
    with _inside(_part, Part(number, shape)), tf.device("CPU:0"), scope:
        yield


@contextlib.contextmanager
def _inside(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
