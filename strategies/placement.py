"""Which parameter server keeps which variable: by bytes, the largest first, on the least loaded.

    groups = record(make)[1]                        # what `make` makes, on this task alone
    placement = place(groups, num_ps=2)
    with strategy.scope(), placed(placement):
        learner = make()                            # the same once more, where it belongs

TensorFlow's own strategy deals variables out in turn, whatever their sizes. The rule here is
Graham's, "Bounds on Multiprocessing Timing Anomalies" (1969): the fullest server holds at most
4/3 - 1/(3 num_ps) of what it would hold under the best placement. Optimizer slots are made beside
their variable, so a variable counts with them.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tensorflow as tf

Made = TypeVar("Made")


class PlacementError(ValueError):
    """A model that is not the same when it is built again. Exit code 2."""


@dataclass
class Group:
    """A variable and those that are made beside it.

    Attributes:
        name: Of the first.
        shape: Of the first.
        num_bytes: Of all.
        num_variables: All of them.
        staged_bytes: Of a gradient of the first; 0 if it is not trained.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    num_variables: int = 1
    staged_bytes: int = 0


@dataclass(frozen=True)
class Placement:
    """The groups, and for each the index of its ps."""

    groups: Sequence[Group]
    ps: Sequence[int]
    num_ps: int
    num_bytes: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        """Sums up."""
        sums = [0] * self.num_ps
        for group, ps in zip(self.groups, self.ps, strict=True):
            sums[ps] += group.num_bytes
        object.__setattr__(self, "num_bytes", tuple(sums))

    def table(self) -> str:
        """A line a ps: its bytes, how many variables they are, and the largest."""
        lines = []
        for ps in range(self.num_ps):
            here = [g for g, index in zip(self.groups, self.ps, strict=True) if index == ps]
            line = f"ps {ps}: {self.num_bytes[ps]:,} bytes, {sum(g.num_variables for g in here)} "
            line += "variables"
            if here:
                largest = max(here, key=lambda group: group.num_bytes)
                line += f", the largest {largest.name} {list(largest.shape)} with its slots: "
                line += f"{largest.num_bytes:,} bytes"
            lines.append(line)
        return "\n".join(lines)


def record(make: Callable[[], Made]) -> tuple[Made, list[Group]]:
    """What `make` returns, and the variables that it made, in their order."""
    groups: list[Group] = []
    group_of: dict[int, Group] = {}
    kept = []  # An id is a variable's own only while it lives.

    def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = next_creator(**kwargs)
        num_bytes = math.prod(variable.shape) * variable.dtype.size
        group = group_of.get(id(kwargs.get("colocate_with")))
        if group is None:
            group = Group(variable.name, tuple(variable.shape), num_bytes)
            group.staged_bytes = num_bytes if variable.trainable else 0
            groups.append(group)
        else:
            group.num_bytes += num_bytes
            group.num_variables += 1
        group_of[id(variable)] = group
        kept.append(variable)
        return variable

    # The default strategy does not say which variables are made beside which; this one does.
    with tf.distribute.OneDeviceStrategy("CPU:0").scope(), tf.variable_creator_scope(creator):
        return make(), groups


def place(groups: Sequence[Group], num_ps: int, *, num_staged: int = 0) -> Placement:
    """The largest group first, each on the ps that holds the fewest bytes so far.

    Synchronous steps keep `num_staged` gradients of each variable beside it.
    """
    groups = [
        dataclasses.replace(group, num_bytes=group.num_bytes + num_staged * group.staged_bytes)
        for group in groups
    ]
    loads = [0] * num_ps
    chosen = [0] * len(groups)
    for index in sorted(range(len(groups)), key=lambda i: -groups[i].num_bytes):
        ps = loads.index(min(loads))
        chosen[index] = ps
        loads[ps] += groups[index].num_bytes
    return Placement(tuple(groups), tuple(chosen), num_ps)


@contextlib.contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Variables that are made in it are those of `placement`, in the same order.

    In the scope of a ParameterServerStrategy.

    Raises:
        PlacementError: others are made.
    """
    anchors = _anchors(placement.num_ps)
    planned = iter(zip(placement.groups, placement.ps, strict=True))

    def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is not None:
            return next_creator(**kwargs)
        group, ps = next(planned, (None, 0))
        variable = next_creator(**{**kwargs, "colocate_with": anchors[ps]})
        if group is None or tuple(variable.shape) != group.shape:
            raise PlacementError(
                "build_model or build_optimizer made other variables when it was called again: "
                f"{variable.name} {list(variable.shape)}, where the first time "
                f"{f'{group.name} {list(group.shape)}' if group else 'there was none'}. It must "
                "make the same ones each time."
            )
        return variable

    with tf.variable_creator_scope(creator):
        yield


def _anchors(num_ps: int) -> list[Any]:
    """A scalar on each ps, beside which others can be made; the strategy makes them in turn."""
    found: dict[int, Any] = {}
    for _ in itertools.repeat(None, 2 * num_ps):
        anchor = tf.Variable(0, trainable=False)
        found.setdefault(tf.DeviceSpec.from_string(anchor.device).task, anchor)
    return [found[ps] for ps in range(num_ps)]
