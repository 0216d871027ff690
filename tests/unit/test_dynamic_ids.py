"""Tables of dynamic ids: equal rows with any number of parts and replicas, in any order of ids."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from strategies.metrics import add_metrics
from strategies.mirrored import MirroredExecutor
from strategies.ps.placement import dry_run, place
from strategies.tables import tables_with
from tests.unit import test_embeddings
from tests.unit.comparing import assert_close, assert_same
from tests.unit.replicas import replicas, steps_on, updater
from tests.unit.test_embeddings import (
    BATCH,
    CLASSES,
    WIDTH,
    assert_files_predict_alike,
    assert_restored,
    reference_of,
    saved_in,
    train_reference,
)
from trainer.checkpoints.checkpointer import Checkpointer, ModelDirError
from trainer.checkpoints.marks import signed
from trainer.checkpoints.warm_start import warm_start
from trainer.embeddings import Adagrad, RowWiseAdagrad
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.dynamic_part import initial_rows
from trainer.embeddings.optimizers import OPTIMIZERS
from trainer.hooks.base import CatchUp
from trainer.learner import Learner
from trainer.learner.variables import set_values
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import ConfigError, WarmStartConfig

# Also the largest and smallest ids, and negative ones.
NAMES = np.array([0, 1, 2, 5, 10**12, -1, -7, 2**63 - 1, -(2**63), 77, 78, 79])
random = np.random.default_rng(1)
IDS = NAMES[random.choice(12, (50, BATCH, 3), p=np.arange(1, 13) / 78)]
ALL_BATCHES = [(ids, (ids % CLASSES).sum(axis=1) % CLASSES) for ids in IDS]
BATCHES = ALL_BATCHES[:20]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.embeddings.dynamic_part._FIRST_ROWS", 2)


make_model = functools.partial(test_embeddings.make_model, rows=None)
make_learner = functools.partial(test_embeddings.make_learner, rows=None)


def train(
    learner: Learner, replica: int = 1, batches: Sequence[Any] = BATCHES, *, evict_every: int = 1
) -> None:
    for step in steps_on(learner, replica, batches):
        if step % evict_every == 0:
            table_of(learner).evict(step)


def table_of(learner: Learner) -> DynamicTable:
    found = learner.model.get_layer("ids").table
    assert isinstance(found, DynamicTable)
    return found


def values_of(learner: Learner) -> Mapping[str, npt.NDArray[Any]]:
    table = table_of(learner)
    index = table.index()
    values = table.values_of(table.ids(index))
    return {**index, **{name: value.numpy() for name, value in values.items()}}


def assign(learner: Learner, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Sets all that `values_of` returns."""
    table, index = table_of(learner), {name: np.asarray(values[name]) for name in ("ids", "use")}
    table.set_index(index)
    of_rows = {name: tf.convert_to_tensor(values[name]) for name in table.value_names}
    table.set_values(table.ids(index), of_rows)


