"""Table and Part: a table with its optimizer slots, in parts; a checkpoint copies it in pieces.

    part.add_slots(marks_changes=False)             # in the strategy's scope
    part.change(gradient, rate, step, factor=None)  # on the device of the part
    index = table.index()
    ids = table.ids(index)                          # all that have rows
    values = table.values_of(ids[:1000])            # from all parts

Ids are int64 [n]. Values are by name: "rows" [n, width], and the names of the slots, [n, ...]. A
checkpoint has them in the order of the ids, so it does not depend on the number of parts.
FixedTable and FixedPart have a fixed number of rows; dynamic.py has the others.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from data.system.compat.autograph import no_autograph
from strategies.base import value_of
from strategies.locks import free
from strategies.tables import making_part
from trainer.embeddings.optimizers import TableUpdate, capacity, gather_rows, scatter_rows
from trainer.learner.variables import SplitVariable
from trainer.step.loss_scale import all_finite

if TYPE_CHECKING:
    from trainer.embeddings.layer import ShardedEmbedding

Ids: TypeAlias = npt.NDArray[np.int64]
# All ids of a table: "ids" [m], sorted; "use" [m, 3]: 1 if the id has a row, its sightings, its
# last step (0 if that is not kept). Empty if the number of rows is fixed.
Index: TypeAlias = Mapping[str, Ids]
Graph: TypeAlias = tf.types.experimental.PolymorphicFunction

IDS = tf.TensorSpec([None], tf.int64)

# Rows that `Part.is_finite` reads at a time.
_ROWS = 1 << 18


class Part:
    """A part of a table, on one device. The base class of FixedPart and DynamicPart.

    Attributes:
        rows: The rows.
        variables: The rows and the optimizer slots, by the names of the values.
        changed: The marks of changed rows, bool; None if there are none.
        marks_changes: True if updates mark the rows that they change.
    """

    def __init__(
        self, layer: "ShardedEmbedding", index: int, rows: tf.Variable, num_rows: int
    ) -> None:
        """`num_rows` is 0 if it is not fixed; a dry run makes `rows` without rows."""
        self.rows = rows
        self._layer, self._index, self._num_rows = layer, index, num_rows
        self.forget_slots()

    def forget_slots(self) -> None:
        """Leaves only the rows: a new Learner of the same model makes its own slots."""
        self.variables = {"rows": self.rows}
        self.changed: tf.Variable | None = None
        self.marks_changes = False

    def add_slots(self, *, marks_changes: bool) -> None:
        """Makes the optimizer slots; called in the strategy's scope.

        With `marks_changes` updates mark the rows that they change, for checkpoints that have only
        these rows.
        """
        self._layer.is_trained, self.marks_changes = True, marks_changes
        for name, (value, is_of_row) in self._layer.optimizer.initial_slots.items():
            inner = () if is_of_row else (self._layer.width,)
            self.variables[name] = self._new_variable(name, value, inner, self.rows.dtype)

    def _new_variable(
        self, name: str, value: float | bool, inner: tuple[int, ...], dtype: tf.DType
    ) -> tf.Variable:
        """Makes a variable beside the rows with `value` everywhere, [rows, *inner]."""
        made = [self.rows.shape[0], *inner]
        with making_part(self._index, (self._num_rows, *inner), beside=self.rows):
            return tf.Variable(
                lambda: tf.fill(made, tf.constant(value, dtype)), trainable=False, name=name
            )

    def lookup(self, ids: tf.Tensor, *, training: bool) -> tf.Tensor:
        """The rows of `ids`, int64 [n]: [n, width]. The gradient is what `change` takes."""
        raise NotImplementedError

    def change(
        self,
        gradient: tf.IndexedSlices,
        rate: tf.Tensor,
        step: tf.Tensor,
        *,
        factor: tf.Tensor | None,
    ) -> tf.Tensor:
        """Applies `gradient`, the sum of all replicas, to this part.

        `rate` is the learning rate of the config, which contains `factor`, the factor of the
        schedule; `step` is the number of steps done. Returns a tensor computed after the update.
        """
        layer = self._layer
        if layer.optimizer.learning_rate is not None:
            rate = tf.constant(layer.optimizer.learning_rate, tf.float32)
            rate = rate if factor is None else rate * factor
        with tf.device(self.rows.device):
            ids, place = tf.unique(gradient.indices)
            rows = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(ids))
            places, rows, held = self._admitted(ids, rows, step)
            if layer.l2:
                rows += 2 * layer.l2 * gather_rows(self.rows, places)
            if layer.clip_norm:
                rows = tf.clip_by_norm(rows, layer.clip_norm, axes=[1])
            rate = tf.cast(rate, rows.dtype)
            update = TableUpdate(self.rows, self.variables, places, rows, rate, step)
            done = layer.optimizer.update(update)
            with tf.control_dependencies([done]):
                if self.changed is not None:
                    # After the change: a checkpoint that finds no mark has the row from before.
                    done = scatter_rows(self.changed, places, tf.ones_like(places, tf.bool))
            with tf.control_dependencies([free(held, done)]):
                return tf.identity(rate)

    def _admitted(
        self, ids: tf.Tensor, rows: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns the places of `ids` of a gradient that have rows, `rows` of these, and locks."""
        return ids, rows, []

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """The places of `ids` of this part, which have rows."""
        raise NotImplementedError

    def values_of(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        """The values of `ids` of this part, which have rows."""
        with tf.device(self.rows.device):
            places = self.find(ids)
            return {name: gather_rows(v, places) for name, v in self.variables.items()}

    def is_finite(self) -> bool:
        """Returns True if all rows are finite. Reads a few at a time: a part may be large."""
        with tf.device(self.rows.device):
            num_rows = int(capacity(self.rows))
            return all(
                all_finite([gather_rows(self.rows, tf.range(start, min(start + _ROWS, num_rows)))])
                for start in range(0, num_rows, _ROWS)
            )

    def set_values(self, ids: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
        """Sets the values of `ids` of this part, which have rows."""
        with tf.device(self.rows.device):
            places = self.find(ids)
            for name, variable in self.variables.items():
                scatter_rows(variable, places, tf.identity(values[name]))


class Table(SplitVariable):
    """The base class of FixedTable and DynamicTable."""

    _parts: Sequence[Part]  # Part p of P has the rows of ids with id mod P = p.
    _graphs: Sequence[Graph] = ()  # Graphs that a derived class needs, with their signatures.

    def index(self) -> dict[str, Ids]:
        """Returns all ids, sorted, and their use; empty if the number of rows is fixed."""
        return {}

    def set_index(self, index: Index, step: int = 0) -> None:
        """Replaces all ids by those of `index`, which was saved at `step`; their rows are zeros.

        Does nothing if the number of rows is fixed.
        """

    def ids(self, index: Index) -> Ids:
        """Returns the ids of `index` that have rows, sorted."""
        return ids_with_rows(index, self.shape[0])

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

    def _set_values(self, ids: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
        for index, part in enumerate(self._parts):
            mine = tf.equal(ids % len(self._parts), index)
            of_mine = {name: tf.boolean_mask(value, mine) for name, value in values.items()}
            part.set_values(tf.boolean_mask(ids, mine), of_mine)

    @functools.cached_property
    def _values_in_graph(self) -> Graph:
        find = [part.values_of for part in self._parts]
        return tf.function(no_autograph(lambda ids: of_parts(ids, find)), input_signature=[IDS])

    @functools.cached_property
    def _set_values_in_graph(self) -> Graph:
        """Not made with the table, which gets its slots later."""
        values = {
            name: tf.TensorSpec([None, *variable.shape[1:]], variable.dtype)
            for name, variable in self._parts[0].variables.items()
        }
        return tf.function(no_autograph(self._set_values), input_signature=[IDS, values])


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


def ids_with_rows(index: Index, num_rows: int) -> Ids:
    """The ids that have rows; without an index those of a table with `num_rows` rows."""
    return index["ids"][index["use"][:, 0] == 1] if index else np.arange(num_rows)


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
