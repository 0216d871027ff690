"""The variables of a model, in the order that all parts of a learner use.

variables = ModelVariables(model, Options())        # in the strategy's scope
with variables.assigning_nothing(values):           # of the first of `inputs`
outputs = model(inputs, training=False)
"""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system.compat.keras_layers import all_layers, own
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.layer import ShardedEmbedding
from trainer.embeddings.table import FixedTable, Rows, saved_variables, tables_of
from trainer.step.loss_scale import computes_in_float16
from trainer.step.options import ConfigError, Options


class ModelVariables:
    """Dense variables, and the parts of tables with their optimizer slots.

    Attributes:
        tables, saved_tables, dense: As of a Learner; `dense` is its `dense_variables`.
        trained: The trainable variables: those of `dense`, then those of `table_parts`.
        is_float16: True if the model computes in float16.
        inputs: The variables that the forward pass reads, without tables: `dense`, then others.
        keras_inputs: Keras' variables of them.
    """

    def __init__(self, model: keras.Model, options: Options) -> None:
        """Creates the slots of tables. Raises OptimizerError or ConfigError, as Learner."""
        self.model = model
        self.tables = [layer for layer in tables_of(model) if layer.table is not None]
        of_tables = {id(part) for layer in self.tables for part in layer.weights}
        self.dense = [v for v in model.trainable_variables if id(v) not in of_tables]
        others = [v for v in model.non_trainable_variables if id(v) not in of_tables]
        self.table_parts = [p for layer in self.tables if layer.trainable for p in layer.parts]
        for part in self.table_parts:
            part.add_slots(marks_changes=options.marks_changed_rows)
        self.saved_tables = [
            layer.table if layer.is_dynamic else FixedTable(layer.table, layer.parts)
            for layer in self.tables
        ]
        parts = [part.rows for part in self.table_parts]
        self.trained: list[tf.Variable] = [*(variable.value for variable in self.dense), *parts]
        self.keras_inputs = [*self.dense, *others]
        self.inputs: list[tf.Variable] = [variable.value for variable in self.keras_inputs]
        self.is_float16 = computes_in_float16(model)
        if self.tables:
            _require_table_options(options, self.tables, is_float16=self.is_float16)

    @property
    def not_trained(self) -> list[tf.Variable]:
        """Those of `inputs` that are not trained."""
        return self.inputs[len(self.dense) :]

    @property
    def table_slots(self) -> list[Rows]:
        """The optimizer slots of tables with a fixed number of rows."""
        tables = [table for table in self.saved_tables if isinstance(table, FixedTable)]
        return [slot for table in tables for slot in table.slots.values()]

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

    def values(self, averages: Sequence[tf.Variable]) -> list[npt.NDArray[np.generic]]:
        """Returns the values of `model.variables`, with `averages`, if any, for those of `trained`.

        Each table is one value, however many parts it has. Tables of dynamic ids are left out.
        """
        evaluated = dict(zip(map(id, self.trained), averages, strict=False))
        return [
            v.numpy()
            if isinstance(v, Rows)
            else np.asarray(evaluated.get(id(v.value), v.value).numpy())
            for v in saved_variables(self.model)
            if not isinstance(v, DynamicTable)
        ]

    def assigning_nothing(
        self, values: Sequence[tf.Tensor], *, completes: bool = False
    ) -> keras.StatelessScope:
        """A scope in which the first of `inputs` have `values`, and assignments have no effect.

        If `completes`, the others have their present values in the scope, too.
        """
        if completes:
            others = self.inputs[len(values) :]
            values = [*values, *(tf.convert_to_tensor(variable) for variable in others)]
        mapping = list(zip(self.keras_inputs, values, strict=False))
        return keras.StatelessScope(state_mapping=mapping, collect_losses=True)


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
