"""What a chief leaves on its servers, and the next one finds: tensors under a name, and variables.

    stored = NamedTensors("/job:ps/replica:0/task:0/device:CPU:0", "progress")
    stored.store([tensor, variable.handle])         # also in a graph
    found = stored.load([tf.int64, tf.resource])    # perhaps in another chief; None without any
    stored.clear()

TensorFlow removes the variables of a chief from the servers some time after the chief has ended,
and they have no names. A stored handle keeps its variable, and gives the next chief access to it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple  # Any: JSON values.

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from strategies.base import Tensor, value_of


class NamedTensors:
    """A list of tensors of any types and shapes, stored and loaded together."""

    def __init__(self, device: str, name: str) -> None:
        """The list `name` on `device`, the full name of a device of a task."""
        self.device = device
        with tf.device(device):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tf.variant, shape=[], shared_name=f"trainer: {name}"
            )

    def store(self, tensors: Sequence[Tensor]) -> tf.Operation | None:
        """Stores `tensors` in place of the former list; returns the op if called in a graph."""
        with tf.device(self.device):
            value = tf.raw_ops.OptionalFromValue(components=tensors)
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def clear(self) -> None:
        """Stores no list. Not in a graph."""
        with tf.device(self.device):
            none = tf.raw_ops.OptionalNone()
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=none)

    def load(self, dtypes: Sequence[tf.DType]) -> list[tf.Tensor] | None:
        """The stored list, on the server; None if there is none. Not in a graph.

        Raises tf.errors.InvalidArgumentError if it has other types.
        """
        with tf.device(self.device):
            if not tf.raw_ops.VarIsInitializedOp(resource=self._handle):
                return None
            value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.variant)
            if not tf.raw_ops.OptionalHasValue(optional=value):
                return None
            return _components(value, dtypes)

    def store_json(self, value: object) -> None:
        """Stores `value`, made of JSON's types, in place of the former list. Not in a graph."""
        self.store([tf.constant(json.dumps(value))])

    def load_json(self) -> Any:
        """What `store_json` has stored; None if there is nothing. Not in a graph."""
        loaded = self.load([tf.string])
        return None if loaded is None else json.loads(np.asarray(value_of(loaded[0])).item())

    def get(self, dtypes: Sequence[tf.DType]) -> list[Tensor]:
        """The stored list, on the server. In a graph, which fails if there is none."""
        with tf.device(self.device):
            value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.variant)
            return _components(value, dtypes)


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
    """The variables of a former chief, first the saved ones; and what is known of them."""

    variables: Sequence[FormerVariable]
    facts: Mapping[str, Any]

    @property
    def saved(self) -> Sequence[FormerVariable]:
        """The variables that a checkpoint has."""
        return self.variables[: self.facts["num_saved"]]

    def stored_values(
        self, stored: NamedTensors, device: str, step: int
    ) -> dict[int, Tensor] | None:
        """The values of the saved variables on `device`, by index, if `stored` begins with `step`.

        `stored` has them after the step, int64, in the order of the variables.
        """
        dtypes = {i: v.dtype for i, v in enumerate(self.saved) if v.device == device}
        loaded = stored.load([tf.int64, *dtypes.values()])
        if loaded is None or int(value_of(loaded[0])) != step:
            return None
        return dict(zip(dtypes, loaded[1:], strict=True))

    @property
    def counter(self) -> FormerVariable:
        """The step counter."""
        return self.variables[int(self.facts["step"])]

    def last_step(self) -> int | None:
        """The value of the step counter; None if its ps has lost it."""
        return None if self.counter.handle is None else int(self.counter.numpy())


def ps_device(index: int) -> str:
    """The device of the ps task `index`."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def _components(value: Tensor, dtypes: Sequence[tf.DType]) -> list[Tensor]:
    found: list[Tensor] = tf.raw_ops.OptionalGetValue(
        optional=value,
        output_types=list(dtypes),
        output_shapes=[tf.TensorShape(None)] * len(dtypes),
    )
    return found
