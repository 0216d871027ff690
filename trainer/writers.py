"""Writers: where reports go: a line on the console, metrics.jsonl, TensorBoard.

All are the chief's. A report is a step, a split ("train" or "eval") and named values.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import rich.console
import rich.progress
import tensorflow as tf

from strategies.base import Metrics
from trainer.hooks import Hook

_SHOWN_WORKERS = 8


class JsonLines(Hook):
    """One JSON object a report, in `metrics.jsonl`."""

    def __init__(self, path: str, always: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Appends to what a former run left; `always`: by split, what every line of it has."""
        self._path = path
        self._always = always or {}

    def begin(self, step: int) -> None:
        """Drops reports of steps after `step`: they will be done again."""
        if not tf.io.gfile.exists(self._path):
            return
        with tf.io.gfile.GFile(self._path) as file:
            text = file.read()
        kept = "".join(f"{line}\n" for line in text.splitlines() if _step_of(line) <= step)
        if kept != text:
            with tf.io.gfile.GFile(f"{self._path}.tmp", "w") as file:
                file.write(kept)
            tf.io.gfile.rename(f"{self._path}.tmp", self._path, overwrite=True)

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Appends a line."""
        with tf.io.gfile.GFile(self._path, "a") as file:
            document = without_nan(
                {"step": step, "split": split, **values, **self._always.get(split, {})}
            )
            file.write(json.dumps(document, allow_nan=False) + "\n")


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Writes `document` to `path`, whole or not at all."""
    with tf.io.gfile.GFile(f"{path}.tmp", "w") as file:
        file.write(json.dumps(without_nan(document), indent=2, allow_nan=False) + "\n")
    tf.io.gfile.rename(f"{path}.tmp", path, overwrite=True)


def without_nan(value: Any) -> Any:
    """`value` with null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Scalars in `tensorboard/train` and `tensorboard/eval`."""

    def __init__(self, directory: str) -> None:
        """Files are made when the first report comes."""
        self._directory = directory
        self._writers: dict[str, Any] = {}

    def writer(self, split: str) -> Any:
        """The tf.summary writer of `split`."""
        if split not in self._writers:
            self._writers[split] = tf.summary.create_file_writer(f"{self._directory}/{split}")
        return self._writers[split]

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Writes a scalar for each number."""
        with self.writer(split).as_default(step=step):
            for name, value in values.items():
                if isinstance(value, Mapping):
                    for key, counted in value.items():
                        if isinstance(counted, Mapping):
                            tf.summary.histogram(f"{name}/{key}", _values(counted))
                        else:
                            tf.summary.scalar(f"{name}/{key}", counted)
                else:
                    tf.summary.scalar(name, value)
        self.writer(split).flush()


class Console(Hook):
    """A line a report; on a terminal also a bar with the step and the time left."""

    def __init__(self, last_step: int) -> None:
        """Shows progress towards `last_step`."""
        self._console = rich.console.Console(highlight=False, soft_wrap=True)
        self._last_step = last_step
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._bar_task = self._bar.add_task("train", total=last_step)

    def begin(self, step: int) -> None:
        """Shows the bar."""
        self._bar.update(self._bar_task, completed=step)
        self._bar.start()

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Moves the bar."""
        self._bar.update(self._bar_task, completed=min(step, self._last_step))

    def stop(self) -> None:
        """Takes the bar away, also when training failed."""
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False)

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """One line: `step 400/1000  train  loss 0.123  accuracy 0.970  12,345 examples/s`."""
        shown = ("learning_rate", "examples", "steps_per_sec", "seconds", "examples_per_sec")
        words = [f"step {step:,}/{self._last_step:,}", f"{split:5}"]
        words += [
            f"{name} {value:.4f}"
            for name, value in values.items()
            if name not in shown and isinstance(value, float)
        ]
        if "examples_per_sec" in values:
            words.append(f"{values['examples_per_sec']:,.0f} examples/s")
            left = max(0, self._last_step - step) / max(values["steps_per_sec"], 1e-9)
            words.append(f"{_clock(left)} left")
        else:
            words.append(f"{values['examples']:,} examples")
        if "worker_share" in values:
            words.append(f"({_balance(values['worker_share'])})")
        self.say("  ".join(words))


def _values(histogram: Mapping[int, int]) -> np.ndarray:
    """A value for each count, at most 10,000 of them in the same proportions."""
    values, counts = np.array(list(histogram)), np.array(list(histogram.values()))
    return np.repeat(values, -(-counts // max(1, counts.sum() // 10_000)))


def _balance(shares: Mapping[str, float]) -> str:
    """`worker 0: 51%  worker 1: 49%`; of many workers those that do the least and the most."""
    listed = [f"{name}: {share:.0%}" for name, share in shares.items()]
    if len(listed) > _SHOWN_WORKERS:
        by_share = sorted(shares, key=lambda name: shares[name])
        ends = [by_share[0], by_share[-1]]
        listed = [f"{len(shares)} workers"] + [f"{name}: {shares[name]:.1%}" for name in ends]
    return "  ".join(listed)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _step_of(line: str) -> int:
    """The step of a line; a torn line, the last of a killed run, counts as never done."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62
