"""A run that waits for input says so, with the rate of the data and the rate of the model."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.tfrecord.split import Split
from strategies.base import Batch
from strategies.pace import Pace
from tests.unit.test_hooks import report_hook
from tests.unit.toy import BATCH, Recorded, Toy, make_reader, parse
from trainer.doctor.plan import input_lines
from trainer.hooks.console import Console
from trainer.hooks.input_limit import limit_of
from trainer.inputs import Inputs
from trainer.loop import train

PARSE_SECS, STEP_SECS = 0.03, 0.015  # Of a batch: much more than all else, also on a busy machine.
EVERY = 32


def later(batch: Batch, secs: tf.Tensor | float) -> Batch:
    """`batch`, `secs` after it is there."""
    with tf.control_dependencies(tf.nest.flatten(batch)):
        slept = tf.numpy_function(time.sleep, [tf.identity(secs)], [])  # noqa: TID251  # Slow input.
    with tf.control_dependencies([slept]):
        return tf.nest.map_structure(tf.identity, batch)


def slow_parse(serialized: tf.Tensor) -> Batch:
    secs = tf.cast(tf.size(serialized), tf.float64) * PARSE_SECS / BATCH
    return parse(later(serialized, secs))


def reports_of(split: Split, tmp_path: Path, *, cache_bytes: int) -> list[Any]:
    """Reports without the first, which has the start of the reader."""
    toy = Toy(split, tmp_path)
    gradients = toy.learner.gradients

    def slow_gradients(batch: Batch) -> Any:
        return gradients(later(batch, np.float64(STEP_SECS)))

    toy.learner.gradients = slow_gradients  # type: ignore[method-assign, assignment]
    toy.reader = dataclasses.replace(toy.reader, parse=slow_parse, cache_bytes=cache_bytes)
    toy.start()
    recorded = Recorded()
    report = report_hook(toy, recorded, every_steps=EVERY, last_step=4 * EVERY)
    train(toy.executor, toy.learner, [report], steps=4 * EVERY, steps_per_call=1000)
    return [{"step": step, **values} for step, _, values in recorded.reports[1:]]


def rate_of_reader(split: Split) -> float:
    """Examples a second of the reader alone."""
    reader = dataclasses.replace(make_reader(split), parse=slow_parse)
    batches = iter(DiskReader(reader).batches(0, range(4)))
    for _ in range(EVERY):
        next(batches)
    began = time.monotonic()
    for _ in range(2 * EVERY):
        next(batches)
    return 2 * EVERY * BATCH / (time.monotonic() - began)


@pytest.mark.slow
def test_rates_of_data_and_model_are_those_measured(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.reader._GROUP_EXAMPLES", 4 * BATCH)
    limit = limit_of(reports_of(split, tmp_path, cache_bytes=0))
    assert limit is not None
    assert limit.data_rate == pytest.approx(rate_of_reader(split), rel=0.1)
    cached = reports_of(split, tmp_path, cache_bytes=1 << 20)
    assert limit_of(cached) is None
    model_rate = len(cached) / sum(1 / report["examples_per_sec"] for report in cached)
    assert limit.model_rate == pytest.approx(model_rate, rel=0.1)


REPORT = {"epoch": 1.0, "steps_per_sec": 10.0, "examples_per_sec": 800.0}


def test_limit_is_named_once_and_the_report_has_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(1000, Pace())
    quiet = Console(1000, Pace(), is_quiet=True)
    for step, wait in ((10, 0.5), (20, 0.04), (30, 0.5), (40, 0.6), (50, 0.6), (60, 0.6)):
        console.write(step, "train", {**REPORT, "input_wait": wait})
        console.write(step, "eval", {"examples": 100})
    lines = [line for line in capsys.readouterr().out.splitlines() if " eval " not in line]
    (limit,) = [line for line in lines if "--num_threads" in line]
    assert lines.index(limit) == 4, "after the second report in a row"
    assert "steps wait for it 60% of their time" in limit
    assert "800 examples/s; the model would take about 2,000" in limit
    assert "--config.data.cache_bytes=N" in limit
    assert ["waits for input" in line for line in lines[:4]] == [True, False, True, True]
    assert lines[3].endswith("waits for input 60%")
    for step in (10, 20, 30):
        quiet.write(step, "train", {**REPORT, "input_wait": 0.5})
    assert capsys.readouterr().out == "", "it is no warning"


def test_reports_count_with_their_time_and_nothing_is_said_of_what_is_not_known() -> None:
    assert limit_of([]) is None
    assert limit_of([{"step": 10, **REPORT}]) is None
    fast = {"steps_per_sec": 100.0, "examples_per_sec": 8000.0}
    reports = [
        {"step": 10, **REPORT, "input_wait": 0.5},
        {"step": 20, **REPORT},
        {"step": 120, **fast, "input_wait": 0.0},
    ]
    assert limit_of(reports) == (0.25, (800 + 8000) / 2, 8800 / 1.5)


def test_doctor_says_the_rate_of_a_short_read_and_what_a_former_run_showed(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.doctor.plan._READ_SECS", 0.1)
    reader = make_reader(split)
    (line,) = input_lines(Inputs(reader, reader), str(tmp_path))
    assert line.startswith("the input gives about ")
    cached = dataclasses.replace(reader, cache_bytes=1 << 20)
    assert not input_lines(Inputs(cached, cached), str(tmp_path))
    waiting = {"step": 10, "split": "train", **REPORT, "loss": 1.0, "input_wait": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(waiting) + "\n")
    (line,) = input_lines(Inputs(cached, cached), str(tmp_path))
    limit = limit_of([waiting])
    assert limit is not None
    assert line == f"{tmp_path}: {limit.text}"
