"""Checkpoints: complete or not used, of this run or refused, and all but the newest removed."""

import concurrent.futures
import contextlib
import json
import logging
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.system.object_store import UnavailableError
from data.tfrecord.split import Split
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from tests.damage import flip_bit
from tests.unit.comparing import assert_same
from tests.unit.replicas import replicas
from tests.unit.toy import BATCH, CLASSES, Toy, assert_restores, file_size_limit
from trainer.checkpoints.checkpointer import Checkpointer, ModelDirError
from trainer.checkpoints.marks import check_file, own_mark, signed
from trainer.checkpoints.snapshot import Snapshot
from trainer.checkpoints.store import Store
from trainer.config import ConfigError
from trainer.guards.fingerprint import check_keras_settings
from trainer.learner import Learner
from trainer.run_files import checkpoints_in
from trainer.step.losses import sparse_categorical_crossentropy


def rebuild(toy: Toy, make_model: Callable[[], keras.Model]) -> None:
    """Gives `toy` another model."""

    def make() -> Learner:
        adam, loss = keras.optimizers.Adam(0.01), sparse_categorical_crossentropy
        return Learner(make_model(), adam, loss, {}, batch_size=BATCH)

    toy.learner = toy.executor.build(make)
    toy.checkpointer = Checkpointer(f"{toy.model_dir}/checkpoints", toy.learner, {}, keep=2)


def sequential(*layers: keras.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), *layers])


class NestedToy(Toy):
    """With what Keras tracks in other ways: layers of layers, statistics, seeds, an embedding."""

    def __init__(
        self, split: Split, model_dir: Path, *, num_replicas: int = 1, seed: int = 0
    ) -> None:
        super().__init__(split, model_dir, seed=seed)
        self.executor = MirroredExecutor(replicas(num_replicas))
        layers = keras.layers

        def model() -> keras.Model:
            dropout = layers.Dropout(0.5, seed=seed)
            inner = sequential(layers.Dense(4), layers.BatchNormalization(), dropout)
            inputs = keras.Input((3,))
            numbers = layers.Lambda(lambda x: keras.ops.cast(x > 0, "int32"))(inputs)
            embedded = layers.Flatten()(layers.Embedding(2, 4)(numbers))
            outputs = layers.Dense(CLASSES)(layers.Concatenate()([inner(inputs), embedded]))
            return keras.Model(inputs, outputs)

        rebuild(self, model)


def save(toy: Toy, *steps: int) -> None:
    """Saves at `steps`, with another state at each."""
    for step in steps:
        toy.jump_to(step)
        toy.checkpointer.save(step, Position(step), {})
    assert toy.checkpointer.has_saved(steps[-1])


def saved_at(split: Split, model_dir: Path, *steps: int) -> list[np.ndarray]:
    """The state of the first one of `steps`, all of which are saved."""
    toy = Toy(split, model_dir, keep=len(steps))
    save(toy, steps[0])
    state = toy.state()
    save(toy, *steps[1:] or steps)
    return state


# What TensorFlow takes for a pattern, what a shell or a URL would change, and other languages.
WORDS = ("a[x]", "a\\b", "a*b", "a?b", "a{b,c}", "a b", "a%20b", "a#b", "-a", "~a", "a\nb")
NAMES = (*WORDS, "Ünï-中文")


def test_directory_may_have_any_name_and_be_moved(split: Split, tmp_path: Path) -> None:
    here, there = (tmp_path.joinpath(name, *NAMES) for name in ("here", "there"))
    state = saved_at(split, here, 3)
    assert_restores(split, here, 3, state)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert_restores(split, there, 3, state)


@pytest.mark.slow
def test_resumed_training_continues_bit_for_bit(split: Split, tmp_path: Path) -> None:
    uninterrupted = NestedToy(split, tmp_path / "uninterrupted")
    uninterrupted.train_and_save(30)
    NestedToy(split, tmp_path / "parts").train_and_save(11)
    toy = NestedToy(split, tmp_path / "parts", seed=1)
    toy.start(toy.restore().position)
    toy.executor.run(19)
    assert_same(uninterrupted.state(), toy.state())


