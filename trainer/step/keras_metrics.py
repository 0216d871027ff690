"""Keras' metrics, exact on any number of replicas: their states are summed, then evaluated.

    metrics = KerasMetrics([keras.metrics.AUC()], [])   # metrics, weighted_metrics of `compile`
    metrics.build(labels, outputs, names)               # specs
    totals = metrics.update(labels, outputs, weights)   # float64 [metrics.size], on each replica
    metrics.results(summed)                             # {"auc": 0.93}

The state of a metric is a list of tensors, for example AUC's true positives at each threshold. The
state after examples A and B is the sum of the state after A and the state after B: this holds for
all metrics of Keras 3.15, and a metric without it is refused. So an update starts at the initial
state, returns the change, and changes no variable. Keras' CompileMetrics chooses names and
functions, as in `fit`.
"""

import concurrent.futures
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system.compat.keras_compile import CompileMetrics, get_metric, is_lower_better
from data.system.compat.keras_layers import select_mask
from data.system.compat.metrics_without_variables import made_anew
from strategies.base import Batch
from trainer.exit_codes import first_line
from trainer.step.advice import shape_advice
from trainer.step.keras_losses import (
    ONLY_OUTPUT,
    LossSpec,
    is_class_of,
    is_keras,
    is_keras_function,
    require_name,
    unreduced,
)
from trainer.step.losses import PerExample, accuracy
from trainer.step.options import ConfigError

# Any: a list, or a dict by output, of names, keras.metrics objects, their classes and functions.
MetricSpec: TypeAlias = Any

_TOLERANCE = 1e-4
_ACCURACY = ("accuracy", "acc")  # Keras chooses the class by the shapes.


class Renamed(NamedTuple):
    """A metric that is reported under another name."""

    name: str
    metric: MetricSpec


