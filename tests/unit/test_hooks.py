"""What hooks write, save and refuse, on a real model and a real executor."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from data.records import Split
from tests.unit.toy import NUM_EXAMPLES, Toy, write_split
from trainer.hooks import (
    Evaluate,
    Export,
    Hook,
    NonFiniteLossError,
    Report,
    SaveCheckpoint,
    StopOnNonFinite,
)
from trainer.loop import train
from trainer.writers import JsonLines


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_split(tmp_path_factory.mktemp("toy"))


class Kept:
    """A writer that keeps what it was given."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, str, Any]] = []

    def write(self, step: int, split: str, values: Any) -> None:
        self.reports.append((step, split, values))


def run(toy: Toy, hooks: Sequence[Hook], steps: int) -> int:
    return train(toy.executor, toy.learner, hooks, steps=steps, steps_per_call=1000)


def test_report_is_of_the_steps_since_the_last_one(split: Split, tmp_path: Path) -> None:
    toy = Toy(split, tmp_path)
    toy.start()
    kept = Kept()
    seconds = iter([100.0, 102.0, 106.0, 107.0])
    report = Report(
        toy.executor,
        toy.learner,
        [kept],
        every_steps=4,
        last_step=9,
        order=toy.reader.order,
        clock=lambda: next(seconds),
    )
    run(toy, [report], 9)
    assert [(step, name) for step, name, _ in kept.reports] == [
        (4, "train"),
        (8, "train"),
        (9, "train"),
    ]
    values = [values for _, _, values in kept.reports]
    assert [v["examples"] for v in values] == [32, 64, 72]
    assert [v["steps_per_sec"] for v in values] == [2.0, 1.0, 1.0]
    assert [v["examples_per_sec"] for v in values] == [16.0, 8.0, 8.0]
    assert [v["seconds"] for v in values] == [2.0, 6.0, 7.0]
    assert all(v["learning_rate"] == pytest.approx(0.01) for v in values)
    assert len({v["loss"] for v in values}) == 3


def test_evaluation_counts_each_example_once_and_keeps_the_best(
    split: Split, tmp_path: Path
) -> None:
    toy = Toy(split, tmp_path, optimizer=keras.optimizers.SGD(0.5))
    toy.start()
    kept = Kept()
    evaluate = Evaluate(
        toy.executor,
        toy.learner,
        [kept],
        every_steps=10,
        last_step=25,
        best_metric="loss",
        checkpointer=toy.checkpointer,
        position=lambda: toy.executor.position,
    )
    run(toy, [evaluate], 25)
    assert [step for step, _, _ in kept.reports] == [10, 20, 25]
    assert all(values["examples"] == NUM_EXAMPLES for _, _, values in kept.reports)
    losses = {step: values["loss"] for step, _, values in kept.reports}
    best = min(losses, key=lambda step: losses[step])
    assert toy.checkpoints() == [f"best-{best:08d}"]
    assert evaluate.latest["loss"] == losses[25]


def test_interrupted_run_is_saved_where_it_stands_and_not_exported(
    split: Split, tmp_path: Path
) -> None:
    toy = Toy(split, tmp_path)
    toy.start()
    toy.executor.run(3)
    toy.executor.request_stop()
    save = SaveCheckpoint(
        toy.executor, toy.learner, toy.checkpointer, every_steps=50, last_step=100
    )
    export = Export(toy.learner, lambda: toy.learner.model, f"{tmp_path}/export", last_step=100)
    last = run(toy, [save, export], 100)
    assert last < 100
    assert toy.checkpoints() == [f"step-{last:08d}"]
    assert not (tmp_path / "export").exists()


def test_non_finite_loss_is_an_error_that_names_the_steps(split: Split, tmp_path: Path) -> None:
    toy = Toy(split, tmp_path)
    toy.start()
    save = SaveCheckpoint(toy.executor, toy.learner, toy.checkpointer, every_steps=4, last_step=100)
    run(toy, [StopOnNonFinite(), save], 4)
    toy.learner.model.trainable_variables[0].assign(np.full((3, 3), math.nan))

    with pytest.raises(NonFiniteLossError, match="steps 5 to 8"):
        run(toy, [StopOnNonFinite(), save], 100)

    assert toy.checkpoints() == ["step-00000004"]


LINES = ['{"step": 10, "split": "train"}', '{"step": 10, "split": "eval"}', '{"step": 20}']


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ("\n".join(LINES) + "\n", LINES[:2]),
        ("\n".join(LINES[:2]) + "\n", LINES[:2]),
        ("\n".join(LINES[:2]) + '\n{"step": 1', LINES[:2]),
        ("\n".join(LINES[:2]), LINES[:2]),
        ("", []),
    ],
    ids=["later steps", "whole", "torn line", "line without its end", "empty"],
)
def test_metrics_of_steps_that_will_be_repeated_are_dropped(
    left: str, kept: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(left)
    writer = JsonLines(str(path))
    writer.begin(15)
    writer.write(16, "train", {"loss": 0.5})
    lines = path.read_text().split("\n")
    assert lines[:-2] == kept
    assert json.loads(lines[-2]) == {"step": 16, "split": "train", "loss": 0.5}
    assert lines[-1] == ""


def test_spoilt_variables_are_not_saved_though_the_loss_was_finite(
    split: Split, tmp_path: Path
) -> None:
    toy = Toy(split, tmp_path)
    toy.start()
    metrics = toy.executor.run(4)
    assert math.isfinite(metrics["loss"][0])
    toy.learner.model.trainable_variables[0].assign(np.full((3, 3), math.inf))
    save = SaveCheckpoint(toy.executor, toy.learner, toy.checkpointer, every_steps=4, last_step=100)

    with pytest.raises(NonFiniteLossError, match=r"At step 4 .* no longer finite"):
        save.act(4)

    assert not (tmp_path / "checkpoints").exists()


def test_evaluation_that_is_no_number_ends_the_run(split: Split, tmp_path: Path) -> None:
    toy = Toy(split, tmp_path)
    toy.start()
    toy.learner.model.trainable_variables[0].assign(np.full((3, 3), math.nan))
    kept = Kept()
    evaluate = Evaluate(
        toy.executor,
        toy.learner,
        [kept],
        every_steps=4,
        last_step=100,
        best_metric="loss",
        checkpointer=toy.checkpointer,
        position=lambda: toy.executor.position,
    )
    with pytest.raises(NonFiniteLossError, match="evaluation loss at step 0 is nan"):
        evaluate.act(0)
    assert not kept.reports