def test_all_but_the_newest_and_the_best_are_removed(toy: Toy) -> None:
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.7), (4, float("nan"))):
        toy.jump_to(step)
        toy.checkpointer.save(step, Position(step), {})
        toy.checkpointer.save_best(step, Position(step), score)
    toy.checkpointer.wait()
    assert toy.checkpoints() == ["best-00000002", "step-00000003", "step-00000004"]


CHANGED = [
    ({}, 0.9, {}, 0.5, False),
    ({}, 0.9, {"is_lowest": True}, -0.95, True),
    ({"is_lowest": True}, -0.95, {}, 0.05, True),
    ({"is_lowest": True}, -0.3, {"is_lowest": True}, -0.4, False),
    ({"is_lowest": True}, -0.3, {"is_lowest": True, "metric": "mae"}, -0.4, True),
    ({"metric": "auc"}, 0.9, {"metric": "accuracy"}, 0.5, True),
    # Marks of earlier versions lack the direction.
    ({"is_lowest": None}, 0.9, {}, 0.5, False),
    ({"is_lowest": None}, 0.9, {"is_lowest": True}, -0.95, True),
    ({"is_lowest": None}, -0.1, {"is_lowest": True}, -0.3, False),
]


@pytest.mark.parametrize(("former", "first", "now", "second", "is_new"), CHANGED)
def test_best_is_of_one_metric_and_direction(
    toy: Toy, former: Any, first: float, now: Any, second: float, is_new: bool
) -> None:
    for step, options, score in ((1, former, first), (2, now, second)):
        toy.jump_to(step)
        config = {"best_metric": options.get("metric", "accuracy")}
        directory = toy.checkpointer.directory
        checkpointer = Checkpointer(directory, toy.learner, {}, keep=2, config=config)
        is_lowest = options.get("is_lowest", False)
        checkpointer.save_best(step, Position(step), score, is_lowest=is_lowest)
        checkpointer.wait()
    assert toy.checkpoints() == [f"best-0000000{2 if is_new else 1}"]


def test_order_is_that_of_the_steps_when_these_have_more_digits(
    split: Split, tmp_path: Path
) -> None:
    toy = Toy(split, tmp_path)
    save(toy, 99_999_800, 99_999_900, 100_000_000)
    names = ["step-99999900", "step-100000000"]
    assert checkpoints_in(toy.checkpointer.directory) == names
    assert_restores(split, tmp_path, 100_000_000, toy.state())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages about checkpoints."""
    return [r.message for r in caplog.records if r.name.startswith("trainer.checkpoints.")]


DATA = "variables.data-00000-of-00001"


def remove_mark(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def truncate(path: Path) -> None:
    (path / DATA).write_bytes((path / DATA).read_bytes()[:-1])


def lose_a_file(path: Path) -> None:
    (path / "variables.index").unlink()


def flip_a_bit(path: Path, name: str = "variables.index") -> None:
    """Keeps the size. TensorFlow does not check all parts."""
    flip_bit(path / name, (path / name).stat().st_size // 2)


def raise_a_number_of_the_mark(path: Path) -> None:
    mark = path / "checkpoint.json"
    before = mark.read_text()
    mark.write_text(before.replace('"next_batch": ', '"next_batch": 1'))
    assert mark.read_text() != before


def edit_mark(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits the mark and its checksum, like another version of this program."""
    mark = path / "checkpoint.json"
    document = json.loads(mark.read_text())
    edit(document)
    mark.write_text(json.dumps(signed(document)))


def mark_without(key: str) -> Callable[[Path], None]:
    return lambda path: edit_mark(path, lambda document: document.pop(key))


def mark_is_a_list(path: Path) -> None:
    (path / "checkpoint.json").write_text("[]")


def mark_is_null_inside(path: Path) -> None:
    edit_mark(path, lambda document: document.update(dict.fromkeys(document)))


