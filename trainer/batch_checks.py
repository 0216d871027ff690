"""Checks what the functions of a config file return, before training.

specs = input_specs(inputs, recipe)         # of the model's inputs, as `parse` returns them
check_batches(inputs, learner, recipe, executor.strategy)
notes = length_notes(inputs, recipe.path)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from data.reader import as_tuples, takes_seeds
from data.system.compat.autograph import autograph
from data.system.compat.keras_optimizers import given_rate
from data.system.files import DataError
from strategies.base import Batch
from trainer.config import ConfigError, Recipe
from trainer.config_file import errors_explained
from trainer.exit_codes import first_line
from trainer.inputs import Inputs, batch_at, data_errors_explained
from trainer.learner import Learner
from trainer.models import has_own_code
from trainer.step.advice import shape_advice
from trainer.step.losses import PerExample
from trainer.step.optimizers import supported_optimizers

_PARSE_HINT = (
    "\n  parse gets n records at once, string [n], and returns (inputs [n, ...], labels [n, ...]): "
    "use tf.io.parse_example, not tf.io.parse_single_example, and tf.map_fn where an op takes one "
    "record."
)
_PARTS = ("inputs", "labels", "weights")  # Of what parse returns.
# Not the length of the longest list: which examples `parse` gets at once depends on the strategy.
_MAKE_DENSE = {
    "SparseTensor": "tf.RaggedTensor.from_sparse(x).to_tensor(shape=[None, 20])",
    "RaggedTensor": "x.to_tensor(shape=[None, 20])",
}


def input_specs(inputs: Inputs, recipe: Recipe) -> Batch:
    """The tensor specs of the model's inputs, as `parse` returns them. No record is read.

    Raises ConfigError if `parse` fails for string [n], or does not return (inputs, labels).
    """
    what = f"parse(serialized) of {recipe.path}"
    with errors_explained(what, _PARSE_HINT):
        specs = inputs.train.parsed_specs
    if not isinstance(specs, tuple) or len(specs) not in (2, 3):
        shapes = tf.nest.map_structure(shape_text, specs)
        raise ConfigError(
            f"{what} must return (inputs, labels) or (inputs, labels, weights), but returned "
            f"{shapes}. If there are no labels, return zeros: "
            "return inputs, tf.zeros([tf.shape(serialized)[0]])."
        )
    check_dense(what, specs)
    for part, spec in zip(_PARTS, specs, strict=False):
        for each in tf.nest.flatten(spec):
            if each.shape.rank == 0:
                raise ConfigError(
                    f"{what} must return {part} of n examples, [n, ...], but returned "
                    f"{shape_text(each)}.{_PARSE_HINT}"
                )
    if inputs.train is not inputs.evaluation and takes_seeds(inputs.train.parse):
        with errors_explained(f"parse(serialized, seeds) of {recipe.path}", _PARSE_HINT):
            seeded = inputs.train.seeded_specs
        if tf.nest.map_structure(str, seeded) != tf.nest.map_structure(str, specs):
            shapes = [tf.nest.map_structure(shape_text, found) for found in (seeded, specs)]
            raise ConfigError(
                f"parse(serialized, seeds) of {recipe.path} must return the same types with seeds, "
                f"in training, as without: in evaluation seeds is None. It returned {shapes[0]} "
                f"and {shapes[1]}."
            )
    return specs[0]


def check_batches(
    inputs: Inputs, learner: Learner, recipe: Recipe, strategy: tf.distribute.Strategy | None = None
) -> None:
    """Puts the first batch of each split through `learner`'s model, loss and metrics.

    Traces a step and an evaluation under `strategy`, by default the current one, if they call
    methods of a user's class.

    Raises:
        DataError: it cannot be read or parsed, labels are out of range, or shapes do not fit.
        ConfigError: `augment`, the loss or a metric fails, or returns values of a wrong number.
    """
    _check_augment(inputs, recipe)
    known = {id(variable) for variable in learner.model.variables}
    for reader in inputs.readers:
        where = f"The first batch of split {reader.split.name!r}"
        with data_errors_explained(inputs):
            examples, labels, *weights = batch_at(reader, 0)
        state = [(variable, variable.numpy()) for variable in _state_of(learner)]
        try:
            outputs = learner.model(examples, training=False)
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            declared = getattr(learner.model, "inputs", None) or []
            taken = tf.nest.map_structure(shape_text, declared) or "inputs without declared shapes"
            shapes = tf.nest.map_structure(shape_text, examples)
            raise DataError(
                f"{where} does not fit the model of {recipe.path}: inputs are {shapes}, the model "
                f"takes {taken}. {first_line(error)}"
            ) from error
        # Not each task makes this check, and what a layer has counted must be equal in all.
        for variable, value in state:
            variable.assign(value)
        if recipe.loss is None and "loss" in learner.objective.functions:
            _check_labels(where, labels, outputs)
        num_examples = tf.nest.flatten(examples)[0].shape[0]
        shapes = tf.nest.map_structure(shape_text, (labels, outputs))
        given = f"labels: {shapes[0]}, outputs: {shapes[1]}{shape_advice(labels, outputs)}"
        for name, function in learner.objective.functions.items():
            called = name if name == "loss" else f"metrics[{name!r}]"
            what = f"{where}: {called}(labels, outputs) of {recipe.path}"
            with errors_explained(what, f"\n  {given}"):
                shape = _shape_of(function, labels, outputs)
            _check_shape(what, shape, num_examples)
        if learner.objective.keras_metrics and num_examples > 1:
            with errors_explained(f"{where}: the metrics of {recipe.path}", f"\n  {given}"):
                learner.objective.keras_metrics.require_sums(labels, outputs)
        for weight in tf.nest.flatten(weights):
            _check_weights(where, weight, num_examples)
        specs = tf.nest.map_structure(tf.type_spec_from_value, (examples, labels, *weights))
        if has_own_code(learner.model) and type(learner).gradients is Learner.gradients:
            what = f"{where}: the model of {recipe.path}, called with training=True,"
            with errors_explained(what):  # Traced, not run: nothing is assigned.
                tf.function(learner.training_losses).get_concrete_function(specs)
            if late := [v.path for v in learner.model.variables if id(v) not in known]:
                raise ConfigError(
                    f"{what} makes new variables, which would not be trained: {', '.join(late)}. "
                    "A layer that is used outside of `call`, for example in compute_loss, needs "
                    "its weights before: call its `build(shape)` in build_model."
                )
        check = _MethodCheck(where, learner, recipe, strategy or tf.distribute.get_strategy())
        if reader is inputs.train and _step_calls_users(learner):
            check.step(specs, num_examples)
        if reader is inputs.evaluation and type(learner) is not Learner:
            check.evaluation(specs, num_examples)


def _state_of(learner: Learner) -> list[tf.Variable]:
    """Variables that layers may change, without frozen weights, which may be large."""
    others = (variable.value for variable in learner.model.non_trainable_variables)
    return [*learner.layer_state, *(v for v in others if not v.dtype.is_floating)]


def _step_calls_users(learner: Learner) -> bool:
    """Returns True if a step calls a user's class or function, besides the model and the loss."""
    functions = [f for v in learner.dense_variables for f in (v.constraint, v.regularizer)]
    optimizer = learner.optimizer
    is_known = type(optimizer) in supported_optimizers().values()
    parts = (*([] if is_known else [optimizer]), given_rate(optimizer), *functions)
    modules = (getattr(part, "__module__", "keras") for part in parts)  # Of numbers, none.
    is_users = any(module.partition(".")[0] != "keras" for module in modules)
    return is_users or type(learner) is not Learner


