"""Keras' losses and metrics have the values of Keras on one device, on any number of replicas.

`compute_loss` of a model is its loss, also with padded batches.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.system.compat.metrics_without_variables import metrics_without_variables
from tests.unit.comparing import assert_close
from tests.unit.replicas import replicas, updater
from trainer.build import build_learner
from trainer.config import Config, Recipe
from trainer.inputs import build_metrics
from trainer.learner import Learner
from trainer.step.keras_losses import KerasLoss, ModelLoss, class_weights
from trainer.step.keras_metrics import KerasMetrics, split_metrics
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import ConfigError, Options

CLASSES = 4
NAMES = ["output"]
OPTIONS: dict[str, dict[str, Any]] = {
    "FBetaScore": {"beta": 0.5, "average": "macro"},
    "F1Score": {"threshold": 0.3},
    "MeanIoU": {"num_classes": CLASSES},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0]},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 1]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.3},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
}
# They take values, and no labels.
OF_VALUES = {"Mean", "Sum"}
STOCK = {
    name: kind
    for name, kind in vars(keras.metrics).items()
    if isinstance(kind, type)
    and issubclass(kind, keras.metrics.Metric)
    and kind is not keras.metrics.Metric
    and name not in OF_VALUES
}


def examples(name: str, number: int) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(number)
    outputs = random.random((number, CLASSES)).astype(np.float32)
    outputs /= outputs.sum(axis=1, keepdims=True)
    classes = random.integers(0, CLASSES, number)
    weights = random.integers(1, 4, number).astype(np.float32)
    if name in ("MeanIoU", "IoU"):
        return classes, random.integers(0, CLASSES, number), weights
    if name == "BinaryIoU":
        return classes > 1, outputs[:, 0], weights
    return classes if name.startswith("Sparse") else np.eye(CLASSES)[classes], outputs, weights


def specs(*arrays: Any) -> Any:
    return tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), arrays)


def build(metrics: KerasMetrics, labels: Any, outputs: Any) -> None:
    label_spec, output_spec = specs(labels, outputs)
    metrics.build(label_spec, output_spec, NAMES)


# Keras counts in integers there; these weights are whole numbers.
@pytest.mark.filterwarnings("ignore:You are passing weight as")
@pytest.mark.parametrize("name", sorted(STOCK))
def test_every_metric_of_keras_is_exact_from_states_of_parts(name: str) -> None:
    # 23 of 30 examples; parts of 10, 10 and 3 with padding, as an uneven last batch has.
    labels, outputs, weights = examples(name, 30)
    made = [STOCK[name](**OPTIONS.get(name, {}), name=f"metric_{i}") for i in range(2)]
    metrics = KerasMetrics(made[:1], made[1:])
    build(metrics, labels, outputs)
    metrics.require_sums(tf.constant(labels), tf.constant(outputs))
    totals = np.zeros([metrics.size])
    for start in range(0, 30, 10):
        part = slice(start, start + 10)
        counts = tf.constant(np.arange(start, start + 10) < 23, tf.float32)
        label, output, weight = (tf.constant(array[part]) for array in (labels, outputs, weights))
        totals += metrics.update(label, output, weight, counts).numpy()
    found = metrics.results(totals)

    own = [STOCK[name](**OPTIONS.get(name, {})) for _ in range(2)]
    own[0].update_state(labels[:23], outputs[:23])
    own[1].update_state(labels[:23], outputs[:23], weights[:23])
    for i, metric in enumerate(own):
        exact = np.ravel(metric.result())
        names = [f"metric_{i}"] if exact.size == 1 else [f"metric_{i}_{j}" for j in range(CLASSES)]
        np.testing.assert_allclose([found[n] for n in names], exact, rtol=1e-6, atol=1e-7)
    empty = metrics.update(
        tf.constant(labels), tf.constant(outputs), tf.constant(weights), tf.zeros([30])
    )
    assert not empty.numpy().any()


class Largest(keras.metrics.Metric):
    """A running maximum: a state that cannot be summed."""

    def __init__(self, name: str = "largest", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.largest = self.add_weight(initializer="zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.largest


def test_metric_whose_state_is_no_sum_is_refused() -> None:
    labels, outputs, _ = examples("", 30)
    metrics = KerasMetrics([Largest()], [])
    build(metrics, labels, outputs)
    with pytest.raises(ConfigError, match="Metric 'largest' keeps a state that is no sum"):
        metrics.require_sums(tf.constant(labels), tf.constant(outputs))


class Within(keras.metrics.Metric):
    """Without get_config(), as many users write it."""

    def __init__(self, tolerance: float = 0.5, inner: Any = None, **kwargs: Any) -> None:
        super().__init__(name=kwargs.get("name", "within"))
        self.tolerance: Any = tolerance
        self.count: Any = self.add_variable((), "ones", name="count")
        self.is_close: Any = lambda error: error < self.tolerance + 0 * self.count
        self.mean = inner or keras.metrics.Mean()
        self.uses, self.bounds = 0, [9.0]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.uses += 1
        self.mean.update_state(self.is_close(keras.ops.abs(y_true - y_pred)))
        assert self.bounds == ([0.1] if self.name == "late" else [9.0])

    def result(self) -> Any:
        return self.mean.result()


def scaled(labels: Any, outputs: Any, factor: float) -> Any:
    return factor * outputs[:, 0]


def arguments_of_metrics() -> list[Any]:
    own = keras.metrics.MeanMetricWrapper(scaled, name="scaled", factor=2.0)
    auc = keras.metrics.AUC(curve="PR", name="auc")
    auc.name = "area"
    late, replaced = Within(name="late"), keras.metrics.MeanSquaredError(name="replaced")
    late.tolerance, late.bounds = np.float32(0.2), [0.1]
    replaced._fn = lambda labels, outputs: 3 * outputs[:, 0]
    inner = Within(0.9, keras.metrics.Sum(), name="b")
    return [Within(), Within(0.2, name="a"), inner, own, auc, late, replaced]


@pytest.mark.parametrize("is_of_file", [True, False])
def test_metric_keeps_its_arguments(is_of_file: bool) -> None:
    labels, outputs = np.zeros([2, 1], np.float32), np.array([[0.3], [0.7]], np.float32)
    with metrics_without_variables(lambda: None) if is_of_file else contextlib.nullcontext():
        given = arguments_of_metrics()
    for size in (1, 2):  # Each run starts from the state of a new metric.
        metrics = KerasMetrics(given, [])
        build(metrics, labels, outputs)
        part = tf.constant(labels[:size]), tf.constant(outputs[:size])
        found = metrics.results(metrics.update(*part).numpy())
        del found["area"]
        within = {"within": 1 / size, "a": 0, "b": size, "scaled": [0.6, 1.0][size - 1]}
        assert found == pytest.approx(within | {"late": 0, "replaced": 1.5 * within["scaled"]})


def test_metric_object_with_variables_is_given_once() -> None:
    labels, outputs, _ = examples("", 30)
    vars(metric := keras.metrics.AUC()).pop("__arguments", None)  # As before the first config file.
    with pytest.raises(ConfigError, match="One metric object is given twice"):
        build(KerasMetrics([metric], [metric]), labels, outputs)
    with metrics_without_variables(lambda: None):
        described = keras.metrics.AUC(name="auc")
    metrics = KerasMetrics([described], [described])
    build(metrics, labels, outputs)
    assert metrics.names == ("auc", "weighted_auc")


def test_keys_of_a_dict_are_names_unless_they_are_outputs() -> None:
    def hits(labels: Any, outputs: Any) -> Any:
        return tf.cast(tf.equal(tf.argmax(outputs, -1), tf.argmax(labels, -1)), tf.float32)

    top = keras.metrics.TopKCategoricalAccuracy(k=3)
    functions, others = split_metrics(
        "metrics", {"hits": hits, "top3": top, "right": "accuracy"}, ["dense"]
    )
    assert functions == {"hits": hits}
    metrics = KerasMetrics(others, [])
    labels, outputs, _ = examples("", 30)
    build(metrics, labels, outputs)
    assert metrics.names == ("top3", "right")
    of_outputs = {"a": ["accuracy"], "b": "mse"}
    assert split_metrics("metrics", of_outputs, ["a", "b"]) == ({}, of_outputs)
    with pytest.raises(ConfigError, match=r"metrics\['x'\] is 3, but must be"):
        split_metrics("metrics", {"x": 3}, ["a", "b"])


INPUTS = 3
BATCH = 11


def built(
    model: keras.Model, labels: Any, *, weights: Any = None, fields: Any = None, **parts: Any
) -> Learner:
    """The learner of a config file with `parts`, for `labels`, a nest of specs."""
    config = Config(batch_size=BATCH, **(fields or {}))
    recipe = Recipe("mine.py", config, lambda config: model, **parts)
    spec = tf.TensorSpec([None, INPUTS], tf.float32)
    learner = build_learner(recipe, spec)
    specs = (spec, labels) if weights is None else (spec, labels, weights)
    inputs: Any = SimpleNamespace(train=SimpleNamespace(parsed_specs=specs))
    build_metrics(inputs, learner, recipe)
    return learner


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.heads = {name: keras.layers.Dense(CLASSES) for name in ("kind", "size")}

    def call(self, inputs: Any) -> Any:
        return {name: head(inputs) for name, head in self.heads.items()}


def functional(of_outputs: type) -> keras.Model:
    inputs = keras.Input((INPUTS,))
    heads = {name: keras.layers.Dense(CLASSES, name=f"{name}_head") for name in ("kind", "size")}
    outputs = {name: head(inputs) for name, head in heads.items()}
    return keras.Model(inputs, outputs if of_outputs is dict else of_outputs(outputs.values()))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: functional(dict), ("kind", "size")),
        (lambda: functional(list), ("kind_head", "size_head")),
        (Subclassed, ("kind", "size")),
    ],
    ids=["dict", "list", "subclassed"],
)
def test_metrics_by_output_have_the_keys_of_the_outputs(model: Any, names: Any) -> None:
    labels = dict.fromkeys(names, tf.TensorSpec([None], tf.int64))
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parts: Any = {"metrics": {names[0]: ["accuracy"]}, "weighted_metrics": {names[1]: "accuracy"}}
    learner = built(model(), labels, loss=dict.fromkeys(names, sparse), **parts)
    of_losses = (f"{names[0]}_loss", f"{names[1]}_loss")
    of_metrics = (f"{names[0]}_accuracy", f"{names[1]}_accuracy")
    assert learner.objective.metric_names == ("loss", *of_losses, *of_metrics)


@pytest.mark.parametrize("loss", ["mse", {"size": "mse"}])
def test_only_output_may_be_named(loss: Any) -> None:
    inputs = keras.Input((INPUTS,))
    model = keras.Model(inputs, keras.layers.Dense(1, name="size")(inputs))
    labels = tf.TensorSpec([None], tf.float32)
    learner = built(model, labels, loss=loss, metrics={"size": ["mae", "mape"]})
    assert learner.objective.metric_names == ("loss", "mae", "mape")
    numbers = tf.zeros([BATCH]), tf.ones([BATCH, 1])
    assert learner.objective.losses(*numbers).numpy().tolist() == [1] * BATCH


LOGITS = np.array([[0.2, -1, 2], [-0.3, 0.4, 0.1], [1, 3, -2], [0.1, 0.3, -4]], np.float32)
DENSE = np.array([[1, 0, 0], [0, 1, 0], [0.2, 0.7, 0.1], [0.6, 0.1, 0.3]], np.float32)
SPARSE = np.array([[0], [1], [1], [0]])
KINDS = keras.losses


@pytest.mark.parametrize(
    ("loss", "labels", "width", "expected"),
    [
        (KINDS.BinaryCrossentropy(from_logits=True), np.array([1, 1, 1, 0]), 1, 0.5),
        (KINDS.BinaryFocalCrossentropy(from_logits=True), np.array([[1], [1], [0], [0]]), 1, 0.25),
        ("binary_crossentropy", np.array([0, 0, 1, 1]), 1, 0.75),
        ("crossentropy", np.array([0.1, 0.4, 0.9, 0.6], np.float32), 1, 0.75),
        (KINDS.BinaryCrossentropy, np.array([0.1, 0.4, 0.9, 0.6], np.float32), 1, 0.75),
        (["binary_crossentropy"], np.array([False, True, True, False]), 1, 0.75),
        (KINDS.BinaryCrossentropy(from_logits=True), DENSE, 3, 8 / 12),
        (KINDS.CategoricalCrossentropy(from_logits=True), DENSE, 3, 0.5),
        ("categorical_focal_crossentropy", DENSE, 3, 0.5),
        (KINDS.SparseCategoricalCrossentropy(from_logits=True), SPARSE[:, 0], 3, 0.5),
        ("sparse_categorical_crossentropy", SPARSE, 3, 0.5),
        ("ce", SPARSE, 3, 0.5),
        (KINDS.SparseCategoricalCrossentropy(ignore_class=-1), SPARSE, 3, None),
        (KINDS.BinaryCrossentropy(axis=1), DENSE, 3, None),
        (KINDS.CategoricalHinge(), DENSE, 3, None),
        ("mse", DENSE, 3, None),
    ],
)
def test_default_accuracy_suits_the_loss(
    loss: Any, labels: Any, width: int, expected: float | None
) -> None:
    inputs = keras.Input((INPUTS,))
    model = keras.Model(inputs, keras.layers.Dense(width)(inputs))
    shapes = {labels.shape[1:], (None,) if labels.ndim == 2 and loss != "ce" else labels.shape[1:]}
    for shape in shapes:
        spec = tf.TensorSpec([None, *shape], labels.dtype)
        objective = built(model, spec, loss=loss).objective
        assert objective.metric_names == ("loss", "accuracy")[: 1 if expected is None else 2]
        if expected is None:
            continue
        assert objective.keras_metrics is not None
        outputs = tf.constant(LOGITS[:, :width])
        totals = objective.keras_metrics.update(tf.constant(labels), outputs).numpy()
        assert objective.keras_metrics.results(totals)["accuracy"] == pytest.approx(expected)


def test_several_outputs_have_no_default_accuracy() -> None:
    labels = dict.fromkeys(("kind", "size"), tf.TensorSpec([None], tf.int64))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    objective = built(functional(dict), labels, loss=loss).objective
    assert objective.metric_names == ("loss", "kind_loss", "size_loss")


def two_outputs() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((INPUTS,))
    kind = keras.layers.Dense(CLASSES, activation="softmax", name="kind")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": keras.layers.Dense(1, name="size")(inputs)})


def one_output() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(CLASSES, "softmax")])


def batches(labels: Any, *others: np.ndarray) -> Any:
    """Three batches of (inputs, labels, ...), the same for Keras and for us."""
    inputs = np.random.default_rng(1).normal(size=(3 * BATCH, INPUTS)).astype(np.float32)
    whole = (inputs, labels, *others)
    return [
        tf.nest.map_structure(lambda a, i=i: a[i * BATCH : (i + 1) * BATCH], whole)
        for i in range(3)
    ]


CASES: dict[str, dict[str, Any]] = {
    "one output, weights": {
        "model": one_output,
        "loss": keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        "metrics": ["accuracy", "mse"],
        "weighted_metrics": ["mae", "categorical_accuracy"],
        "weights": True,
    },
    "one output, class weights": {
        "model": one_output,
        "loss": keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        "metrics": ["accuracy", "mse"],
        "weighted_metrics": ["mae", "accuracy"],
        "class_weight": {0: 2.0, 3: 0.5},
    },
    "two outputs, weights": {
        "model": two_outputs,
        "loss": {"kind": "categorical_crossentropy", "size": keras.losses.Huber()},
        "loss_weights": {"kind": 0.5, "size": 2.0},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        "weighted_metrics": {"size": ["mse"]},
        "weights": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_and_reports_equal_those_of_fit(case: dict[str, Any], num_replicas: int) -> None:
    random = np.random.default_rng(0)
    kind = np.eye(CLASSES, dtype=np.float32)[random.integers(0, CLASSES, 3 * BATCH)]
    labels: Any = kind
    if case["model"] is two_outputs:
        labels = {"kind": kind, "size": random.normal(size=3 * BATCH).astype(np.float32)}
    weights = (random.random(3 * BATCH).astype(np.float32) + 0.5,) if "weights" in case else ()
    data = batches(labels, *weights)
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    compiled = {name: case[name] for name in names if name in case}
    reference = case["model"]()
    reference.compile(keras.optimizers.SGD(0.3), **compiled, jit_compile=False)
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(data), output_signature=specs(*data[0])
    ).apply(tf.data.experimental.assert_cardinality(3))
    history = reference.fit(
        dataset, class_weight=case.get("class_weight"), shuffle=False, verbose=0
    ).history

    strategy = replicas(num_replicas)
    with strategy.scope():
        learner = Learner(
            case["model"](),
            keras.optimizers.SGD(0.3),
            KerasLoss(case["loss"], case.get("loss_weights")),
            {},
            batch_size=BATCH,
            keras_metrics=KerasMetrics(case["metrics"], case["weighted_metrics"]),
            options=Options(class_weight=case.get("class_weight", {})),
        )
    spec_of = specs(labels, reference(data[0][0]))
    learner.objective.build_metrics(*spec_of)
    totals = np.zeros([learner.num_totals])
    for batch in data:
        parts = updater(learner, num_replicas)(batch)
        totals += np.sum([p.numpy() for p in strategy.experimental_local_results(parts)], axis=0)
    metrics = learner.to_metrics(totals)
    found = {name: total / count for name, (total, count) in metrics.items()}
    assert metrics.results is not None
    found |= metrics.results(metrics.states)
    assert set(found) == set(history)
    for name, value in found.items():
        assert value == pytest.approx(history[name][0], rel=1e-5, abs=1e-6), name
    assert_close(learner.weights(), reference.get_weights(), rtol=1e-5)


def test_mean_is_over_examples_whatever_the_reduction() -> None:
    labels, outputs, _ = examples("", 6)
    exact = keras.losses.categorical_crossentropy(labels, outputs).numpy()
    for reduction in ("sum_over_batch_size", "sum", "none", None):
        loss = KerasLoss(keras.losses.CategoricalCrossentropy(reduction=reduction))
        found = loss(tf.constant(labels), tf.constant(outputs), NAMES)
        np.testing.assert_allclose(found, exact, rtol=1e-5)
        assert bool(loss.notes) is (reduction != "sum_over_batch_size")


def test_direction_is_that_of_keras_then_of_the_name() -> None:
    kinds = keras.metrics
    lower = [
        *("mse", "FalseNegatives", kinds.FalsePositives([0.2, 0.7], name="alarms")),
        kinds.MeanSquaredError(name="anything"),
    ]
    higher = [
        kinds.AUC(name="not_mse"),
        kinds.TruePositives(),
        kinds.R2Score(name="error_explained"),
    ]
    functions = {name: lambda labels, outputs: outputs[:, 0] for name in ("wordError", "perplexed")}
    inputs = keras.Input((INPUTS,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    parts: Any = {"loss": "mse", "metrics": functions, "weighted_metrics": [*lower, *higher]}
    objective = built(model, tf.TensorSpec([None, 1], tf.float32), **parts).objective
    falling = [n for n in objective.metric_names if objective.is_lower_better(n)]
    of_lower = ["mse", "FalseNegatives", "alarms_0", "alarms_1", "anything"]
    assert falling == ["loss", "wordError", *of_lower]
    for mode, is_lowest in (("min", True), ("max", False)):
        fields = {"best_metric": "mse", "best_mode": mode}
        objective = built(model, tf.TensorSpec([None, 1]), fields=fields, **parts).objective
        assert objective.is_lower_better("mse") is is_lowest
        assert objective.is_lower_better("anything")


@pytest.mark.parametrize(
    "metrics",
    [
        lambda kinds: ["mae", "mae", kinds.MeanAbsoluteError(name="mae_1")],
        lambda kinds: [kinds.FalsePositives([0.2, 0.7], name="a"), kinds.AUC(name="a_1")],
    ],
)
def test_metrics_of_one_name_are_refused(metrics: Any) -> None:
    labels, outputs = np.zeros([2, 1], np.float32), np.ones([2, 1], np.float32)
    with pytest.raises(ConfigError, match="Two metrics have one name in the reports: "):
        build(KerasMetrics(metrics(keras.metrics), []), labels, outputs)


def first_output(labels: Any, outputs: Any) -> Any:
    return outputs[:, 0]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"metrics": {"seconds": first_output}}, "'seconds', which another value has"),
        ({"metrics": {"step": "mae"}}, "'step', which another value has"),
        ({"metrics": {"loss": first_output}}, "'loss', which another metric has"),
        ({"metrics": {"mae": first_output}, "weighted_metrics": ["mae"]}, "'mae', which another"),
        ({"metrics": {"worker_share": "mae"}}, "name='my_worker_share' of a Keras metric"),
    ],
)
def test_metrics_named_as_other_values_of_reports_are_refused(parts: Any, said: str) -> None:
    inputs = keras.Input((INPUTS,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    with pytest.raises(ConfigError, match=said):
        built(model, tf.TensorSpec([None, 1], tf.float32), loss="mse", **parts)


class ScaledLoss(keras.losses.Loss):
    """Without get_config(), as many users write it."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.factor * keras.ops.square(y_true - y_pred)[..., 0]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (ScaledLoss(3.0), 12),
        (ScaledLoss, 4),
        ([ScaledLoss], 4),
        ({"output": lambda labels, outputs: 3 * tf.square(outputs - labels)[:, 0]}, 12),
    ],
)
def test_loss_keeps_its_function_and_its_arguments(loss: Any, expected: float) -> None:
    found = KerasLoss(loss)(tf.ones([3, 1]), tf.fill([3, 1], 3.0), NAMES)
    assert found.numpy().tolist() == [expected] * 3


