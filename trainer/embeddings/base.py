"""Table: a table with its optimizer slots, as a checkpoint reads and writes it, in pieces.

    index = table.index()
    ids = table.ids(index)                          # all that have rows
    values = table.values_of(ids[:1000])            # from all parts

Ids are int64 [n]. Values are by name: "rows" [n, width], and the names of the slots, [n, ...].
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system.compat.autograph import no_autograph

Ids: TypeAlias = npt.NDArray[np.int64]
# "ids" and "use" of dynamic.Values. Empty if the number of rows is fixed.
Index: TypeAlias = Mapping[str, Ids]
Graph: TypeAlias = tf.types.experimental.PolymorphicFunction

IDS = tf.TensorSpec([None], tf.int64)


class Table:
    """The base class of FixedTable and DynamicTable.

    Attributes:
        part_variables: The variables of the first part, by the names of the values.
    """

    part_variables: Mapping[str, tf.Variable]

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
        self._values_in_graph.get_concrete_function()
        self._set_values_in_graph.get_concrete_function()

    @property
    def value_names(self) -> list[str]:
        """The names of the values."""
        return list(self.part_variables)

    @property
    def row_bytes(self) -> int:
        """The bytes of the values of one id."""
        variables = self.part_variables.values()
        return sum(variable.dtype.size * math.prod(variable.shape[1:]) for variable in variables)

    def values_of(self, ids: Ids) -> dict[str, tf.Tensor]:
        """Returns the values of `ids`, which have rows."""
        values: dict[str, tf.Tensor] = self._values_in_graph(tf.constant(ids))
        return values

    def set_values(self, ids: Ids, values: Mapping[str, tf.Tensor]) -> None:
        """Sets the values of different `ids`, which have rows."""
        self._set_values_in_graph(tf.constant(ids), dict(values))

    def _values_of(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        raise NotImplementedError

    def _set_values(self, ids: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
        raise NotImplementedError

    @functools.cached_property
    def _values_in_graph(self) -> Graph:
        return tf.function(no_autograph(self._values_of), input_signature=[IDS])

    @functools.cached_property
    def _set_values_in_graph(self) -> Graph:
        """Not made with the table: a dynamic table gets its slots later."""
        values = {
            name: tf.TensorSpec([None, *variable.shape[1:]], variable.dtype)
            for name, variable in self.part_variables.items()
        }
        return tf.function(no_autograph(self._set_values), input_signature=[IDS, values])


def values_of_parts(
    ids: tf.Tensor,
    places: tf.Tensor,
    find: Sequence[Callable[[tf.Tensor], Mapping[str, tf.Tensor]]],
) -> dict[str, tf.Tensor]:
    """The values of `ids`, [n]: part p of P finds those of the `places` with id mod P = p."""
    if len(find) == 1:
        return dict(find[0](places))
    owner = tf.cast(ids % len(find), tf.int32)
    positions = tf.dynamic_partition(tf.range(tf.size(ids)), owner, len(find))
    of_parts = tf.dynamic_partition(places, owner, len(find))
    found = [of_part(part) for of_part, part in zip(find, of_parts, strict=True)]
    return {
        name: tf.dynamic_stitch(positions, [values[name] for values in found]) for name in found[0]
    }
