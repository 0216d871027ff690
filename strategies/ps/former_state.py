"""The state of a run on its servers, as one chief publishes it and the next one finds it.

    published = PublishedState(cluster)             # in each chief
    former = published.find()                         # of the former chief, or None
    published.publish(variables, {"kind": ...})     # from now on the next chief finds these
    published.withdraw()                            # before variables are set back

Each ps has two lists (named_tensors.py): the handles of its variables, and a record, which is JSON
and says which variable is which. The record is the same on each ps, so it is found if any ps is
left.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple  # Any: JSON values.

import numpy.typing as npt
import tensorflow as tf

from strategies.base import Tensor, value_of
from strategies.cluster.tf_config import Cluster
from strategies.ps.named_tensors import NamedTensors


class FormerVariable(NamedTuple):
    """A variable of a former chief."""

    device: str
    dtype: tf.DType
    handle: Tensor | None  # None if its ps has lost it.

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


class FormerState(NamedTuple):
    """The arguments of a former chief's `PublishedState.publish`."""

    variables: Sequence[FormerVariable]
    facts: Mapping[str, Any]

    @property
    def has_all_variables(self) -> bool:
        """False if a ps has lost its variables."""
        return all(variable.handle is not None for variable in self.variables)

    @property
    def saved(self) -> Sequence[FormerVariable]:
        """The variables that a checkpoint has."""
        return self.variables[: self.facts["num_saved"]]

    def last_step(self) -> int | None:
        """The step counter; None if its ps has lost its variables."""
        counter = self.variables[self.facts["step"]]
        return None if counter.handle is None else int(counter.numpy())


class PublishedState:
    """The lists and records on the ps tasks of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        """Connects to no task yet, but needs a strategy that has connected."""
        self.devices = [ps_device(index) for index in sorted(cluster.jobs["ps"])]
        self._handles = [NamedTensors(device, "variables") for device in self.devices]
        self._records = [NamedTensors(device, "record") for device in self.devices]

    def publish(self, variables: Sequence[tf.Variable], facts: Mapping[str, Any]) -> None:
        """Publishes `variables`, each on a ps, and `facts`, JSON values. Replaces earlier ones."""
        self.withdraw()
        for stored in self._handles:
            here = [v.handle for v in variables if v.device == stored.device]
            stored.store([tf.constant(len(here)), *here])
        places = [self.devices.index(variable.device) for variable in variables]
        dtypes = [variable.dtype.name for variable in variables]
        record = {"facts": facts, "places": places, "dtypes": dtypes, "ps": len(self.devices)}
        for stored in self._records:
            stored.store_json(record)

    def withdraw(self) -> None:
        """Removes the records: a chief that comes now finds no state."""
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
        places, handles = record["places"], []
        for ps, stored in enumerate(self._handles):
            number = places.count(ps)
            loaded = stored.load([tf.int32, *[tf.resource] * number])
            handles.append(iter(loaded[1:] if loaded else [None] * number))
        variables = [
            FormerVariable(self.devices[place], tf.as_dtype(dtype), next(handles[place]))
            for place, dtype in zip(places, record["dtypes"], strict=True)
        ]
        return FormerState(variables, record["facts"])


def ps_device(index: int) -> str:
    """The device of the ps task `index`."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"
