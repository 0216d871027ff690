"""Writers: where reports go: a line on the console, metrics.jsonl, TensorBoard.

All are the chief's. A report is a step, a split ("train" or "eval") and named values. A report that
cannot be written, because a disk is full, does not end a run: see Lossy.
"""

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import rich.console
import rich.progress
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from strategies.base import Metrics
from trainer.exits import first_line
from trainer.hooks import Hook, Writer
from trainer.storage import STORAGE_ERRORS

log = logging.getLogger(__name__)

_SHOWN_WORKERS = 8
# Above that of every report; and in place of the step of a torn line.
_ALL_STEPS = 2**62 - 1
_NEVER_DONE = 2**62


class Lossy(Hook):
    """Goes on where a writer cannot write: says so once, and at the end how much is missing."""

    def __init__(self, writer: Writer, where: str) -> None:
        """`writer` may be a hook too; `where` it writes, for messages."""
        self._writer = writer
        self._where = where
        self._num_lost = 0

    def begin(self, step: int) -> None:
        """The writer's own, if it has one."""
        if isinstance(self._writer, Hook):
            try:
                self._writer.begin(step)
            except STORAGE_ERRORS as error:
                log.warning("%s cannot be written: %s", self._where, first_line(error))

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Writes a report, or counts it as lost."""
        try:
            self._writer.write(step, split, values)
        except STORAGE_ERRORS as error:
            if not self._num_lost:
                log.warning(
                    "%s cannot be written: %s. Training goes on; later reports are tried again.",
                    self._where,
                    first_line(error),
                )
            self._num_lost += 1

    def end(self, step: int) -> None:
        """Says how many reports were lost, if any."""
        if self._num_lost:
            log.warning("%s lacks %d report(s).", self._where, self._num_lost)


class JsonLines(Hook):
    """One JSON object a report, in `metrics.jsonl`."""

    def __init__(self, path: str, always: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Appends to what a former run left; `always`: by split, what every line of it has."""
        self._path = path
        self._always = always or {}
        # Lines that do not belong, or are torn, may follow those up to this step; None for no.
        self._tidy_up_to: int | None = None

    def begin(self, step: int) -> None:
        """Drops reports of steps after `step`: they will be done again."""
        self._tidy_up_to = step
        self._tidy()

    def read(self) -> list[dict[str, Any]]:
        """The reports so far, but for a torn one."""
        if not tf.io.gfile.exists(self._path):
            return []
        with tf.io.gfile.GFile(self._path) as file:
            lines = file.read().splitlines()
        return [json.loads(line) for line in lines if _step_of(line) != _NEVER_DONE]

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Appends a line."""
        document = without_nan(
            {"step": step, "split": split, **values, **self._always.get(split, {})}
        )
        line = json.dumps(document, allow_nan=False)
        self._tidy()
        # Until it is written: of a line that does not fit on the disk, a part may be.
        self._tidy_up_to = _ALL_STEPS
        with tf.io.gfile.GFile(self._path, "a") as file:
            file.write(f"{line}\n")
        self._tidy_up_to = None

    def _tidy(self) -> None:
        if self._tidy_up_to is not None and tf.io.gfile.exists(self._path):
            with tf.io.gfile.GFile(self._path) as file:
                text = file.read()
            lines = (line for line in text.splitlines() if _step_of(line) <= self._tidy_up_to)
            kept = "".join(f"{line}\n" for line in lines)
            if kept != text:
                with tf.io.gfile.GFile(f"{self._path}.tmp", "w") as file:
                    file.write(kept)
                tf.io.gfile.rename(f"{self._path}.tmp", self._path, overwrite=True)
        self._tidy_up_to = None


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

    @contextlib.contextmanager
    def writing(self, split: str, step: int) -> Iterator[None]:
        """While in it, tf.summary writes to `split`; on leaving it, all of that is written."""
        try:
            if split not in self._writers:
                self._writers[split] = tf.summary.create_file_writer(f"{self._directory}/{split}")
            with self._writers[split].as_default(step=step):
                yield
            self._writers[split].flush()
        except STORAGE_ERRORS:
            # Of a file with a torn record TensorBoard reads no more: what comes next needs another.
            self._writers.pop(split, None)
            self._remove_empty(split)
            raise

    def _remove_empty(self, split: str) -> None:
        """Or each try to write to a full disk would leave a file."""
        with contextlib.suppress(*STORAGE_ERRORS):
            for path in tf.io.gfile.glob(f"{self._directory}/{split}/events*"):
                if not tf.io.gfile.stat(path).length:
                    tf.io.gfile.remove(path)

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Writes a scalar for each number, all in one op: tf.summary.scalar takes 0.5 ms each."""
        summary = summary_pb2.Summary()
        for name, value in values.items():
            if not isinstance(value, Mapping):
                summary.MergeFrom(scalar_pb(name, value))
                continue
            for key, counted in value.items():
                if isinstance(counted, Mapping):
                    summary.MergeFrom(histogram_pb(f"{name}/{key}", _values(counted)))
                else:
                    summary.MergeFrom(scalar_pb(f"{name}/{key}", counted))
        with self.writing(split, step):
            tf.summary.experimental.write_raw_pb(summary.SerializeToString())


class Console(Hook):
    """A line a report; on a terminal also a bar with the step and the time left."""

    def __init__(self, last_step: int) -> None:
        """Shows progress towards `last_step`."""
        self._console = rich.console.Console(highlight=False, soft_wrap=True)
        self._last_step = last_step
        self._has_failed = False
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
        """Prints a line, above the bar if there is one; not if standard output takes none."""
        try:
            self._console.print(text, markup=False)
        except OSError as error:  # It is a file on a full disk.
            if not self._has_failed:
                log.warning("The console cannot be written: %s. Training goes on.", error)
            self._has_failed = True

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """One line: `step 400/1000  train  loss 0.123  12,345 examples/s  0.0081 s/batch`."""
        shown = ("learning_rate", "examples", "steps_per_sec", "seconds", "examples_per_sec")
        words = [f"step {step:,}/{self._last_step:,}", f"{split:5}"]
        words += [
            f"{name} {value:.4f}"
            for name, value in values.items()
            if name not in shown and isinstance(value, float)
        ]
        if "examples_per_sec" in values:
            secs_per_step = 1 / max(values["steps_per_sec"], 1e-9)
            words.append(f"{values['examples_per_sec']:,.0f} examples/s")
            words.append(f"{secs_per_step:.2g} s/batch")
            words.append(f"{_clock(max(0, self._last_step - step) * secs_per_step)} left")
        else:
            words.append(f"{values['examples']:,} examples")
        if "worker_share" in values:
            words.append(f"({_balance(values['worker_share'])})")
        self.say("  ".join(words))


def _values(histogram: Mapping[int, int]) -> np.ndarray:
    """A value for each count, at most 10,000 of them in the same proportions."""
    # Typed, because of a worker that has done nothing yet.
    values = np.array(list(histogram), np.int64)
    counts = np.array(list(histogram.values()), np.int64)
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
        return _NEVER_DONE