@pytest.mark.parametrize("kind", [keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError])
@pytest.mark.parametrize("is_named", [True, False])
def test_loss_as_a_metric_is_the_mean_of_examples(kind: Any, is_named: bool) -> None:
    found = split_metrics("metrics", {"a": kind} if is_named else [kind], NAMES)
    metrics = KerasMetrics(found[1], [])
    labels, outputs = np.zeros([3, 1], np.float32), np.array([[0], [0], [3]], np.float32)
    build(metrics, labels, outputs)
    parts = [slice(2), slice(2, 3)]
    totals = [metrics.update(tf.constant(labels[p]), tf.constant(outputs[p])) for p in parts]
    assert list(metrics.results(np.sum(totals, axis=0)).values()) == [3]
    assert metrics.names == (("a",) if is_named else ("mean_squared_error",))


@pytest.mark.parametrize("labels", [SPARSE, DENSE], ids=["class", "probabilities"])
def test_accuracy_of_labels_of_unknown_width(labels: Any) -> None:
    metrics = KerasMetrics(["accuracy"], [])
    spec = tf.TensorSpec([None, None], labels.dtype)
    metrics.build(spec, tf.TensorSpec([None, 3], tf.float32), NAMES)
    update = tf.function(metrics.update, input_signature=[spec, tf.TensorSpec([None, 3])])
    assert metrics.results(update(labels, LOGITS).numpy()) == {"accuracy": 0.5}