class KerasMetrics:
    """The metrics of `compile(metrics=..., weighted_metrics=...)`.

    Attributes:
        size: The number of totals; known after `build`, as the names are.
        names: The names of the results.
        are_lower_better: By name, only of the metrics of which Keras knows it.
    """

    def __init__(self, metrics: MetricSpec, weighted_metrics: MetricSpec) -> None:
        self._specs = (metrics, weighted_metrics)
        self.size = 0
        self.names: Sequence[str] = ()
        self.are_lower_better: Mapping[str, bool] = {}

    def build(self, labels: Batch, outputs: Batch, output_names: Sequence[str]) -> None:
        """Makes the metrics for `labels` and `outputs`, nests of specs.

        Each call makes new ones: objects of a config file only say what to make. Objects that were
        made elsewhere, in a notebook for example, are used, as in Keras' `compile`.

        Raises:
            ConfigError: a metric cannot be made, or does not fit the labels and outputs.
        """
        # Keras needs variables to name the parts of a state. A strategy's scope holds in one
        # thread; in another, these are ordinary variables of this process.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(self._build, labels, outputs, output_names).result()

    def _build(self, labels: Batch, outputs: Batch, output_names: Sequence[str]) -> None:
        examples = tf.nest.map_structure(_zeros, (labels, outputs))
        has_width = all(len(s.shape) < 2 or s.shape[-1] for s in tf.nest.flatten(labels))
        try:
            made = (_fresh(spec, examples, has_width=has_width) for spec in self._specs)
            self._metrics = CompileMetrics(*made, output_names=list(output_names))
            with tf.device("CPU:0"):
                self._metrics.update_state(*examples, self._ones(examples[1]))
                self._metrics.reset_state()
                self._initial = [np.asarray(v) for v in self._metrics.stateless_reset_state()]
        except ConfigError:
            raise
        except Exception as error:  # Keras, or a user's class, which may raise any error.
            shapes = tf.nest.map_structure(lambda t: (None, *t.shape[1:]), examples)
            raise ConfigError(
                f"The metrics of the config file do not fit: {type(error).__name__}: "
                f"{first_line(error)} (labels and outputs have the shapes {shapes})"
                f"{shape_advice(labels, outputs) or '.'}"
            ) from error
        if len({*map(id, self._metrics.variables)}) < len(self._initial):
            raise ConfigError(
                "One metric object is given twice, and would count twice. Make one for each place."
            )
        self.size = sum(part.size for part in self._initial)
        values, metrics = self._values(np.zeros([self.size])), self._metrics.metrics
        self.names = tuple(name for each in values.items() for name in _numbered(*each))
        if len(values) < len(metrics) or len({*self.names}) < len(self.names):
            raise ConfigError(
                f"Two metrics have one name in the reports: {', '.join(m.name for m in metrics)}. "
                "Give one of them another name, keras.metrics.AUC(name='NAME') for example."
            )
        self.are_lower_better = {
            name: is_lower
            for each, metric in zip(values.items(), metrics, strict=True)
            if (is_lower := is_lower_better(metric)) is not None
            for name in _numbered(*each)
        }

    def update(
        self,
        labels: Batch,
        outputs: Batch,
        weights: Batch | None = None,
        counts: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the change of the states, float64 [size], for a part of a batch.

        `weights` are for weighted_metrics only. Examples whose `counts`, [B], are 0 are left out.
        """
        if counts is not None:
            labels, outputs, weights, counts = without_padding((labels, outputs, weights, counts))
        after = self._metrics.stateless_update_state(
            [tf.constant(part) for part in self._initial], labels, outputs, weights
        )
        changes = [
            tf.reshape(tf.cast(state, tf.float64) - part, [-1])
            for state, part in zip(after, self._initial, strict=True)
        ]
        change = tf.ensure_shape(tf.concat(changes, axis=0), [self.size])
        if counts is None:
            return change
        return tf.where(tf.reduce_any(counts > 0), change, tf.zeros_like(change))

    def results(self, totals: npt.NDArray[np.float64]) -> dict[str, float]:
        """Returns the metrics of summed `totals` by name; NAME_0, NAME_1 ... of a vector."""
        named: dict[str, float] = {}
        for name, value in self._values(totals).items():
            named |= _numbered(name, value)
        return named

    def _values(self, totals: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        bounds = np.cumsum([part.size for part in self._initial])[:-1]
        states = [
            tf.constant((part + total.reshape(part.shape)).astype(part.dtype))
            for part, total in zip(self._initial, np.split(totals, bounds), strict=True)
        ]
        with tf.device("CPU:0"):
            found = self._metrics.stateless_result(states)
        return {name: np.asarray(value, np.float64) for name, value in found.items()}

    def require_sums(self, labels: Batch, outputs: Batch) -> None:
        """Raises ConfigError if the state of a metric is not a sum over these examples."""
        middle = tf.nest.flatten(outputs)[0].shape[0] // 2

        def after(start: list[Any], part: slice) -> list[Any]:
            examples = tf.nest.map_structure(lambda t: t[part], (labels, outputs))
            states = self._metrics.stateless_update_state(start, *examples, self._ones(examples[1]))
            return list(map(np.asarray, states))

        first = after(self._initial, slice(middle))
        second = after(self._initial, slice(middle, None))
        both = after(first, slice(middle, None))
        names = [metric.name for metric in self._metrics.metrics for _ in metric.variables]
        for name, start, *states in zip(names, self._initial, first, second, both, strict=True):
            one, other, joint = (state - start for state in states)
            if not np.allclose(joint, one + other, rtol=_TOLERANCE):
                raise ConfigError(
                    f"Metric {name!r} keeps a state that is no sum over examples, as a maximum is "
                    "none. So it has no exact value on several replicas. Leave it out, or derive "
                    "a class from a metric of Keras that sums, for example keras.metrics.Mean."
                )

    def _ones(self, outputs: Batch) -> tf.Tensor | None:
        if not self._specs[1]:
            return None
        return tf.ones([tf.nest.flatten(outputs)[0].shape[0]])


def _numbered(name: str, value: npt.NDArray[np.float64]) -> dict[str, float]:
    if not value.ndim:
        return {name: float(value)}
    return {f"{name}_{i}": float(item) for i, item in enumerate(value.ravel())}


def _fresh(spec: MetricSpec, examples: tuple[Batch, Batch], *, has_width: bool) -> MetricSpec:
    """Returns `spec` with a copy of each metric: another run may use those of the file.

    `examples` are labels and outputs. Without `has_width` the last axis of labels is of a size that
    only a step knows.
    """
    again = functools.partial(_fresh, examples=examples, has_width=has_width)
    if isinstance(spec, Renamed):
        made = get_metric(again(spec.metric), *(tf.nest.flatten(nest)[0] for nest in examples))
        made.name = spec.name
        return made
    if isinstance(spec, Mapping):
        return {name: again(part) for name, part in spec.items()}
    if isinstance(spec, (list, tuple)):
        return [again(part) for part in spec]
    if isinstance(spec, str):
        if spec.lower() not in _ACCURACY:
            require_name(f"metric {spec!r}", spec, keras.metrics)
        elif not has_width:
            return keras.metrics.MeanMetricWrapper(_accuracy, name=spec)
    if is_class_of(spec, keras.Loss):
        spec = spec()
    if isinstance(spec, keras.Loss):  # With a reduction, a small part would count as a large one.
        spec = unreduced(spec)
    return made_anew(spec) if isinstance(spec, keras.metrics.Metric) else spec


def _accuracy(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Keras' "accuracy" if only a step knows whether labels are classes or one-hot."""
    if outputs.shape[-1] == 1:
        return keras.metrics.binary_accuracy(labels, outputs)
    if len(labels.shape) < len(outputs.shape):
        return keras.metrics.sparse_categorical_accuracy(labels, outputs)
    first = tf.cast(labels[..., 0], tf.int64)
    classes = tf.where(tf.equal(tf.shape(labels)[-1], 1), first, tf.argmax(labels, axis=-1))
    return tf.cast(tf.equal(tf.argmax(outputs, axis=-1), classes), tf.float32)


def default_metrics(loss: LossSpec, outputs: Batch) -> MetricSpec:
    """Returns the accuracy that suits `loss`; no metric for losses of numbers.

    `outputs` are those of the model, a nest of specs; None if they are not known. A `loss` that is
    a function gets the accuracy, too: `build_metrics` of trainer/inputs.py leaves it out if labels
    are no classes. Functions and not objects are returned: this is called where a model is built,
    and metrics make variables.
    """
    if not is_keras(loss):
        return {"accuracy": accuracy}
    if isinstance(loss, (list, tuple, Mapping)) and len(loss) == 1:
        (loss,) = loss.values() if isinstance(loss, Mapping) else loss
    outputs = tf.nest.flatten(outputs)
    if len(outputs) > 1:
        return []
    name = getattr(loss, "__name__", loss if isinstance(loss, str) else type(loss).__name__)
    kind = name.replace("_", "").lower()
    if "crossentropy" not in kind and kind != "ce":
        return []
    # Accuracy would count the examples that the loss ignores, or compare along another axis.
    if getattr(loss, "ignore_class", None) is not None or getattr(loss, "axis", -1) != -1:
        return []
    if kind in ("sparsecategoricalcrossentropy", "categoricalgeneralizedcrossentropy"):
        return [Renamed("accuracy", keras.metrics.sparse_categorical_accuracy)]
    if kind in ("categoricalcrossentropy", "categoricalfocalcrossentropy"):
        return [Renamed("accuracy", keras.metrics.categorical_accuracy)]
    is_narrow = outputs and outputs[0] is not None and outputs[0].shape[-1] == 1
    if is_narrow or kind in ("binarycrossentropy", "binaryfocalcrossentropy"):
        threshold = 0.0 if getattr(loss, "from_logits", False) else 0.5
        return [Renamed("accuracy", functools.partial(_binary_accuracy, threshold=threshold))]
    return ["accuracy"]


def _binary_accuracy(labels: tf.Tensor, outputs: tf.Tensor, threshold: float) -> tf.Tensor:
    """Keras' binary_accuracy, but a label is a probability: 0.9 agrees with each output above."""
    is_one = labels if labels.dtype == tf.bool else labels > tf.cast(0.5, labels.dtype)
    return keras.metrics.binary_accuracy(is_one, outputs, threshold=threshold)


def split_metrics(
    what: str, metrics: MetricSpec, output_names: Sequence[str]
) -> tuple[Mapping[str, PerExample], MetricSpec]:
    """Splits `metrics` of a config file: functions of examples by name, and the rest, for Keras.

    The keys of a dict are the names of metrics. But if there are several outputs, and all keys
    are names of outputs, each entry has the metrics of its output, as in Keras. So has a list under
    the name of the only output, or ONLY_OUTPUT.
    """
    if _is_keras_metric(metrics):
        return {}, [metrics]
    if isinstance(metrics, (list, tuple)):
        return {}, list(metrics)
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{what} is {metrics!r}, but must be a list or a dict of names, keras.metrics objects "
            "and functions of (labels, outputs)."
        )
    if len(output_names) > 1 and set(metrics) <= set(output_names):
        return {}, dict(metrics)
    are_lists = all(isinstance(of_output, (list, tuple)) for of_output in metrics.values())
    if len(output_names) == 1 and are_lists and set(metrics) <= {*output_names, ONLY_OUTPUT}:
        return {}, [metric for of_output in metrics.values() for metric in of_output]
    functions: dict[str, PerExample] = {}
    others = []
    for name, metric in metrics.items():
        if _is_keras_metric(metric):
            others.append(Renamed(name, metric))
        elif callable(metric):
            functions[name] = metric
        else:
            raise ConfigError(
                f"{what}[{name!r}] is {metric!r}, but must be a keras.metrics object, its name, or "
                "a function of (labels, outputs). Only the keys of a model with several outputs "
                "have lists of metrics."
            )
    return functions, others


