"""A part of a table of dynamic ids, on one server: the hash table, the rows, what changes them.

    part = DynamicPart(layer, index, num_parts)     # in the strategy's scope; id mod P is `index`
    rows = part.lookup(ids, training=True)          # on a worker; gathered on the server
    part.change(gradient, rate, step, factor=None)  # on the server; admits ids

dynamic.py says what is in the hash table, and when it changes. TensorFlow's MutableDenseHashTable
is not used: after removals an insertion may add an id twice.
"""

import hashlib
import math
import uuid
from typing import TYPE_CHECKING, NamedTuple

import keras
import tensorflow as tf
from typing_extensions import override

from data.split_mix import GAMMA
from data.system.compat.own_gradients import with_gradient
from strategies import locks
from strategies.tables import making_part
from trainer.embeddings.optimizers import capacity, gather_rows, scatter_rows
from trainer.embeddings.table import Part
from trainer.step.random_layers import split_mix, uint64

if TYPE_CHECKING:
    from trainer.embeddings.layer import ShardedEmbedding

# The rows for which a new part has memory. Later it grows by half of its size.
_FIRST_ROWS = 1024

# Values of an id in the hash table, int64: its place, its sightings, its last step.
NUM_VALUES = 3
_UNKNOWN = (-1, 0, 0)

# Of 23 bits and a half, no value of an interval is rounded to 0 or 1 in float32.
_BITS = 23


class Counts(NamedTuple):
    """The counters of a part, int64."""

    rows: int  # Rows that are used, with gaps: the next row gets this place.
    new: int  # Ids that got a row.
    evicted: int  # Ids that lost their row.


