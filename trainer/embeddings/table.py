"""Rows: the parts of a table, or of an optimizer slot of it, as one variable.

    rows = Rows(parts, (1_000_000, 64), "embedding/embeddings")
    rows.assign(rows.read_value())                  # complete, [1000000, 64], sorted by id

A checkpoint has the rows of a table in the order of their ids, so it does not depend on the number
of parts. It is written and read over the methods of base.Table, which FixedTable implements.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from data.system.compat.autograph import no_autograph
from strategies.base import value_of
from trainer.embeddings.base import Ids, Index, Part, Table
from trainer.embeddings.optimizers import gather_rows
from trainer.learner.variables import SplitVariable

if TYPE_CHECKING:
    from trainer.embeddings.layer import ShardedEmbedding


class Rows(SplitVariable):
    """Variables of which part p has the rows p, p + P, p + 2 P, ... of a table of P parts."""

    def read_value(self) -> tf.Tensor:
        """The complete table."""
        values = [part.read_value() for part in self.parts]
        if len(values) == 1:
            return values[0]
        num_rows, num_parts = self.shape[0], len(values)
        places = [tf.range(index, num_rows, num_parts) for index in range(num_parts)]
        return tf.ensure_shape(tf.dynamic_stitch(places, values), self.shape)

    def numpy(self) -> npt.NDArray[np.generic]:
        """The complete table as an array."""
        return np.asarray(self.read_value().numpy())

    def assign(self, value: tf.Tensor | npt.NDArray[np.generic]) -> None:
        """Sets the complete table; does nothing in a dry run, in which it has no rows."""
        for index, part in enumerate(self.parts):
            if part.shape[0]:
                part.assign(value[index :: len(self.parts)])


class FixedPart(Part):
    """A part of a table with a fixed number of rows: id `i` is at place `i // P` of P parts."""

    @override
    def add_slots(self, *, marks_changes: bool) -> None:
        super().add_slots(marks_changes=marks_changes)
        if marks_changes:
            self.changed = self._new_variable("changed", False, (), tf.bool)

    @override
    def find(self, ids: tf.Tensor) -> tf.Tensor:
        return ids // len(self._layer.parts)

    @override
    def lookup(self, ids: tf.Tensor, *, training: bool) -> tf.Tensor:
        return gather_rows(self.rows, self.find(ids))


class FixedTable(Rows, Table):
    """A table with a fixed number of rows, and its optimizer slots."""

    def __init__(self, parts: Sequence[FixedPart], layer: "ShardedEmbedding") -> None:
        path = f"{layer.path}/embeddings"
        super().__init__([part.rows for part in parts], (layer.num_rows, layer.width), path)
        self._parts = parts
        self._changed_in_graph = tf.function(self._take_changed_ids, input_signature=[])
        self._graphs = [self._changed_in_graph]

    @property
    def slots(self) -> list[Rows]:
        """The optimizer slots; none if the table is not trained."""
        found = []
        for name in self.value_names[1:]:
            variables = [part.variables[name] for part in self._parts]
            shape = (self.shape[0], *variables[0].shape[1:])
            found.append(Rows(variables, shape, f"{self.path}/{name}"))
        return found

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of all parts, without the marks."""
        return [part for each in (self, *self.slots) for part in each.parts]

    @override
    def take_changed_ids(self, index: Index, step: int) -> Ids:
        return np.sort(value_of(self._changed_in_graph()))

    @no_autograph
    def _take_changed_ids(self) -> tf.Tensor:
        found = [tf.zeros([0], tf.int64)]  # If no part has marks.
        for index, part in enumerate(self._parts):
            if (changed := part.changed) is not None:
                with tf.device(changed.device):
                    found.append(tf.where(changed.read_value())[:, 0] * len(self._parts) + index)
                    changed.assign(tf.zeros_like(changed))
        return tf.concat(found, axis=0)