@dataclasses.dataclass
class _MethodCheck:
    """Traces, without running, what a step and an evaluation call on a replica."""

    where: str
    learner: Learner
    recipe: Recipe
    strategy: tf.distribute.Strategy

    def step(self, specs: tuple[Batch, ...], num_examples: int) -> None:
        """Raises ConfigError if a step of a batch of `specs`, (inputs, labels, ...), would fail."""
        learner, what = self.learner, self._named("gradients(batch)")
        if learner.needs_seeds:
            specs = (*specs, tf.TensorSpec([num_examples, 2], tf.int32))
        returned = self._traced(what, learner.gradients, specs)
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise ConfigError(f"{what} must return (gradients, totals). Received: {returned!r}.")
        gradients, totals = returned
        if not isinstance(gradients, (list, tuple)) or len(gradients) != len(learner.variables):
            received = f"{len(gradients)}" if isinstance(gradients, (list, tuple)) else gradients
            raise ConfigError(
                f"{what} must return a list with a gradient, or None, for each of the "
                f"{len(learner.variables)} `variables`. Received: {received}."
            )
        self._check_totals(what, totals)
        given = [None if g is None else tf.type_spec_from_value(g) for g in gradients]
        self._traced(self._named("apply(gradients)"), learner.apply, given)

    def evaluation(self, specs: tuple[Batch, ...], num_examples: int) -> None:
        """Raises ConfigError if the evaluation of a batch of `specs` would fail."""
        what = self._named("evaluate(batch)")
        counts = tf.TensorSpec([num_examples], tf.float32)
        self._check_totals(what, self._traced(what, self.learner.evaluate, (*specs, counts)))

    def _named(self, method: str) -> str:
        return f"{self.where}: {method} of {type(self.learner).__name__} of {self.recipe.path}"

    def _traced(self, what: str, method: Callable[[Any], Any], specs: Any) -> Any:
        returned: list[Any] = []

        def in_replica(argument: Any) -> None:
            returned.append(autograph(method)(argument))

        def in_all_replicas(argument: Any) -> None:
            self.strategy.run(in_replica, args=(argument,))

        with errors_explained(what), self.strategy.scope():
            tf.function(in_all_replicas, autograph=False).get_concrete_function(specs)
        return returned[0]

    def _check_totals(self, what: str, totals: Any) -> None:
        needed = tf.TensorSpec([self.learner.num_totals], tf.float64)
        if not (tf.is_tensor(totals) and needed.is_compatible_with(totals)):
            spec = f"{totals.dtype.name}{totals.shape}" if tf.is_tensor(totals) else repr(totals)
            raise ConfigError(
                f"{what} must return the totals of `measure`: float64({needed.shape[0]},), a total "
                f"and a count for the loss and each metric. Received: {spec}."
            )