UNKNOWN = tf.TensorSpec([None, None], tf.int64)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "width": (UNKNOWN, {"loss": "ce"}, "which is not known.* Give 'sparse_categorical_cross"),
    "rank": (tf.TensorSpec(None, tf.int64), {"loss": "mse"}, r"tf.ensure_shape\(labels, \[None\]"),
    "factors": (UNKNOWN, {"loss": "mse", "loss_weights": {"a": "x"}}, "loss_weights has 'x'"),
}


@pytest.mark.parametrize(("labels", "parts", "said"), REFUSED.values(), ids=REFUSED)
def test_losses_that_do_not_fit_the_labels_are_refused(labels: Any, parts: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        built(one_output(), labels, **parts)


@pytest.mark.parametrize(
    ("labels", "shape"),
    [
        ([0, 1, 2, -1], [None]),
        ([0.0, 1.0, 2.0, -1.0], [None]),
        ([[0], [1], [2], [-1]], [None, None]),
        ([[0], [1], [2], [-1]], [None, 1]),
        (np.eye(4)[[0, 1, 2, 3]].tolist(), [None, None]),
        (np.eye(4)[[0, 1, 2, 3]].tolist(), [None, 4]),
    ],
)
def test_class_weights_of_labels_of_any_shape(labels: Any, shape: Any) -> None:
    constant = tf.constant(labels)
    spec = tf.TensorSpec(shape, constant.dtype)
    found = tf.function(lambda y: class_weights(y, {0: 3.0, 1: 2.0}), input_signature=[spec])
    assert found(constant).numpy().tolist() == [3, 2, 1, 1]


def test_output_is_another_name_of_the_only_output() -> None:
    inputs = keras.Input((INPUTS,))
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(inputs))
    found = {}
    for name in ("head", "output"):
        factor = {name: np.int64(2)}
        parts = {"loss": {name: "mse"}, "loss_weights": factor, "metrics": {name: ["mae"]}}
        objective = built(model, tf.TensorSpec([None, 1]), **parts).objective
        losses = objective.losses(tf.ones([2, 1]), tf.zeros([2, 1]))
        found[name] = (objective.metric_names, losses.numpy().tolist())
    assert found["output"] == found["head"] == (("loss", "mae"), [2, 2])


