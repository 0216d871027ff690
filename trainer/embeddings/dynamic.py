"""A table without a fixed number of rows: any int64 id may get a row, and may lose it again.

    part = DynamicPart(layer, index, num_parts)     # in the strategy's scope; id mod P is `index`
    rows = part.lookup(ids, training=True)          # on a worker; gathered on the server
    places = part.places(rows, variables, ids, step)    # in the update; admits ids
    table = DynamicTable([part, ...], layer)
    table.numpy()                                   # sorted by id
    table.evict(step)                               # no step may be in flight

A hash table maps an id to its place (the index of its row), its sightings (the number of steps that
used it), and the last of these steps. An id without a row has place -1. Rows and optimizer slots
are variables that grow. All changes are made on the server of the part:

| when | what |
| --- | --- |
| in the update of a step | sightings are counted; ids with enough of them get their initial row |
| between steps, by a hook | ids that were not used for long are removed |

So all decisions depend on steps and ids only, and not on the order in which workers answer.

TensorFlow's MutableDenseHashTable is not used: after removals an insertion may add an id twice.
"""

import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import record

from data.autograph import no_autograph
from strategies import locks
from strategies.base import value_of
from strategies.tables import making_part
from trainer.embeddings.initial import initial_rows
from trainer.embeddings.optimizers import Slots, capacity, gather_rows, handle_of

if TYPE_CHECKING:
    from trainer.embeddings.layer import ShardedEmbedding

log = logging.getLogger(__name__)

# The rows for which a new part has memory. Later it grows by half of its size.
_FIRST_ROWS = 1024

# Values of an id in the hash table, int64: its place, its sightings, its last step.
_NUM_VALUES = 3
_UNKNOWN = (-1, 0, 0)

_numbers = itertools.count()

# The values of a table, by name: "ids" int64 [m], sorted; "use" int64 [m, 3]: 1 if the id has a
# row, its sightings, its last step (0 if that is not kept); "rows" [n, width], optimizer slots
# [n, ...] of ids with rows.
Values = Mapping[str, npt.NDArray[np.generic]]


class Counts(NamedTuple):
    """What a part counts, int64."""

    rows: int  # Rows that are used, with gaps: the next row gets this place.
    new: int  # Ids that got a row.
    evicted: int  # Ids that lost their row.


class _Index(NamedTuple):
    """The resources of one copy of a part."""

    ids: tf.Tensor  # The hash table.
    locks: list[tf.Tensor]


