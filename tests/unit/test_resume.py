"""Recovery from a NaN, and agreement on a checkpoint, on a real model and real files."""

import concurrent.futures
import dataclasses
import logging
import math
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from data.tfrecord.split import Split
from strategies.metrics import Metrics
from strategies.mirrored import MirroredExecutor
from strategies.position import Position, Reached
from tests.damage import flip_bit
from tests.unit.comparing import assert_same
from tests.unit.toy import BATCH, Toy, parts_of
from trainer.checkpoints.checkpointer import ModelDirError
from trainer.checkpoints.finite import NonFiniteLossError
from trainer.checkpoints.marks import Saved
from trainer.config import Config
from trainer.hooks.report import Report
from trainer.hooks.stops import StopOnNonFinite
from trainer.hooks.writers import Writer
from trainer.resume import restore_newest, restore_together, train_recovering


class Poisoned(MirroredExecutor):
    """Some batches make the loss, and the weights, NaN."""

    bad_batches: Collection[int] = ()
    lowered_rate = 0.0
    diverging_batches: Collection[int] = ()  # The weights become finite, but not the evaluation.

    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        first = self.position.next_batch
        metrics, seconds = super()._run(num_steps)
        if any(first <= batch < first + num_steps for batch in self.bad_batches):
            for variable in self._learner.variables:
                variable.assign(np.full(variable.shape, math.nan))
            metrics["loss"] = (math.nan, metrics["loss"][1])
            if self.lowered_rate:  # By a callback, since the last checkpoint.
                cast(Any, self._learner).optimizer.learning_rate = self.lowered_rate
        if any(first <= batch < first + num_steps for batch in self.diverging_batches):
            for variable in self._learner.variables:
                variable.assign(np.full(variable.shape, 3e38))
        return metrics, seconds


class TakesOver(MirroredExecutor):
    """Its former chief has died."""

    recovery: Any = None


