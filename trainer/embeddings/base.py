"""Table: a table with its optimizer slots, as a checkpoint reads and writes it, in pieces.

    index = table.index()
    ids = table.ids(index)                          # all that have rows
    values = table.values_of(ids[:1000])            # from all parts

Ids are int64 [n]. Values are by name: "rows" [n, width], and the names of the slots, [n, ...].
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system.compat.autograph import no_autograph

Ids: TypeAlias = npt.NDArray[np.int64]
# "ids" and "use" of dynamic.Values. Empty if the number of rows is fixed.
Index: TypeAlias = Mapping[str, Ids]
Graph: TypeAlias = tf.types.experimental.PolymorphicFunction

IDS = tf.TensorSpec([None], tf.int64)


class Part(Protocol):
    """A part of a table; its methods compute on the device of the part."""

    @property
    def variables(self) -> Mapping[str, tf.Variable]:
        """The rows and the optimizer slots, by the names of the values."""

    def values_of(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        """The values of `ids` of this part, which have rows."""

    def set_values(self, ids: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
        """Sets the values of `ids` of this part, which have rows."""


class Table:
    """The base class of FixedTable and DynamicTable."""

    _parts: Sequence[Part]  # Part p of P has the rows of ids with id mod P = p.
    _graphs: Sequence[Graph] = ()  # Graphs that a derived class needs, with their signatures.

    def index(self) -> dict[str, Ids]:
        """Returns all ids, sorted, and their use."""
        raise NotImplementedError

    def set_index(self, index: Index, step: int = 0) -> None:
        """Replaces all ids by those of `index`, which was saved at `step`; their rows are zeros."""
        raise NotImplementedError

    def ids(self, index: Index) -> Ids:
        """Returns the ids of `index` that have rows, sorted."""
        raise NotImplementedError

    def take_changed_ids(self, index: Index, step: int) -> Ids:
        """Returns the ids whose rows changed since the last call, sorted; `step` steps are done."""
        raise NotImplementedError

    def make_graphs(self) -> None:
        """Traces the graphs that a run needs. Under ps all tasks must answer meanwhile."""
        for graph in (self._values_in_graph, self._set_values_in_graph, *self._graphs):
            graph.get_concrete_function()

    @property
    def value_names(self) -> list[str]:
        """The names of the values."""
        return list(self._parts[0].variables)

    @property
    def row_bytes(self) -> int:
        """The bytes of the values of one id."""
        variables = self._parts[0].variables.values()
        return sum(variable.dtype.size * math.prod(variable.shape[1:]) for variable in variables)

    def values_of(self, ids: Ids) -> dict[str, tf.Tensor]:
        """Returns the values of `ids`, which have rows."""
        values: dict[str, tf.Tensor] = self._values_in_graph(tf.constant(ids))
        return values

    def set_values(self, ids: Ids, values: Mapping[str, tf.Tensor]) -> None:
        """Sets the values of different `ids`, which have rows."""
        self._set_values_in_graph(tf.constant(ids), dict(values))

    def _values_of(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        found: dict[str, tf.Tensor] = of_parts(ids, [part.values_of for part in self._parts])
        return found

    def _set_values(self, ids: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
        for index, part in enumerate(self._parts):
            mine = tf.equal(ids % len(self._parts), index)
            of_mine = {name: tf.boolean_mask(value, mine) for name, value in values.items()}
            part.set_values(tf.boolean_mask(ids, mine), of_mine)

    @functools.cached_property
    def _values_in_graph(self) -> Graph:
        return tf.function(no_autograph(self._values_of), input_signature=[IDS])

    @functools.cached_property
    def _set_values_in_graph(self) -> Graph:
        """Not made with the table: a dynamic table gets its slots later."""
        values = {
            name: tf.TensorSpec([None, *variable.shape[1:]], variable.dtype)
            for name, variable in self._parts[0].variables.items()
        }
        return tf.function(no_autograph(self._set_values), input_signature=[IDS, values])


def of_parts(ids: tf.Tensor, find: Sequence[Callable[[tf.Tensor], Any]]) -> Any:  # Any: a nest.
    """What `find` returns for `ids`, [n]: tensors [n, ...]. Part p of P finds id mod P = p."""
    if len(find) == 1:
        return find[0](ids)
    # The remainder of a negative id is not negative, as in Python.
    owner = tf.cast(ids % len(find), tf.int32)
    positions = tf.dynamic_partition(tf.range(tf.size(ids)), owner, len(find))
    ids_of_parts = tf.dynamic_partition(ids, owner, len(find))
    found = [of_part(part) for of_part, part in zip(find, ids_of_parts, strict=True)]
    return tf.nest.map_structure(lambda *parts: tf.dynamic_stitch(positions, parts), *found)