@pytest.mark.parametrize("num_axes", [2, 3])
def test_class_weights_of_labels_of_positions_are_refused(num_axes: int) -> None:
    inputs = keras.Input((INPUTS,))
    positions = keras.layers.Reshape((5, CLASSES))(keras.layers.Dense(5 * CLASSES)(inputs))
    spec = tf.TensorSpec([None, 5, CLASSES][:num_axes], tf.int64)
    with pytest.raises(ConfigError, match=r"one label an example, but .* returns several labels"):
        built(
            keras.Model(inputs, positions),
            spec,
            fields={"class_weight": {0: 2.0}},
            loss="sparse_categorical_crossentropy",
        )


def test_class_weights_with_a_model_that_needs_the_number_of_examples() -> None:
    class OfBatches(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(CLASSES)

        def call(self, inputs: Any) -> Any:
            return self.dense(tf.reshape(inputs, [int(inputs.shape[0]), INPUTS]))

    model = OfBatches()
    model(tf.zeros([2, INPUTS]))
    functions = {"loss": first_output, "metrics": {"first": first_output}}
    spec = tf.TensorSpec([None, CLASSES])
    built(model, spec, fields={"class_weight": {0: 2.0}}, **functions)


def test_weights_by_output_of_a_function_are_refused() -> None:
    spec = tf.TensorSpec([None], tf.int64)
    with pytest.raises(ConfigError, match="several weights, but the loss is a function"):
        built(one_output(), spec, weights={"a": spec}, loss=lambda labels, outputs: outputs[:, 0])


def test_mistakes_in_losses_are_refused() -> None:
    labels = tf.zeros([2, 1])
    with pytest.raises(ConfigError, match=r"metric 'ce' is none of Keras. metrics. See keras.io"):
        build(KerasMetrics(["ce"], []), labels, labels)
    both = {"a": labels, "b": labels}
    with pytest.raises(ConfigError, match=r"is none of Keras. losses. Did you mean"):
        KerasLoss("categorical_crossentropie")
    with pytest.raises(ConfigError, match=r"loss='accuracy' is none .* See keras.io/api/losses"):
        KerasLoss("accuracy")
    with pytest.raises(ConfigError, match=r"loss names 'c', but the outputs .* 'a', 'b'"):
        KerasLoss({"c": "mse"})(both, both, ["a", "b"])
    with pytest.raises(ConfigError, match="loss has 1 entries, but the model has 2"):
        KerasLoss(["mse"])(both, both, ["a", "b"])
    with pytest.raises(ConfigError, match=r"parse.. returns no label of that name"):
        KerasLoss({"a": "mse", "b": "mse"})({"a": labels}, both, ["a", "b"])


class Own(keras.Model):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
        losses = sparse_categorical_crossentropy(y, y_pred)
        if sample_weight is not None:
            losses *= sample_weight
        return tf.reduce_mean(losses) + sum(self.losses)


@pytest.fixture
def batch() -> Any:
    random = np.random.default_rng(0)
    images = random.normal(size=(BATCH, 3)).astype(np.float32)
    weights = random.random(BATCH).astype(np.float32)
    return images, random.integers(0, 5, BATCH), weights


def learner_of(kind: type[keras.Model]) -> Learner:
    keras.utils.set_random_seed(1)
    x = keras.Input((3,))
    model = kind(x, keras.layers.Dense(5, kernel_regularizer="l2")(x))
    loss = ModelLoss(model) if kind is Own else sparse_categorical_crossentropy
    return Learner(model, keras.optimizers.SGD(0.5), loss, {}, batch_size=BATCH)


def trained(kind: type[keras.Model], batch: Any, num_replicas: int) -> list[np.ndarray]:
    with replicas(num_replicas).scope():
        learner = learner_of(kind)
    for _ in range(3):
        updater(learner, num_replicas)(batch)
    return [value.copy() for value in learner.model.get_weights()]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_weights_are_those_of_the_same_loss_as_a_function(num_replicas: int, batch: Any) -> None:
    expected = trained(keras.Model, batch, 1)
    assert_close(trained(Own, batch, num_replicas), expected)


@pytest.mark.parametrize("num_padded", [0, 3, BATCH])
def test_padding_does_not_count_in_an_evaluation(num_padded: int, batch: Any) -> None:
    learner = learner_of(Own)
    images, labels, _ = batch
    counts = np.ones(BATCH, np.float32)
    counts[BATCH - num_padded :] = 0
    images[BATCH - num_padded :] = np.inf
    metrics = learner.to_metrics(learner.evaluate((images, labels, counts)).numpy())
    total, count = metrics["loss"]
    assert count == BATCH - num_padded
    if count:
        kept = slice(BATCH - num_padded)
        outputs = learner.model(images[kept])
        exact = learner.model.compute_loss(None, labels[kept], outputs, None, training=False)
        assert total / count == pytest.approx(float(exact), rel=1e-5)
    else:
        assert total == 0
