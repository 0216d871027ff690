"""What hooks write, save and refuse, on a real model and a real executor."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorflow.python.eager import context  # noqa: TID251

from data.tfrecord.split import Split
from strategies.metrics import Metrics
from tests.unit.toy import NUM_EXAMPLES, Recorded, Toy, file_size_limit
from trainer.checkpoints.finite import NonFiniteLossError
from trainer.hooks.base import Hook, PeriodicHook
from trainer.hooks.console import Console
from trainer.hooks.evaluate import Evaluate
from trainer.hooks.inspect import Histograms
from trainer.hooks.report import Report
from trainer.hooks.save import KeepConfig, SaveCheckpoint
from trainer.hooks.stops import StopOnNonFinite
from trainer.hooks.writers import JsonLines, TensorBoard
from trainer.inputs import batch_at
from trainer.loop import train
from trainer.run_files import RunFiles
from trainer.step.loss_scale import LossScale
from trainer.step.options import EarlyStoppingConfig, LossScaleConfig


def run(toy: Toy, hooks: Sequence[Hook], steps: int) -> int:
    return train(toy.executor, toy.learner, hooks, steps=steps, steps_per_call=1000)


def report_hook(toy: Toy, writer: Recorded, *, every_steps: int, last_step: int) -> Report:
    steps = {"every_steps": every_steps, "last_step": last_step}
    return Report(toy.executor, toy.learner, [writer], **steps, order=toy.reader.order)


class SteppingClock:
    """Time that passes in steps, and by hand."""

    def __init__(self, toy: Toy) -> None:
        self._toy = toy
        self.paused = 0.0

    def __call__(self) -> float:
        compiled = 90.0 if self._toy.step else 0.0
        return self._toy.step + compiled + self.paused


@dataclass(eq=False)
class Pause(PeriodicHook):
    clock: SteppingClock
    seconds: float = 0.0

    def act(self, step: int) -> None:
        self.clock.paused += self.seconds


def test_report_is_of_the_steps_since_the_last_one_and_its_rate_is_of_steps_alone(toy: Toy) -> None:
    recorded = Recorded()
    # Each call of `run` takes a second a step, and 90 s more to compile the first.
    clock = SteppingClock(toy)
    toy.executor.clock = clock
    report = report_hook(toy, recorded, every_steps=4, last_step=9)
    pause = Pause(clock, every_steps=4, seconds=1000.0)  # An evaluation, for example.
    run(toy, [report, pause], 9)
    assert [(step, name) for step, name, _ in recorded.reports] == [(n, "train") for n in (4, 8, 9)]
    rates = {"steps_per_sec": 1.0, "examples_per_sec": 8.0, "learning_rate": pytest.approx(0.01)}
    for step, seconds, values in zip((4, 8, 9), (94, 1098, 2099), recorded.values(), strict=True):
        progress = {"examples": 8 * step, "epoch": pytest.approx(8 * step / NUM_EXAMPLES)}
        assert values.items() >= {**rates, **progress, "seconds": seconds}.items()
    assert toy.executor.pace.secs_per_step() == 1.0
    assert len({values["loss"] for values in recorded.values()}) == 3


def test_report_has_the_most_memory_of_a_gpu(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"GPU:0": 5 << 30, "GPU:1": 6 << 30}
    monkeypatch.setattr("trainer.hooks.report.peak_bytes", lambda: peaks)
    recorded = Recorded()
    report = report_hook(toy, recorded, every_steps=1, last_step=2)
    run(toy, [report], 1)
    peaks.clear()
    run(toy, [report], 2)
    assert [v.get("gpu_peak_bytes") for v in recorded.values()] == [6 << 30, None]


def test_evaluation_counts_examples_once_and_keeps_the_best(split: Split, tmp_path: Path) -> None:
    toy = Toy(split, tmp_path, optimizer=keras.optimizers.SGD(0.5))
    toy.start()
    recorded = Recorded()
    evaluate = toy.evaluate([recorded], every_steps=10, last_step=25, checkpointer=toy.checkpointer)
    run(toy, [evaluate], 25)
    assert [step for step, _, _ in recorded.reports] == [10, 20, 25]
    assert all(values["examples"] == NUM_EXAMPLES for _, _, values in recorded.reports)
    losses = {step: values["loss"] for step, _, values in recorded.reports}
    best = min(losses, key=lambda step: losses[step])
    toy.checkpointer.wait()
    assert toy.checkpoints() == [f"best-{best:08d}"]
    assert evaluate.latest["loss"] == losses[25]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "reported", "evaluated"), [(10, [], [10]), (10, [10], []), (12, [], []), (0, [], [])]
)
def test_evaluation_that_a_former_process_did_not_report_is_made_up_for_and_counts_once(
    toy: Toy, step: int, reported: list[int], evaluated: list[int]
) -> None:
    toy.executor.run(step)
    recorded = Recorded()
    history = [{"split": "eval", "step": at, "loss": 0.0} for at in reported]
    # Of a loss of 0 before, the new one is no improvement.
    evaluate = toy.evaluate(
        [recorded],
        every_steps=10,
        history=lambda: history,
        early_stopping=EarlyStoppingConfig(patience=1),
    )
    evaluate.begin(step)
    evaluate.catch_up(step)
    assert [at for at, _, _ in recorded.reports] == evaluated
    assert not evaluate.done


def traced_functions() -> set[str]:
    """Without those that TensorFlow makes of single ops."""
    return {n for n in context.context().list_function_names() if n.startswith("__inference_")}


def test_first_save_makes_no_graph(toy: Toy) -> None:
    """Under ps, TensorFlow would send it to all tasks, and wait for one that is silent."""
    save = toy.save(4)
    save.begin(0)
    toy.executor.run(4)
    before = traced_functions()
    save.act(4)
    toy.checkpointer.wait()
    assert toy.checkpoints() == ["step-00000004"]
    assert traced_functions() <= before


LINES = ['{"step": 10, "split": "train"}', '{"step": 10, "split": "eval"}', '{"step": 20}']
COMPLETE = "\n".join(LINES[:2]) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COMPLETE, LINES[:2]),
        (COMPLETE.removesuffix("\n"), LINES[:2]),
        ("", []),
        (COMPLETE + LINES[2] + "\n", LINES[:2]),
        (COMPLETE + '{"step": 1', LINES[:2]),
        (COMPLETE + '{"step": 1, "split": "\udcff"}\n', LINES[:2]),
        (COMPLETE + "\0" * 50, LINES[:2]),
        (COMPLETE + '{"step": 1e999}\n', LINES[:2]),
        (COMPLETE + '["step"]\n7\n', LINES[:2]),
    ],
)
def test_repeated_steps_are_dropped(text: str, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    writer = JsonLines(str(path))
    writer.begin(15)
    writer.write(16, "train", {"loss": 0.5})
    lines = path.read_text().split("\n")
    assert lines[:-2] == expected
    assert json.loads(lines[-2]) == {"step": 16, "split": "train", "loss": 0.5}
    assert lines[-1] == ""


def test_damaged_lines_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "\xff": 0}\n\0\0\0{"step": 3}\n')
    writer = JsonLines(str(path))
    assert writer.read() == [{"step": 1}]
    writer.begin(5)
    assert caplog.messages == [f"{path} has 2 damaged line(s), which are removed."]
    assert path.read_bytes() == b'{"step": 1}\n'


def test_files_deleted_during_a_run_are_written_anew_at_the_next_save(
    split: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = tmp_path / "run"
    toy = Toy(split, model_dir)
    toy.start()
    files = RunFiles(str(model_dir))
    files.write_config({"a": 1})
    keep = KeepConfig(files, {"a": 1}, every_steps=4, last_step=8)
    save = toy.save(4, 8)
    writer, board = JsonLines(files.metrics), TensorBoard(files.tensorboard)
    board.write(1, "train", {"loss": 1.0})

    class Delete(Hook):
        def __call__(self, step: int, metrics: Metrics) -> None:
            writer.write(step, "train", {"loss": 1.0})
            board.write(step, "train", {"loss": 1.0})
            if step in (4, 8):
                toy.checkpointer.wait()
                assert toy.checkpoints() == [f"step-{step:08d}"]
                shutil.rmtree(model_dir)

    hooks = [keep, writer, save, Delete()]
    train(toy.executor, toy.learner, hooks, steps=8, steps_per_call=2)
    toy.checkpointer.wait()
    assert json.loads(Path(files.config).read_text()) == {"a": 1}
    assert toy.checkpoints() == ["step-00000008"]
    assert keep.result() == {"files_deleted_before_steps": [8, 8]}
    said = [message for message in caplog.messages if "was deleted before step 8" in message]
    assert len(said) == 2
    assert not KeepConfig(files, {"a": 1}).result()


def test_tensorboard_writes_to_a_new_file_after_its_files_were_deleted(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path / "board"))
    board.write(1, "train", {"loss": 1.0})
    shutil.rmtree(tmp_path / "board")
    board.write(2, "train", {"loss": 1.0})
    assert scalar_steps(tmp_path / "board" / "train") == [2]


@pytest.mark.parametrize("saves", [True, False])
def test_damaged_variables_end_the_run_though_the_loss_was_finite_and_are_not_saved(
    saves: bool, toy: Toy, tmp_path: Path
) -> None:
    checkpointer = toy.checkpointer if saves else None
    save = SaveCheckpoint(toy.executor, toy.learner, checkpointer, every_steps=4, last_step=4)
    metrics = toy.executor.run(4)
    assert math.isfinite(metrics["loss"][0])
    toy.learner.model.trainable_variables[0].assign(np.full((3, 3), math.inf))
    with pytest.raises(NonFiniteLossError, match=r"At step 4 .* no longer finite"):
        save.act(4)
    assert not (tmp_path / "checkpoints").exists()


def test_evaluation_loss_of_nan_ends_the_run(toy: Toy) -> None:
    toy.learner.model.trainable_variables[0].assign(np.full((3, 3), math.nan))
    recorded = Recorded()
    evaluate = toy.evaluate([recorded], every_steps=4, checkpointer=toy.checkpointer)
    with pytest.raises(NonFiniteLossError, match="evaluation loss at step 0 is nan"):
        evaluate.act(0)
    assert not recorded.reports


def test_last_save_that_fails_is_tried_again(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    save = toy.save(3, 6)
    run(toy, [save], 3)
    with file_size_limit(500):
        assert run(toy, [save], 6) == 6
    assert not toy.checkpointer.has_saved(6)
    assert toy.checkpoints() == ["step-00000003"]
    tried = [r for r in caplog.records if "step-00000006 could not be written" in r.message]
    assert len(tried) == 2
    save.end(6)
    assert toy.checkpointer.has_saved(6)


def test_reports_that_do_not_fit_on_the_disk_are_counted_and_leave_no_damaged_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(str(path))
    long = {"loss": 0.5, "note": "x" * 100}
    writer.begin(0)
    writer.write(1, "train", long)
    with file_size_limit(200):
        for step in (2, 3):
            writer.write(step, "train", long)
        assert 150 < path.stat().st_size <= 200, "no line was damaged"
        assert not caplog.records[1:], "said more than once"
    writer.write(4, "train", long)
    writer.end(4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4]
    first, last = (record.message for record in caplog.records)
    assert "File too large" in first
    assert f"{path} lacks 2 report(s)" in last


def test_lines_of_repeated_steps_are_dropped_once_the_disk_has_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in LINES))
    writer = JsonLines(str(path))
    with file_size_limit(10):
        writer.begin(15)
    assert path.read_text().count("\n") == len(LINES)
    assert len(caplog.records) == 1
    writer.write(16, "train", {})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 10, 16]


def scalar_steps(directory: Path) -> list[int]:
    """The steps of all events that TensorBoard can read; it reads a file up to a damaged record."""
    steps = []
    for path in sorted(directory.glob("events*"), key=lambda path: path.stat().st_mtime_ns):
        records = tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
        with contextlib.suppress(tf.errors.DataLossError):
            for record in records:
                event = Event.FromString(record)
                steps += [event.step] * bool(event.summary.value)
    return sorted(set(steps))


def test_tensorboard_reads_events_after_a_record_that_did_not_fit_on_the_disk(
    split: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy(split, tmp_path)
    board = TensorBoard(str(tmp_path))
    parts = toy.learner, lambda: batch_at(toy.reader, 0), lambda step: board.writing("train", step)
    histograms = Histograms(*parts, every_steps=1)
    board.write(1, "train", {"loss": 1.0})
    histograms.act(1)
    (file,) = (tmp_path / "train").iterdir()
    with file_size_limit(file.stat().st_size + 20):
        board.write(2, "train", {"loss": 1.0})
    with file_size_limit(0):
        histograms.act(2)
    assert len([r for r in caplog.records if "File too large" in r.message]) == 2
    board.write(3, "train", {"loss": 1.0})
    assert scalar_steps(tmp_path / "train") == [1, 3]
    assert len(list((tmp_path / "train").iterdir())) == 2, "an empty file was left"


def test_worker_without_steps_is_reported_too(tmp_path: Path) -> None:
    values = {"staleness": {"worker 0": {0: 2}, "worker 1": {}}}
    TensorBoard(str(tmp_path)).write(1, "train", values)
    assert scalar_steps(tmp_path / "train") == [1]


def test_export_that_does_not_fit_on_the_disk_sets_failure(toy: Toy, tmp_path: Path) -> None:
    export = toy.export(tmp_path, 2)
    with file_size_limit(500):
        assert run(toy, [export], 2) == 2
    assert "export could not be written: " in export.failure
    assert "File too large" in export.failure


def test_console_on_a_full_disk_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        console = Console(10)
        console.say("one")
        console.say("two")
        monkeypatch.undo()
        assert ["No space left on device" in record.message for record in caplog.records] == [True]
        # Or it would fail again when the file is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def early_stopping_run(
    split: Split, model_dir: Path, *, steps: int
) -> tuple[Toy, list[tuple[int, str, Any]], Evaluate]:
    """A run that learns nothing, with as many steps as `steps`, or what is left of them."""
    toy = Toy(split, model_dir, optimizer=keras.optimizers.SGD(1e-9))
    saved = toy.checkpointer.restore()
    toy.start(saved.position if saved else None)
    recorded = Recorded()
    json_lines = JsonLines(f"{model_dir}/metrics.jsonl")
    evaluate = toy.evaluate(
        [recorded, json_lines],
        every_steps=5,
        history=json_lines.read,
        early_stopping=EarlyStoppingConfig(patience=3, min_delta=1e-3),
    )
    export = toy.export(model_dir, stop=evaluate)
    run(toy, [json_lines, evaluate, toy.save(0), export], steps)
    return toy, recorded.reports, evaluate


def test_training_ends_when_evaluations_no_longer_improve(split: Split, tmp_path: Path) -> None:
    toy, reports, stop = early_stopping_run(split, tmp_path, steps=100)
    # The first is the best; then three are no better.
    assert [step for step, _, _ in reports] == [5, 10, 15, 20]
    assert toy.step == 20
    assert stop.done == "no better loss in 3 evaluations: stopped early"
    assert toy.checkpoints() == ["step-00000020"]
    assert (tmp_path / "export" / "model.keras").exists()


@pytest.mark.slow
def test_resumed_run_stops_early_at_the_same_step(split: Split, tmp_path: Path) -> None:
    first, _, stop = early_stopping_run(split, tmp_path, steps=12)
    assert (first.step, stop.done) == (12, "")
    assert not (tmp_path / "export").exists()
    second, reports, stop = early_stopping_run(split, tmp_path, steps=100)
    assert [step for step, _, _ in reports] == [15, 20]
    assert second.step == 20
    assert stop.done


def test_improvement_resets_the_count_and_a_step_is_counted_once(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(split, tmp_path)
    options = EarlyStoppingConfig(patience=2, min_delta=0.05)
    former = {"split": "eval", "step": 0, "loss": 1.0}  # Before there was such a metric.
    choices: dict[str, Any] = {"best_metric": "accuracy", "early_stopping": options}
    evaluate = toy.evaluate(every_steps=1, history=lambda: [former], **choices)
    evaluate.begin(0)
    done = []
    # A run that resumes at its last step evaluates that step a second time.
    accuracies = [(0, 0.1), (1, 0.2), (2, 0.2), (3, 0.3), (4, 0.34), (4, 0.34), (5, math.nan)]
    for step, value in accuracies:
        found = Metrics({"loss": (1.0, 1.0), "accuracy": (value, 1.0)})
        monkeypatch.setattr(toy.executor, "evaluate", lambda must_complete, found=found: found)
        evaluate.act(step)
        done.append(bool(evaluate.done))
    assert done == [False] * 6 + [True]


def test_skipped_float16_step_does_not_end_the_run_unless_all_are_skipped() -> None:
    scale = LossScale(LossScaleConfig())
    value, _, num_skipped = scale.variables
    hook = StopOnNonFinite(scale)
    hook.begin(0)
    finite, damaged = (Metrics({"loss": (total, 8.0)}) for total in (1.0, math.nan))
    num_skipped.assign(1)
    hook(10, damaged)
    hook(20, finite)
    with pytest.raises(NonFiniteLossError, match=r"loss became nan .* steps 21 to 30"):
        hook(30, damaged)

    num_skipped.assign(11)
    hook(40, damaged)
    value.assign(1.0)
    num_skipped.assign(20)
    hook(50, damaged)
    num_skipped.assign(30)
    with pytest.raises(NonFiniteLossError, match=r"steps 51 to 60 .* float16.*mixed_bfloat16"):
        hook(60, finite)
