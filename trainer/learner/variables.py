"""The variables of a model, in the order that all parts of a learner use."""

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from data.system.compat.keras_layers import all_layers, own
from trainer.embeddings.layer import ShardedEmbedding
from trainer.embeddings.table import FixedTable, tables_of
from trainer.step.loss_scale import computes_in_float16
from trainer.step.options import ConfigError, Options


class ModelVariables:
    """The part of a Learner that finds the variables, and makes the optimizer slots of tables."""

    model: keras.Model
    _step_options: Options

    def _find_variables(self) -> None:
        """Raises OptimizerError or ConfigError, as Learner."""
        model, options = self.model, self._step_options
        self.tables = tables_of(model)
        for layer in self.tables:
            if isinstance(layer.table, FixedTable):
                layer.table.forget_slots()
        of_tables = {id(part) for layer in self.tables for part in layer.weights}
        self.dense_variables = [v for v in model.trainable_variables if id(v) not in of_tables]
        others = [v for v in model.non_trainable_variables if id(v) not in of_tables]
        self._table_parts = [p for layer in self.tables if layer.trainable for p in layer.parts]
        for part in self._table_parts:
            part.add_slots(marks_changes=options.marks_changed_rows)
        parts = [part.rows for part in self._table_parts]
        self.variables: list[tf.Variable] = [*(v.value for v in self.dense_variables), *parts]
        self.num_dense = len(self.dense_variables)
        # The forward pass reads these, and the tables.
        self._keras_inputs = [*self.dense_variables, *others]
        self._forward_inputs: list[tf.Variable] = [v.value for v in self._keras_inputs]
        self._not_trained = self._forward_inputs[self.num_dense :]
        self._is_float16 = computes_in_float16(model)
        if self.tables:
            _require_table_options(options, self.tables, is_float16=self._is_float16)

    @property
    def layer_state(self) -> list[tf.Variable]:
        """The variables that layers change in training, each replica its own copy.

        Moving statistics, but no integers, and no variables with an aggregation of the layer.
        """
        return [
            variable.value
            for layer in all_layers(self.model)
            if layer.trainable
            for variable in own(layer, "non_trainable_variables")
            if variable.aggregation == "none" and tf.as_dtype(variable.dtype).is_floating
        ]


def _require_table_options(
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
