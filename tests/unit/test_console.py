"""The lines of the console fit the terminal, and are complete in a pipe."""

import io
import os
import sys

import pytest

from strategies.pace import Pace
from trainer.hooks.console import Console
from trainer.hooks.terminal import passed_width
from trainer.local.task_logs import say

REPORT = {
    "loss": 0.1234,
    "accuracy": 0.5,
    "learning_rate": 0.1,
    "examples": 25_600,
    "epoch": 17.81,
    "steps_per_sec": 200.0,
    "examples_per_sec": 12_800.0,
    "seconds": 5.0,
    "worker_share": {"worker 0": 0.5, "worker 1": 0.5},
}
NEEDED = "step 400/1,000  train  loss 0.1234  accuracy 0.5000"


def pace() -> Pace:
    found = Pace()
    found.add(10, 1.0)
    found.add(10, 1.0)
    found.add(1, 500.0)  # The call in which a worker was restarted.
    return found


def test_small_values_and_slow_rates_are_not_shown_as_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = {"loss": 0.0000418, "steps_per_sec": 0.0005, "examples_per_sec": 0.032}
    Console(1000).write(400, "train", {**REPORT, **slow})
    shown = "loss 4.18e-05  accuracy 0.5000  epoch 17.8  0.032 examples/s  2,000 s/batch"
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (
            None,
            f"{NEEDED}  epoch 17.8  12,800 examples/s  0.005 s/batch  0:01:00 left  "
            "(worker 0: 50%  worker 1: 50%)",
        ),
        (125, f"{NEEDED}  epoch 17.8  12,800 examples/s  0.005 s/batch  0:01:00 left"),
        (80, f"{NEEDED}  epoch 17.8  0:01:00 left"),
        (70, f"{NEEDED}  0:01:00 left"),
        (20, NEEDED),
    ],
)
def test_words_that_matter_least_are_left_out_first(
    width: int | None,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if width is not None:
        monkeypatch.setenv("TRAINER_WIDTH", str(width))
    assert passed_width() == width
    Console(1000, pace()).write(400, "train", REPORT)
    assert capsys.readouterr().out == f"{line}\n"


def test_compilation_is_announced_once_and_the_time_left_is_not_guessed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(1000, Pace())
    console.begin(0)
    console.begin(0)  # Training went back to a checkpoint.
    console.write(10, "train", REPORT)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "compiling the first step"
    assert "left" not in second


def test_closed_pipe_and_characters_that_a_stream_lacks_end_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    # Unbuffered below the text, so that closing it writes nothing.
    with open(writing, "wb", buffering=0) as raw:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
        console = Console(1000, pace())
        console.say("one")
        console.say("two")
    assert caplog.text.count("The console cannot be written") == 1

    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    say("Données \u732b", latin)
    assert latin.buffer.getvalue() == b"Donn\xe9es \\u732b\n"