class DynamicPart(Part):
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
        width, dtype = layer.width, tf.as_dtype(layer.variable_dtype)
        with making_part(index, (0, width)):
            rows = tf.Variable(
                lambda: tf.zeros([_FIRST_ROWS, width], dtype),
                name=f"{layer.name}/embeddings_{index}",
            )
        super().__init__(layer, index, rows, num_rows=0)
        self._num_parts = num_parts
        with making_part(index, (len(Counts._fields),), beside=self.rows):
            self.counts = tf.Variable(
                tf.zeros([len(Counts._fields)], tf.int64), trainable=False, name="counts"
            )
        name = f"ids-{uuid.uuid4().hex}"
        with tf.device(self.rows.device):
            self._hash_table = tf.raw_ops.MutableHashTableOfTensorsV2(
                key_dtype=tf.int64, value_dtype=tf.int64, value_shape=[NUM_VALUES], shared_name=name
            )
            self._locks = locks.make_locks(name)

    @property
    def keeps_last(self) -> bool:
        """True if the last step of an id with a row is kept, and not that in which it got the row.

        To keep it costs a write of the hash table for each id that a step uses.
        """
        return self._layer.evicts or self.marks_changes

    @override
    def add_slots(self, *, marks_changes: bool) -> None:
        super().add_slots(marks_changes=marks_changes)
        size = capacity(self.rows)  # Above that of a new part if there are rows already.
        with tf.device(self.rows.device):
            for name, (value, _) in self._layer.optimizer.initial_slots.items():
                slot = self.variables[name]
                first = tf.fill([size, *slot.shape[1:]], tf.constant(value, slot.dtype))
                tf.raw_ops.AssignVariableOp(resource=slot.handle, value=first, validate_shape=False)

    @override
    def lookup(self, ids: tf.Tensor, *, training: bool) -> tf.Tensor:
        """The gradient is (ids, gradients of rows).

        An id without a row has zeros. But if this step will admit the id, it has its initial row.
        """
        # The gradient has ids in place of places: an id may have no place yet.
        return with_gradient(
            "ShardedEmbedding",
            lambda: self._rows_of(ids, training),
            self.rows.handle,
            lambda upstream: tf.IndexedSlices(upstream, ids),
        )

    def _rows_of(self, ids: tf.Tensor, training: bool) -> tf.Tensor:
        layer = self._layer
        place, sightings, _ = self._find(ids)
        found = gather_rows(self.rows, tf.maximum(place, 0))
        rows = tf.where((place >= 0)[:, tf.newaxis], found, tf.zeros_like(found))
        if not training:
            return rows
        is_new = (place < 0) & (sightings + 1 >= layer.admit_after)
        new = tf.where(is_new)
        initial = initial_rows(tf.gather_nd(ids, new), layer.width, layer.initializer, rows.dtype)
        return tf.tensor_scatter_nd_update(rows, new, initial)

    @override
    def _admitted(
        self, ids: tf.Tensor, rows: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        # Under asynchronous ps two workers may bring the same new id.
        held = locks.take(self._locks, [ids, rows])
        with tf.control_dependencies(held):
            places = self._places(tf.identity(ids), step)
        has_row = places >= 0
        return tf.boolean_mask(places, has_row), tf.boolean_mask(rows, has_row), held

    def _places(self, ids: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The places of different `ids`, int64 [n], -1 without a row, after one more sighting.

        Gives rows to ids that have enough sightings now. `step` is the number of steps done before.
        """
        layer = self._layer
        place, sightings, last = self._find(ids)
        sightings += 1
        is_new = (place < 0) & (sightings >= layer.admit_after)
        new = tf.where(is_new)
        num_new = tf.shape(new, tf.int64)[0]
        first = tf.raw_ops.ReadVariableOp(resource=self.counts.handle, dtype=tf.int64)[0]
        new_places = first + tf.range(num_new)
        new_ids = tf.gather_nd(ids, new)
        initial = {"rows": initial_rows(new_ids, layer.width, layer.initializer, self.rows.dtype)}
        for name, (value, is_of_row) in layer.optimizer.initial_slots.items():
            inner = [] if is_of_row else [layer.width]
            initial[name] = tf.fill([num_new, *inner], tf.constant(value, self.rows.dtype))
        written = []
        for name, values in initial.items():
            variable = self.variables[name]
            with tf.control_dependencies([_grown(variable, first + num_new)]):
                written.append(scatter_rows(variable, new_places, values))
        # The ids come last: a worker that finds an id finds its row, too.
        with tf.control_dependencies(written):
            more = tf.stack([num_new, num_new, tf.zeros_like(num_new)])
            counted = tf.raw_ops.AssignAddVariableOp(resource=self.counts.handle, value=more)
        is_changed = tf.ones_like(is_new) if self.keeps_last else place < 0
        place = tf.tensor_scatter_nd_update(place, new, new_places)
        # An update of an asynchronous worker may come late.
        last = tf.maximum(last, tf.cast(step, tf.int64) + 1)
        values = tf.stack([place, sightings, last], axis=1)
        with tf.control_dependencies([counted]):
            changed = tf.boolean_mask(ids, is_changed)
            inserted = self._insert(changed, tf.boolean_mask(values, is_changed))
        with tf.control_dependencies([inserted]):
            return tf.identity(place)

    def index(self) -> tuple[tf.Tensor, tf.Tensor]:
        """All ids, int64 [m], in any order, and their use, int64 [m, 3] (`table.Index`)."""
        with tf.device(self.rows.device):
            ids, found = self._exported()
            has_row = tf.cast(found[:, :1] >= 0, tf.int64)
            last = found[:, 2:] if self.keeps_last else found[:, 2:] * (1 - has_row)
            return ids, tf.concat([has_row, found[:, 1:2], last], axis=1)

    def set_index(self, ids: tf.Tensor, use: tf.Tensor) -> None:
        """Replaces all ids by those of `ids` that belong to this part; their rows are zeros."""
        mine = tf.equal(ids % self._num_parts, self._index)
        ids, use = tf.boolean_mask(ids, mine), tf.boolean_mask(use, mine)
        number = tf.reduce_sum(use[:, 0])
        size = tf.maximum(number, _FIRST_ROWS)
        place = tf.where(use[:, 0] > 0, tf.cumsum(use[:, 0]) - 1, -1)
        in_hash = tf.concat([place[:, tf.newaxis], use[:, 1:]], axis=1)
        with tf.device(self.rows.device):
            for variable in self.variables.values():
                zeros = tf.zeros([size, *variable.shape[1:]], variable.dtype)
                tf.raw_ops.AssignVariableOp(
                    resource=variable.handle, value=zeros, validate_shape=False
                )
            self._remove(self._exported()[0])
            self._insert(tf.identity(ids), tf.identity(in_hash))
            self.counts.assign(tf.stack([number, 0, 0]))

    def last_steps(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The last steps of ids with rows, int64 [k], and the numbers of these ids, int64 [k]."""
        with tf.device(self.rows.device):
            _, found = self._exported()
            steps = tf.boolean_mask(found[:, 2], found[:, 0] >= 0)
            steps, _, numbers = tf.unique_with_counts(steps, tf.int64)
            return steps, numbers

    def evict(self, step: tf.Tensor) -> None:
        """Removes ids that neither `step` nor a later one used. The last rows fill the gaps."""
        with tf.device(self.rows.device):
            ids, found = self._exported()
            is_kept = found[:, 2] >= step
            has_row = found[:, 0] >= 0
            keeps_row = is_kept & has_row
            number = tf.math.count_nonzero(keeps_row)
            is_moved = keeps_row & (found[:, 0] >= number)
            stays = tf.boolean_mask(found[:, 0], keeps_row & ~is_moved)
            is_used = tf.scatter_nd(stays[:, tf.newaxis], tf.ones_like(stays), number[tf.newaxis])
            gaps = tf.where(tf.equal(is_used, 0))[:, 0]
            moved = tf.boolean_mask(found, is_moved)
            variables = self.variables.values()
            written = [scatter_rows(v, gaps, gather_rows(v, moved[:, 0])) for v in variables]
            with tf.control_dependencies(written):
                self._remove(tf.boolean_mask(ids, ~is_kept))
                in_gaps = tf.concat([gaps[:, tf.newaxis], moved[:, 1:]], axis=1)
                self._insert(tf.boolean_mask(ids, is_moved), in_gaps)
                before = self.counts.read_value()
                evicted = tf.math.count_nonzero(has_row) - number
                self.counts.assign(tf.stack([number, before[1], before[2] + evicted]))

    @override
    def find(self, ids: tf.Tensor) -> tf.Tensor:
        return self._find(ids)[0]

    def _find(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=self._hash_table,
            keys=ids,
            default_value=tf.constant(_UNKNOWN, tf.int64),
        )
        place, sightings, last = tf.unstack(
            tf.ensure_shape(found, [*ids.shape, NUM_VALUES]), axis=1
        )
        return place, sightings, last

    def _exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        """All ids, int64 [m], and their values, int64 [m, 3]."""
        ids, values = tf.raw_ops.LookupTableExportV2(
            table_handle=self._hash_table, Tkeys=tf.int64, Tvalues=tf.int64
        )
        return tf.ensure_shape(ids, [None]), tf.ensure_shape(values, [None, NUM_VALUES])

    def _insert(self, ids: tf.Tensor, values: tf.Tensor) -> tf.Operation | None:
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=self._hash_table, keys=ids, values=values
        )

    def _remove(self, ids: tf.Tensor) -> None:
        tf.raw_ops.LookupTableRemoveV2(table_handle=self._hash_table, keys=ids)


def _grown(variable: tf.Variable, needed: tf.Tensor) -> tf.Tensor:
    """Grows `variable` to `needed` rows, or by half of its size. Returns a tensor after that."""
    size = capacity(variable)

    def grow() -> tf.Tensor:
        rows = gather_rows(variable, tf.range(size))
        missing = tf.maximum(needed, size * 3 // 2) - size
        larger = tf.pad(rows, [[0, missing], *[[0, 0]] * (len(rows.shape) - 1)])
        assigned = tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=larger, validate_shape=False
        )
        with tf.control_dependencies([assigned]):
            return tf.constant(True)

    return tf.cond(needed > size, grow, lambda: tf.constant(False))


def initial_rows(
    ids: tf.Tensor, width: int, initializer: keras.initializers.Initializer, dtype: tf.DType
) -> tf.Tensor:
    """The initial rows of `ids`, int64 [n], as `initializer` distributes values: [n, width].

    A function of the seed of `initializer` and the id. SplitMix64 hashes the id for each column:
    a generator would give values in the order in which ids arrive, which differs between runs.
    """
    shape = [tf.size(ids), width]
    settings = initializer.get_config()
    if "seed" not in settings:
        return tf.cast(initializer(shape), dtype)
    uniform = _uniform(ids, width, str(initializer.seed))
    if isinstance(initializer, keras.initializers.RandomUniform):
        low, high = settings["minval"], settings["maxval"]
        return tf.cast(low + (high - low) * uniform, dtype)
    if isinstance(initializer, keras.initializers.TruncatedNormal):
        # Values are between -2 and 2 standard deviations.
        below = math.erfc(2**0.5) / 2
        uniform = below + (1 - 2 * below) * uniform
    return tf.cast(settings["mean"] + settings["stddev"] * tf.math.ndtri(uniform), dtype)


def _uniform(ids: tf.Tensor, width: int, seed: str) -> tf.Tensor:
    """Values between 0 and 1, both excluded, float32 [n, width]."""
    key = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big")
    # `split_mix` adds GAMMA, which the key of an id does not have.
    mixed = split_mix(
        tf.bitwise.bitwise_xor(tf.bitcast(ids, tf.uint64), uint64(key)) - uint64(GAMMA)
    )
    # Not a constant vector: TensorFlow rounds vectors of large uint64 constants in graphs.
    columns = tf.cast(tf.range(width), tf.uint64) * uint64(GAMMA)
    bits = tf.bitwise.right_shift(split_mix(mixed[:, tf.newaxis] + columns), uint64(64 - _BITS))
    return (tf.cast(bits, tf.float32) + 0.5) / 2**_BITS
