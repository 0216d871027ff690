"""ShardedEmbedding: a Keras layer whose table is split by row over all parameter servers.

    layer = ShardedEmbedding(1_000_000, 64, optimizer="adagrad")
    rows = layer(ids)                               # ids [B, ...] -> [B, ..., 64]

The forward pass sends the different ids of a batch to the parts of the table, and receives their
rows; the gradient is (ids, summed rows). An update changes these rows only. So the traffic and the
time of a step do not depend on the size of the table.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any  # Any: keyword arguments and JSON values of Keras.

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from data.system.compat.own_gradients import with_gradient
from data.system.compat.recomputing import compute_once
from strategies.tables import making_part, part_rows, table_settings
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.dynamic_part import DynamicPart
from trainer.embeddings.model_tables import ModelTables, add_lookup
from trainer.embeddings.optimizers import TableOptimizer, table_optimizer, to_config
from trainer.embeddings.table import FixedPart, FixedTable, Part, of_parts
from trainer.step.options import ConfigError

# Rows that are initialised with one seed.
_BLOCK_ROWS = 1 << 16

# How the rows of several ids become one.
COMBINERS: Mapping[str, Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "sum": tf.math.unsorted_segment_sum,
    "mean": tf.math.unsorted_segment_mean,
    "sqrtn": tf.math.unsorted_segment_sqrt_n,
}

# The least values of arguments that are whole numbers.
_LEAST = {"admit_after": 1, "evict_after": 0, "max_rows": 0, "evict_every": 1}

# Arguments that are JSON values, and attributes of the same names.
_SETTINGS = ("width", "l2", "clip_norm", "combiner", *_LEAST)

# Fills up the ids of a feature that has fewer of them than others.
_PADDING = -1

# Initial values that do not depend on the shape, besides their seed.
_INITIALIZERS = (
    keras.initializers.RandomUniform,
    keras.initializers.RandomNormal,
    keras.initializers.TruncatedNormal,
    keras.initializers.Constant,
    keras.initializers.Zeros,
    keras.initializers.Ones,
)


@keras.saving.register_keras_serializable(package="tf_distribution_trainer")
class ShardedEmbedding(keras.layers.Layer):
    """Turns ids into rows of a table: integers [B, ...] into [B, ..., width].

    With `rows=None` any int64 is an id. Ids get rows during training (dynamic.py), and other ids
    have zeros.

    With a `combiner` the last dimension has the ids of one feature, filled up with -1, and their
    rows are combined: integers [B, ..., length] into [B, ..., width].

    With a list of numbers of rows each column of the ids has its own table; they are stored as
    one: integers [B, ..., columns] into [B, ..., columns, width]; with a combiner, integers
    [B, ..., columns, length] into the same.

    The initial value of a row depends on the seed, the table and the id only. The table has an
    optimizer of its own, because those of Keras change all rows in each step.

    Attributes:
        table: The complete table, FixedTable or DynamicTable; None before the layer is built.
        num_rows: The number of rows of the table; 0 if it is not fixed.
        parts: Its parts, FixedParts or DynamicParts.
        optimizer: A TableOptimizer.
        stores_rows: False in a dry run, and after `freeze`.
        evicts: True if ids are removed, so the last step that used an id must be known.
        frozen: The ids and rows of `freeze`; empty without.
        is_trained: True if a learner has made optimizer slots of the table.
        l2, clip_norm, combiner, admit_after, evict_after, max_rows, evict_every: See __init__.
    """

    of_model = ModelTables  # The class of all tables of a model.

    def __init__(
        self,
        rows: int | Sequence[int] | None,
        width: int,
        *,
        optimizer: TableOptimizer | str | Mapping[str, object] = "adagrad",
        initializer: keras.initializers.Initializer | str = "uniform",
        l2: float = 0.0,
        clip_norm: float = 0.0,
        combiner: str | None = None,
        admit_after: int = 1,
        evict_after: int = 0,
        max_rows: int = 0,
        evict_every: int = 1000,
        **kwargs: Any,
    ) -> None:
        """Makes no variable yet.

        Args:
            rows: The number of rows: ids are from 0 to rows - 1. Or one number for each column.
                None: any int64 is an id; only such tables take `admit_after`, `evict_after`,
                `max_rows` and `evict_every`.
            width: The number of values of a row.
            optimizer: An object of trainer.embeddings, or its name: sgd, adagrad, rowwise_adagrad,
                ftrl or lazy_adam.
            initializer: One of Keras: uniform, random_normal, truncated_normal or constants.
            l2: Adds 2 * l2 * row to the gradient of each row that the batch used: the gradient of
                l2 * sum(row ** 2). It is not part of the reported loss.
            clip_norm: Scales the gradient of each row down to this norm; 0 does not clip. The
                gradient is that of the complete step, with its l2.
            combiner: How the rows of a feature's ids become one: "sum", "mean", or "sqrtn", the sum
                divided by the square root of their number. Without an id the result is zeros.
            admit_after: An id gets its row in the step that is the `admit_after`-th to use it.
            evict_after: Removes an id that no step used for this number of steps; 0 does not.
            max_rows: Removes the ids whose last use is oldest, until no more than this number have
                rows; 0 does not. Ids of the same last step go together, and those of the last step
                stay.
            evict_every: Ids are removed when the step is a multiple of this.
            **kwargs: `name`, `dtype` and `trainable`, as of every layer. Rows, and their optimizer
                slots, are float32 or float64.

        Raises:
            ConfigError: an argument is out of range.
        """
        super().__init__(**kwargs)
        self._set_untracked(table=None, parts=[], frozen=[])
        if self.variable_dtype not in ("float32", "float64"):
            raise ConfigError(
                f"ShardedEmbedding: rows are float32 or float64. Received: the dtype policy "
                f'{self.dtype_policy.name}. Type dtype="mixed_bfloat16": it computes in bfloat16, '
                "and the rows are float32."
            )
        # As ids.max() + 1 is.
        rows = rows.item() if isinstance(rows, np.integer) else rows
        self.rows, self.width = rows, width
        self.is_dynamic, self.stores_rows, self.is_trained = rows is None, True, False
        sizes = list(rows) if isinstance(rows, Sequence) else [0 if rows is None else rows]
        needed = [width, *([] if self.is_dynamic else sizes)]
        if not sizes or any(type(n) is not int or n < 1 for n in needed):
            raise ConfigError(
                "ShardedEmbedding(rows, width): both must be whole numbers above 0, and rows may "
                f"be a list of them, or None for any ids. Received: rows={rows!r}, width={width!r}."
            )
        limited = admit_after, evict_after, max_rows, evict_every
        for (name, least), given in zip(_LEAST.items(), limited, strict=True):
            is_valid = type(given) is int and given >= least
            _check(name, given, is_valid, f"a whole number of {least} or more")
        for name, value in (("l2", l2), ("clip_norm", clip_norm)):
            is_valid = isinstance(value, int | float) and 0 <= value < float("inf")
            _check(name, value, is_valid, "0 or more")
        combiners = f"one of {', '.join(COMBINERS)}, or None"
        _check("combiner", combiner, combiner in (None, *COMBINERS), combiners)
        if not self.is_dynamic and (admit_after > 1 or evict_after or max_rows):
            raise ConfigError(
                "ShardedEmbedding: admit_after, evict_after and max_rows are for tables without a "
                f"fixed number of rows. Received: rows={rows!r}. Type rows=None, or leave them out."
            )
        self.combiner = combiner
        self.admit_after, self.evict_after = admit_after, evict_after
        self.max_rows, self.evict_every = max_rows, evict_every
        self.evicts = bool(evict_after or max_rows)
        self.optimizer = table_optimizer(optimizer)
        self.l2, self.clip_norm = float(l2), float(clip_norm)
        self.initializer = keras.initializers.get(initializer)
        if type(self.initializer) not in _INITIALIZERS:
            names = ", ".join(kind.__name__ for kind in _INITIALIZERS)
            raise ConfigError(
                f"ShardedEmbedding: initializer must be one of {names}. Received: {initializer!r}, "
                "whose values depend on the shape of the table."
            )
        self._sizes = tuple(sizes)
        self.num_rows = sum(sizes)

    @override
    def build(self, input_shape: Sequence[int | None]) -> None:
        if self.combiner and len(input_shape) < 2:
            raise ValueError(
                f"{self.name} has a combiner, so it needs several ids of an example: [B, length]. "
                f"Received: shape {tuple(input_shape)}. Leave combiner out for one id, or use "
                "keras.Input((length,))."
            )
        columns = input_shape[-1] if self.combiner is None else input_shape[-2]
        if isinstance(self.rows, Sequence) and columns != len(self._sizes):
            raise ValueError(
                f"{self.name} has {len(self._sizes)} numbers of rows, so it needs ids of as many "
                f"columns. Received: shape {tuple(input_shape)}."
            )
        total = table_settings().num_parts
        self.stores_rows = table_settings().has_rows
        self._set_untracked(parts=[self._make_part(index, total) for index in range(total)])
        self._make_table()

    def _make_part(self, index: int, num_parts: int) -> Part:
        if self.is_dynamic:
            return DynamicPart(self, index, num_parts)
        of_part = part_rows(self.num_rows, index, num_parts), self.width
        with making_part(index, of_part):
            weight = self.add_weight(
                shape=of_part if self.stores_rows else (0, self.width),
                initializer=functools.partial(self._initial_rows, index, num_parts),
                name="embeddings" if num_parts == 1 else f"embeddings_{index}",
            )
        return FixedPart(self, index, weight.value, of_part[0])

    def _make_table(self) -> None:
        """Makes the table of `parts`, which forget the slots of a former Learner of the model."""
        for part in self.parts:
            part.forget_slots()
        kind = DynamicTable if self.is_dynamic else FixedTable
        self._set_untracked(table=kind(self.parts, self))

    def _set_untracked(self, **attributes: Any) -> None:
        """Sets attributes that Keras does not see: it would save each part on its own."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _initial_rows(
        self, index: int, num_parts: int, shape: Sequence[int], dtype: object = None
    ) -> tf.Tensor:
        """The rows of one part. All rows are made, in blocks, and the rows of the part are kept."""
        if not self.stores_rows:
            return tf.zeros(shape, dtype)
        kept = []
        for start in range(0, self.num_rows, _BLOCK_ROWS):
            rows = min(_BLOCK_ROWS, self.num_rows - start)
            block = self._initializer_of_block(start)([rows, self.width], dtype)
            kept.append(block[(index - start) % num_parts :: num_parts])
        return kept[0] if len(kept) == 1 else tf.concat(kept, axis=0)

    def _initializer_of_block(self, start: int) -> keras.initializers.Initializer:
        settings = self.initializer.get_config()
        if "seed" not in settings:
            return self.initializer
        seed = f"{self.initializer.seed} {start}".encode()
        digest = int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest(), "big")
        return type(self.initializer).from_config({**settings, "seed": digest >> 1})

    @override
    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not inputs.dtype.is_integer:
            raise ValueError(
                f"{self.name} takes ids, which are integers. Received: {inputs.dtype.name}. Cast "
                "them, or declare keras.Input(..., dtype='int64')."
            )
        compute_once()
        with tf.device("CPU:0"):  # As the table, also if this replica computes on a GPU.
            ids = tf.cast(inputs, tf.int64)
            is_id = tf.not_equal(ids, _PADDING) if self.combiner else tf.ones_like(ids, tf.bool)
            numbered = tf.reshape(self._numbered(ids, is_id), [-1])
            if self.combiner:
                numbered = tf.boolean_mask(numbered, tf.reshape(is_id, [-1]))
            used, place = tf.unique(numbered)
            if training:
                add_lookup(self, tf.size(used), tf.size(numbered))
            # No step admits an id to a table that is not trained.
            found = self._lookup(used, training=bool(training) and self.trainable)
        # Copied to the device of the replica once, and expanded there.
        rows = _expanded(tf.identity(found), place)
        if self.combiner:
            rows = self._combined(rows, is_id)
        static = self.compute_output_shape(inputs.shape)
        shape = tf.concat([tf.shape(inputs)[: len(static) - 1], [self.width]], axis=0)
        return tf.ensure_shape(tf.reshape(tf.cast(rows, self.compute_dtype), shape), static)

    def _combined(self, rows: tf.Tensor, is_id: tf.Tensor) -> tf.Tensor:
        """One row for each feature, [features, width], of `rows`, [number of ids, width].

        `is_id`, [..., length], is False for padding.
        """
        assert self.combiner is not None
        combine = COMBINERS[self.combiner]
        of_features = tf.reshape(is_id, [-1, tf.shape(is_id)[-1]])
        feature = tf.where(of_features)[:, 0]
        return combine(rows, feature, tf.shape(of_features, tf.int64)[0])

    def _numbered(self, ids: tf.Tensor, is_id: tf.Tensor) -> tf.Tensor:
        """The rows of `ids` in the table of all columns, int64. Raises an error out of range.

        If the number of rows is not fixed, the ids themselves.
        """
        if self.is_dynamic:
            return ids
        ends = tf.constant(self._sizes if len(self._sizes) > 1 else self._sizes[0], tf.int64)
        if len(self._sizes) > 1 and self.combiner:
            ends = ends[:, tf.newaxis]
        is_right = tf.reduce_all(((ids >= 0) & (ids < ends)) | ~is_id)
        message = f"{self.name}: an id is not from 0 to {self.rows} - 1 (rows)"
        with tf.control_dependencies(
            [tf.debugging.Assert(is_right, [message, tf.reduce_min(ids), tf.reduce_max(ids)])]
        ):
            if len(self._sizes) == 1:
                return tf.identity(ids)
            return ids + tf.cumsum(ends, exclusive=True, axis=0)

    def _lookup(self, ids: tf.Tensor, *, training: bool) -> tf.Tensor:
        """The rows of different `ids`, [n] -> [n, width], gathered on the devices of the parts."""
        if self.frozen:
            return self._frozen_rows(ids)
        if not self.stores_rows:
            return tf.zeros([tf.size(ids), self.width], self.parts[0].rows.dtype)

        if len(self.parts) == 1 and table_settings().read_dtype == "float32":
            # No device: a program that loads the exported model may lack the one of this process.
            return self.parts[0].lookup(ids, training=training)

        def sent_from(part: Part, ids: tf.Tensor) -> tf.Tensor:
            with tf.device(part.rows.device):
                rows = part.lookup(ids, training=training)
            return _rounded_on(part.rows.device, rows)

        rows: tf.Tensor = of_parts(ids, [functools.partial(sent_from, p) for p in self.parts])
        return rows

    def freeze(self, ids: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
        """Replaces a table of dynamic ids by constant variables, in a model that is exported.

        `ids` are sorted; the layer has no other rows.
        """
        self._drop_frozen()
        self.stores_rows = False
        self._tracker.unlock()
        options = {"initializer": "zeros", "trainable": False, "autocast": False}
        frozen = [
            self.add_weight(shape=value.shape, dtype=value.dtype.name, name=name, **options)
            for name, value in (("ids", ids), ("rows", rows))
        ]
        self._tracker.lock()
        self._set_untracked(frozen=frozen)
        for weight, value in zip(self.frozen, (ids, rows), strict=True):
            weight.assign(value)

    def start_training(self) -> None:
        """Forgets the optimizer slots of a former Learner; called before they are made.

        The constants of `freeze`, which a model that Keras has loaded has, become rows again.
        """
        is_known = self.is_dynamic and (self.frozen or self.is_trained)
        former = self.table.ids_and_rows() if is_known else None
        self._drop_frozen()
        self.stores_rows = table_settings().has_rows
        self._make_table()
        if former and self.stores_rows:
            self.table.set_ids_and_rows(*former)

    def _drop_frozen(self) -> None:
        self._tracker.unlock()
        for weight in self.frozen:
            self._non_trainable_variables.remove(weight)
        self._tracker.lock()
        self._set_untracked(frozen=[])

    def _frozen_rows(self, ids: tf.Tensor) -> tf.Tensor:
        known, rows = (weight.value for weight in self.frozen)
        if not known.shape[0]:
            return tf.zeros([tf.size(ids), self.width], rows.dtype)
        place = tf.minimum(tf.searchsorted(known, ids), known.shape[0] - 1)
        has_row = tf.equal(tf.gather(known, place), ids)
        found = tf.gather(rows, place)
        return tf.where(has_row[:, tf.newaxis], found, tf.zeros_like(found))

    @override
    def save_own_variables(self, store: Any) -> None:
        """Saves the complete table, which any number of parts can load."""
        if self.table is None:  # No input came yet.
            super().save_own_variables(store)
        elif self.is_dynamic:
            # A model in training stays as it is.
            store["0"], store["1"] = self.table.ids_and_rows()
        else:
            store["0"] = self.table.numpy()

    @override
    def load_own_variables(self, store: Any) -> None:
        if self.table is None:
            super().load_own_variables(store)
        elif not self.is_dynamic:
            rows = np.asarray(store["0"])
            if rows.shape != self.table.shape:
                raise ValueError(f"{self.name} is {self.table.shape}, but {rows.shape} in the file")
            self.table.assign(rows)
        elif self.is_trained:
            raise ValueError(
                f"{self.name} has dynamic ids and is being trained: a .keras file has neither "
                "their sightings nor optimizer slots. Resume from a checkpoint instead."
            )
        else:
            self.freeze(np.asarray(store["0"]), np.asarray(store["1"]))

    @override
    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return (*(input_shape[:-1] if self.combiner else input_shape), self.width)

    @override
    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "rows": list(self.rows) if isinstance(self.rows, Sequence) else self.rows,
            "optimizer": to_config(self.optimizer),
            "initializer": keras.initializers.serialize(self.initializer),
            **{name: getattr(self, name) for name in _SETTINGS},
        }

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """A checkpoint has tables in files of their own (saved.py)."""
        if save_type == "checkpoint" and self.table is not None and not self.frozen:
            return {}
        children: dict[str, Any] = super()._trackable_children(save_type, **kwargs)
        return children


def _check(name: str, value: object, is_valid: bool, needed: str) -> None:
    """Raises ConfigError if the argument `name` of the layer is not valid."""
    if not is_valid:
        raise ConfigError(f"ShardedEmbedding: {name} must be {needed}. Received: {value!r}.")


def _rounded_on(device: str, rows: tf.Tensor) -> tf.Tensor:
    """`rows`, rounded on `device` to the type in which they are sent. No gradient is rounded."""
    dtype = tf.as_dtype(table_settings().read_dtype)
    if dtype == tf.float32 or dtype.size >= rows.dtype.size:
        return rows

    def sent() -> tf.Tensor:
        with tf.device(device):
            rounded = tf.cast(rows, dtype)
        return tf.cast(rounded, rows.dtype)

    return with_gradient("RoundedRows", sent, rows, lambda upstream: upstream)


def _expanded(rows: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """`rows`, [n, width], at `place`, [m]; the gradient sums the rows of equal places."""

    def summed(upstream: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(upstream, place, tf.shape(rows)[0])

    return with_gradient("ExpandedRows", lambda: tf.gather(rows, place), rows, summed)
