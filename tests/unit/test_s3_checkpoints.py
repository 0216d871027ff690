"""Checkpoints at s3://: complete or not used, and a store that fails is as a full disk."""

import logging
from pathlib import Path

import pytest

from benchmarks.slow_link import SlowLink
from data.system import files, object_store
from data.system.object_store import UnavailableError
from data.tfrecord.split import Split
from tests.s3 import link, needs_s3, url
from tests.unit.toy import Toy, assert_restores
from trainer.compare import variable_differences
from trainer.config import Config
from trainer.evaluator import _is_done
from trainer.model_dir import check_model_dir
from trainer.run_files import RunFiles

__all__ = ["link", "url"]  # Fixtures.
pytestmark = [pytest.mark.quick, needs_s3]


def saved_at(split: Split, url: str, steps: list[int]) -> Toy:
    toy = Toy(split, url)
    toy.train_and_save(*steps)
    return toy


def test_newest_is_restored_bit_for_bit_and_old_ones_are_removed(
    split: Split, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    check_model_dir(url)
    assert not files.exists(url)
    assert Toy(split, url).checkpointer.restore() is None
    toy = saved_at(split, url, [2, 4, 6])
    moved: list[int] = []
    toy.checkpointer.on_progress = lambda: moved.append(1)
    toy.checkpointer.save_best(6, toy.executor.position, 1.0)
    toy.checkpointer.wait()
    assert len(moved) > 2, "an upload is progress"
    names = sorted(files.names_in(f"{url}/checkpoints"))
    assert names == ["best-00000006", "step-00000004", "step-00000006"]
    assert_restores(split, url, 6, toy.state())
    assert not list(tmp_path.glob("trainer-scratch-*")), "local files are left"


def test_they_are_compared(split: Split, url: str) -> None:
    saved_at(split, url, [2, 4])
    first, second = (f"{url}/checkpoints/step-0000000{step}" for step in (2, 4))
    assert not variable_differences(first, first)
    assert variable_differences(first, second)


def test_unfinished_and_damaged_ones_are_not_used(
    split: Split, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_at(split, url, [2, 4])
    path = f"{url}/checkpoints/step-00000004"
    mark = object_store.open_object(f"{path}/checkpoint.json").read()
    object_store.remove(f"{path}/checkpoint.json")  # An upload that never ended.
    assert_restores(split, url, 2)
    object_store.put(f"{path}/checkpoint.json", mark)
    data = f"{path}/variables.data-00000-of-00001"
    content = bytearray(object_store.open_object(data).read())
    content[20] ^= 1
    object_store.put(data, bytes(content))
    with caplog.at_level(logging.WARNING):
        assert_restores(split, url, 2)
    assert "variables.data-00000-of-00001 has another checksum" in caplog.text
    object_store.remove(data)
    assert_restores(split, url, 2)


def test_failing_store_does_not_end_training_and_the_next_save_counts(
    split: Split, url: str, link: SlowLink, caplog: pytest.LogCaptureFixture
) -> None:
    toy = saved_at(split, url, [2])
    link.is_open = False
    with caplog.at_level(logging.WARNING):
        toy.executor.run(2)
        toy.checkpointer.save(4, toy.executor.position, {})
        assert not toy.checkpointer.has_saved(4)
    assert "step-00000004 could not be written" in caplog.text
    link.is_open = True
    assert_restores(split, url, 2)
    toy.executor.run(2)
    toy.checkpointer.save(6, toy.executor.position, {})
    assert toy.checkpointer.has_saved(6)
    assert_restores(split, url, 6, toy.state())


def test_checkpoint_that_cannot_be_read_now_is_not_considered_damaged(
    split: Split, url: str, link: SlowLink
) -> None:
    saved_at(split, url, [2, 4])
    toy = Toy(split, url)
    link.is_open = False
    for call in (toy.checkpointer.restore, toy.checkpointer.check, toy.checkpointer.newest):
        with pytest.raises(UnavailableError):
            call()
    with pytest.raises(UnavailableError):
        check_model_dir(url)
    link.is_open = True
    assert toy.restore().step == 4


def test_evaluator_without_its_chief_takes_a_run_that_cannot_be_read_for_unfinished(
    url: str, link: SlowLink
) -> None:
    document = {"step": 5, "eval": {}, "exit_code": 0, "why": "done"}
    RunFiles(url).write_result(document)
    assert _is_done(url, Config(train_steps=5))
    assert not _is_done(url, Config(train_steps=6))
    link.is_open = False
    assert not _is_done(url, Config(train_steps=5)), "the thread that watches would have ended"
