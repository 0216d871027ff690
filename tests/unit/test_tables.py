"""Checkpoints of tables: written in pieces, and with only the rows that were changed."""

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from data.system.object_store import UnavailableError
from strategies.position import Position
from tests.damage import flip_bit
from tests.unit import test_dynamic_ids, test_embeddings
from tests.unit.replicas import steps_on
from trainer.checkpoints.checkpointer import Checkpointer, ModelDirError
from trainer.checkpoints.marks import signed
from trainer.checkpoints.store import Store
from trainer.embeddings import Adagrad, RowWiseAdagrad
from trainer.embeddings.saved import StagedTables, table_directories, table_values
from trainer.learner import Learner
from trainer.run_files import checkpoints_in
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import Options

EVERY = 4  # Of the checkpoints here, each fourth is complete.
STEPS = 3  # Between two checkpoints. Three batches use some rows, but not all.
Values = Mapping[str, npt.NDArray[np.generic]]


def fixed(parts: int = 1, replica: int = 1) -> Learner:
    """A table with a fixed number of rows."""
    options = Options(marks_changed_rows=True)
    return test_embeddings.make_learner(
        RowWiseAdagrad(0.1), parts=parts, replica=replica, step_options=options
    )


def dynamic(parts: int = 1, replica: int = 1) -> Learner:
    """A table of dynamic ids, which come and go."""
    limits = {"admit_after": 2, "evict_after": 6}
    options = Options(marks_changed_rows=True)
    return test_dynamic_ids.make_learner(
        Adagrad(0.1), parts=parts, replica=replica, step_options=options, **limits
    )


@pytest.fixture(params=[fixed, dynamic])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Learner]:
    monkeypatch.setattr("trainer.embeddings.dynamic_part._FIRST_ROWS", 2)
    monkeypatch.setattr("trainer.embeddings.saved._PIECE_BYTES", 40)  # One or two rows.
    made: Callable[..., Learner] = request.param
    return made


def batches_of(learner: Learner) -> list[Any]:
    is_dynamic = learner.model.get_layer("ids").is_dynamic
    module = test_dynamic_ids if is_dynamic else test_embeddings
    batches = module.ALL_BATCHES[:40]
    # Few ids in each batch, so that most rows stay as they are.
    return [(np.broadcast_to(ids[:1], ids.shape), labels) for ids, labels in batches]


def train(learner: Learner, first: int, last: int, replica: int = 1) -> None:
    """Steps `first` + 1 to `last`."""
    for number, _ in enumerate(steps_on(learner, replica, batches_of(learner)[first:last])):
        if learner.model.get_layer("ids").is_dynamic:
            learner.model.get_layer("ids").table.evict(first + number + 1)


def values_of(learner: Learner) -> dict[str, npt.NDArray[np.generic]]:
    """All values of the table, with its slots."""
    table = learner.model.get_layer("ids").table
    index = table.index()
    values = table.values_of(table.ids(index))
    return {**index, **{name: value.numpy() for name, value in values.items()}}


def assert_same(left: Values, right: Values) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def checkpointer_of(learner: Learner, directory: Path, keep: int = 9) -> Checkpointer:
    return Checkpointer(str(directory), learner, {}, keep=keep, complete_every=EVERY)


def train_and_save(learner: Learner, checkpointer: Checkpointer, step: int) -> None:
    """Trains from the former checkpoint to `step`, and saves."""
    train(learner, step - STEPS, step)
    checkpointer.save(step, Position(), {})
    assert checkpointer.has_saved(step)


def assert_restores(learner: Learner, directory: Path, step: int, values: Values) -> None:
    """The checkpoint of `step`, restored to another learner, has these values."""
    assert checkpointer_of(learner, directory).restore_step(step)
    assert_same(values_of(learner), values)


def saved_run(learner: Learner, directory: Path, number: int, keep: int = 9) -> dict[int, Values]:
    """Trains, saves `number` checkpoints, and returns the values of the table at each of them."""
    checkpointer = checkpointer_of(learner, directory, keep)
    found: dict[int, Values] = {}
    for step in range(STEPS, STEPS * (number + 1), STEPS):
        train_and_save(learner, checkpointer, step)
        found[step] = values_of(learner)
    return found


def needs_of(directory: Path, step: int) -> list[str]:
    path = str(directory / f"step-{step:08d}")
    return [os.path.basename(needed) for needed in table_directories(path)[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "replica"), [(1, 3, 1), (3, 1, 2)])
