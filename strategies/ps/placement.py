"""Places variables on parameter servers: the largest first, each on the server with fewest bytes.

    _, groups = dry_run(make)                       # makes the variables on this task alone
    placement = place(groups, num_ps=2)
    with strategy.scope(), placed(placement):
        learner = make()                            # makes the same variables on the servers

TensorFlow's own strategy places variables round-robin, whatever their sizes. Here each variable
goes to the server that has the fewest bytes so far, the largest variable first. Compared with the
best possible placement, the fullest server then holds at most a third more (Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969). Optimizer slots are placed with their variable, so the
bytes of a variable include them. A table (strategies/tables.py) has a part on each server.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tensorflow as tf

from data.system.errors import UsageError
from strategies.tables import part_rows, table_settings, tables_with

Made = TypeVar("Made")


@dataclass
class Group:
    """A variable and the variables that are colocated with it, such as optimizer slots."""

    name: str  # Of the first variable.
    shape: tuple[int, ...]  # Of the first variable.
    num_bytes: int  # Of all variables.
    num_variables: int = 1
    gradient_bytes: int = 0  # Of a gradient of the first variable; 0 if it is not trainable.
    ps: int = 0  # In the result of `place`: where it is.
    is_table: bool = False  # In the result of `place`: a part of a table.
    num_gradient_buffers: int = 0  # In `num_bytes`, besides the variables.

    @property
    def others(self) -> str:
        """What `num_bytes` includes besides the first variable, in words."""
        slots = "its slots" if self.num_variables > 1 else ""
        has_buffers = self.num_gradient_buffers and self.gradient_bytes
        buffers = f"{self.num_gradient_buffers} gradients" if has_buffers else ""
        included = " and ".join(filter(None, [slots, buffers]))
        return included and f" with {included}"


@dataclass(frozen=True)
class Placement:
    """The groups, and the bytes on each ps."""

    groups: Sequence[Group]
    num_bytes: Sequence[int]

    def table(self) -> str:
        """One line per ps: its bytes, its number of variables, and the largest variable."""
        lines = []
        for ps, num_bytes in enumerate(self.num_bytes):
            here = [group for group in self.groups if group.ps == ps]
            num_variables = sum(group.num_variables for group in here)
            lines.append(f"ps {ps}: {num_bytes:,} bytes, {num_variables} variables")
            if here:
                largest = max(here, key=lambda group: group.num_bytes)
                lines[-1] += f", the largest {largest.name} {list(largest.shape)}{largest.others}: "
                lines[-1] += f"{largest.num_bytes:,} bytes"
        return "\n".join(lines)


def dry_run(make: Callable[[], Made]) -> tuple[Made, list[Group]]:
    """Calls `make` on this task alone; returns its result and the variables in creation order."""
    groups: list[Group] = []
    group_of: dict[int, Group] = {}
    alive = []  # An id is unique only while its object is alive.

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        variable = next_creator(**kwargs)
        part = table_settings().part
        shape = tuple(variable.shape) if part is None else part.shape
        num_bytes = math.prod(shape) * variable.dtype.size
        group = group_of.get(id(kwargs.get("colocate_with")))
        if group is None:
            group = Group(variable.name, shape, num_bytes, is_table=part is not None)
            # Gradients of tables are rows, whose number is not known.
            group.gradient_bytes = num_bytes if variable.trainable and part is None else 0
            groups.append(group)
        else:
            group.num_bytes += num_bytes
            group.num_variables += 1
        group_of[id(variable)] = group
        alive.append(variable)
        return variable

    # The default strategy does not pass `colocate_with` to creators; this one does.
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope(), tf.variable_creator_scope(creator), tables_with(has_rows=False):
        return make(), groups


def place(groups: Sequence[Group], num_ps: int, *, num_gradient_buffers: int = 0) -> Placement:
    """Places the largest group first, each on the ps that has the fewest bytes so far.

    Tables come before all others: each gets a part on each ps. The server of a trainable variable
    also stores `num_gradient_buffers` of its gradients.
    """
    tables = [
        _part_of(group, ps, num_ps) for group in groups if group.is_table for ps in range(num_ps)
    ]
    dense = [
        dataclasses.replace(
            g,
            num_bytes=g.num_bytes + num_gradient_buffers * g.gradient_bytes,
            num_gradient_buffers=num_gradient_buffers,
        )
        for g in groups
        if not g.is_table
    ]
    loads = [sum(part.num_bytes for part in tables[ps::num_ps]) for ps in range(num_ps)]
    for group in sorted(dense, key=lambda g: -g.num_bytes):
        group.ps = loads.index(min(loads))
        loads[group.ps] += group.num_bytes
    return Placement([*dense, *tables], loads)


def _part_of(table: Group, index: int, num_parts: int) -> Group:
    rows = part_rows(table.shape[0], index, num_parts)
    # A table of dynamic ids has no row yet.
    num_bytes = table.num_bytes // table.shape[0] * rows if table.shape[0] else table.num_bytes
    shape = (rows, *table.shape[1:])
    return dataclasses.replace(table, shape=shape, num_bytes=num_bytes, ps=index)


@contextlib.contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Places the variables that are made inside, which are those of `placement` in this order.

    Entered in the scope of a ParameterServerStrategy.

    Raises:
        UsageError: a variable is made that is not in `placement`.
    """
    anchors = _anchors(len(placement.num_bytes))
    planned = iter(group for group in placement.groups if not group.is_table)

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        if kwargs.get("colocate_with") is not None:
            return next_creator(**kwargs)
        if (part := table_settings().part) is not None:
            return next_creator(**{**kwargs, "colocate_with": anchors[part.number]})
        group = next(planned, None)
        anchor = anchors[group.ps if group else 0]
        variable = next_creator(**{**kwargs, "colocate_with": anchor})
        if group is None or tuple(variable.shape) != group.shape:
            raise UsageError(
                "build_model or build_optimizer made other variables when it was called again: "
                f"{variable.name} {list(variable.shape)} instead of "
                f"{f'{group.name} {list(group.shape)}' if group else 'none'}. Make the same "
                "variables at each call."
            )
        return variable

    with tf.variable_creator_scope(creator), tables_with(num_parts=len(anchors)):
        yield


def _anchors(num_ps: int) -> list[tf.Variable]:
    """A scalar on each ps, to colocate variables with; the strategy places them round-robin."""
    made = [tf.Variable(0, trainable=False) for _ in range(num_ps)]
    return sorted(made, key=lambda anchor: tf.DeviceSpec.from_string(anchor.device).task)