def _is_keras_metric(metric: object) -> bool:
    kinds = (keras.metrics.Metric, keras.Loss)
    return (
        isinstance(metric, (str, *kinds))
        or is_class_of(metric, *kinds)
        or is_keras_function(metric)
    )


def _zeros(spec: Any) -> tf.Tensor:  # A tf.TensorSpec or a keras.KerasTensor.
    shape = [2, *(size or 1 for size in spec.shape[1:])]
    return tf.zeros(shape, tf.as_dtype(spec.dtype))


def without_padding(batch: Batch) -> Batch:
    """Returns `batch` without the examples whose `counts`, the last entry of `batch`, [B], are 0.

    If all are 0, the first example stays: some metrics and losses fail without examples.
    """
    counts = batch[-1]
    none_counts = tf.logical_not(tf.reduce_any(counts > 0))
    is_first = tf.equal(tf.range(tf.size(counts)), 0)
    is_kept = tf.logical_or(counts > 0, tf.logical_and(none_counts, is_first))
    return tf.nest.map_structure(lambda t: None if t is None else _kept(t, is_kept), batch)


def _kept(tensor: tf.Tensor, is_kept: tf.Tensor) -> tf.Tensor:
    kept = tf.boolean_mask(tensor, is_kept)
    select_mask(tensor, kept, is_kept)
    return kept
