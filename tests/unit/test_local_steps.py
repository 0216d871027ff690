"""config.local_steps: replicas train alone, then all of them change by the outer step."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from data.system.errors import UsageError
from strategies.base import read_now
from strategies.gradients.compression import Compression
from strategies.metrics import Metrics
from strategies.mirrored import MirroredExecutor
from strategies.position import Position, Reached
from strategies.step_errors import DataFaultError
from strategies.worker_stats import WorkerStats
from tests.unit.comparing import assert_close, assert_same
from tests.unit.replicas import replicas
from tests.unit.toy import BATCH, CLASSES, make_reader, parts_of, write_split
from trainer.build import build_learner, check_for_strategy
from trainer.config import Config, ConfigError, Recipe
from trainer.config_checks import check, check_replicas
from trainer.embeddings import ShardedEmbedding
from trainer.inputs import batch_at
from trainer.learner import Learner
from trainer.resume import train_recovering
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import LocalStepsConfig, Options

EVERY = 3
RATE = 0.1
PLAIN = LocalStepsConfig(EVERY)
OUTER = LocalStepsConfig(EVERY, outer_learning_rate=0.7, outer_momentum=0.9)
BY_TIME = LocalStepsConfig(every_secs=30)

Weights = list[npt.NDArray[Any]]
Vector = npt.NDArray[Any]  # All weights, one behind the other.


def build_model() -> keras.Model:
    """A model whose gradient is a short formula."""
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES)])


def build_normalised_model(config: Config | None = None) -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(4), layers.Dropout(0.5), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(CLASSES)])


class Training:
    """An executor of one or two replicas on logical CPUs, and its learner."""

    def __init__(
        self,
        directory: Path,
        options: LocalStepsConfig,
        *,
        num: int = 2,
        optimizer: Callable[[], keras.Optimizer] = lambda: keras.optimizers.SGD(RATE),
        model: Callable[[], keras.Model] = build_model,
        last_step: int = 1000,
        jit_compile: bool = False,
        wire_dtype: str = "float32",
        factor: float = 1.0,
    ) -> None:
        """The loss is multiplied by `factor`, and fails after `last_step`."""
        self.reader = make_reader(write_split(directory))
        compression = None if wire_dtype == "float32" else Compression(wire_dtype, num)
        self.executor = MirroredExecutor(replicas(num), compression)

        def make() -> Learner:
            keras.utils.set_random_seed(0)
            made, chosen = optimizer(), Options(local_steps=options, jit_compile=jit_compile)
            return Learner(model(), made, loss, {}, batch_size=BATCH, options=chosen)

        def loss(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
            num_steps, last = read_now(self.learner.step), np.int64(last_step)
            check = tf.debugging.assert_less(num_steps, last, "the last step")
            with tf.control_dependencies([check]):
                return factor * sparse_categorical_crossentropy(labels, outputs)

        self.learner = self.executor.build(make)
        train = dataclasses.replace(self.reader, gives_seeds=self.learner.needs_seeds)
        self.executor.start(self.learner, train, self.reader, Position())

    def copies(self) -> list[Weights]:
        """All variables of the model and of the optimizer, of each replica."""
        model, optimizer = self.learner.model, self.learner.optimizer
        variables = [v.value for v in (*model.variables, *optimizer.variables)]
        local = self.executor.strategy.experimental_local_results
        parts = [[np.asarray(copy.numpy()) for copy in local(v)] for v in variables]
        return [list(each) for each in zip(*parts, strict=True)]

    def weights(self) -> Weights:
        """The trained weights of the first replica."""
        return [np.asarray(v.numpy()) for v in self.learner.model.trainable_variables]


def flat(weights: Iterable[npt.ArrayLike]) -> Vector:
    return np.concatenate([np.ravel(weight) for weight in weights])


def trained_alone(weights: Vector, inputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Vector:
    """One step of SGD on the mean cross entropy of softmax(inputs @ kernel + bias)."""
    kernel, bias = weights[:-CLASSES].reshape(-1, CLASSES), weights[-CLASSES:]
    shares = np.exp(inputs @ kernel + bias)
    shares /= shares.sum(axis=1, keepdims=True)
    error = (shares - np.eye(CLASSES)[labels]) / len(labels)
    return weights - RATE * flat([inputs.T @ error, error.sum(axis=0)])


def round_alone(training: Training, first: int, of_replicas: list[Vector]) -> list[Vector]:
    """What two replicas make of their weights in EVERY steps, from step `first` on."""
    for step in range(first, first + EVERY):
        inputs, labels = (tensor.numpy() for tensor in batch_at(training.reader, step))
        halves = (inputs[:4], labels[:4]), (inputs[4:], labels[4:])
        of_replicas = [
            trained_alone(own, *half) for own, half in zip(of_replicas, halves, strict=True)
        ]
    return of_replicas


def reference(
    training: Training, options: LocalStepsConfig, shares: tuple[float, float], num_rounds: int
) -> tuple[Vector, Vector]:
    """The average and the momentum after some rounds, by the formula in strategies/local_steps.py.

    `shares` are the replicas' parts of the mean; their sum is 2.
    """
    average = flat(training.weights())
    momentum = in_flight = np.zeros_like(average)
    of_replicas = [average, average]

    def outer_step(mean: Vector) -> None:
        nonlocal average, momentum
        momentum = options.outer_momentum * momentum + mean
        change = mean + options.outer_momentum * momentum
        average = average + options.outer_learning_rate * change

    for first in range(0, num_rounds * EVERY, EVERY):
        starts, of_replicas = of_replicas, round_alone(training, first, of_replicas)
        changes = [new - old for new, old in zip(of_replicas, starts, strict=True)]
        mean = (shares[0] * changes[0] + shares[1] * changes[1]) / 2
        if options.overlap:  # Each continues from the average before, with its own changes.
            outer_step(in_flight)
            in_flight = mean
            of_replicas = [average + own for own in changes]
        else:
            outer_step(mean)
            of_replicas = [average, average]
    if options.overlap:
        outer_step(in_flight)
    return average, momentum


@pytest.mark.parametrize("overlap", [False, True])
def test_average_is_that_of_the_formula(overlap: bool, tmp_path: Path) -> None:
    options, shares = dataclasses.replace(OUTER, overlap=overlap), (1.5, 0.5)
    training = Training(tmp_path / "data", options)
    rounds, strategy = training.executor._rounds, training.executor.strategy
    assert rounds is not None
    rounds.weight = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(shares[context.replica_id_in_sync_group])
    )
    average, momentum = reference(training, options, shares, num_rounds=3)
    training.executor.run(3 * EVERY)
    assert_close(flat(training.weights()), average)
    assert_same(*training.copies())
    assert int(training.learner.step.numpy()) == 3 * EVERY
    kept = training.learner.local_steps
    assert kept is not None
    assert_close(flat(kept.momenta), momentum)


@pytest.mark.parametrize("overlap", [False, True])
def test_constraints_hold_after_each_average(overlap: bool, tmp_path: Path) -> None:
    def build() -> keras.Model:
        norm, positive = keras.constraints.UnitNorm(), keras.constraints.NonNeg()
        layer = keras.layers.Dense(CLASSES, kernel_constraint=norm, bias_constraint=positive)
        return keras.Sequential([keras.Input((3,)), layer])

    options = dataclasses.replace(OUTER, overlap=overlap)
    training = Training(tmp_path / "a", options, model=build)
    training.executor.run(3 * EVERY)
    kernel, bias = training.weights()
    assert_close(np.linalg.norm(kernel, axis=0), np.ones(CLASSES))
    assert bias.min() >= 0


@pytest.mark.slow
def test_compiled_by_xla_local_steps_are_the_same(tmp_path: Path) -> None:
    plain = Training(tmp_path / "a", OUTER)
    compiled = Training(tmp_path / "b", OUTER, jit_compile=True)
    for training in (plain, compiled):
        training.executor.run(2 * EVERY)
    assert_close(compiled.weights(), plain.weights())


@pytest.mark.slow
def test_slots_of_the_optimizer_are_not_sent_in_16_bits(tmp_path: Path) -> None:
    adam = functools.partial(keras.optimizers.Adam, 0.001)
    found = []
    for name in ("float32", "float16"):
        training = Training(tmp_path / name, OUTER, optimizer=adam, wire_dtype=name, factor=1e-3)
        training.executor.run(4 * EVERY)
        slots = training.learner.optimizer.variables
        found.append([slot.numpy() for slot in slots if "velocity" in slot.name])
    for exact, sent in zip(*found, strict=True):
        assert exact.min() < 1e-8, "float16 would have lost them"
        np.testing.assert_allclose(sent, exact, rtol=0.05)


def test_all_that_a_step_changes_is_equal_on_all_replicas_after_a_call(tmp_path: Path) -> None:
    adam = functools.partial(keras.optimizers.Adam, 0.05)
    training = Training(tmp_path / "a", OUTER, optimizer=adam, model=build_normalised_model)
    before = training.copies()
    training.executor.run(EVERY)
    first, second = training.copies()
    assert_same(first, second)
    changed = [not np.array_equal(old, new) for old, new in zip(before[0], first, strict=True)]
    learner = training.learner
    names = [v.name for v in (*learner.model.variables, *learner.optimizer.variables)]
    unchanged = [name for name, has in zip(names, changed, strict=True) if not has]
    assert unchanged == ["seed_generator_state", "learning_rate"]


def test_each_call_ends_with_an_average(tmp_path: Path) -> None:
    training = Training(tmp_path / "a", OUTER)
    for asked, done in ((1, EVERY), (EVERY, 2 * EVERY), (EVERY + 1, 4 * EVERY)):
        training.executor.run(asked)
        assert int(training.learner.step.numpy()) == done


@pytest.mark.parametrize(("overlap", "sizes"), [(True, [4 * EVERY]), (False, [2] * 4)])
def test_sums_overlap_whatever_steps_per_call_is(
    overlap: bool, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dataclasses.replace(PLAIN, overlap=overlap)
    training, no_checkpointer = Training(tmp_path / "a", options), None
    executor, run = training.executor, training.executor.run
    asked: list[int] = []

    def run_and_note(num_steps: int) -> Metrics:
        asked.append(num_steps)
        return run(num_steps)

    monkeypatch.setattr(executor, "run", run_and_note)
    config = Config(train_steps=4 * EVERY, steps_per_call=2, local_steps=options)
    parts = parts_of(executor, training.learner, no_checkpointer, training.reader, config)
    train_recovering(parts, [])
    assert asked == sizes


def test_after_an_error_between_two_averages_the_state_is_that_of_the_first(tmp_path: Path) -> None:
    training = Training(tmp_path / "a", OUTER, last_step=2 * EVERY + 1)
    executor, step = training.executor, training.learner.step
    executor.run(2 * EVERY)
    before = training.copies()[0]
    with pytest.raises(DataFaultError, match="the last step"):
        executor.run(EVERY)
    assert int(step.numpy()) == 2 * EVERY + 1
    first, second = training.copies()
    assert not np.array_equal(first[0], second[0])
    assert executor.return_to_complete_step() == Reached(2 * EVERY, Position(2 * EVERY), {})
    for copies in training.copies():
        assert_same(before, copies)


def test_after_a_roll_back_rounds_begin_with_the_restored_state(tmp_path: Path) -> None:
    training, again = Training(tmp_path / "a", OUTER), Training(tmp_path / "b", OUTER)
    training.executor.run(EVERY)
    again.executor.run(EVERY)
    reached, saved = again.executor.reached(), again.copies()[0]
    again.executor.run(EVERY)

    def restore() -> tuple[Position, WorkerStats]:
        model, optimizer = again.learner.model, again.learner.optimizer
        for variable, value in zip((*model.variables, *optimizer.variables), saved, strict=True):
            variable.value.assign(value)
        momenta = [t.learner.state["outer_momentum"] for t in (again, training)]
        for own, other in zip(*momenta, strict=True):
            own.assign(other)
        return reached.position, {}

    again.executor.roll_back(restore)
    training.executor.run(EVERY)
    again.executor.run(EVERY)
    assert_same(again.copies()[1], training.copies()[0])


def notes_of(strategy: str = "multiworker", **fields: Any) -> Sequence[str]:
    """What is said about a run with these fields of the config."""
    recipe = Recipe("file.py", Config(**fields), build_normalised_model)
    learner = build_learner(recipe)
    check_for_strategy(learner, recipe, strategy=strategy, num_workers=2, read_dtype="float32")
    return learner.notes


@pytest.mark.parametrize(("steps", "end"), [(300, 300), (301, 450)])
def test_step_at_which_the_run_ends_is_said(steps: int, end: int) -> None:
    notes = notes_of(train_steps=steps, local_steps=LocalStepsConfig(every=150))
    (note,) = [note for note in notes if "multiples of 150" in note]
    assert f"the end, step {end}," in note


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "no effect with config.log_every_steps=100: .*Type --config.log_every_steps=1500"),
        ({"log_every_steps": 151, "checkpoint_every_steps": 0}, ""),
        ({"log_every_steps": 300, "eval_every_steps": 150}, "no effect with config.eval_every_st"),
    ],
)
def test_it_is_said_if_reports_leave_no_overlap(changes: Mapping[str, Any], said: str) -> None:
    notes = notes_of(local_steps=LocalStepsConfig(every=150, overlap=True), **changes)
    found = [note for note in notes if "overlap" in note]
    assert re.search(said, found[0]) if said else not found


@pytest.mark.parametrize(
    ("strategy", "fields", "message"),
    [
        (
            "ps",
            {"local_steps": OUTER},
            "every=3.*Type --strategy=multiworker, or --config.local_steps.every=0 --config.local_"
            "steps.outer_learning_rate=1.0 --config.local_steps.outer_momentum=0.0.",
        ),
        (
            "mirrored",
            {"local_steps": OUTER, "precision": "mixed_float16"},
            "every=3.*--config.precision=mixed_bfloat16",
        ),
        (
            "mirrored",
            {"local_steps": BY_TIME},
            "every_secs=30.*unequal speed.*every_secs=0 --config",
        ),
        ("ps", {"local_steps": BY_TIME}, "every_secs=30.*Type --strategy=multiworker, or --config"),
    ],
)
def test_local_steps_are_refused(strategy: str, fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.local_steps\." + message):
        notes_of(strategy, batch_size=BATCH, **fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LocalStepsConfig(EVERY, every_secs=30), "one of .*Received: .*every=3 .*every_secs=30. T"),
        (BY_TIME, "every_secs=0 .*=100, or leave determ"),
        (LocalStepsConfig(every_secs=-1.0), "every_secs must be 0 or more"),
        (LocalStepsConfig(outer_momentum=0.5), "means nothing without config.local_steps.every"),
    ],
)
def test_fields_that_do_not_fit_are_refused(options: LocalStepsConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Config(local_steps=options, deterministic=options is BY_TIME))


def test_unequal_shares_of_a_batch_are_refused() -> None:
    config = Config(local_steps=OUTER, batch_size=8)
    check_replicas(config, 2)
    with pytest.raises(ConfigError, match="3 replicas, and 8 lanes for batch_size=8"):
        check_replicas(config, 3)


def test_a_table_is_refused() -> None:
    def build_model_with_table(config: Config) -> keras.Model:
        inputs = keras.Input((2,), dtype="int64")
        found = keras.layers.Flatten()(ShardedEmbedding(9, 4)(inputs))
        return keras.Model(inputs, keras.layers.Dense(CLASSES)(found))

    recipe = Recipe("file.py", Config(local_steps=OUTER), build_model_with_table)
    with pytest.raises(ConfigError, match="Use sums in each step"):
        build_learner(recipe)


def test_overlap_is_refused_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MirroredExecutor, "_has_gpus", True)
    with pytest.raises(UsageError, match="Leave it out"):
        Training(tmp_path / "a", dataclasses.replace(OUTER, overlap=True))