def _check_augment(inputs: Inputs, recipe: Recipe) -> None:
    reader = inputs.train
    if reader.augment is None:
        return
    with data_errors_explained(inputs):
        batch = batch_at(dataclasses.replace(reader, augment=None), 0)
    seeds = tf.constant(reader.order.seeds(0, 1)[0])
    # In a graph and for any number of examples, as in training.
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), (*batch[:2], seeds)
    )
    what = f"augment(inputs, labels, seeds) of {recipe.path}"
    with errors_explained(what):
        augment = tf.function(reader.augment, input_signature=specs)
        returned = as_tuples(augment(*batch[:2], seeds))
    num_examples = reader.order.batch_size
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if is_pair:
        check_dense(what, returned)
    shapes = [getattr(value, "shape", None) for value in tf.nest.flatten(returned)]
    if not is_pair or any(not shape or shape[0] != num_examples for shape in shapes):
        raise ConfigError(
            f"{what} must return (inputs, labels) of as many examples as it gets, {num_examples} "
            f"here. Received: shapes {', '.join(map(str, shapes))}."
        )


def _shape_of(function: PerExample, labels: tf.Tensor, outputs: tf.Tensor) -> tf.TensorShape | None:
    # Traced, not run: it may have ops that only workers can run.
    specs = tf.nest.map_structure(tf.type_spec_from_value, (labels, outputs))
    returned = tf.function(function).get_concrete_function(*specs).structured_outputs
    return getattr(returned, "shape", None)


def _check_shape(what: str, shape: tf.TensorShape | None, num_examples: int) -> None:
    if shape is not None and shape.is_compatible_with([num_examples]):
        return
    remedy = (
        "reduce over every axis but the first, as tf.reduce_mean(..., axis=-1) does; and give "
        "labels and outputs the same shape, as outputs[:, 0] does"
    )
    if shape is None:
        remedy = "return a single tensor"
    elif shape.rank == 0:
        remedy = "drop tf.reduce_mean or tf.reduce_sum"
    returned = "no tensor" if shape is None else f"shape {shape}"
    raise ConfigError(
        f"{what} returned {returned} for {num_examples} examples, but shape "
        f"({num_examples},) is needed. Return one value an example: {remedy}."
    )