class DynamicPart:
    """The ids of a table of which id mod P is `index`.

    Attributes:
        rows: The rows, [capacity, width]. Its static shape is that of a new part: a worker process
            aborts when it is sent the handle of a variable with an unknown dimension. So the value
            is only read by `gather_rows`, and its size by `capacity`.
        counts: Counts, int64 [3].
        marks_changes: True if the last step of each id is kept, also if no id is evicted.
    """

    def __init__(self, layer: "ShardedEmbedding", index: int, num_parts: int) -> None:
        """Makes the variables; called in the strategy's scope."""
        self._layer, self._index, self._num_parts = layer, index, num_parts
        self.marks_changes = False
        width, dtype = layer.width, tf.as_dtype(layer.variable_dtype)
        self.slots: dict[str, tf.Variable] = {}
        with making_part(index, (0, width)):
            self.rows = tf.Variable(
                lambda: tf.zeros([_FIRST_ROWS, width], dtype),
                name=f"{layer.name}/embeddings_{index}",
            )
        extended = tf.distribute.get_strategy().extended
        with extended.colocate_vars_with(self.rows), making_part(index, (len(Counts._fields),)):
            self.counts = tf.Variable(
                tf.zeros([len(Counts._fields)], tf.int64), trainable=False, name="counts"
            )
        self._indices = {
            copy.handle.device: _index_on(copy.device) for copy in copies_of(self.rows)
        }

    @property
    def keeps_last(self) -> bool:
        """True if the last step of an id with a row is kept, and not that in which it got the row.

        To keep it costs a write of the hash table for each id that a step uses.
        """
        return self._layer.evicts or self.marks_changes

    def add_slots(self, initial: Slots) -> Mapping[str, tf.Variable]:
        """Makes the optimizer slots; called in the strategy's scope. Returns them by name."""
        extended = tf.distribute.get_strategy().extended
        for name, (_, is_of_row) in initial.items():
            inner = () if is_of_row else (self._layer.width,)
            with extended.colocate_vars_with(self.rows), making_part(self._index, (0, *inner)):
                self.slots[name] = tf.Variable(
                    lambda inner=inner: tf.zeros([_FIRST_ROWS, *inner]),
                    trainable=False,
                    name=name,
                )
        return self.slots

    def lookup(self, ids: tf.Tensor, *, training: bool) -> tf.Tensor:
        """The rows of `ids`, int64 [n]: [n, width]. The gradient is (ids, gradients of rows).

        An id without a row has zeros. But if this step will admit the id, it has its initial row.
        """
        handle = handle_of(self.rows)
        with record.stop_recording():
            rows = self._rows_of(ids, training)
        # The gradient has ids in place of places: an id may have no place yet.
        record.record_operation(
            "ShardedEmbedding", [rows], [handle], lambda upstream: [tf.IndexedSlices(upstream, ids)]
        )
        return rows

    def _rows_of(self, ids: tf.Tensor, training: bool) -> tf.Tensor:
        layer = self._layer
        place, sightings, _ = self._find(self._indices[handle_of(self.rows).device], ids)
        found = gather_rows(self.rows, tf.maximum(place, 0))
        rows = tf.where((place >= 0)[:, tf.newaxis], found, tf.zeros_like(found))
        if not training:
            return rows
        is_new = (place < 0) & (sightings + 1 >= layer.admit_after)
        new = tf.where(is_new)
        initial = initial_rows(tf.gather_nd(ids, new), layer.width, layer.initializer, rows.dtype)
        return tf.tensor_scatter_nd_update(rows, new, initial)

    def take_lock(self, rows: tf.Variable, waited_for: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Takes the lock of updates of the copy `rows` when `waited_for` are computed."""
        return locks.take(self._indices[rows.handle.device].locks, waited_for)

    def places(
        self,
        rows: tf.Variable,
        colocated: Mapping[str, tf.Variable],
        ids: tf.Tensor,
        step: tf.Tensor,
    ) -> tf.Tensor:
        """The places of different `ids`, int64 [n], -1 without a row, after one more sighting.

        Gives rows to ids that have enough sightings now. `rows` and `colocated` (slots, and
        "counts") are copies of this part's variables; `step` is the number of steps done before.
        """
        layer, index = self._layer, self._indices[rows.handle.device]
        place, sightings, last = self._find(index, ids)
        sightings += 1
        is_new = (place < 0) & (sightings >= layer.admit_after)
        new = tf.where(is_new)
        num_new = tf.shape(new, tf.int64)[0]
        counts = colocated["counts"]
        first = tf.raw_ops.ReadVariableOp(resource=counts.handle, dtype=tf.int64)[0]
        new_places = first + tf.range(num_new)
        new_ids = tf.gather_nd(ids, new)
        initial = {"": initial_rows(new_ids, layer.width, layer.initializer, rows.dtype)}
        for name, (value, is_of_row) in layer.optimizer.initial_slots.items():
            inner = [] if is_of_row else [layer.width]
            initial[name] = tf.fill([num_new, *inner], tf.constant(value))
        written = []
        for name, values in initial.items():
            variable = colocated[name] if name else rows
            with tf.control_dependencies([_grown(variable, first + num_new)]):
                written.append(_scattered(variable, new_places, values))
        # The ids come last: a worker that finds an id finds its row, too.
        with _after(*written):
            more = tf.stack([num_new, num_new, tf.zeros_like(num_new)])
            counted = tf.raw_ops.AssignAddVariableOp(resource=counts.handle, value=more)
        is_changed = tf.ones_like(is_new) if self.keeps_last else place < 0
        place = tf.tensor_scatter_nd_update(place, new, new_places)
        # An update of an asynchronous worker may come late.
        last = tf.maximum(last, _int64(step) + 1)
        values = tf.stack([place, sightings, last], axis=1)
        with _after(counted):
            inserted = tf.raw_ops.LookupTableInsertV2(
                table_handle=index.ids,
                keys=tf.boolean_mask(ids, is_changed),
                values=tf.boolean_mask(values, is_changed),
            )
        with _after(inserted):
            return tf.identity(place)

    def index(self) -> tuple[tf.Tensor, tf.Tensor]:
        """All ids, int64 [m], in any order, and their use, int64 [m, 3], as in `Values`."""
        rows = copies_of(self.rows)[0]
        with tf.device(rows.device):
            ids, found = _exported(self._indices[rows.handle.device])
            has_row = tf.cast(found[:, :1] >= 0, tf.int64)
            last = found[:, 2:] if self.keeps_last else found[:, 2:] * (1 - has_row)
            return ids, tf.concat([has_row, found[:, 1:2], last], axis=1)

    def values_of(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        """The rows and slots of `ids`, which have rows, by name."""
        rows = copies_of(self.rows)[0]
        with tf.device(rows.device):
            place, _, _ = self._find(self._indices[rows.handle.device], ids)
            return {name: gather_rows(v, place) for name, v in self._variables().items()}

    def set_index(self, ids: tf.Tensor, use: tf.Tensor) -> None:
        """Replaces all ids by those of `ids` that belong to this part; their rows are zeros."""
        mine = tf.equal(ids % self._num_parts, self._index)
        ids, use = tf.boolean_mask(ids, mine), tf.boolean_mask(use, mine)
        number = tf.reduce_sum(use[:, 0])
        size = tf.maximum(number, _FIRST_ROWS)
        place = tf.where(use[:, 0] > 0, tf.cumsum(use[:, 0]) - 1, -1)
        in_hash = tf.concat([place[:, tf.newaxis], use[:, 1:]], axis=1)
        for variable in self._variables().values():
            for copy in copies_of(variable):
                with tf.device(copy.device):
                    zeros = tf.zeros([size, *copy.shape[1:]], copy.dtype)
                    tf.raw_ops.AssignVariableOp(
                        resource=copy.handle, value=zeros, validate_shape=False
                    )
        for rows, counts in zip(copies_of(self.rows), copies_of(self.counts), strict=True):
            index = self._indices[rows.handle.device]
            with tf.device(rows.device):
                tf.raw_ops.LookupTableRemoveV2(table_handle=index.ids, keys=_exported(index)[0])
                tf.raw_ops.LookupTableInsertV2(
                    table_handle=index.ids, keys=tf.identity(ids), values=tf.identity(in_hash)
                )
                counts.assign(tf.stack([number, 0, 0]))

    def set_values(self, ids: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
        """Sets the rows and slots of those of `ids`, which have rows, that belong to this part."""
        mine = tf.equal(ids % self._num_parts, self._index)
        ids = tf.boolean_mask(ids, mine)
        of_mine = {name: tf.boolean_mask(value, mine) for name, value in values.items()}
        copies = [copies_of(variable) for variable in self._variables().values()]
        for of_device in zip(*copies, strict=True):
            rows = of_device[0]
            with tf.device(rows.device):
                place, _, _ = self._find(self._indices[rows.handle.device], ids)
                for name, variable in zip(self._variables(), of_device, strict=True):
                    _scattered(variable, place, tf.identity(of_mine[name]))

    def _variables(self) -> dict[str, tf.Variable]:
        return {"rows": self.rows, **self.slots}

    def last_steps(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The last steps of ids with rows, int64 [k], and the numbers of these ids, int64 [k]."""
        rows = copies_of(self.rows)[0]
        with tf.device(rows.device):
            _, found = _exported(self._indices[rows.handle.device])
            steps = tf.boolean_mask(found[:, 2], found[:, 0] >= 0)
            steps, _, numbers = tf.unique_with_counts(steps, tf.int64)
            return steps, numbers

    def evict(self, step: tf.Tensor) -> None:
        """Removes ids that neither `step` nor a later one used. The last rows fill the gaps."""
        variables = [copies_of(v) for v in (self.rows, self.counts, *self.slots.values())]
        for rows, counts, *slots in zip(*variables, strict=True):
            index = self._indices[rows.handle.device]
            with tf.device(rows.device):
                ids, found = _exported(index)
                is_kept = found[:, 2] >= step
                has_row = found[:, 0] >= 0
                keeps_row = is_kept & has_row
                number = tf.math.count_nonzero(keeps_row)
                is_moved = keeps_row & (found[:, 0] >= number)
                stays = tf.boolean_mask(found[:, 0], keeps_row & ~is_moved)
                is_used = tf.scatter_nd(
                    stays[:, tf.newaxis], tf.ones_like(stays), number[tf.newaxis]
                )
                gaps = tf.where(tf.equal(is_used, 0))[:, 0]
                moved = tf.boolean_mask(found, is_moved)
                written = [_scattered(v, gaps, gather_rows(v, moved[:, 0])) for v in (rows, *slots)]
                with _after(*written):
                    tf.raw_ops.LookupTableRemoveV2(
                        table_handle=index.ids, keys=tf.boolean_mask(ids, ~is_kept)
                    )
                    tf.raw_ops.LookupTableInsertV2(
                        table_handle=index.ids,
                        keys=tf.boolean_mask(ids, is_moved),
                        values=tf.concat([gaps[:, tf.newaxis], moved[:, 1:]], axis=1),
                    )
                    before = counts.read_value()
                    evicted = tf.math.count_nonzero(has_row) - number
                    counts.assign(tf.stack([number, before[1], before[2] + evicted]))

    def _find(self, index: _Index, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=index.ids, keys=ids, default_value=tf.constant(_UNKNOWN, tf.int64)
        )
        place, sightings, last = tf.unstack(
            tf.ensure_shape(found, [*ids.shape, _NUM_VALUES]), axis=1
        )
        return place, sightings, last


class DynamicTable:
    """The parts of a table, with their optimizer slots. Its methods are those of FixedTable.

    Attributes:
        parts: The variables with the rows of each part.
        shape: (None, width).
        path: The name of the table.
        dtype: The name of the type of the values.
    """

    def __init__(self, parts: Sequence[DynamicPart], layer: "ShardedEmbedding") -> None:
        self.dynamic_parts = list(parts)
        self.parts = [part.rows for part in parts]
        self.layer = layer
        self.shape = (None, layer.width)
        self.path = self.name = f"{layer.path}/embeddings"
        self.dtype: str = parts[0].rows.dtype.name
        self._has_warned = False
        self._saved_step = 0
        step = tf.TensorSpec([], tf.int64)
        ids = tf.TensorSpec([None], tf.int64)
        use = tf.TensorSpec([None, _NUM_VALUES], tf.int64)
        self._last_steps_in_graph = tf.function(self._last_steps, input_signature=[])
        self._evict_in_graph = tf.function(self._evict, input_signature=[step])
        self._index_in_graph = tf.function(self._joined_index, input_signature=[])
        self._values_in_graph = tf.function(self._values_of, input_signature=[ids])
        self._set_index_in_graph = tf.function(self._set_index, input_signature=[ids, use])
        # Slots come after the layer is made.
        self._set_values_in_graph: tf.types.experimental.PolymorphicFunction | None = None

    @property
    def slot_names(self) -> list[str]:
        """The names of the optimizer slots."""
        return list(self.dynamic_parts[0].slots)

    @property
    def value_names(self) -> list[str]:
        """The names of what `values_of` returns."""
        return ["rows", *self.slot_names]

    @property
    def row_bytes(self) -> int:
        """The bytes of the values of one id."""
        part = self.dynamic_parts[0]
        return sum(
            variable.dtype.size * math.prod(variable.shape[1:])
            for variable in (part.rows, *part.slots.values())
        )

    def index(self) -> dict[str, npt.NDArray[np.int64]]:
        """All ids, sorted, and their use, as in `Values`."""
        ids, use = map(value_of, self._index_in_graph())
        order = np.argsort(ids)
        return {"ids": ids[order], "use": use[order]}

    def ids(self, index: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """The ids of `index` that have rows."""
        found: npt.NDArray[np.int64] = index["ids"][index["use"][:, 0] == 1]
        return found

    def take_changed_ids(
        self, index: Mapping[str, npt.NDArray[np.int64]], step: int
    ) -> npt.NDArray[np.int64]:
        """The ids with rows that were used since the last call, sorted; `step` steps are done."""
        has_row, last_step = index["use"][:, 0] == 1, index["use"][:, 2]
        found: npt.NDArray[np.int64] = index["ids"][has_row & (last_step > self._saved_step)]
        self._saved_step = step
        return found

    def values_of(self, ids: npt.NDArray[np.int64]) -> dict[str, tf.Tensor]:
        """The values of `ids`, [n], which have rows, by name: [n, ...]."""
        values: dict[str, tf.Tensor] = self._values_in_graph(tf.constant(ids))
        return values

    def set_index(self, index: Mapping[str, npt.NDArray[np.int64]], step: int = 0) -> None:
        """Replaces all ids by those of `index`; their rows are zeros.

        Rows whose last use was not kept count as used at `step`: otherwise rows in use would be
        removed if a run is resumed with other arguments of the layer.
        """
        use, unknown = index["use"], (index["use"][:, 0] == 1) & (index["use"][:, 2] == 0)
        if self.dynamic_parts[0].keeps_last and unknown.any():
            use = np.where(unknown[:, np.newaxis] & (np.arange(_NUM_VALUES) == 2), step, use)
            if self.layer.evicts:
                log.warning(
                    "%s: the checkpoint does not say when %s of its rows were last used, because "
                    "no id was removed so far. They count as used at its step, %s.",
                    self.path,
                    f"{np.count_nonzero(unknown):,}",
                    f"{step:,}",
                )
        self._set_index_in_graph(tf.constant(index["ids"]), tf.constant(use))

    def set_values(self, ids: npt.NDArray[np.int64], values: Mapping[str, tf.Tensor]) -> None:
        """Sets the values of `ids`, [n], which have rows."""
        self._setting_graph()(tf.constant(ids), dict(values))

    def numpy(self) -> dict[str, npt.NDArray[np.generic]]:
        """All ids and their rows, sorted by id, as in `Values`."""
        index = self.index()
        values = self.values_of(self.ids(index))
        return {**index, **{name: value_of(value) for name, value in values.items()}}

    def counts(self) -> Counts:
        """The sums of all parts."""
        counts = [value_of(copies_of(part.counts)[0]) for part in self.dynamic_parts]
        return Counts(*np.sum(counts, axis=0).tolist())

    def make_graphs(self) -> None:
        """Traces the graphs that a run needs. Under ps all tasks must answer meanwhile."""
        self._last_steps_in_graph.get_concrete_function()
        self._evict_in_graph.get_concrete_function()
        self._index_in_graph.get_concrete_function()
        self._values_in_graph.get_concrete_function()
        self._set_index_in_graph.get_concrete_function()
        self._setting_graph().get_concrete_function()

    def evict(self, step: int) -> None:
        """Removes ids, as the layer's arguments say; `step` steps are done, and none is in flight.

        With `max_rows` ids of the same last step stay, or go, together. So the result does not
        depend on an order of ids or parts. Those of the last step stay, however many they are.
        """
        first = 0  # Ids whose last step is before are removed.
        if self.layer.evict_after:
            first = max(0, step + 1 - self.layer.evict_after)
        if self.layer.max_rows:
            first = max(first, self._first_within(self.layer.max_rows, first))
        if first:
            self._evict_in_graph(tf.constant(first, tf.int64))

    def _first_within(self, max_rows: int, first: int) -> int:
        """The lowest step such that at most `max_rows` ids with rows have it, or a later one."""
        found, numbers = map(value_of, self._last_steps_in_graph())
        steps, places = np.unique(found, return_inverse=True)
        of_steps = np.zeros(len(steps), np.int64)
        np.add.at(of_steps, places, numbers)
        since = np.cumsum(of_steps[::-1])[::-1]
        beyond = steps[since > max_rows]
        if not len(beyond):
            return 0
        if beyond[-1] < steps[-1]:
            return int(beyond[-1]) + 1
        if steps[-1] >= first and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: step %d alone used %d ids with rows, more than max_rows=%d. They stay. Set "
                "max_rows to several times the different ids of a batch.",
                self.path,
                steps[-1],
                of_steps[-1],
                max_rows,
            )
        return int(steps[-1])

    @no_autograph
    def _last_steps(self) -> tuple[tf.Tensor, tf.Tensor]:
        found = [part.last_steps() for part in self.dynamic_parts]
        steps, numbers = (tf.concat(values, axis=0) for values in zip(*found, strict=True))
        return steps, numbers

    @no_autograph
    def _evict(self, step: tf.Tensor) -> None:
        for part in self.dynamic_parts:
            part.evict(step)

    def _setting_graph(self) -> tf.types.experimental.PolymorphicFunction:
        if self._set_values_in_graph is None:
            part = self.dynamic_parts[0]
            values = {
                name: tf.TensorSpec([None, *variable.shape[1:]], variable.dtype)
                for name, variable in {"rows": part.rows, **part.slots}.items()
            }
            signature = [tf.TensorSpec([None], tf.int64), values]
            self._set_values_in_graph = tf.function(self._set_values, input_signature=signature)
        return self._set_values_in_graph

    @no_autograph
    def _joined_index(self) -> tuple[tf.Tensor, tf.Tensor]:
        found = [part.index() for part in self.dynamic_parts]
        ids, use = (tf.concat(values, axis=0) for values in zip(*found, strict=True))
        return ids, use

    @no_autograph
    def _values_of(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        return values_of_parts(ids, ids, [part.values_of for part in self.dynamic_parts])

    @no_autograph
    def _set_index(self, ids: tf.Tensor, use: tf.Tensor) -> None:
        for part in self.dynamic_parts:
            part.set_index(ids, use)

    @no_autograph
    def _set_values(self, ids: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
        for part in self.dynamic_parts:
            part.set_values(ids, values)


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


def _index_on(device: str) -> _Index:
    name = f"ids-{os.getpid()}-{time.time_ns()}-{next(_numbers)}"
    with tf.device(device):
        ids = tf.raw_ops.MutableHashTableOfTensorsV2(
            key_dtype=tf.int64, value_dtype=tf.int64, value_shape=[_NUM_VALUES], shared_name=name
        )
        return _Index(ids, locks.make_locks(name))


def _exported(index: _Index) -> tuple[tf.Tensor, tf.Tensor]:
    """All ids, int64 [m], and their values, int64 [m, 3]."""
    ids, values = tf.raw_ops.LookupTableExportV2(
        table_handle=index.ids, Tkeys=tf.int64, Tvalues=tf.int64
    )
    return tf.ensure_shape(ids, [None]), tf.ensure_shape(values, [None, _NUM_VALUES])


def copies_of(variable: tf.Variable) -> list[tf.Variable]:
    """The copies of `variable` in this process."""
    values = getattr(variable, "values", None)
    return [variable] if values is None or callable(values) else list(values)


def _grown(variable: tf.Variable, needed: tf.Tensor) -> tf.Tensor:
    """Grows `variable` to `needed` rows, or by half of its size. Returns a tensor after that."""
    size = capacity(variable)

    def grow() -> tf.Tensor:
        larger = _padded(gather_rows(variable, tf.range(size)), tf.maximum(needed, size * 3 // 2))
        assigned = tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=larger, validate_shape=False
        )
        with _after(assigned):
            return tf.constant(True)

    return tf.cond(needed > size, grow, lambda: tf.constant(False))


def _padded(values: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`values`, [n, ...], with zeros up to `size` rows."""
    missing = size - tf.shape(values, tf.int64)[0]
    return tf.pad(values, [[0, missing], *[[0, 0]] * (len(values.shape) - 1)])


def _scattered(variable: tf.Variable, places: tf.Tensor, values: tf.Tensor) -> tf.Operation | None:
    return tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=places, updates=values
    )


def _after(*ops: tf.Operation | None) -> contextlib.AbstractContextManager[None]:
    """Ops that are made inside come after `ops`; those of eager code are None."""
    after: contextlib.AbstractContextManager[None]
    after = tf.control_dependencies([op for op in ops if op is not None])
    return after


def _int64(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int64)
