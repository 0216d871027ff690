"""Rows: the parts of a table, or of an optimizer slot of it, as one variable.

    rows = Rows(parts, (1_000_000, 64), "embedding/embeddings")
    rows.assign(rows.read_value())                  # complete, [1000000, 64], sorted by id
    saved_variables(model)                          # model.variables, with Rows in place of parts

A checkpoint and an exported model have the complete table, so they do not depend on the number of
parts. One process needs the memory of the complete table to write or to read them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.embeddings.dynamic import DynamicTable

if TYPE_CHECKING:
    from trainer.embeddings.layer import ShardedEmbedding
    from trainer.learner import Learner

# The name that a tf.Variable has in a checkpoint.
_VALUE = "VARIABLE_VALUE"


class Rows(tf.__internal__.tracking.Trackable):
    """Variables of which part p has the rows p, p + P, p + 2 P, ... of a table of P parts.

    Attributes:
        parts: The variables.
        shape: That of the complete table.
        path: The name of the complete table.
        dtype: The name of the type of the values.
    """

    def __init__(self, parts: Sequence[tf.Variable], shape: tuple[int, ...], path: str) -> None:
        self.parts = list(parts)
        self.shape = shape
        self.path = self.name = path
        self.dtype: str = parts[0].dtype.name

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

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_VALUE: self.read_value()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored[_VALUE])


def tables_of(model: keras.Model) -> "list[ShardedEmbedding]":
    """The layers of `model` that are split, also those inside of other layers."""
    # Not isinstance of the layer: layer.py imports this module.
    layers = model._flatten_layers(include_self=False)
    return [
        layer for layer in layers if isinstance(getattr(layer, "table", None), Rows | DynamicTable)
    ]


def saved_variables(model: keras.Model) -> list[keras.Variable | Rows | DynamicTable]:
    """`model.variables`, in which each table is one entry, at the place of its first part.

    Tables of dynamic ids, which are not in `model.variables`, come last.
    """
    table_of = {id(part): layer.table for layer in tables_of(model) for part in layer.weights}
    entries = [table_of.get(id(variable), variable) for variable in model.variables]
    # A model that was exported has constants in place of dynamic ids.
    entries = [entry for entry in entries if not isinstance(entry, DynamicTable)]
    entries += [layer.table for layer in tables_of(model) if isinstance(layer.table, DynamicTable)]
    return list({id(entry): entry for entry in entries}.values())


def set_values(model: keras.Model, learner: "Learner") -> None:
    """Gives a model that is not trained any more the values with which `learner` evaluates."""
    entries = [v for v in saved_variables(model) if not isinstance(v, DynamicTable)]
    for entry, value in zip(entries, learner.weights(), strict=True):
        entry.assign(value)
    for layer, trained in zip(tables_of(model), tables_of(learner.model), strict=True):
        if isinstance(trained.table, DynamicTable):
            layer.freeze(trained.table.numpy())