KEYS = ("step", "next_batch", "open_shares", "skipped", "files", "identity")
DAMAGED_MARKS = [mark_is_a_list, mark_is_null_inside, *map(mark_without, KEYS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove_mark, "checkpoint.json is missing"),
        (truncate, r"variables.data-00000-of-00001 has 1,\d{3} bytes instead of 1,\d{3}\."),
        (lose_a_file, "variables.index is missing"),
        (flip_a_bit, "variables.index has another checksum"),
        (lambda path: flip_a_bit(path, DATA), f"{DATA} has another checksum"),
        (raise_a_number_of_the_mark, "checkpoint.json has another checksum"),
        *((damage, "checkpoint.json is not one of this program") for damage in DAMAGED_MARKS),
    ],
)
def test_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    damage: Callable[[Path], None],
    named: str,
    split: Split,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = saved_at(split, tmp_path, 3, 7)
    damage(tmp_path / "checkpoints" / "step-00000007")
    with caplog.at_level(logging.WARNING):
        assert_restores(split, tmp_path, 3, state)
    (warning,) = warnings_in(caplog)
    assert "step-00000007" in warning
    assert re.search(named, warning)
    assert "\n" not in warning


def test_restored_checkpoint_is_not_written_again(split: Split, tmp_path: Path) -> None:
    saved_at(split, tmp_path, 3)
    mark = tmp_path / "checkpoints" / "step-00000003" / "checkpoint.json"
    before = mark.stat()
    toy = Toy(split, tmp_path)
    assert toy.restore().step == 3
    save(toy, 3)
    assert (mark.stat().st_ino, mark.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [remove_mark, flip_a_bit])