def test_changes_are_replayed_exactly_on_any_number_of_parts(
    before: int, after: int, replica: int, make: Callable[..., Learner], tmp_path: Path
) -> None:
    saved, resumed = make(before), make(before)
    expected = saved_run(saved, tmp_path, 3)
    checkpointer = checkpointer_of(resumed, tmp_path)
    assert checkpointer.restore() is not None
    for step in (4 * STEPS, 5 * STEPS, 6 * STEPS):  # It continues the chain.
        train_and_save(resumed, checkpointer, step)
        expected[step] = values_of(resumed)
    assert [len(needs_of(tmp_path, step)) for step in expected] == [0, 1, 2, 3, 0, 1]
    learner = make(after, replica)
    for step, values in expected.items():
        train(learner, 0, 2, replica)  # What is there before must go.
        assert_restores(learner, tmp_path, step, values)
        composed = table_values(str(tmp_path / f"step-{step:08d}"))
        assert_same(composed, {f"0/{name}": value for name, value in values.items()})
    # A run that resumes ends with the same values as one that does not.
    train(saved, 3 * STEPS, 6 * STEPS)
    assert_same(values_of(saved), expected[6 * STEPS])


def test_a_checkpoint_of_changes_has_only_the_rows_that_were_changed(
    make: Callable[..., Learner], tmp_path: Path
) -> None:
    learner = make()
    expected = saved_run(learner, tmp_path, 4)
    reader = tf.train.load_checkpoint(str(tmp_path / "step-00000012" / "tables"))
    changed = reader.get_tensor("0/changed")
    before, after = expected[9], expected[12]
    used = np.unique([ids for ids, _ in batches_of(learner)[9:12]])
    assert set(changed) <= set(used.tolist())
    assert 0 < len(changed) < len(after["rows"])
    assert reader.get_tensor("0/rows").shape[0] == len(changed)
    if "ids" not in after:
        is_changed = np.any(before["rows"] != after["rows"], axis=1)
        np.testing.assert_array_equal(changed, np.where(is_changed)[0])