def assert_equal(one: Learner, other: Learner, atol: float = 1e-6) -> None:
    left, right = values_of(one), values_of(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        if name in ("ids", "use"):
            np.testing.assert_array_equal(value, right[name])
        else:
            np.testing.assert_allclose(value, right[name], atol=atol)
    assert_close(one.model.get_weights(), other.model.get_weights(), atol=atol)


ALL_LIMITS = {"admit_after": 3, "evict_after": 4, "max_rows": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limits", "others"),
    [
        ("adagrad", {}, [(3, 1), (1, 2)]),
        *((name, ALL_LIMITS, [(3, 2)]) for name in OPTIMIZERS),
    ],
)
def test_rows_are_equal_with_any_number_of_parts_and_replicas(
    name: str, limits: dict[str, int], others: list[tuple[int, int]]
) -> None:
    options: dict[str, Any] = {"l2": 0.02, "clip_norm": 0.05, **limits}
    one = make_learner(OPTIMIZERS[name](0.1), **options)
    train(one)
    for parts, replica in others:
        other = make_learner(OPTIMIZERS[name](0.1), parts=parts, replica=replica, **options)
        train(other, replica)
        assert_equal(one, other)


def test_equals_50_steps_of_a_plain_loop_with_a_table_of_all_rows() -> None:
    learner = make_learner(Adagrad(0.3), parts=2)
    layer = learner.model.get_layer("ids")
    reference = reference_of(len(NAMES))
    rows = initial_rows(tf.constant(NAMES), WIDTH, layer.initializer, tf.float32)
    reference.set_weights([rows.numpy(), *learner.model.get_weights()])
    train(learner, batches=ALL_BATCHES)
    order = np.argsort(NAMES)
    places = [(order[np.searchsorted(NAMES[order], ids)], labels) for ids, labels in ALL_BATCHES]
    train_reference(reference, keras.optimizers.Adagrad(0.3), places)
    table = reference.trainable_variables[0]
    found = values_of(learner)
    np.testing.assert_array_equal(found["ids"], NAMES[order])
    np.testing.assert_allclose(found["rows"], table.numpy()[order], atol=1e-5)
    assert np.abs(found["rows"] - rows.numpy()[order]).max() > 1e-2


@pytest.mark.parametrize(
    ("initializer", "low", "high", "deviation"),
    [
        (keras.initializers.RandomUniform(-1, 1, seed=1), -1.0, 1.0, 3**-0.5),
        (keras.initializers.RandomNormal(stddev=0.5, seed=1), -4.0, 4.0, 0.5),
        (keras.initializers.TruncatedNormal(stddev=0.5, seed=1), -1.0, 1.0, 0.44),
        (keras.initializers.Constant(2.0), 2.0, 2.0, 0.0),
    ],
)
def test_initial_rows_are_functions_of_the_id_alone(
    initializer: Any, low: float, high: float, deviation: float
) -> None:
    ids = tf.constant(NAMES)
    found = rows_of(ids, initializer)
    np.testing.assert_array_equal(rows_of(tf.reverse(ids, [0]), initializer), found[::-1])
    in_graph = tf.function(lambda: initial_rows(ids, 500, initializer, tf.float32))
    np.testing.assert_array_equal(in_graph(), found)
    assert low <= found.min() <= found.max() <= high
    np.testing.assert_allclose(found.std(), deviation, atol=0.02)
    if deviation:
        assert len(np.unique(found)) > 0.99 * found.size
        assert abs(found.mean() - (low + high) / 2) < 0.03


def test_initial_rows_depend_on_the_seed() -> None:
    uniform = keras.initializers.RandomUniform
    first, second = (rows_of(tf.constant(NAMES), uniform(-1, 1, seed=seed)) for seed in (1, 2))
    assert not np.any(first == second)


def rows_of(ids: tf.Tensor, initializer: Any) -> npt.NDArray[Any]:
    return np.asarray(initial_rows(ids, 500, initializer, tf.float32))


def batches_of(*ids: Sequence[int]) -> list[Any]:
    """Batches that use these ids and id 0."""
    filled = [np.resize(np.array([*some, 0]), (BATCH, 3)) for some in ids]
    return [(some, some[:, 0] % CLASSES) for some in filled]


def test_an_id_gets_its_row_with_the_last_sighting_that_it_needs() -> None:
    learner = make_learner(parts=2, admit_after=3)
    layer = learner.model.get_layer("ids")
    initial = initial_rows(tf.constant([5], tf.int64), WIDTH, layer.initializer, tf.float32)
    for number, batch in enumerate(batches_of([5], [], [5, 7], [7], [5])):
        before = layer(tf.constant([5]), training=True)
        expected = initial if number >= 3 else tf.zeros_like(initial)
        np.testing.assert_array_equal(before, expected)
        train(learner, batches=[batch])
    found = values_of(learner)
    assert found["ids"].tolist() == [0, 5, 7]
    assert found["use"].tolist() == [[1, 3, 0], [1, 3, 0], [0, 2, 4]]
    assert found["rows"].shape == (2, WIDTH)
    assert np.abs(found["rows"][1] - initial[0]).max() > 1e-4, "the last step changed its row"
    for training in (True, False):
        rows = layer(tf.constant([0, 5, 8]), training=training)
        np.testing.assert_array_equal(rows, [*found["rows"], np.zeros(WIDTH)])


def test_a_table_that_is_not_trained_has_the_same_rows_in_training_and_evaluation() -> None:
    learner = make_learner(trainable=False, evict_after=2)
    train(learner, batches=batches_of([5]))
    layer = learner.model.get_layer("ids")
    assert values_of(learner)["ids"].tolist() == []
    assert learner.tables
    assert learner.tables.hooks(MirroredExecutor.on(["CPU:0"])) == []
    for training in (True, False):
        np.testing.assert_array_equal(layer(tf.constant([5]), training=training), [[0] * WIDTH])


@pytest.mark.slow
def test_ids_that_are_not_used_are_evicted_and_begin_anew() -> None:
    learner = make_learner(Adagrad(0.1), parts=2, evict_after=3)
    train(learner, batches=batches_of([1, 2, 3, 4, 5], [3], [3, 8], [9]), evict_every=4)
    found = values_of(learner)
    # After step 4, ids remain whose last step is 2, 3 or 4.
    assert found["ids"].tolist() == [0, 3, 8, 9]
    assert found["use"][:, 2].tolist() == [4, 3, 3, 4]
    assert table_of(learner).counts() == (4, 8, 4)
    train(learner, batches=batches_of([2, 4], [9]), evict_every=1000)
    fresh = make_learner(Adagrad(0.1), parts=1, evict_after=3)
    train(fresh, batches=batches_of([1, 2, 3, 4, 5], [3], [3, 8], [9], [2, 4], [9]), evict_every=4)
    assert_equal(learner, fresh)


@pytest.mark.slow
def test_the_rows_used_last_remain_within_max_rows() -> None:
    learner = make_learner(parts=3, max_rows=4)
    train(learner, batches=batches_of([1, 2], [3, 4], [5, 6]), evict_every=3)
    # 0, 5 and 6 are of step 3; with 3 and 4, both of step 2, there would be five.
    assert values_of(learner)["ids"].tolist() == [0, 5, 6]


@pytest.mark.slow
def test_the_ids_of_the_last_step_stay_if_they_are_more_than_max_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner = make_learner(parts=2, max_rows=2)
    train(learner, batches=batches_of([1, 2], [3, 4], [4, 5]))
    found = values_of(learner)
    assert found["ids"].tolist() == [0, 4, 5]
    assert found["rows"].shape == (3, WIDTH)
    (warning,) = [r.getMessage() for r in caplog.records if "max_rows" in r.getMessage()]
    assert "step 1 alone used 3 ids with rows, more than max_rows=2" in warning
    # Ids that are old enough go nevertheless.
    old = make_learner(parts=2, max_rows=2, evict_after=2)
    assign(old, found)
    table_of(old).evict(9)
    assert values_of(old)["ids"].tolist() == []


@pytest.mark.slow
def test_an_eviction_that_a_dead_process_missed_is_made_by_the_next() -> None:
    """A worker that is left saves a step before its hooks have run."""
    saved = make_learner(evict_after=2)
    train(saved, batches=batches_of([1, 2], [3], [4], [5]), evict_every=1000)
    for times, step, expected in ((1, 3, [0, 1, 2, 3, 4, 5]), (2, 4, [0, 4, 5])):
        learner = make_learner(evict_after=2, evict_every=2)
        assign(learner, values_of(saved))
        assert learner.tables
        hooks = learner.tables.hooks(MirroredExecutor.on(["CPU:0"]))
        assert len(hooks) == 1
        for hook in [*hooks, *(CatchUp(hooks) for _ in range(times))]:
            hook.begin(step)
        assert values_of(learner)["ids"].tolist() == expected


@pytest.mark.slow
def test_eviction_that_begins_with_a_resume_counts_uses_from_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without eviction the last use of a row is not kept, to spare the steps."""
    saved = make_learner(parts=2)
    train(saved, batches=batches_of([1, 2], [3], [2]), evict_every=1000)
    saved_in(tmp_path, saved, 3)
    learner = make_learner(parts=1, evict_after=2)
    assert_restored(tmp_path, learner, 3)
    assert "when 4 of its rows were last used" in caplog.text
    table_of(learner).evict(3)
    assert values_of(learner)["ids"].tolist() == [0, 1, 2, 3]
    train(learner, batches=batches_of([2], [4]))  # Steps 4 and 5: 1 and 3 were last used at 3.
    assert values_of(learner)["ids"].tolist() == [0, 2, 4]


@pytest.mark.slow
def test_many_evictions_leave_each_id_with_its_own_row() -> None:
    drawn = np.random.default_rng(2).zipf(1.3, (60, BATCH, 3)) % 200
    batches = [(ids, ids.sum(axis=1) % CLASSES) for ids in drawn]
    limits = {"admit_after": 2, "evict_after": 9, "max_rows": 30}
    one, other = make_learner(Adagrad(0.1), **limits), make_learner(Adagrad(0.1), parts=2, **limits)
    train(one, batches=batches, evict_every=3)
    train(other, batches=batches, evict_every=3)
    assert_equal(one, other)
    counts = table_of(one).counts()
    assert counts.rows <= 30
    assert counts.evicted > 50
    assert counts.rows == counts.new - counts.evicted


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, [(3, 1)]), (2, [(1, 1), (1, 2)])])
def test_a_checkpoint_restores_exactly_with_another_number_of_parts(
    before: int, after: list[tuple[int, int]], tmp_path: Path
) -> None:
    limits = {"admit_after": 2, "evict_after": 9}
    saved = make_learner(Adagrad(0.1), parts=before, **limits)
    for first, step in ((0, 10), (10, 15)):  # The second has more rows.
        train(saved, batches=BATCHES[first:step])
        saved_in(tmp_path, saved, step)
    expected = values_of(saved)
    assert {"rows", "accumulator"} < set(expected)
    train(saved, batches=BATCHES[15:])
    for parts, replica in after:
        learner = make_learner(Adagrad(0.1), parts=parts, replica=replica, **limits)
        train(learner, replica, BATCHES[:3])  # What is there before must go.
        assert_restored(tmp_path, learner, 15)
        for name, value in values_of(learner).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
        train(learner, replica, BATCHES[15:])
        assert_equal(saved, learner)


def test_a_checkpoint_of_slots_of_the_same_names_and_other_shapes_is_refused(
    tmp_path: Path,
) -> None:
    saved_in(tmp_path, make_learner(Adagrad(0.1)), 1)
    other = Checkpointer(str(tmp_path), make_learner(RowWiseAdagrad(0.1)), {}, keep=1)
    with pytest.raises(ModelDirError, match=r"ids/embeddings/accumulator .* there, .* here"):
        other.check()
    mark = tmp_path / "step-00000001" / "checkpoint.json"
    contents = json.loads(mark.read_text())
    del contents["identity"]["dynamic_table_slots"]  # As in a checkpoint of a former version.
    mark.write_text(json.dumps(signed(contents)))
    assert_restored(tmp_path, make_learner(Adagrad(0.1)), 1)


def test_a_table_that_is_not_trained_any_more_is_restored_without_its_slots(
    tmp_path: Path,
) -> None:
    """So config.freeze may be given when a run is resumed; an earlier version ignored it."""
    saved = make_learner(Adagrad(0.1))
    train(saved, batches=BATCHES[:5])
    checkpointer = saved_in(tmp_path, saved, 5)
    frozen = make_learner(Adagrad(0.1), trainable=False)
    assert Checkpointer(str(tmp_path), frozen, {}, keep=2).restore_model("step-00000005").step == 5
    assert_restored(tmp_path, frozen, 5)
    train(frozen, batches=BATCHES[5:7])
    found, expected = values_of(frozen), values_of(saved)
    assert found.keys() == {"ids", "use", "rows"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])
    saved_in(tmp_path, frozen, 7)
    with pytest.raises(ModelDirError, match=r"float32\[None, 4\] there, .* accumulator here"):
        checkpointer.check()


@pytest.mark.slow
def test_an_exported_model_is_loaded_by_tensorflow_alone(tmp_path: Path) -> None:
    learner = make_learner(parts=3, admit_after=4)
    train(learner)
    exported = make_model(admit_after=4)
    set_values(exported, learner)
    unknown = np.array([[123456, -5, 3]] * BATCH)
    assert len(np.unique(learner.model(unknown))) == CLASSES, "ids without a row are equal"
    assert_files_predict_alike(exported, tmp_path, learner.model, IDS[0], unknown)
    built = make_model(admit_after=4)
    built.load_weights(tmp_path / "model.keras")
    np.testing.assert_allclose(built(IDS[0]), learner.model(IDS[0]), atol=1e-6)


def learner_of(make: Callable[[], keras.Model]) -> Learner:
    loss, sgd = sparse_categorical_crossentropy, keras.optimizers.SGD(0.1)
    return Learner(make(), sgd, loss, {}, batch_size=BATCH)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_loaded_model_is_trained_from_its_rows_and_exported_with_them(
    parts: int, tmp_path: Path
) -> None:
    limits = {"admit_after": 2, "evict_after": 50}
    saved = make_learner(Adagrad(0.1), **limits)
    train(saved, batches=BATCHES[:10])
    set_values(exported := make_model(Adagrad(0.1), **limits), saved)
    exported.save(path := tmp_path / "model.keras")

    def load() -> keras.Model:
        return keras.models.load_model(path)

    dry_run(lambda: learner_of(load))
    with replicas(1).scope(), tables_with(num_parts=parts):
        learner = learner_of(load)
    expected, found = values_of(saved), values_of(learner)
    has_row = expected["use"][:, 0] == 1
    np.testing.assert_array_equal(found["ids"], expected["ids"][has_row])
    np.testing.assert_array_equal(found["use"], [[1, 2, 0]] * has_row.sum())
    np.testing.assert_array_equal(found["rows"], expected["rows"])
    np.testing.assert_array_equal(found["accumulator"], np.full_like(found["rows"], 0.1))
    train(learner, batches=BATCHES[10:])
    assert np.abs(values_of(learner)["rows"][:3] - expected["rows"][:3]).max() > 1e-3
    set_values(again := load(), learner)
    assert_files_predict_alike(again, tmp_path, learner.model, IDS[0])


def test_a_table_that_is_not_trained_needs_rows_to_begin_with(tmp_path: Path) -> None:
    """A run could only compute with zeros."""

    def load() -> keras.Model:
        model = keras.models.load_model(tmp_path / "model.keras")
        model.get_layer("ids").trainable = False
        return model

    def check(learner: Learner) -> None:
        assert learner.tables
        learner.tables.check_rows()

    saved = make_learner(Adagrad(0.1))
    check(saved)
    set_values(empty := make_model(Adagrad(0.1)), saved)
    empty.save(tmp_path / "model.keras")
    makes: list[Callable[[], Learner]] = [
        lambda: make_learner(trainable=False, replica=0),
        lambda: learner_of(load),
    ]
    for make in makes:
        for learner in (make(), dry_run(make)[0]):
            with pytest.raises(ConfigError, match=r"ids: .* has none.*leave it out of c"):
                check(learner)
    train(saved, batches=BATCHES[:3])
    set_values(exported := make_model(Adagrad(0.1)), saved)
    exported.save(tmp_path / "model.keras")
    check(dry_run(lambda: learner_of(load))[0])
    check(first := learner_of(load))
    np.testing.assert_array_equal(values_of(first)["rows"], values_of(saved)["rows"])
    check(learner_of(lambda: first.model))  # Its second run.


def test_a_second_learner_of_a_model_begins_with_its_rows_and_without_its_slots() -> None:
    first = make_learner(Adagrad(0.1), evict_after=50)
    train(first)
    expected = values_of(first)
    with replicas(1).scope():
        second = learner_of(lambda: first.model)
    found = values_of(second)
    np.testing.assert_array_equal(found["rows"], expected["rows"])
    np.testing.assert_array_equal(found["accumulator"], np.full_like(found["rows"], 0.1))
    assert not found["use"][:, 2].any(), "its steps are counted from 0"
    train(second)
    assert len(values_of(second)["rows"]) == len(NAMES)


def test_an_export_before_any_id_has_a_row(tmp_path: Path) -> None:
    model = make_model()
    set_values(model, make_learner())
    np.testing.assert_array_equal(model.get_layer("ids")(IDS[0]), np.zeros((BATCH, 3, WIDTH)))


def test_a_dry_run_makes_no_rows() -> None:
    learner, groups = dry_run(lambda: make_learner("adagrad", replica=0))
    assert learner.model(IDS[0]).shape == (BATCH, CLASSES)
    placement = place(groups, 2)
    assert [g.ps for g in placement.groups if g.is_table] == [0, 1]
    assign(learner, values_of(make_learner("adagrad")))


def test_different_ids_and_all_ids_of_each_replica_are_counted() -> None:
    learner = make_learner(parts=2, replica=2)
    ids, labels = BATCHES[0]
    totals = replicas(2).reduce("SUM", updater(learner, 2)((ids, labels)), axis=None)
    unique = sum(len(np.unique(part)) for part in (ids[:5], ids[5:]))
    metrics = learner.to_metrics(np.asarray(totals))
    assert metrics.lookups == {"ids": (unique, ids.size)}
    assert add_metrics(metrics, metrics).lookups == {"ids": (2 * unique, 2 * ids.size)}
    evaluated = learner.evaluate((tf.constant(ids), tf.constant(labels), tf.ones([BATCH])))
    assert learner.to_metrics(np.asarray(evaluated)).lookups == {"ids": (0, 0)}


@pytest.mark.slow
def test_saving_a_model_in_training_does_not_change_it(tmp_path: Path) -> None:
    learner, undisturbed = make_learner(), make_learner()
    train(learner, batches=BATCHES[:5])
    learner.model.save(tmp_path / "model.keras")
    train(learner, batches=BATCHES[5:])
    train(undisturbed)
    assert_equal(learner, undisturbed)
    with pytest.raises(ValueError, match="Resume from a checkpoint"):
        learner.model.load_weights(tmp_path / "model.keras")


def test_warm_start_takes_over_what_is_no_dynamic_table(tmp_path: Path) -> None:
    learner = make_learner()
    train(learner)
    set_values(exported := make_model(), learner)
    exported.save(tmp_path / "model.keras")
    model = make_model()
    warm_start(model, WarmStartConfig(path=str(tmp_path / "model.keras")))
    assert_same(model.get_weights(), learner.model.get_weights())


def test_the_state_of_a_dead_chief_is_not_taken_over(tmp_path: Path) -> None:
    """A new chief finds variables on the servers, but not the ids: a checkpoint has them."""
    assert Checkpointer(str(tmp_path), make_learner(parts=2), {}, keep=1).variables == []