def test_damaged_newer_checkpoints_are_written_anew_or_removed_by_the_next_save(
    damage: Callable[[Path], None], split: Split, tmp_path: Path
) -> None:
    saved_at(split, tmp_path, 3, 7, 8, 9)
    for name in ("step-00000008", "step-00000009"):
        damage(tmp_path / "checkpoints" / name)
    toy = Toy(split, tmp_path, keep=3)
    assert toy.restore().step == 7
    assert toy.checkpoints()[2:] == ["step-00000008", "step-00000009"]
    save(toy, 8)
    assert toy.checkpoints() == ["step-00000003", "step-00000007", "step-00000008"]
    assert_restores(split, tmp_path, 8, toy.state())


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """No file can be opened."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_file_that_cannot_be_opened_for_now_is_not_damaged(split: Split, tmp_path: Path) -> None:
    saved_at(split, tmp_path, 3)
    path = tmp_path / "checkpoints" / "step-00000003"
    contents = own_mark(str(path)).files[DATA]
    for read in (lambda: own_mark(str(path)), lambda: check_file(f"{path}/{DATA}", contents)):
        with no_free_descriptor(), pytest.raises(UnavailableError, match="Too many open files"):
            read()
    check_file(f"{path}/{DATA}", contents)


@pytest.mark.parametrize("is_later", [True, False], ids=["newest", "oldest"])
def test_checkpoint_that_the_storage_fails_to_read_is_skipped_and_not_removed(
    is_later: bool, split: Split, tmp_path: Path
) -> None:
    saved_at(split, tmp_path, 3, 7)
    name = "step-00000007" if is_later else "step-00000003"
    mark, away = tmp_path / "checkpoints" / name / "checkpoint.json", tmp_path / "away"
    toy = Toy(split, tmp_path, keep=1)
    if not is_later:
        assert toy.restore().step == 7
    mark.rename(away)
    mark.mkdir()  # Reading it fails.
    if is_later:
        assert toy.restore().step == 3
        mark.rmdir()
        away.rename(mark)
    save(toy, 4 if is_later else 8)
    assert name in toy.checkpoints()
    other = {"step-00000003", "step-00000007"} - {name}
    assert other.isdisjoint(toy.checkpoints()), "others are removed as ever"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, lose_a_file, flip_a_bit, mark_is_a_list])
def test_training_is_refused_if_no_checkpoint_can_be_read(
    damage: Callable[[Path], None], split: Split, tmp_path: Path
) -> None:
    saved_at(split, tmp_path, 3, 7)
    for name in ("step-00000003", "step-00000007"):
        damage(tmp_path / "checkpoints" / name)
    toy = Toy(split, tmp_path)
    # `check` does not read variables.
    checks = [] if damage is flip_a_bit else [toy.checkpointer.check]
    for refuse in (toy.checkpointer.restore, *checks):
        with pytest.raises(ModelDirError, match=r"none can be read: .*0007.*0003.*--model_dir"):
            refuse()


def test_training_starts_from_step_0_if_the_first_save_was_never_finished(
    split: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_at(split, tmp_path, 3)
    remove_mark(tmp_path / "checkpoints" / "step-00000003")
    toy = Toy(split, tmp_path)
    toy.checkpointer.check()
    with caplog.at_level(logging.WARNING):
        assert toy.checkpointer.restore() is None
    assert ["step-00000003" in message for message in warnings_in(caplog)] == [True]
    save(toy, 2)
    assert toy.checkpoints() == ["step-00000002"]


def test_checkpoint_of_another_model_optimizer_or_order_is_refused(
    split: Split, tmp_path: Path
) -> None:
    saved_at(split, tmp_path, 3)
    others = {
        "variables": Toy(split, tmp_path, width=4),
        "optimizer": Toy(split, tmp_path, optimizer=keras.optimizers.SGD(0.1)),
    }
    for name, other in others.items():
        before = other.state()
        for refuse in (other.checkpointer.check, other.checkpointer.restore):
            with pytest.raises(ModelDirError, match=f"{name}: .* there, .* here"):
                refuse()
        assert_same(before, other.state())

    with pytest.raises(ModelDirError, match=r"optimizer's variables: .* there"):
        others["optimizer"].checkpointer.check()

    path = tmp_path / "checkpoints" / "step-00000003"
    edit_mark(path, lambda document: document.pop("names"))  # Of an earlier version.
    with pytest.raises(ModelDirError, match=r"variable 0 float32\[3, 3\] there, seq\S*kernel"):
        others["variables"].checkpointer.check()
    edit_mark(path, lambda document: document["identity"].update(batch_size=16))
    with pytest.raises(ModelDirError, match="batch_size: 16 there, 8 here"):
        Toy(split, tmp_path).checkpointer.restore()


def test_model_of_the_same_variables_put_together_in_another_way_is_refused(toy: Toy) -> None:
    def flat() -> keras.Model:
        return sequential(keras.layers.BatchNormalization(), keras.layers.Dense(CLASSES))

    rebuild(toy, flat)
    save(toy, 0)
    rebuild(toy, lambda: sequential(flat()))
    with pytest.raises(ModelDirError, match="put together in another way"):
        toy.checkpointer.restore()


def test_settings_of_keras_are_compared_where_they_were_recorded(
    split: Split, tmp_path: Path
) -> None:
    name, default = "keras.config.epsilon", keras.config.epsilon()
    keras.config.set_epsilon(0.001)
    try:
        state = saved_at(split, tmp_path, 3)
        path = tmp_path / "checkpoints" / "step-00000003"
        edit_mark(path, lambda document: document["identity"].pop(name))  # Of an earlier version.
        assert_restores(split, tmp_path, 3, state)
        check_keras_settings({}, str(tmp_path))

        edit_mark(path, lambda document: document["identity"].update({name: default}))
        with pytest.raises(ModelDirError, match=f"{name}: 1e-07 there, 0.001 here"):
            Toy(split, tmp_path).checkpointer.check()
        with pytest.raises(ConfigError, match=r"epsilon is 0\.001 here, but was 1e-07"):
            check_keras_settings({name: default}, str(tmp_path))
    finally:
        keras.config.set_epsilon(default)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_files_are_equal_to_those_of_tensorflow(
    num_replicas: int, split: Split, tmp_path: Path
) -> None:
    toy = NestedToy(split, tmp_path, num_replicas=num_replicas)
    save(toy, 3)
    original = toy.checkpointer._checkpoint
    original.write(str(tmp_path / "original"))
    ours = tf.train.load_checkpoint(str(tmp_path / "checkpoints/step-00000003/variables"))
    theirs = tf.train.load_checkpoint(str(tmp_path / "original"))
    names = ours.get_variable_to_shape_map()
    assert names == theirs.get_variable_to_shape_map()
    assert len(names) > 20
    # The graph of objects, by which TensorFlow finds out what is whose, is one of them.
    assert [n for n in names if np.any(ours.get_tensor(n) != theirs.get_tensor(n))] == []
    assert "_CHECKPOINTABLE_OBJECT_GRAPH" in names


class Gate:
    """Holds writes of the variables back until it is opened; how many have come and gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.come, self.gone = threading.Semaphore(0), 0
        write = Snapshot.write

        def held(snapshot: Snapshot, *args: Any) -> None:
            self.come.release()
            assert self.is_open.wait(60)
            write(snapshot, *args)
            self.gone += 1

        monkeypatch.setattr(Snapshot, "write", held)