@pytest.mark.slow
def test_checkpoints_that_others_need_stay(make: Callable[..., Learner], tmp_path: Path) -> None:
    learner = make()
    expected = saved_run(learner, tmp_path, 3, keep=1)
    chain = [f"step-{step:08d}" for step in expected]
    checkpointer = checkpointer_of(learner, tmp_path, keep=1)
    assert checkpoints_in(str(tmp_path)) == chain
    assert checkpointer.restore() is not None
    checkpointer.save_best(9, Position(), 1.0)
    for step in (12, 15):  # The second is complete.
        train_and_save(learner, checkpointer, step)
    assert checkpoints_in(str(tmp_path)) == ["best-00000009", *chain, "step-00000015"]
    best = make()
    assert checkpointer_of(best, tmp_path).restore_model("best-00000009").step == 9
    assert_same(values_of(best), expected[9])
    checkpointer.save_best(15, Position(), 2.0)
    train_and_save(learner, checkpointer, 18)
    assert checkpoints_in(str(tmp_path)) == [
        "best-00000015",
        "step-00000015",
        "step-00000018",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("is_mark", [False, True], ids=["a file", "the mark"])
def test_a_checkpoint_whose_base_is_damaged_is_skipped(
    make: Callable[..., Learner], tmp_path: Path, *, is_mark: bool
) -> None:
    saved = make()
    expected = saved_run(saved, tmp_path, 6)
    base = tmp_path / "step-00000015"
    if is_mark:
        (base / "checkpoint.json").unlink()
    else:
        (data,) = base.glob("tables.data-00000-*")
        flip_bit(data, -1)
    learner = make()
    found = checkpointer_of(learner, tmp_path).restore()
    assert found is not None
    assert found.step == 12
    assert_same(values_of(learner), expected[12])


def test_after_a_failed_save_the_next_checkpoint_is_complete(
    make: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make()
    directory = tmp_path / "checkpoints"
    saved_run(learner, directory, 2)
    checkpointer = checkpointer_of(learner, directory)
    assert checkpointer.restore() is not None
    train(learner, 6, 9)
    with monkeypatch.context() as patch:

        def fail(**_: object) -> None:
            raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

        patch.setattr(tf.raw_ops, "SaveV2", fail)
        checkpointer.save(9, Position(), {})
        assert not checkpointer.has_saved(9)
    train_and_save(learner, checkpointer, 12)
    assert needs_of(directory, 12) == []
    shutil.rmtree(directory / "step-00000003")
    other = make()
    assert checkpointer_of(other, directory).restore() is not None
    assert_same(values_of(other), values_of(learner))


def test_a_lost_server_is_no_error_of_storage(
    make: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make()
    train(learner, 0, 3)

    def fail(_: object) -> None:
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    monkeypatch.setattr(learner.model.get_layer("ids").table, "values_of", fail)
    with pytest.raises(tf.errors.UnavailableError):
        checkpointer_of(learner, tmp_path).save(3, Position(), {})


@pytest.mark.slow
@pytest.mark.parametrize("is_newest", [False, True], ids=["the base", "the newest"])
def test_the_next_checkpoint_is_complete_when_one_that_it_needs_is_gone(
    make: Callable[..., Learner], tmp_path: Path, *, is_newest: bool
) -> None:
    learner = make()
    checkpointer = checkpointer_of(learner, tmp_path)
    for step in (3, 6, 9):
        train(learner, step - STEPS, step)
        if step == 9:
            shutil.rmtree(tmp_path / ("step-00000006" if is_newest else "step-00000003"))
        checkpointer.save(step, Position(), {})
        assert checkpointer.has_saved(step)
    assert needs_of(tmp_path, 9) == []
    shutil.rmtree(tmp_path / "step-00000009")  # The last one, when nothing has changed since.
    checkpointer.save(9, Position(), {})
    assert checkpointer.has_saved(9)
    assert_restores(make(), tmp_path, 9, values_of(learner))


def test_another_checkpoint_in_the_place_of_one_that_is_needed_is_noticed(
    make: Callable[..., Learner], tmp_path: Path
) -> None:
    saved_run(make(), tmp_path / "one", 2)
    saved_run(make(), tmp_path / "other", 1)
    shutil.rmtree(tmp_path / "one" / "step-00000003")
    shutil.copytree(tmp_path / "other" / "step-00000003", tmp_path / "one" / "step-00000003")
    mark = tmp_path / "one" / "step-00000003" / "checkpoint.json"
    contents = {**json.loads(mark.read_text()), "next_batch": 77}
    mark.write_text(json.dumps(signed(contents)))
    with pytest.raises(ModelDirError, match="needs another step-00000003"):
        checkpointer_of(make(), tmp_path / "one").restore_model("step-00000006")


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", ["the check before", "the mark after"])
def test_after_a_failure_of_the_storage_around_a_save_the_next_is_complete(
    fails_at: str,
    make: Callable[..., Learner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = make()
    saved_run(learner, tmp_path, 2)
    checkpointer = checkpointer_of(learner, tmp_path)
    assert checkpointer.restore() is not None
    train(learner, 6, 9)
    real = checkpointer._store.mark_if_complete
    # The first look is that before the tables are staged; the second comes when all is written.
    answers = [False, True] if fails_at == "the mark after" else [True]

    def look(name: str) -> object:
        if answers and answers.pop(0):
            raise UnavailableError("503")
        return real(name)

    monkeypatch.setattr(checkpointer._store, "mark_if_complete", look)
    checkpointer.save(9, Position(), {})
    assert checkpointer.has_saved(9)
    assert len(needs_of(tmp_path, 9)) == (2 if fails_at == "the mark after" else 0)
    train_and_save(learner, checkpointer, 12)
    assert len(needs_of(tmp_path, 12)) == (0 if fails_at == "the mark after" else 1)
    assert_restores(make(), tmp_path, 12, values_of(learner))


def test_an_evaluation_that_is_not_the_best_writes_no_tables(
    make: Callable[..., Learner], tmp_path: Path
) -> None:
    learner, calls = make(), []
    checkpointer = checkpointer_of(learner, tmp_path)
    train(learner, 0, 3)
    checkpointer.save_best(3, Position(), 1.0)
    checkpointer.wait()
    checkpointer.on_progress = lambda: calls.append(1)
    train(learner, 3, 6)
    checkpointer.save_best(6, Position(), 0.5)
    checkpointer.wait()
    assert not calls
    assert checkpoints_in(str(tmp_path)) == ["best-00000003"]


@pytest.mark.slow
def test_checkpoints_of_an_evaluator_need_no_others(
    make: Callable[..., Learner], tmp_path: Path
) -> None:
    expected = saved_run(make(), tmp_path, 3)
    learner = make()
    evaluator = Checkpointer(
        str(tmp_path), learner, {}, keep=1, complete_every=EVERY, is_evaluator=True
    )
    assert evaluator.restore_step(9)
    evaluator.save_best(9, Position(), 1.0)
    evaluator.wait()
    for step in expected:
        shutil.rmtree(tmp_path / f"step-{step:08d}")
    other = make()
    assert checkpointer_of(other, tmp_path).restore_model("best-00000009").step == 9
    assert_same(values_of(other), expected[9])


def test_a_staged_file_that_is_gone_is_an_error_of_the_save(
    make: Callable[..., Learner], tmp_path: Path
) -> None:
    learner = make()
    train(learner, 0, 3)
    store = Store(
        str(tmp_path), str(tmp_path / "claims"), lambda _: None, lambda: None, lambda: None
    )
    staged = StagedTables([learner.model.get_layer("ids").table], store, "CPU:0", lambda: None, 1)
    staged.stage(3, is_complete=True)
    (directory,) = (tmp_path / "claims").iterdir()
    next(directory.glob("tables.data-*")).unlink()
    (tmp_path / "one").mkdir()
    with pytest.raises((OSError, tf.errors.OpError)):
        staged.add_to(str(tmp_path / "one"))


@pytest.mark.slow
def test_directory_that_is_deleted_while_it_is_tidied_does_not_end_training(
    make: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make()
    directory = tmp_path / "checkpoints"
    checkpointer = checkpointer_of(learner, directory)
    real = checkpointer._store.chain_of

    def delete(name: str) -> Mapping[str, str]:
        found = real(name)
        shutil.rmtree(directory)
        return found

    train(learner, 0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._store, "chain_of", delete)
        checkpointer.save(3, Position(), {})
        assert not checkpointer.has_saved(3)
    train_and_save(learner, checkpointer, 6)
    assert needs_of(directory, 6) == []


def test_long_writes_and_reads_are_progress(make: Callable[..., Learner], tmp_path: Path) -> None:
    learner, calls = make(), []
    checkpointer = checkpointer_of(learner, tmp_path)
    checkpointer.on_progress = lambda: calls.append(1)
    train(learner, 0, 3)
    checkpointer.save(3, Position(), {})
    num_rows = len(values_of(learner)["rows"])
    num_of_writing = len(calls)
    assert num_of_writing >= num_rows / 2
    assert checkpointer.restore() is not None
    assert len(calls) - num_of_writing >= num_rows / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_saves_in_any_order_restore_exactly(
    seed: int, make: Callable[..., Learner], tmp_path: Path
) -> None:
    """Saves of steps, of the best and before a restart, and resumed processes, at random."""
    chance = random.Random(seed)
    learners = [make(1), make(2)]
    learner = learners[0]
    checkpointer = checkpointer_of(learner, tmp_path, keep=2)
    expected: dict[int, Values] = {}
    step, score = 0, 0.0
    while step < 16:
        train(learner, step, step + 1)
        step += 1
        expected[step] = values_of(learner)
        kinds = chance.choice([(), (), ("step",), ("best", "step"), ("step", "best"), ("best",)])
        for kind in kinds:
            if kind == "step":
                checkpointer.save(step, Position(), {})
            else:
                score += chance.choice([1.0, -0.5])
                checkpointer.save_best(step, Position(), score)
        if chance.random() < 0.2 and checkpoints_in(str(tmp_path)):
            if chance.random() < 0.5:
                checkpointer.save_for_restart(step, Position(), {})
            checkpointer.wait()
            learner = chance.choice(learners)  # What it has must go.
            checkpointer = checkpointer_of(learner, tmp_path, keep=2)
            found = checkpointer.restore()
            step = found.step if found else 0
            if found:
                assert_same(values_of(learner), expected[step])
            else:
                learner = make()
                checkpointer = checkpointer_of(learner, tmp_path, keep=2)
    checkpointer.wait()
    assert checkpoints_in(str(tmp_path))
    other = make()
    for name in checkpoints_in(str(tmp_path)):
        found = checkpointer_of(other, tmp_path).restore_model(name)
        assert_same(values_of(other), expected[found.step])


def test_second_learner_of_a_model_has_its_own_slots_and_marks() -> None:
    first = fixed()
    train(first, 0, 2)
    trained = values_of(first)
    second = Learner(
        first.model,
        keras.optimizers.SGD(0.1),
        sparse_categorical_crossentropy,
        {},
        batch_size=test_embeddings.BATCH,
        options=Options(marks_changed_rows=True),
    )
    found = values_of(second)
    np.testing.assert_array_equal(found["rows"], trained["rows"])
    assert trained["accumulator"].max() > np.float32(0.1)
    np.testing.assert_array_equal(found["accumulator"], np.float32(0.1))
    table, (part,) = second.model.get_layer("ids").table, second.model.get_layer("ids").parts
    assert len(table.take_changed_ids({}, 0)) == 0
    part.changed.assign(tf.one_hot(1, part.changed.shape[0], True, False))
    assert table.take_changed_ids({}, 0).tolist() == [1]
