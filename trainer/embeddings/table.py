"""Rows: the parts of a table, or of an optimizer slot of it, as one variable.

    rows = Rows(parts, (1_000_000, 64), "embedding/embeddings")
    rows.assign(rows.read_value())                  # complete, [1000000, 64], sorted by id
    saved_variables(model)                          # model.variables, with Rows in place of parts

A checkpoint has the rows of a table in the order of their ids, so it does not depend on the number
of parts. It is written and read in pieces, over the methods of FixedTable:

    table = FixedTable(rows, {"accumulator": slots}, changed)
    table.values_of(ids)                            # of any ids, from all parts
    table.take_changed_ids({}, step)                # since the last call
"""

import collections
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system.compat.autograph import no_autograph
from data.system.compat.keras_layers import all_layers
from strategies.base import value_of
from trainer.embeddings.dynamic import DynamicTable, values_of_parts
from trainer.embeddings.dynamic_part import copies_of
from trainer.embeddings.optimizers import gather_rows
from trainer.step.options import ConfigError

if TYPE_CHECKING:
    from trainer.embeddings.layer import ShardedEmbedding
    from trainer.learner import Learner


Item = TypeVar("Item", bound="keras.Variable | Rows | DynamicTable")


class Rows:
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


class FixedTable:
    """A table with a fixed number of rows, and its optimizer slots: what a checkpoint has of them.

    Ids are int64 [n], and values are by name: "rows" [n, width], and the names of the slots.

    Attributes:
        rows: The rows of all parts.
        slots: The slots of all parts, by name.
    """

    def __init__(
        self, rows: Rows, slots: Mapping[str, Rows], changed: Sequence[tf.Variable] = ()
    ) -> None:
        """`changed` has a variable for each part, bool [rows]: True if a step changed the row."""
        self.rows, self.slots = rows, dict(slots)
        self._variables = {"rows": rows.parts, **{n: slot.parts for n, slot in slots.items()}}
        self._changed = list(changed)
        ids = tf.TensorSpec([None], tf.int64)
        values = {
            name: tf.TensorSpec([None, *parts[0].shape[1:]], parts[0].dtype)
            for name, parts in self._variables.items()
        }
        self._values_in_graph = tf.function(self._values_of, input_signature=[ids])
        self._set_values_in_graph = tf.function(self._set_values, input_signature=[ids, values])
        self._changed_in_graph = tf.function(self._take_changed_ids, input_signature=[])

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of all parts, without the marks."""
        return [part for parts in self._variables.values() for part in parts]

    @property
    def value_names(self) -> list[str]:
        """The names of what `values_of` returns."""
        return list(self._variables)

    @property
    def row_bytes(self) -> int:
        """The bytes of the values of one id."""
        firsts = [parts[0] for parts in self._variables.values()]
        return sum(first.dtype.size * math.prod(first.shape[1:]) for first in firsts)

    def make_graphs(self) -> None:
        """Traces the graphs that a run needs. Under ps all tasks must answer meanwhile."""
        self._values_in_graph.get_concrete_function()
        self._set_values_in_graph.get_concrete_function()
        if self._changed:
            self._changed_in_graph.get_concrete_function()

    def index(self) -> dict[str, npt.NDArray[np.int64]]:
        """Nothing: the ids are known."""
        return {}

    def set_index(self, index: Mapping[str, npt.NDArray[np.int64]], step: int = 0) -> None:
        """Does nothing."""

    def ids(self, index: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """All ids."""
        return np.arange(self.rows.shape[0], dtype=np.int64)

    def take_changed_ids(
        self, index: Mapping[str, npt.NDArray[np.int64]], step: int
    ) -> npt.NDArray[np.int64]:
        """The ids of rows that were changed since the last call, sorted; `step` steps are done."""
        if not self._changed:  # The table is not trained.
            return np.zeros([0], np.int64)
        return np.sort(value_of(self._changed_in_graph()))

    def values_of(self, ids: npt.NDArray[np.int64]) -> dict[str, tf.Tensor]:
        """The values of `ids`."""
        values: dict[str, tf.Tensor] = self._values_in_graph(tf.constant(ids))
        return values

    def set_values(self, ids: npt.NDArray[np.int64], values: Mapping[str, tf.Tensor]) -> None:
        """Sets the values of different `ids`."""
        self._set_values_in_graph(tf.constant(ids), dict(values))

    @no_autograph
    def _values_of(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        num_parts = len(self.rows.parts)

        def of_part(index: int, places: tf.Tensor) -> Mapping[str, tf.Tensor]:
            with tf.device(self.rows.parts[index].device):
                variables = self._variables.items()
                return {name: gather_rows(parts[index], places) for name, parts in variables}

        find = [partial(of_part, index) for index in range(num_parts)]
        return values_of_parts(ids, ids // num_parts, find)

    @no_autograph
    def _set_values(self, ids: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
        num_parts = len(self.rows.parts)
        for index in range(num_parts):
            mine = tf.equal(ids % num_parts, index)
            places = tf.boolean_mask(ids, mine) // num_parts
            for name, parts in self._variables.items():
                of_mine = tf.boolean_mask(values[name], mine)
                for copy in copies_of(parts[index]):
                    with tf.device(copy.device):
                        tf.raw_ops.ResourceScatterUpdate(
                            resource=copy.handle, indices=places, updates=tf.identity(of_mine)
                        )

    @no_autograph
    def _take_changed_ids(self) -> tf.Tensor:
        found = []
        for index, variable in enumerate(self._changed):
            first, *others = copies_of(variable)
            with tf.device(first.device):
                found.append(tf.where(first.read_value())[:, 0] * len(self._changed) + index)
            for copy in (first, *others):
                with tf.device(copy.device):
                    copy.assign(tf.zeros_like(copy))
        return tf.concat(found, axis=0)


def tables_of(model: keras.Model) -> "list[ShardedEmbedding]":
    """The layers of `model` that are split, also those inside of other layers."""
    # Not isinstance of the layer: layer.py imports this module.
    layers = all_layers(model, include_self=False)
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
    """Gives a model that is not trained any more the values with which `learner` evaluates.

    Variables are matched by their paths: `model` may have fewer, if it is built for predictions. Or
    by their order, if a config file numbers its layers itself, but makes the same variables.

    Raises ConfigError if `model` has another variable.
    """
    arrays, weights = _arrays_of(model), learner.weights()
    for variable, place in zip(arrays, _places(arrays, _arrays_of(learner.model)), strict=True):
        variable.assign(weights[place])
    layers, trained = tables_of(model), [layer.table for layer in tables_of(learner.model)]
    places = _places([layer.table for layer in layers], trained)
    for layer, place in zip(layers, places, strict=True):
        if isinstance(table := trained[place], DynamicTable):
            layer.freeze(table.numpy())


def _arrays_of(model: keras.Model) -> list[keras.Variable | Rows]:
    return [entry for entry in saved_variables(model) if not isinstance(entry, DynamicTable)]


def _places(items: Sequence[Item], trained: Sequence[Item]) -> list[int]:
    """The place in `trained` of each of `items`."""
    keys, places = _keys(items), {key: place for place, key in enumerate(_keys(trained))}
    others = [path for path, number in keys if (path, number) not in places]
    if not others:
        return [places[key] for key in keys]
    kinds, needed = ([(tuple(i.shape), i.dtype) for i in side] for side in (items, trained))
    if kinds == needed:
        return list(range(len(trained)))
    raise ConfigError(
        f"build_model made other variables when it was called again: {', '.join(others)}. "
        "Make the same variables, of the same names, at each call."
    )


def _keys(items: Sequence[Item]) -> list[tuple[str, int]]:
    """The `path` of each item, and the number of items of this path before: it may occur twice."""
    counts: collections.Counter[str] = collections.Counter()
    keys = []
    for item in items:
        keys.append((item.path, counts[item.path]))
        counts[item.path] += 1
    return keys