def test_training_continues_while_variables_are_written_without_changing_the_files(
    toy: Toy, split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {}
    for step in (2, 4):  # The first copy, and one over it.
        gate = Gate(monkeypatch)
        toy.executor.run(2)
        states[step] = toy.state()
        toy.checkpointer.save(step, toy.executor.position, {})
        assert gate.come.acquire(timeout=60)
        toy.executor.run(1)
        toy.learner.model.variables[0].assign(np.zeros((3, 3)))
        toy.learner.optimizer.iterations.assign(step)
        assert not gate.gone, "was not written meanwhile"
        gate.is_open.set()
        toy.checkpointer.wait()
        monkeypatch.undo()
    for step in (4, 2):
        other = Toy(split, tmp_path, seed=1)
        assert other.checkpointer.restore_step(step)
        assert_same(states[step], other.state())


def test_one_copy_is_written_at_a_time_and_serves_the_best_of_the_same_step(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    toy.jump_to(1)
    toy.checkpointer.save_best(1, Position(1), 0.5)
    toy.checkpointer.save(1, Position(1), {})
    assert gate.come.acquire(timeout=60)
    assert not gate.come.acquire(timeout=0.1), "two writes at a time"
    toy.jump_to(2)
    opened = threading.Timer(0.2, gate.is_open.set)
    opened.start()
    toy.checkpointer.save(2, Position(2), {})
    assert gate.is_open.is_set()
    assert gate.gone == 2, "variables were copied over while they were written"
    toy.checkpointer.wait()
    assert toy.checkpoints() == ["best-00000001", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("what", ["variables", "mark"])
def test_save_that_fails_is_reported_cleaned_up_and_costs_no_other_checkpoint(
    what: str, split: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy(split, tmp_path, keep=1)
    if what == "mark":  # So long that the variables fit, and it does not.
        identity = {"long": "x" * 20_000}
        toy.checkpointer = Checkpointer(f"{tmp_path}/checkpoints", toy.learner, identity, keep=1)
    save(toy, 1)
    state = toy.state()
    with file_size_limit(10_000 if what == "mark" else 500):
        for step in (2, 3):
            toy.jump_to(step)
            toy.checkpointer.save(step, Position(step), {})
            toy.checkpointer.save_best(step, Position(step), 0.5)
            assert not toy.checkpointer.has_saved(step)
    failures = warnings_in(caplog)
    assert len(failures) == 4
    file = "variables" if what == "variables" else "checkpoint.json"
    for words in (file, "File too large", "the newest complete checkpoint is of step 1"):
        assert all(words in line for line in failures)
    assert toy.checkpoints() == ["step-00000001"]
    if what == "variables":
        assert_restores(split, tmp_path, 1, state)
    save(toy, 4)
    assert toy.checkpoints() == ["step-00000004"]


def test_checkpoint_that_cannot_be_removed_is_reported_and_the_new_one_counts(
    split: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(split, tmp_path, keep=1)
    save(toy, 1)

    def refuse(path: str) -> None:
        raise tf.errors.PermissionDeniedError(None, None, f"{path}; Read-only file system")

    monkeypatch.setattr(tf.io.gfile, "rmtree", refuse)
    save(toy, 2)
    assert toy.checkpoints() == ["step-00000001", "step-00000002"]
    assert ["Read-only file system" in message for message in warnings_in(caplog)] == [True]


def test_write_is_progress_while_training_waits_for_it(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    toy.checkpointer.on_progress = lambda: moved.append(1)
    toy.checkpointer.save(1, Position(1), {})
    concurrent.futures.wait(toy.checkpointer._writes)
    assert not moved, "hides that training stalls"
    gate = Gate(monkeypatch)
    toy.jump_to(2)
    toy.checkpointer.save(2, Position(2), {})
    threading.Timer(0.2, gate.is_open.set).start()
    toy.checkpointer.wait()
    assert len(moved) == 2, "one for each file"


def test_checkpoint_written_while_another_step_is_restored_is_finished_first(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    toy.jump_to(3)
    toy.checkpointer.save(3, Position(3), {})
    threading.Timer(0.2, gate.is_open.set).start()
    assert toy.restore().step == 3


def test_later_checkpoints_that_not_all_tasks_can_read_are_skipped_and_written_anew(
    split: Split, tmp_path: Path
) -> None:
    saved_at(split, tmp_path, 3, 7)
    toy = Toy(split, tmp_path)
    for at_most, step in ((None, 7), (6, 3)):
        assert toy.restore(at_most).step == step
    assert toy.checkpointer.restore(2) is None
    toy.checkpointer.restore(6)
    mark = tmp_path / "checkpoints/step-00000007/checkpoint.json"
    before = mark.stat().st_mtime_ns
    save(toy, 7)
    assert mark.stat().st_mtime_ns > before


def test_checkpoint_for_a_restart_gives_way_to_a_complete_one_of_another_process(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, other = Toy(split, tmp_path), Toy(split, tmp_path)
    real = Store.mark_if_complete
    looked: list[str] = []

    def mark_if_complete(store: Store, name: str) -> Any:
        found = real(store, name)
        if store is toy.checkpointer._store and not looked:
            looked.append(name)  # Now the other process completes the step.
            other.checkpointer.save(3, Position(3), {"worker": {"other": 1}})
            other.checkpointer.wait()
        return found

    monkeypatch.setattr(Store, "mark_if_complete", mark_if_complete)
    # It has looked before the other process was done, and removes no complete checkpoint.
    monkeypatch.setattr("data.system.files.remove_tree", lambda path: None)
    toy.checkpointer.save_for_restart(3, Position(3), {})
    toy.checkpointer.wait()
    assert looked == ["step-00000003"]
    assert Toy(split, tmp_path).restore().counts == {"worker": {"other": 1}}


def test_save_that_fails_leaves_the_checkpoint_that_another_process_has_completed(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, other = Toy(split, tmp_path), Toy(split, tmp_path)
    gate = Gate(monkeypatch)
    toy.jump_to(3)
    toy.checkpointer.save(3, Position(3), {})
    assert gate.come.acquire(timeout=60)
    monkeypatch.undo()
    other.jump_to(3)
    other.checkpointer.save_for_restart(3, Position(3), {})
    assert other.checkpointer.has_saved(3)
    with file_size_limit(100):
        gate.is_open.set()
        assert not toy.checkpointer.has_saved(3)
    assert_restores(split, tmp_path, 3, other.state())


def shared_toy(split: Split, model_dir: Path, *, keep: int = 2) -> Toy:
    """Of an elastic run: the chief of an earlier group may still be writing."""
    toy = Toy(split, model_dir, keep=keep)
    identity = {"train data": split.fingerprint, "batch_size": BATCH}
    directory = f"{model_dir}/checkpoints"
    toy.checkpointer = Checkpointer(directory, toy.learner, identity, keep=keep, is_shared=True)
    return toy


def test_chief_of_an_earlier_group_removes_no_later_checkpoint_and_changes_none(
    split: Split, tmp_path: Path
) -> None:
    earlier, later = shared_toy(split, tmp_path, keep=1), shared_toy(split, tmp_path, keep=2)
    for step in (10, 20, 30):
        later.checkpointer.save(step, Position(step), {"worker": {"later": 1}})
    later.checkpointer.wait()
    names = ["step-00000020", "step-00000030"]
    assert checkpoints_in(later.checkpointer.directory) == names
    before = snapshot_of(tmp_path)
    earlier.checkpointer.save(20, Position(20), {"worker": {"earlier": 1}})
    assert earlier.checkpointer.has_saved(20)
    assert checkpoints_in(later.checkpointer.directory) == names
    assert snapshot_of(tmp_path) == before

    save(later, 40)
    assert checkpoints_in(later.checkpointer.directory) == ["step-00000030", "step-00000040"]


def test_damaged_checkpoint_of_an_elastic_run_is_written_anew(split: Split, tmp_path: Path) -> None:
    toy = shared_toy(split, tmp_path)
    save(toy, 10, 20)
    flip_a_bit(tmp_path / "checkpoints/step-00000020")
    again = shared_toy(split, tmp_path)
    assert again.restore().step == 10
    save(again, 20)
    assert Toy(split, tmp_path).restore().step == 20


def snapshot_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
