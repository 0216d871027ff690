"""Checkpoints: whole or not used, of this run or refused, few and the newest."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

from data.records import Split
from strategies.base import Position
from tests.unit.toy import BATCH, CLASSES, Toy, write_split
from trainer.checkpoint import Checkpointer, ModelDirError
from trainer.learner import Learner, sparse_categorical_crossentropy


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_split(tmp_path_factory.mktemp("toy"))


def rebuild(
    toy: Toy,
    make_model: Callable[[], keras.Model],
    make_optimizer: Callable[[], keras.Optimizer] = lambda: keras.optimizers.Adam(0.01),
    keep: int = 2,
) -> None:
    """Gives `toy` another model and optimizer."""
    toy.learner = toy.executor.build(
        lambda: Learner(
            make_model(), make_optimizer(), sparse_categorical_crossentropy, {}, batch_size=BATCH
        )
    )
    toy.checkpointer = Checkpointer(f"{toy.model_dir}/checkpoints", toy.learner, {}, keep=keep)


def sequential(*layers: keras.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), *layers])


class DroppingToy(Toy):
    """With dropout, whose masks depend on a state that no other layer has."""

    def __init__(self, split: Split, model_dir: Path, *, keep: int = 2, seed: int = 0) -> None:
        super().__init__(split, model_dir, keep=keep, seed=seed)
        dense, dropout = keras.layers.Dense, keras.layers.Dropout
        rebuild(
            self, lambda: sequential(dense(16), dropout(0.5, seed=seed), dense(CLASSES)), keep=keep
        )


def trained(
    split: Split, model_dir: Path, steps: list[int], keep: int = 3, kind: type[Toy] = Toy
) -> dict[int, object]:
    """Trains, saving at `steps`; returns the state at each."""
    toy = kind(split, model_dir, keep=keep)
    toy.start()
    states: dict[int, object] = {}
    for step in steps:
        toy.executor.run(step - toy.step)
        toy.checkpointer.save(step, toy.executor.position, {})
        states[step] = toy.state()
    return states


def assert_restores(split: Split, model_dir: Path, step: int, state: object) -> None:
    toy = Toy(split, model_dir, seed=1)
    saved = toy.checkpointer.restore()
    assert saved is not None
    assert (saved.step, saved.position) == (step, Position(step))
    assert toy.step == step
    assert isinstance(state, list)
    for left, right in zip(state, toy.state(), strict=True):
        np.testing.assert_array_equal(left, right)


def test_newest_is_restored_bit_for_bit_with_the_optimizers_state(
    split: Split, tmp_path: Path
) -> None:
    states = trained(split, tmp_path, [3, 7])
    fresh = Toy(split, tmp_path, seed=1)
    assert any((a != b).any() for a, b in zip(fresh.state(), states[7], strict=True))  # type: ignore[call-overload]
    assert_restores(split, tmp_path, 7, states[7])


def test_nothing_is_restored_from_an_empty_directory(split: Split, tmp_path: Path) -> None:
    toy = Toy(split, tmp_path)
    toy.checkpointer.check()
    assert toy.checkpointer.restore() is None
    assert toy.step == 0


@pytest.mark.parametrize("kind", [Toy, DroppingToy])
def test_resumed_training_goes_on_bit_for_bit(
    kind: type[Toy], split: Split, tmp_path: Path
) -> None:
    whole = trained(split, tmp_path / "whole", [30], kind=kind)
    trained(split, tmp_path / "parts", [11], kind=kind)
    toy = kind(split, tmp_path / "parts", seed=1)
    saved = toy.checkpointer.restore()
    assert saved is not None
    toy.start(saved.position)
    toy.executor.run(19)
    expected = whole[30]
    assert isinstance(expected, list)
    for left, right in zip(expected, toy.state(), strict=True):
        np.testing.assert_array_equal(left, right)


def test_only_the_newest_are_kept_and_the_best(split: Split, tmp_path: Path) -> None:
    toy = Toy(split, tmp_path, keep=2)
    toy.start()
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.7), (4, float("nan"))):
        toy.executor.run(1)
        toy.checkpointer.save(step, toy.executor.position, {})
        toy.checkpointer.save_best(step, toy.executor.position, score)
    assert toy.checkpoints() == ["best-00000002", "step-00000003", "step-00000004"]


def resumed(split: Split, model_dir: Path, step: int, keep: int = 2) -> Toy:
    """A run that goes on from `step`, where it must find its checkpoint."""
    toy = Toy(split, model_dir, keep=keep)
    saved = toy.checkpointer.restore()
    assert saved is not None
    assert saved.step == step
    toy.start(saved.position)
    return toy


def save_after(toy: Toy, num_steps: int) -> None:
    toy.executor.run(num_steps)
    toy.checkpointer.save(toy.step, toy.executor.position, {})


def remove_mark(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def truncate(path: Path) -> None:
    data = next(path.glob("variables.data-*"))
    data.write_bytes(data.read_bytes()[:-1])


def lose_a_file(path: Path) -> None:
    (path / "variables.index").unlink()


def garble(path: Path) -> None:
    """Of the same size, so that only reading it finds out."""
    index = path / "variables.index"
    index.write_bytes(bytes(len(index.read_bytes())))


def mark_without(key: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        mark = path / "checkpoint.json"
        document = json.loads(mark.read_text())
        del document[key]
        mark.write_text(json.dumps(document))

    spoil.__name__ = f"mark_without_{key}"
    return spoil


def mark_is_a_list(path: Path) -> None:
    (path / "checkpoint.json").write_text("[]")


def mark_is_null_inside(path: Path) -> None:
    mark = path / "checkpoint.json"
    mark.write_text(json.dumps(dict.fromkeys(json.loads(mark.read_text()))))


SPOILT_MARKS = [
    mark_is_a_list,
    mark_is_null_inside,
    *map(mark_without, ("step", "next_batch", "open_shares", "files", "identity")),
]


@pytest.mark.parametrize("spoil", [remove_mark, truncate, lose_a_file, garble, *SPOILT_MARKS])
def test_broken_checkpoint_is_reported_and_the_one_before_it_used(
    spoil: Callable[[Path], None],
    split: Split,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = trained(split, tmp_path, [3, 7])
    spoil(tmp_path / "checkpoints" / "step-00000007")
    with caplog.at_level(logging.WARNING):
        assert_restores(split, tmp_path, 3, states[3])
    warnings = [r.message for r in caplog.records if r.name == "trainer.checkpoint"]
    assert ["step-00000007" in warning for warning in warnings] == [True]


@pytest.mark.parametrize("spoil", [remove_mark, garble])
def test_broken_checkpoint_is_written_anew(
    spoil: Callable[[Path], None], split: Split, tmp_path: Path
) -> None:
    trained(split, tmp_path, [3, 7])
    spoil(tmp_path / "checkpoints" / "step-00000007")
    toy = resumed(split, tmp_path, 3)
    save_after(toy, 4)
    assert_restores(split, tmp_path, 7, toy.state())


def test_restored_checkpoint_is_not_written_again(split: Split, tmp_path: Path) -> None:
    trained(split, tmp_path, [3])
    mark = tmp_path / "checkpoints" / "step-00000003" / "checkpoint.json"
    before = mark.stat()
    toy = resumed(split, tmp_path, 3)
    save_after(toy, 0)
    assert (mark.stat().st_ino, mark.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("spoil", [remove_mark, truncate, garble])
def test_broken_newer_checkpoints_take_no_place_and_are_removed_by_the_next_save(
    spoil: Callable[[Path], None], split: Split, tmp_path: Path
) -> None:
    trained(split, tmp_path, [3, 7, 8, 9], keep=4)
    for name in ("step-00000008", "step-00000009"):
        spoil(tmp_path / "checkpoints" / name)
    toy = resumed(split, tmp_path, 7, keep=3)
    assert toy.checkpoints()[2:] == ["step-00000008", "step-00000009"]
    save_after(toy, 1)
    assert toy.checkpoints() == ["step-00000003", "step-00000007", "step-00000008"]
    assert_restores(split, tmp_path, 8, toy.state())


def test_what_was_just_written_is_kept_even_if_older_than_what_cannot_be_read(
    split: Split, tmp_path: Path
) -> None:
    trained(split, tmp_path, [3, 7, 9])
    for name in ("step-00000007", "step-00000009"):
        garble(tmp_path / "checkpoints" / name)
    toy = resumed(split, tmp_path, 3, keep=1)
    save_after(toy, 1)
    assert toy.checkpoints() == ["step-00000004"]


def test_torn_checkpoint_is_not_counted_among_those_kept(split: Split, tmp_path: Path) -> None:
    trained(split, tmp_path, [3, 5, 7])
    truncate(tmp_path / "checkpoints" / "step-00000005")
    toy = resumed(split, tmp_path, 7, keep=3)
    save_after(toy, 1)
    assert toy.checkpoints() == ["step-00000003", "step-00000007", "step-00000008"]


@pytest.mark.parametrize("spoil", [truncate, lose_a_file, garble, mark_is_a_list])
def test_training_does_not_begin_anew_where_no_checkpoint_can_be_read(
    spoil: Callable[[Path], None], split: Split, tmp_path: Path
) -> None:
    trained(split, tmp_path, [3, 7])
    for name in ("step-00000003", "step-00000007"):
        spoil(tmp_path / "checkpoints" / name)
    toy = Toy(split, tmp_path)
    # Without reading variables `check` cannot find a garbled one.
    for refuse in (toy.checkpointer.restore, *([toy.checkpointer.check] * (spoil is not garble))):
        with pytest.raises(ModelDirError, match=r"none can be read: .*0007.*0003.*--model_dir"):
            refuse()


def test_training_begins_anew_where_the_first_save_was_never_finished(
    split: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(split, tmp_path, [3])
    remove_mark(tmp_path / "checkpoints" / "step-00000003")
    toy = Toy(split, tmp_path)
    toy.checkpointer.check()
    with caplog.at_level(logging.WARNING):
        assert toy.checkpointer.restore() is None
    assert ["step-00000003" in r.message for r in caplog.records] == [True]
    toy.start()
    save_after(toy, 2)
    assert toy.checkpoints() == ["step-00000002"]


def test_checkpoint_of_another_model_optimizer_or_order_is_refused(
    split: Split, tmp_path: Path
) -> None:
    trained(split, tmp_path, [3])
    others = {
        "variables": Toy(split, tmp_path, width=4),
        "optimizer": Toy(split, tmp_path, optimizer=keras.optimizers.SGD(0.1)),
    }
    mark = tmp_path / "checkpoints" / "step-00000003" / "checkpoint.json"
    for name, other in others.items():
        before = other.state()
        for refuse in (other.checkpointer.check, other.checkpointer.restore):
            with pytest.raises(ModelDirError, match=f"{name}: .* there, .* here"):
                refuse()
        for left, right in zip(before, other.state(), strict=True):
            np.testing.assert_array_equal(left, right)

    document = json.loads(mark.read_text())
    document["identity"]["batch_size"] = 16
    mark.write_text(json.dumps(document))
    with pytest.raises(ModelDirError, match="batch_size: 16 there, 8 here"):
        Toy(split, tmp_path).checkpointer.restore()


def test_changed_setting_of_the_optimizer_is_refused_by_name(split: Split, tmp_path: Path) -> None:
    def rebuilt(optimizer: Callable[[], keras.Optimizer]) -> Toy:
        toy = Toy(split, tmp_path)
        rebuild(toy, lambda: sequential(keras.layers.Dense(CLASSES)), optimizer)
        return toy

    plain = rebuilt(lambda: keras.optimizers.SGD(0.1))
    plain.start()
    save_after(plain, 3)
    other = rebuilt(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    for refuse in (other.checkpointer.check, other.checkpointer.restore):
        with pytest.raises(ModelDirError, match=r"optimizer's variables: .* there, .* here"):
            refuse()


def test_model_of_the_same_variables_put_together_in_another_way_is_refused(
    split: Split, tmp_path: Path
) -> None:
    def flat() -> keras.Model:
        return sequential(keras.layers.BatchNormalization(), keras.layers.Dense(CLASSES))

    toy = Toy(split, tmp_path)
    rebuild(toy, flat)
    toy.checkpointer.save(0, Position(), {})
    rebuild(toy, lambda: sequential(flat()))
    with pytest.raises(ModelDirError, match="put together in another way"):
        toy.checkpointer.restore()


def test_differences_are_named_in_one_order(split: Split, tmp_path: Path) -> None:
    trained(split, tmp_path, [3])
    mark = tmp_path / "checkpoints" / "step-00000003" / "checkpoint.json"
    document = json.loads(mark.read_text())
    names = [f"setting {letter}" for letter in "abcdefghij"]
    document["identity"] |= dict.fromkeys(reversed(names), 1)
    mark.write_text(json.dumps(document))
    with pytest.raises(ModelDirError) as caught:
        Toy(split, tmp_path).checkpointer.check()
    lines = str(caught.value).splitlines()[1:-1]
    assert [line.strip().partition(":")[0] for line in lines] == names


def test_checkpoints_may_be_moved(split: Split, tmp_path: Path) -> None:
    states = trained(split, tmp_path / "here", [3])
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert_restores(split, tmp_path / "there", 3, states[3])