def _check_weights(where: str, weights: tf.Tensor, num_examples: int) -> None:
    is_number = weights.dtype.is_floating or weights.dtype.is_integer
    if not is_number or weights.shape.rank == 0 or weights.shape[0] != num_examples:
        raise DataError(
            f"{where} has weights {shape_text(weights)} for {num_examples} examples, but needs "
            "a number for each, [n]. parse() returns (inputs, labels, weights)."
        )


def _check_labels(where: str, labels: Batch, outputs: Batch) -> None:
    if tf.nest.is_nested(labels) or tf.nest.is_nested(outputs):
        shapes = [tf.nest.map_structure(shape_text, part) for part in (labels, outputs)]
        raise DataError(
            f"{where} has the labels {shapes[0]} and the outputs {shapes[1]}, but the default loss "
            "is for one label and one output. Define `loss` in the config file."
        )
    num_classes = outputs.shape[-1]
    if labels.dtype.is_floating and labels.shape.rank == 2 and labels.shape[1] == num_classes:
        return  # One-hot, or probabilities.
    if not labels.dtype.is_integer or labels.shape.rank != 1:
        raise DataError(
            f"{where} has labels {labels.dtype.name}{list(labels.shape)}, but the default loss "
            f"needs an integer for each example, or {num_classes} probabilities. Define `loss` in "
            "the config file for other labels: loss = 'mse' for numbers."
        )
    values = labels.numpy()
    if values.min() < 0 or values.max() >= num_classes:
        raise DataError(
            f"{where} has labels from {values.min()} to {values.max()}, but the model has "
            f"{num_classes} outputs. Labels must be 0 to {num_classes - 1}."
        )


def check_dense(what: str, returned: Batch) -> None:
    """Raises ConfigError if a part of (inputs, labels, ...) is sparse, ragged or no tensor."""
    for path, found in keras.tree.flatten_with_path(returned):
        if isinstance(found, (tf.Tensor, tf.TensorSpec)):
            continue
        name = _part_name(path)
        kind = type(found).__name__.removesuffix("Spec")
        shown = "None" if found is None else f"a {kind}"
        said = f"{what} must return dense tensors, but its {name} are {shown}."
        if kind in _MAKE_DENSE:
            said += (
                f" Pad it to one length, here 20, which cuts longer lists: {_MAKE_DENSE[kind]} "
                "(default_value=-1 tells padding from ids)."
            )
        raise ConfigError(said)


def length_notes(inputs: Inputs, path: str) -> list[str]:
    """Names the tensors of `parse`, of the config `path`, that have an axis of unknown size.

    If lists are padded to the longest one, their length depends on which examples `parse` gets at
    once, and this on the strategy. A loss that is a mean over the length then depends on it, too.
    """
    found = {
        _part_name(where): spec
        for where, spec in keras.tree.flatten_with_path(inputs.train.parsed_specs)
        if not spec.shape[1:].is_fully_defined()
    }
    if not found:
        return []
    named = ", ".join(f"{name} of {shape_text(spec)}" for name, spec in found.items())
    first = next(iter(found.values())).shape
    inner = [20] if first.rank is None else [size or 20 for size in first[1:]]
    shape = f"[{', '.join(map(str, [None, *inner]))}]"
    return [
        f"parse() of {path} returns {named}. If a size that is None depends on the examples in a "
        "batch, other strategies train otherwise: they parse other groups of examples. Pad lists "
        f"to one length, here 20: x.to_tensor(shape={shape}). If the size is always the same, "
        f"return tf.ensure_shape(x, {shape}) with that size."
    ]


def _part_name(path: Sequence[int | str]) -> str:
    """The name, for messages, of a tensor in (inputs, labels, ...)."""
    part, *keys = path
    return _PARTS[int(part)] + "".join(f"[{key!r}]" for key in keys)


def shape_text(spec: tf.TensorSpec | tf.Tensor) -> str:
    """The dtype and the shape of a tensor, for messages."""
    if not hasattr(spec, "dtype"):
        return type(spec).__name__
    return f"{tf.as_dtype(spec.dtype).name}{spec.shape}"
