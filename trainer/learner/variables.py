"""The variables of a model, in the order that all parts of a learner use, and its tables.

trainer/embeddings is optional: no module of the core imports it. A config that uses tables does,
and then the layers of its model bring what the core calls (model_tables.py there).
"""

import collections
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from data.system.compat import recomputing
from data.system.compat.keras_layers import all_layers, own
from trainer.step.loss_scale import computes_in_float16
from trainer.step.options import ConfigError, Options
from trainer.step.random_layers import replaying

if TYPE_CHECKING:
    from trainer.embeddings.model_tables import ModelTables
    from trainer.learner import Learner

recomputing.install(replaying)


class SplitVariable:
    """The variables of the parts of a table, or of an optimizer slot of it.

    Attributes:
        parts: The variables.
        shape: That of the complete table; the number of rows is None if it is not fixed.
        path: The name of the complete table.
        dtype: The name of the type of the values.
    """

    def __init__(self, parts: Sequence[tf.Variable], shape: tuple[Any, ...], path: str) -> None:
        self.parts, self.shape = list(parts), shape
        self.path = self.name = path
        self.dtype: str = parts[0].dtype.name


class ModelVariables:
    """The part of a Learner that finds the variables, and makes the optimizer slots of tables."""

    model: keras.Model
    _step_options: Options

    def _find_variables(self) -> None:
        """Raises OptimizerError or ConfigError, as Learner."""
        model, options = self.model, self._step_options
        self._is_float16 = is_float16 = computes_in_float16(model)
        self.tables = tables = tables_of(model)
        self.table_parts = tables.start(options, is_float16=is_float16) if tables else []
        of_tables = {id(part) for layer in tables for part in layer.weights}
        self.dense_variables = [v for v in model.trainable_variables if id(v) not in of_tables]
        others = [v for v in model.non_trainable_variables if id(v) not in of_tables]
        parts = [part.rows for part in self.table_parts]
        self.variables: list[tf.Variable] = [*(v.value for v in self.dense_variables), *parts]
        self.num_dense = len(self.dense_variables)
        # The forward pass reads these, and the tables.
        self._keras_inputs = [*self.dense_variables, *others]
        self._forward_inputs: list[tf.Variable] = [v.value for v in self._keras_inputs]
        self._not_trained = self._forward_inputs[self.num_dense :]
        # Replicas of one process are threads, which take turns where they communicate. Keras keeps
        # the losses of layers in one list for all threads, but in a stateless scope in one of each.
        layers = all_layers(model)
        self._needs_scope = recomputing.is_used_by(model) or any(
            getattr(layer, "synchronized", False)
            or any(v.aggregation != "none" for v in own(layer, "non_trainable_variables"))
            for layer in layers
        )
        spectral = [la for la in layers if isinstance(la, keras.layers.SpectralNormalization)]
        if self._needs_scope and spectral:
            raise ConfigError(
                f"SpectralNormalization {spectral[0].name!r} assigns its kernel in the forward "
                "pass. Its gradient would be another one beside a layer that recomputes, or that "
                "communicates with other replicas (synchronized=True). Leave one of them out."
            )

    @property
    def layer_state(self) -> list[tf.Variable]:
        """The variables that layers change in training, each replica its own copy.

        Moving statistics, but no integers, and no variables with an aggregation of the layer.
        """
        return [
            variable.value
            for layer in all_layers(self.model)
            # Other layers may change their state although they are frozen.
            if layer.trainable or not isinstance(layer, keras.layers.BatchNormalization)
            for variable in own(layer, "non_trainable_variables")
            if variable.aggregation == "none" and tf.as_dtype(variable.dtype).is_floating
        ]


def tables_of(model: keras.Model) -> "ModelTables | tuple[()]":
    """The layers of `model` that are split, also those inside of other layers; () without them."""
    layers = all_layers(model, include_self=False)
    split = [one for one in layers if isinstance(getattr(one, "table", None), SplitVariable)]
    return split[0].of_model(split) if split else ()


def is_trainable(model: keras.Model) -> bool:
    """Returns True if `model` has something to train; Keras sees no table of dynamic ids."""
    tables = tables_of(model)
    return bool(model.trainable_variables or any(la.is_dynamic and la.trainable for la in tables))


def saved_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns `saved_arrays` of `model`, and its tables of dynamic ids, which come last."""
    return [*saved_arrays(model), *(la.table for la in tables_of(model) if la.is_dynamic)]


def saved_arrays(model: keras.Model) -> list[keras.Variable]:
    """Returns `model.variables`; each table is one entry, at the place of its first part."""
    tables = tables_of(model)
    table_of = {id(part): layer.table for layer in tables for part in layer.weights}
    entries = [table_of.get(id(variable), variable) for variable in model.variables]
    # A model that was exported has constants in place of dynamic ids.
    left_out = {id(layer.table) for layer in tables if layer.is_dynamic}
    return list({id(entry): entry for entry in entries if id(entry) not in left_out}.values())


def set_values(model: keras.Model, learner: "Learner") -> None:
    """Copies the values with which `learner` evaluates to `model`, which will not be trained.

    Variables are matched by their paths: `model` may have fewer, if it is built for predictions.
    If paths differ, because a config file numbers its layers itself, they are matched by order.

    Raises ConfigError if `model` has another variable.
    """
    arrays, weights = saved_arrays(model), learner.weights()
    for variable, place in zip(arrays, _places(arrays, saved_arrays(learner.model)), strict=True):
        variable.assign(weights[place])
    refresh_constants(model)
    layers, trained = tables_of(model), [layer.table for layer in learner.tables]
    places = _places([layer.table for layer in layers], trained)
    for layer, place in zip(layers, places, strict=True):
        if layer.is_dynamic:
            layer.freeze(*trained[place].ids_and_rows())


def refresh_constants(model: keras.Model) -> None:
    """Makes each Normalization compute with the present values of its variables.

    It computes with tensors that it makes of them when it is built or adapted. Called after the
    variables of `model` were assigned.
    """
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def _places(items: Sequence[Any], trained: Sequence[Any]) -> list[int]:
    """The place in `trained`, of variables or tables, of each of `items`."""
    keys, places = [*_keys(items)], {key: place for place, key in enumerate(_keys(trained))}
    others = [path for path, number in keys if (path, number) not in places]
    if not others:
        return [places[key] for key in keys]
    kinds, needed = ([(tuple(i.shape), i.dtype) for i in side] for side in (items, trained))
    if kinds == needed:
        return list(range(len(trained)))
    raise ConfigError(
        f"build_model made other variables when it was called again: {', '.join(others)}. "
        "Make the same variables, of the same names, at each call."
    )


def _keys(items: Sequence[Any]) -> Iterator[tuple[str, int]]:
    """The `path` of each item, and the number of items of this path so far: it may occur twice."""
    counts: collections.Counter[str] = collections.Counter()
    for item in items:
        counts[item.path] += 1
        yield item.path, counts[item.path]
