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
from tests.unit.toy import Toy, write_split
from trainer.checkpoint import ModelDirError


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_split(tmp_path_factory.mktemp("toy"))


def trained(split: Split, model_dir: Path, steps: list[int], keep: int = 3) -> dict[int, object]:
    """Trains, saving at `steps`; returns the state at each."""
    toy = Toy(split, model_dir, keep=keep)
    toy.start()
    states: dict[int, object] = {}
    for step in steps:
        toy.executor.run(step - toy.step)
        toy.checkpointer.save(step, toy.executor.position)
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


def test_resumed_training_goes_on_bit_for_bit(split: Split, tmp_path: Path) -> None:
    whole = trained(split, tmp_path / "whole", [30])
    trained(split, tmp_path / "parts", [11])
    toy = Toy(split, tmp_path / "parts", seed=1)
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
        toy.checkpointer.save(step, toy.executor.position)
        toy.checkpointer.save_best(step, toy.executor.position, score)
    assert toy.checkpoints() == ["best-00000002", "step-00000003", "step-00000004"]


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


@pytest.mark.parametrize("spoil", [remove_mark, truncate, lose_a_file, garble])
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


def test_half_written_checkpoint_is_written_anew(split: Split, tmp_path: Path) -> None:
    trained(split, tmp_path, [3, 7])
    remove_mark(tmp_path / "checkpoints" / "step-00000007")
    toy = Toy(split, tmp_path)
    saved = toy.checkpointer.restore()
    assert saved is not None
    toy.start(saved.position)
    toy.executor.run(4)
    toy.checkpointer.save(7, toy.executor.position)
    assert_restores(split, tmp_path, 7, toy.state())


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


def test_checkpoints_may_be_moved(split: Split, tmp_path: Path) -> None:
    states = trained(split, tmp_path / "here", [3])
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert_restores(split, tmp_path / "there", 3, states[3])
