"""ShardedEmbedding: a Keras layer whose table is split by row over all parameter servers.

    layer = ShardedEmbedding(1_000_000, 64, optimizer="adagrad")
    rows = layer(ids)                               # ids [B, ...] -> [B, ..., 64]

The forward pass sends the different ids of a batch to the parts of the table, and receives their
rows; the gradient is (ids, summed rows). An update changes these rows only. So the traffic and the
time of a step do not depend on the size of the table.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any  # Any: keyword arguments and JSON values of Keras.

import keras
import tensorflow as tf
from typing_extensions import override

from strategies.tables import has_rows, making_part, num_parts, part_rows
from trainer.embeddings.optimizers import TableOptimizer, gather_rows, table_optimizer, to_config
from trainer.embeddings.table import Rows
from trainer.step.options import ConfigError

# Rows that are initialised with one seed.
_BLOCK_ROWS = 1 << 16

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

    With several numbers of rows it is a table for each of as many columns, stored as one:
    integers [B, ..., columns] into [B, ..., columns, width].

    The initial value of a row depends on the seed, the table and the id only. The table has an
    optimizer of its own, because those of Keras change all rows in each step.

    Attributes:
        table: The complete table (trainer.embeddings.table.Rows); None before the layer is built.
        optimizer: A TableOptimizer.
        l2: See __init__.
        clip_norm: See __init__.
    """

    def __init__(
        self,
        rows: int | Sequence[int],
        width: int,
        *,
        optimizer: TableOptimizer | str | Mapping[str, object] = "adagrad",
        initializer: keras.initializers.Initializer | str = "uniform",
        l2: float = 0.0,
        clip_norm: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """Makes no variable yet.

        Args:
            rows: The number of rows: ids are from 0 to rows - 1. Or one number for each column.
            width: The number of values of a row.
            optimizer: An object of trainer.embeddings, or its name: sgd, adagrad, rowwise_adagrad,
                ftrl or lazy_adam.
            initializer: One of Keras: uniform, random_normal, truncated_normal or constants.
            l2: Adds 2 * l2 * row to the gradient of each row that the batch used: the gradient of
                l2 * sum(row ** 2). It is not part of the reported loss.
            clip_norm: Scales the gradient of each row down to this norm; 0 does not clip. The
                gradient is that of the complete step, with its l2.
            **kwargs: `name`, `dtype` and `trainable`, as of every layer.

        Raises:
            ConfigError: an argument is out of range.
        """
        super().__init__(**kwargs)
        object.__setattr__(self, "table", None)
        self.rows, self.width = rows, width
        sizes = list(rows) if isinstance(rows, Sequence) else [rows]
        if not sizes or any(type(n) is not int or n < 1 for n in (*sizes, width)):
            raise ConfigError(
                "ShardedEmbedding(rows, width): both must be whole numbers above 0, and rows may "
                f"be a list of them. Received: rows={rows!r}, width={width!r}."
            )
        for name, value in (("l2", l2), ("clip_norm", clip_norm)):
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ConfigError(
                    f"ShardedEmbedding: {name} must be 0 or more. Received: {value!r}."
                )
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
        self._num_rows = sum(sizes)

    @override
    def build(self, input_shape: Sequence[int | None]) -> None:
        if not isinstance(self.rows, int) and input_shape[-1] != len(self._sizes):
            raise ValueError(
                f"{self.name} has {len(self._sizes)} numbers of rows, so it needs ids of as many "
                f"columns. Received: shape {tuple(input_shape)}."
            )
        total, shape = num_parts(), (self._num_rows, self.width)
        self._has_rows = has_rows()
        if part_rows(self._num_rows, 0, total) >= 2**31:
            raise ConfigError(
                f"ShardedEmbedding {self.name}: a part of {self._num_rows:,} rows on {total} "
                "parameter server(s) has more than 2,147,483,647 rows. Use more of them: --ps."
            )
        parts = []
        for index in range(total):
            of_part = part_rows(self._num_rows, index, total), self.width
            with making_part(index, of_part):
                weight = self.add_weight(
                    shape=of_part if self._has_rows else (0, self.width),
                    initializer=functools.partial(self._initial_rows, index, total),
                    name="embeddings" if total == 1 else f"embeddings_{index}",
                )
            parts.append(weight.value)
        path = f"{weight.path.rpartition('/')[0]}/embeddings"
        # Not by Keras, which would save each part on its own.
        object.__setattr__(self, "table", Rows(parts, shape, path))

    def _initial_rows(
        self, index: int, num_parts: int, shape: Sequence[int], dtype: object = None
    ) -> tf.Tensor:
        """The rows of one part. All rows are made, in blocks, and the rows of the part are kept."""
        if not self._has_rows:
            return tf.zeros(shape, dtype)
        kept = []
        for start in range(0, self._num_rows, _BLOCK_ROWS):
            rows = min(_BLOCK_ROWS, self._num_rows - start)
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
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if not inputs.dtype.is_integer:
            raise ValueError(
                f"{self.name} takes ids, which are integers. Received: {inputs.dtype.name}. Cast "
                "them, or declare keras.Input(..., dtype='int64')."
            )
        used, place = tf.unique(tf.reshape(self._numbered(inputs), [-1]))
        rows = _expanded(self._lookup(used), place)
        shape = tf.concat([tf.shape(inputs), [self.width]], axis=0)
        found = tf.reshape(tf.cast(rows, self.compute_dtype), shape)
        return tf.ensure_shape(found, [*inputs.shape, self.width])

    def _numbered(self, ids: tf.Tensor) -> tf.Tensor:
        """The rows of `ids` in the table of all columns, int64. Raises an error out of range."""
        ids = tf.cast(ids, tf.int64)
        ends = tf.constant(self._sizes if len(self._sizes) > 1 else self._sizes[0], tf.int64)
        is_right = tf.reduce_all((ids >= 0) & (ids < ends))
        message = f"{self.name}: an id is not from 0 to {self.rows} - 1 (rows)"
        with tf.control_dependencies(
            [tf.debugging.Assert(is_right, [message, tf.reduce_min(ids), tf.reduce_max(ids)])]
        ):
            if len(self._sizes) == 1:
                return tf.identity(ids)
            return ids + tf.cumsum(ends, exclusive=True)

    def _lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """The rows of different `ids`, [n] -> [n, width], gathered on the devices of the parts."""
        parts = self.table.parts
        if not self._has_rows:
            return tf.zeros([tf.size(ids), self.width], parts[0].dtype)
        if len(parts) == 1:
            return gather_rows(parts[0], tf.cast(ids, tf.int32))
        owner = tf.cast(ids % len(parts), tf.int32)
        positions = tf.dynamic_partition(tf.range(tf.size(ids)), owner, len(parts))
        in_part = tf.cast(ids // len(parts), tf.int32)
        ids_of_parts = tf.dynamic_partition(in_part, owner, len(parts))
        found = []
        for part, of_part in zip(parts, ids_of_parts, strict=True):
            with tf.device(part.device):
                found.append(gather_rows(part, of_part))
        return tf.dynamic_stitch(positions, found)

    @override
    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return (*input_shape, self.width)

    @override
    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "rows": self.rows if isinstance(self.rows, int) else list(self.rows),
            "width": self.width,
            "optimizer": to_config(self.optimizer),
            "initializer": keras.initializers.serialize(self.initializer),
            "l2": self.l2,
            "clip_norm": self.clip_norm,
        }

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """A checkpoint has the complete table in place of its parts."""
        if save_type == "checkpoint" and self.table is not None:
            return {"embeddings": self.table}
        children: dict[str, Any] = super()._trackable_children(save_type, **kwargs)
        return children


def _expanded(rows: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """`rows`, [n, width], at `place`, [m]; the gradient sums the rows of equal places."""

    @tf.custom_gradient
    def expand(rows: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(upstream, place, tf.shape(rows)[0])

        return tf.gather(rows, place), gradient

    expanded: tf.Tensor = expand(rows)
    return expanded
