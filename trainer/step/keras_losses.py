"""Keras' losses: a name, a keras.losses object, several by output; or `compute_loss` of a model.

    loss = KerasLoss({"digit": "sparse_categorical_crossentropy", "size": "mse"}, {"size": 0.1})
    values = loss(labels, outputs, weights)         # [B]: the executor sums over all replicas
    values = ModelLoss(model)(labels, outputs, weights, inputs, training=True)      # [B]

Whatever the reduction of a keras.losses object, the loss of a batch is the mean over its examples,
and the loss of an example is the mean over its other axes: Keras' "sum_over_batch_size". A sample
weight multiplies the loss of its example; the sum is still divided by the number of examples. These
are the formulas of Keras' `fit`. A mask of the model multiplies positions by 0 or 1; Keras divides
by the number of positions that count, too, which differs from batch to batch.
"""

import difflib
import functools
import inspect
import itertools
import numbers
import operator
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from data.system.compat.keras_compile import compute_loss, get_loss
from strategies.base import Batch
from trainer.step.options import ConfigError

# Any: a name, a keras.Loss or its class, a function of (labels, outputs), or None: without a loss.
LossSpec: TypeAlias = Any

_RESOLVED_BY_SHAPE = ("crossentropy", "ce")
_MEANS = ("sum_over_batch_size", "mean")

# Stands for the only output of a model, whatever its name. Earlier versions named it so.
ONLY_OUTPUT = "output"


def is_keras_function(value: object) -> bool:
    """Returns True for a function of Keras, for example keras.losses.mean_squared_error."""
    return inspect.isfunction(value) and value.__module__.partition(".")[0] == "keras"


def is_class_of(value: object, *kinds: type) -> bool:
    """Returns True for a class derived from one of `kinds`: Keras calls it without arguments."""
    return inspect.isclass(value) and issubclass(value, kinds)


def is_keras(loss: object) -> bool:
    """Returns True for a LossSpec that Keras resolves, not a function of a config file."""
    is_object = isinstance(loss, (str, list, tuple, Mapping, keras.Loss))
    return is_object or is_class_of(loss, keras.Loss) or is_keras_function(loss)


def output_names(model: keras.Model, outputs: Batch) -> list[str]:
    """Returns the names of the `outputs` of `model`, a nest of one level, in Keras' order.

    Outputs in a dict have its keys. Else Keras names an output after the layer that made it. Of
    equal names, as of a layer that was called twice, the later ones get a number: `head`, `head_1`.
    """
    if isinstance(outputs, Mapping):
        return sorted(outputs)
    names = list(getattr(model, "output_names", None) or [])
    if not isinstance(outputs, (list, tuple)):
        return names if len(names) == 1 else [ONLY_OUTPUT]
    if len(names) != len(outputs):
        return [f"output_{i}" for i in range(len(outputs))]
    found: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        found.append(next(n for n in itertools.chain([name], numbered) if n not in found))
    return found


def listed(what: str, value: Batch, names: Sequence[str]) -> list[Any]:
    """Returns the part of `value` for each output in `names`.

    `value` is one part for all outputs, a sequence of parts in the order of `names`, or a dict,
    where outputs without an entry get None. The key of the only output may be ONLY_OUTPUT. `what`
    names it in errors.

    Raises ConfigError if `value` has another structure.
    """
    if isinstance(value, Mapping):
        if len(names) == 1 and set(value) == {ONLY_OUTPUT}:
            return list(value.values())
        if unknown := sorted(set(value) - set(names)):
            raise ConfigError(
                f"{what} names {', '.join(map(repr, unknown))}, but the outputs of the model are "
                f"{', '.join(map(repr, names))}."
            )
        return [value.get(name) for name in names]
    if isinstance(value, (list, tuple)):
        if len(value) != len(names):
            raise ConfigError(
                f"{what} has {len(value)} entries, but the model has {len(names)} output(s): "
                f"{', '.join(map(repr, names))}. Give one for each, in this order; or a dict."
            )
        return list(value)
    return [value] * len(names)


