"""The variables that a chief leaves on its servers, as the next one finds them (recovery.py)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple  # Any: JSON values.

import numpy.typing as npt
import tensorflow as tf

from strategies.base import Tensor, value_of


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


def ps_device(index: int) -> str:
    """The device of the ps task `index`."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"