class Recorded(Writer):
    """A writer that records its reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, Any]] = []

    def write(self, step: int, split: str, values: Any) -> None:
        self.reports.append((step, values))


class Run:
    """A run that saves every 4 steps, checks every 2, and reports every 3."""

    def __init__(
        self, split: Split, model_dir: Path, *bad_batches: int, last_step: int, keep: int = 10
    ) -> None:
        self.toy = Toy(split, model_dir, executor=Poisoned, keep=keep)
        assert isinstance(self.toy.executor, Poisoned)
        self.toy.executor.bad_batches = bad_batches
        self.recorded = Recorded()
        self._last_step = last_step
        self.eval_every_steps = 0

    def train(self, most_recoveries: int) -> int:
        toy, last = self.toy, self._last_step
        saved = restore_together(toy.executor, toy.checkpointer)
        if saved is None:
            toy.checkpointer.save(0, Position(), {})
        toy.start(saved.position if saved else Position())
        order = toy.reader.order
        report = Report(
            toy.executor, toy.learner, [self.recorded], every_steps=3, last_step=last, order=order
        )
        save = toy.save(4, last)
        evaluate = toy.evaluate(
            every_steps=self.eval_every_steps, checkpointer=toy.checkpointer, save=save
        )
        config = Config(train_steps=last, steps_per_call=2, recover_from_nan=most_recoveries)
        parts = parts_of(toy.executor, toy.learner, toy.checkpointer, toy.reader, config)
        return train_recovering(parts, [StopOnNonFinite(), report, evaluate, save])


@pytest.mark.slow
def test_examples_before_a_nan_are_skipped_and_other_steps_are_unchanged(
    split: Split, tmp_path: Path
) -> None:
    run = Run(split, tmp_path / "poisoned", 9, last_step=15)
    assert run.train(most_recoveries=1) == 15
    # Checked after 8, 9 and 11 steps; saved after 8.
    assert run.toy.executor.position == Position(18, (), (3 * BATCH,))
    undisturbed = Toy(split, tmp_path / "undisturbed")
    undisturbed.start()
    undisturbed.executor.run(8)
    undisturbed.executor.roll_back(lambda: (Position(11), {}))
    undisturbed.executor.run(7)
    assert_same(run.toy.state(), undisturbed.state())

    reported = dict(run.recorded.reports)
    assert [step for step, _ in run.recorded.reports] == [3, 6, 9, 9, 12, 15]
    assert {step: values["examples"] for step, values in reported.items()} == {
        step: step * BATCH for step in (3, 6, 9, 12, 15)
    }
    skipping = [step for step, values in reported.items() if "examples_skipped" in values]
    assert skipping == [9, 12, 15]
    assert all(math.isfinite(values["loss"]) for values in reported.values())


@pytest.mark.parametrize(("given", "expected"), [(0.5, 0.125), (0.25, 0.25)])
def test_resumed_run_has_the_rate_of_a_callback_unless_another_is_given(
    given: float, expected: float, split: Split, tmp_path: Path
) -> None:
    former = Toy(split, tmp_path, rate=0.5)
    former.learner.optimizer.learning_rate = 0.125
    former.train_and_save(2)
    toy = Toy(split, tmp_path, rate=given)
    parts = parts_of(toy.executor, toy.learner, toy.checkpointer, toy.reader, Config())
    spec = dataclasses.replace(parts.spec, model_dir=str(tmp_path))
    assert restore_newest(dataclasses.replace(parts, spec=spec))
    assert (toy.step, toy.learner.optimizer_rate) == (2, expected)


@pytest.mark.parametrize(("given", "expected"), [(0.5, 0.125), (0.25, 0.25)])
def test_next_chief_that_takes_over_a_step_has_the_rate_of_a_callback_unless_another_is_given(
    given: float, expected: float, split: Split, tmp_path: Path
) -> None:
    Toy(split, tmp_path, rate=0.5).train_and_save(2)
    (tmp_path / "config.json").touch()
    toy = Toy(split, tmp_path, executor=TakesOver, rate=given)

    def take_over(variables: Any, identity: str, after_step: Callable[[], int]) -> Reached:
        assert after_step() == 2
        toy.learner.step.assign(3)
        toy.learner.optimizer.learning_rate = 0.125
        return Reached(3, Position(3), {})

    TakesOver.recovery = SimpleNamespace(take_over=take_over)
    parts = parts_of(toy.executor, toy.learner, toy.checkpointer, toy.reader, Config())
    spec = dataclasses.replace(parts.spec, model_dir=str(tmp_path))
    saved = restore_newest(dataclasses.replace(parts, spec=spec))
    assert saved
    assert (saved.step, toy.learner.optimizer_rate) == (3, expected)
    # What callbacks did to the former rate is not in the one that is given now.
    assert (toy.checkpointer.begun_step == -1) == (given == expected)


def test_rate_of_a_callback_stays_when_a_run_goes_back(split: Split, tmp_path: Path) -> None:
    run = Run(split, tmp_path, 5, last_step=8)
    assert isinstance(run.toy.executor, Poisoned)
    run.toy.executor.lowered_rate = 0.125
    assert run.train(most_recoveries=1) == 8
    assert run.toy.executor.position.skipped
    assert run.toy.learner.optimizer_rate == 0.125


@pytest.mark.slow
def test_skips_are_saved_and_a_resumed_run_ends_bit_for_bit(split: Split, tmp_path: Path) -> None:
    uninterrupted = Run(split, tmp_path / "uninterrupted", 5, 18, last_step=24)
    assert uninterrupted.train(most_recoveries=2) == 24
    Run(split, tmp_path / "parts", 5, last_step=13).train(most_recoveries=2)
    resumed = Run(split, tmp_path / "parts", 18, last_step=24)
    assert resumed.train(most_recoveries=2) == 24
    assert_same(uninterrupted.toy.state(), resumed.toy.state())
    position = resumed.toy.executor.position
    assert position == uninterrupted.toy.executor.position
    assert len(position.skipped) == 2
    assert position.num_examples(resumed.toy.reader.order) == 24 * BATCH


@pytest.mark.slow
def test_number_of_recoveries_is_limited_over_all_parts_of_a_run(
    split: Split, tmp_path: Path
) -> None:
    Run(split, tmp_path, 5, last_step=9).train(most_recoveries=1)
    again = Run(split, tmp_path, 14, last_step=24)
    with pytest.raises(NonFiniteLossError, match=r"became nan .* gone back 1 time\(s\) before"):
        again.train(most_recoveries=1)
    again.toy.checkpointer.wait()
    assert max(again.toy.checkpoints()) == "step-00000012"


@pytest.mark.slow
def test_recoveries_between_two_checkpoints_are_all_counted(split: Split, tmp_path: Path) -> None:
    run = Run(split, tmp_path, 5, 7, 9, last_step=9)
    with pytest.raises(NonFiniteLossError, match=r"gone back 2 time\(s\) before"):
        run.train(most_recoveries=2)
    run = Run(split, tmp_path / "complete", 5, 7, last_step=9)
    assert run.train(most_recoveries=2) == 9
    position = run.toy.executor.position
    assert position == Position(13, (), (2 * BATCH, 2 * BATCH))
    assert position.num_examples(run.toy.reader.order) == 9 * BATCH


def test_nan_without_allowed_recoveries_ends_training(split: Split, tmp_path: Path) -> None:
    run = Run(split, tmp_path, 5, last_step=9)
    with pytest.raises(NonFiniteLossError, match=r"before\.$"):
        run.train(most_recoveries=0)


def test_nan_before_anything_could_be_saved_ends_training(split: Split, tmp_path: Path) -> None:
    run = Run(split, tmp_path, 1, last_step=9)
    # A file in the place of a directory: no save succeeds.
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(NonFiniteLossError, match="no checkpoint to go back to"):
        run.train(most_recoveries=1)


@pytest.mark.slow
@pytest.mark.parametrize("most_recoveries", [0, 1])
def test_state_that_the_first_evaluation_finds_diverged_is_not_resumed(
    most_recoveries: int, split: Split, tmp_path: Path
) -> None:
    run = Run(split, tmp_path, last_step=9, keep=1)
    run.eval_every_steps = 6
    assert isinstance(run.toy.executor, Poisoned)
    run.toy.executor.diverging_batches = (5,)
    if most_recoveries:
        assert run.train(most_recoveries) == 9
        assert run.toy.executor.position == Position(11, (), (2 * BATCH,))
    else:
        with pytest.raises(NonFiniteLossError, match=r"evaluation loss at step 6 .* from before"):
            run.train(most_recoveries)
        assert Toy(split, tmp_path).restore().step == 4


def test_run_that_is_stopped_before_the_step_from_which_it_went_back_is_saved(
    split: Split, tmp_path: Path
) -> None:
    class StopAtSecondTry(Recorded):
        def write(self, step: int, split: str, values: Any) -> None:
            if "examples_skipped" in values:
                run.toy.executor.request_stop()

    run = Run(split, tmp_path, 11, last_step=40)
    run.recorded = StopAtSecondTry()
    last = run.train(most_recoveries=1)
    assert 8 < last < 12, "was not stopped where it had been before"
    assert run.toy.checkpointer.has_saved(last)


class Together(MirroredExecutor):
    """One of two tasks in threads of this process, which exchange numbers."""

    index: int
    barrier: threading.Barrier
    numbers: list[int]

    def gathered(self, number: int) -> list[int]:
        self.numbers[self.index] = number
        self.barrier.wait(60)
        numbers = list(self.numbers)
        self.barrier.wait(60)
        return numbers


def restored_by_two(
    split: Split, directories: tuple[Path, Path]
) -> list[Saved | ModelDirError | None]:
    """What `restore_together` returns, or raises, in two tasks that see these directories."""
    barrier, numbers = threading.Barrier(2), [0, 0]
    tasks = []
    for index, directory in enumerate(directories):
        toy = Toy(split, directory, executor=Together, seed=1)
        assert isinstance(toy.executor, Together)
        toy.executor.index, toy.executor.barrier, toy.executor.numbers = index, barrier, numbers
        tasks.append(toy)

    def restore(toy: Toy) -> Saved | ModelDirError | None:
        try:
            saved = restore_together(toy.executor, toy.checkpointer)
        except ModelDirError as error:
            return error
        assert toy.step == (saved.step if saved else 0)
        return saved

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(restore, tasks))


def two_views(split: Split, tmp_path: Path, steps: list[int]) -> tuple[Path, Path]:
    """A run that saved at `steps`, as two tasks see it."""
    toy = Toy(split, tmp_path / "chief", keep=9)
    toy.train_and_save(*steps)
    shutil.copytree(tmp_path / "chief", tmp_path / "other")
    return tmp_path / "chief", tmp_path / "other"


def damage(directory: Path, step: int) -> None:
    flip_bit(directory / f"checkpoints/step-{step:08d}/variables.data-00000-of-00001", 7)


@pytest.mark.parametrize("damaged", [0, 1], ids=["by the chief", "by another"])
def test_damage_seen_by_one_task_makes_all_tasks_restore_the_checkpoint_before(
    damaged: int, split: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    views = two_views(split, tmp_path, [2, 4, 6])
    damage(views[damaged], 6)
    damage(views[1 - damaged], 4)
    with caplog.at_level(logging.WARNING):
        found = restored_by_two(split, views)
    assert [saved.step for saved in found if isinstance(saved, Saved)] == [2, 2]
    assert len([r for r in caplog.records if "has another checksum" in r.message]) == 2


@pytest.mark.parametrize(
    "lost", [{0: (2, 4)}, {1: (2, 4, 6)}], ids=["one sees others", "one sees none"]
)
def test_tasks_with_different_directories_are_refused(
    lost: dict[int, tuple[int, ...]], split: Split, tmp_path: Path
) -> None:
    views = two_views(split, tmp_path, [2, 4, 6])
    damage(views[1], 6)
    for view, steps in lost.items():
        for step in steps:
            shutil.rmtree(views[view] / f"checkpoints/step-{step:08d}")
    for error in restored_by_two(split, views):
        assert isinstance(error, ModelDirError)
        assert "one directory that all of them see" in str(error)


def test_tasks_without_checkpoints_start_from_step_0(split: Split, tmp_path: Path) -> None:
    assert restored_by_two(split, (tmp_path, tmp_path)) == [None, None]
