"""Updates tables: TablePart has the rows of one part of a table, and its optimizer slots.

parts = [TablePart(layer, index) for index in range(P)]     # makes the slots
part.change(gradient, rate, step, factor=None)              # on the device of the variable
saved_tables(layers, parts)                                 # for a checkpoint
"""

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from strategies.locks import free
from strategies.tables import making_part, part_rows, table_settings
from trainer.embeddings.base import Table
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.dynamic_part import DynamicPart
from trainer.embeddings.layer import ShardedEmbedding
from trainer.embeddings.optimizers import TableUpdate, after, gather_rows, scatter_rows
from trainer.embeddings.table import FixedTable, Rows
from trainer.step.options import ConfigError, Options


class TablePart:
    """A part of the table of a layer, with its optimizer slots.

    Attributes:
        variable: The rows of the part.
        slots: The optimizer slots, by name.
        changed: The marks of changed rows, bool; None if there are none.
    """

    def __init__(self, layer: ShardedEmbedding, index: int, *, marks_changes: bool = False) -> None:
        """Makes the slots; called in the strategy's scope.

        With `marks_changes` updates mark the rows that they change, for checkpoints that have only
        these rows.
        """
        self.layer, self.index = layer, index
        layer.is_trained = True
        self.variable: tf.Variable = layer.table.parts[index]
        self._dynamic: DynamicPart | None = None
        self.slots: Mapping[str, tf.Variable]
        self.changed: tf.Variable | None = None
        if isinstance(layer.table, DynamicTable):
            self._dynamic = layer.table.dynamic_parts[index]
            self._dynamic.marks_changes = marks_changes
            self.slots = self._dynamic.add_slots(layer.optimizer.initial_slots)
            return
        self.slots = {
            name: self._add_variable(name, value, () if is_of_row else (layer.width,))
            for name, (value, is_of_row) in layer.optimizer.initial_slots.items()
        }
        if marks_changes:
            self.changed = self._add_variable("changed", False, ())

    def _add_variable(self, name: str, value: float | bool, inner: tuple[int, ...]) -> tf.Variable:
        """Makes a variable with `value` everywhere, [rows of the part, *inner]."""
        table = self.layer.table
        rows = part_rows(table.shape[0], self.index, len(table.parts))
        made = [rows if table_settings().has_rows else 0, *inner]
        with making_part(self.index, (rows, *inner), beside=self.variable):
            return tf.Variable(
                lambda: tf.fill(made, tf.constant(value)), trainable=False, name=name
            )

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
        layer, variable = self.layer, self.variable
        if layer.optimizer.learning_rate is not None:
            rate = tf.constant(layer.optimizer.learning_rate, tf.float32)
            rate = rate if factor is None else rate * factor
        with tf.device(variable.device):
            ids, place = tf.unique(gradient.indices)
            rows = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(ids))
            held: list[tf.Tensor] = []
            if self._dynamic is not None:
                # Under asynchronous ps two workers may bring the same new id.
                held = self._dynamic.take_lock([ids, rows])
                with tf.control_dependencies(held):
                    places = self._dynamic.places(tf.identity(ids), step)
                has_row = places >= 0
                ids, rows = tf.boolean_mask(places, has_row), tf.boolean_mask(rows, has_row)
            if layer.l2:
                rows += 2 * layer.l2 * gather_rows(variable, ids)
            if layer.clip_norm:
                rows = tf.clip_by_norm(rows, layer.clip_norm, axes=[1])
            rate = tf.cast(rate, rows.dtype)
            update = TableUpdate(variable, self.slots, ids, rows, rate, step)
            done = layer.optimizer.update(update)
            with after(done):
                if self.changed is not None:
                    # After the change: a checkpoint that finds no mark has the row from before.
                    done = scatter_rows(self.changed, ids, tf.ones_like(ids, tf.bool))
            with after(done):
                rate = tf.identity(rate)
            if held:
                with tf.control_dependencies([free(held, rate)]):
                    rate = tf.identity(rate)
            return rate


def saved_tables(layers: Sequence[ShardedEmbedding], parts: Sequence[TablePart]) -> list[Table]:
    """The tables of `layers`, with the slots that `parts` have; those not trained have none."""
    found: list[Table] = []
    for layer in layers:
        if layer.is_dynamic:
            found.append(layer.table)
            continue
        of_layer = [part for part in parts if part.layer is layer]
        num_rows, width = layer.table.shape
        slots = {}
        for name in of_layer[0].slots if of_layer else ():
            variables = [part.slots[name] for part in of_layer]
            shape = (num_rows, width)[: len(variables[0].shape)]
            slots[name] = Rows(variables, shape, f"{layer.table.path}/{name}")
        changed = [part.changed for part in of_layer if part.changed is not None]
        found.append(FixedTable(layer.table, slots, changed))
    return found


def require_table_options(
    options: Options, tables: Sequence[ShardedEmbedding], *, is_float16: bool
) -> None:
    """Raises ConfigError for an option that would change, or read, a whole table in each step."""
    names = ", ".join(layer.name for layer in tables)
    refused = {
        f"config.{item.name}": (getattr(options, item.name) != getattr(Options(), item.name), use)
        for item in dataclasses.fields(options)
        if (use := item.metadata.get("with_tables"))
    } | {
        "config.jit_compile": (options.jit_compile, "--config.jit_compile=False"),
        "config.precision=mixed_float16": (is_float16, "--config.precision=mixed_bfloat16"),
    }
    for name, (is_set, instead) in refused.items():
        if is_set:
            raise ConfigError(
                f"{name} cannot be used with a ShardedEmbedding ({names}), of which a step knows "
                f"the rows of its batch only. Use {instead}."
            )