class KerasLoss:
    """The weighted sum of a loss for each output of a model, as one value per example."""

    def __init__(
        self, loss: LossSpec, factors: Mapping[str, float] | Sequence[float] | None = None
    ) -> None:
        """`loss` and `factors` are for all outputs, or a list or dict with one for each output."""
        self._loss = loss
        self._factors = factors
        self.notes = []
        for factor in tf.nest.flatten(factors):
            if factor is not None and not isinstance(factor, numbers.Real):
                raise ConfigError(
                    f"loss_weights has {factor!r}, but must be a number, or a list or dict of "
                    "numbers by output."
                )
        for item in keras.tree.flatten(loss):
            if isinstance(item, str) and item not in _RESOLVED_BY_SHAPE:
                require_name(f"loss={item!r}", item, keras.losses)
            if isinstance(item, keras.Loss) and item.reduction not in _MEANS:
                self.notes.append(
                    f"{type(item).__name__}(reduction={item.reduction!r}): the loss is the mean "
                    "over the examples of a batch, as with reduction='sum_over_batch_size'."
                )

    def __call__(
        self, labels: Batch, outputs: Batch, names: Sequence[str], weights: Batch | None = None
    ) -> tf.Tensor:
        """Returns the loss of each example, [B]; `names` are the `output_names`."""
        values = self.by_output(labels, outputs, names, weights)
        factors = dict(zip(names, listed("loss_weights", self._factors, names), strict=True))
        for name, value in values.items():
            if factors[name] is not None:
                values[name] = value * float(factors[name])
        return functools.reduce(operator.add, values.values())

    def outputs_with_loss(self, names: Sequence[str]) -> list[str]:
        """Returns those of the outputs `names` that have a loss."""
        losses = listed("loss", self._loss, names)
        return [name for name, loss in zip(names, losses, strict=True) if loss is not None]

    def require_widths(self, labels: Batch, outputs: Batch, names: Sequence[str]) -> None:
        """Raises ConfigError if Keras cannot tell what a loss means: it looks at the last axes."""
        of_labels, of_outputs = listed("labels", labels, names), listed("outputs", outputs, names)
        losses = listed("loss", self._loss, names)
        for loss, label, output in zip(losses, of_labels, of_outputs, strict=True):
            if loss not in _RESOLVED_BY_SHAPE or label is None or output.shape[-1] == 1:
                continue
            if len(label.shape) == len(output.shape) and label.shape[-1] is None:
                raise ConfigError(
                    f"loss={loss!r} depends on the size of the last axis of the labels, which is "
                    f"not known: shape {label.shape}. Give 'sparse_categorical_crossentropy' for "
                    "the number of a class, or 'categorical_crossentropy' for a number for each "
                    "class."
                )

    def by_output(
        self, labels: Batch, outputs: Batch, names: Sequence[str], weights: Batch | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns the loss of each output that has one, [B] each, by name."""
        losses = listed("loss", self._loss, names)
        if all(loss is None for loss in losses):
            raise ConfigError("loss is None for all outputs of the model. Give a loss for one.")
        of_outputs = listed("the model", outputs, names)
        of_labels = listed("parse() returns labels, of which one", labels, names)
        of_weights = listed("parse() returns sample weights, of which one", weights, names)
        values = {}
        for name, loss, label, output, weight in zip(
            names, losses, of_labels, of_outputs, of_weights, strict=True
        ):
            if loss is None:
                continue
            if label is None:
                raise ConfigError(
                    f"loss has an entry for output {name!r}, but parse() returns no label of that "
                    "name. Return one, or leave the loss out."
                )
            values[name] = _per_example(loss, label, output, weight)
        return values


def overrides(model: keras.Model, method: str) -> bool:
    """Returns True if the class of `model` has its own `method` of keras.Model."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


class ModelLoss:
    """The loss of a model whose class overrides Keras' `compute_loss`.

    `compute_loss` returns a scalar: the mean over the examples that it gets, with the penalties of
    the layers if it adds `self.losses`. Each example gets this scalar as its loss. So the sum over
    the examples of a replica, divided by the batch size of all replicas, is the part of the
    replica.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __call__(
        self,
        labels: Batch,
        outputs: Batch,
        weights: Batch | None = None,
        inputs: Batch = None,
        *,
        training: bool = False,
    ) -> tf.Tensor:
        """Returns the loss of each of these examples, [B].

        Raises ConfigError if `compute_loss` returns no scalar.
        """
        value = compute_loss(self._model, inputs, labels, outputs, weights, training=training)
        if not tf.is_tensor(value) or value.shape.rank != 0:
            came = f"shape {value.shape}" if tf.is_tensor(value) else repr(value)
            raise ConfigError(
                f"compute_loss() of {type(self._model).__name__} returned {came}, but must return "
                "a scalar, the mean over the examples: `return keras.ops.mean(...)`."
            )
        num_examples = tf.shape(tf.nest.flatten((labels, outputs))[0])[0]
        return tf.fill([num_examples], value)


def weighted(values: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """`values`, [B, ...], times `weights`: [B], [B, 1] or with more axes of the values."""
    if weights is None:
        return values
    weights = tf.cast(weights, values.dtype)
    if weights.shape.rank == values.shape.rank + 1:
        weights = tf.squeeze(weights, axis=-1)
    while weights.shape.rank < values.shape.rank:
        weights = weights[..., tf.newaxis]
    return values * weights


def class_weights(labels: tf.Tensor, class_weight: Mapping[int, float]) -> tf.Tensor:
    """The weight of the class of each label, float32 [B]; 1 for classes without a weight.

    labels: int [B] or [B, 1]; or the probability of each class, [B, classes].
    """
    first = labels if labels.shape.rank == 1 else labels[..., 0]
    classes = tf.cast(tf.round(first) if first.dtype.is_floating else first, tf.int32)
    if labels.shape.rank > 1 and labels.shape[-1] != 1:  # Only a step may know the size.
        largest = tf.argmax(labels, axis=-1, output_type=tf.int32)
        classes = tf.where(tf.equal(tf.shape(labels)[-1], 1), classes, largest)
    table = [class_weight.get(i, 1.0) for i in range(max(class_weight) + 1)]
    is_listed = tf.logical_and(classes >= 0, classes < len(table))
    found = tf.gather(tf.constant(table, tf.float32), tf.where(is_listed, classes, 0))
    return tf.where(is_listed, found, 1.0)


def unreduced(loss: keras.Loss) -> keras.Loss:
    """Returns a copy of `loss` that gives the values of examples.

    copy.copy() makes a loss again from its config, which lacks a user's function or arguments.
    """
    made: keras.Loss = object.__new__(type(loss))
    vars(made).update(vars(loss), reduction="none")
    return made


def _per_example(
    loss: LossSpec, labels: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor | None
) -> tf.Tensor:
    values = weighted(unreduced(get_loss(loss, labels, outputs))(labels, outputs), weights)
    if values.shape.rank < 2:
        return values
    return tf.reduce_mean(values, axis=list(range(1, values.shape.rank)))


def require_name(what: str, name: str, kind: ModuleType) -> None:
    """Raises ConfigError if `name` is none of `kind`: keras.losses or keras.metrics."""
    if _has_name(kind, name):
        return
    names = difflib.get_close_matches(name, ["accuracy", *vars(kind)])
    of_kind = kind.__name__.rpartition(".")[2]
    near = next((other for other in names if _has_name(kind, other)), "")
    hint = f"Did you mean {near!r}?" if near else f"See keras.io/api/{of_kind}."
    raise ConfigError(f"{what} is none of Keras' {of_kind}. {hint}")


def _has_name(kind: ModuleType, name: str) -> bool:
    try:
        kind.get(name)
    except (ValueError, TypeError) as error:
        return isinstance(error, TypeError)  # The class needs arguments.
    return True
