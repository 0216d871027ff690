"""The state of a run on its servers, as one chief publishes it and the next one finds it.

    published = PublishedState(cluster)             # in each chief
    former = published.find()                         # of the former chief, or None
    published.publish(variables, {"kind": ...})     # from now on the next chief finds these
    published.withdraw()                            # before variables are set back

A ps has the handles of its variables in one list (named_tensors.py), and a record: JSON that says
which variable is which. Each ps has the same record, so it is found if any ps is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # JSON values.

import numpy.typing as npt
import tensorflow as tf

from strategies.base import Tensor, value_of
from strategies.cluster.tf_config import Cluster
from strategies.ps.named_tensors import NamedTensors

_ps_device = "/job:ps/replica:0/task:{}/device:CPU:0"


@dataclass(frozen=True)
class FormerVariable:
    """A variable of a former chief."""

    device: str
    dtype: tf.DType
    handle: Tensor

    def value(self) -> tf.Tensor:
        """The current value, on its server; shares memory with the variable until that changes."""
        with tf.device(self.device):
            return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def numpy(self) -> npt.NDArray[Any]:
        """The current value as an array."""
        return value_of(self.value())

    def empty(self) -> None:
        """Frees the memory of the variable."""
        with tf.device(self.device):
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.zeros([0], self.dtype))


@dataclass(frozen=True)
class FormerState:
    """What a former chief has published.

    Attributes:
        facts: The argument of `PublishedState.publish`.
        variables: Of each published variable, in their order; None if a ps has lost its variables.
        found: All variables that are left, in any order.
        devices: The devices of the published variables, in their order.
        dtypes: Their types.
    """

    facts: Mapping[str, Any]
    variables: Sequence[FormerVariable] | None
    found: Sequence[FormerVariable]
    devices: Sequence[str] = ()
    dtypes: Sequence[tf.DType] = ()

    def last_step(self) -> int | None:
        """The step counter; None if its ps has lost its variables."""
        index = self.facts["step"]
        device, place = self.devices[index], self.devices[:index].count(self.devices[index])
        here = [variable for variable in self.found if variable.device == device]
        return int(here[place].numpy()) if place < len(here) else None


class PublishedState:
    """The lists and records on the ps tasks of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        """Connects to no task yet, but needs a strategy that has connected."""
        self.devices = [ps_device(index) for index in sorted(cluster.jobs["ps"])]
        self._handles = [NamedTensors(device, "variables") for device in self.devices]
        self._records = [NamedTensors(device, "record") for device in self.devices]

    def publish(self, variables: Sequence[tf.Variable], facts: Mapping[str, Any]) -> None:
        """Publishes `variables`, each on a ps, and `facts`, JSON values, in place of the former."""
        self.withdraw()
        places = [self.devices.index(variable.device) for variable in variables]
        for ps, stored in enumerate(self._handles):
            here = [v.handle for v, place in zip(variables, places, strict=True) if place == ps]
            stored.store([tf.constant(len(here)), *here])
        dtypes = [variable.dtype.name for variable in variables]
        record = {"facts": facts, "places": places, "dtypes": dtypes, "ps": len(self.devices)}
        for stored in self._records:
            stored.store_json(record)

    def withdraw(self) -> None:
        """A chief that comes now finds no state."""
        for stored in self._records:
            stored.clear()

    def find(self) -> FormerState | None:
        """The state that was published; None if there is none.

        Raises tf.errors.OpError if a ps does not answer.
        """
        records = (stored.load_json() for stored in self._records)
        record = next((found for found in records if found), None)
        if record is None or record["ps"] != len(self.devices):
            return None
        places, dtypes = record["places"], record["dtypes"]
        of_ps: list[list[FormerVariable]] = []
        for ps, (device, stored) in enumerate(zip(self.devices, self._handles, strict=True)):
            kinds = [tf.as_dtype(d) for d, place in zip(dtypes, places, strict=True) if place == ps]
            loaded = stored.load([tf.int32, *[tf.resource] * len(kinds)])
            handles = loaded[1:] if loaded else []
            of_ps.append(
                [FormerVariable(device, *pair) for pair in zip(kinds, handles, strict=False)]
            )
        found = [variable for here in of_ps for variable in here]
        variables = None
        if len(found) == len(places):
            rest = [iter(here) for here in of_ps]
            variables = [next(rest[place]) for place in places]
        of_each = [self.devices[place] for place in places], list(map(tf.as_dtype, dtypes))
        return FormerState(record["facts"], variables, found, *of_each)


def ps_device(index: int) -> str:
    """The device of the ps task `index`."""
    return _ps_device.format(index)


def assign_value(variable: tf.Variable, value: tf.Tensor) -> None:
    """Sets `variable` on its server. If `value` is there, it does not travel."""
    with tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
