"""Writers: where reports go (metrics.jsonl, TensorBoard; console.py), by chief or evaluator.

    writer = JsonLines("model_dir/metrics.jsonl")
    writer.write(step, "train", {"loss": 0.5, "worker_share": {"worker 0": 0.6, "worker 1": 0.4}})

A report is a step, a split ("train" or "eval") and named values.
"""

import abc
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import summary_v2 as hp
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from typing_extensions import override

from data.system.files import replace_file
from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.exit_codes import first_line
from trainer.hooks.base import Hook
from trainer.run_files import json_text, read_reports, step_of

log = logging.getLogger(__name__)

# A number; or by worker a number or a histogram {value: count}, as in Executor.worker_stats. Any:
# each writer distinguishes the three when it writes.
Values = Mapping[str, Any]


class Writer(Hook, abc.ABC):
    """A hook that takes reports."""

    @abc.abstractmethod
    def write(self, step: int, split: str, values: Values) -> None:
        """Writes one report. Raises one of STORAGE_ERRORS if it cannot be written."""


class FileWriter(Writer):
    """Writes to `path`. A report that cannot be written does not end a run.

    The first error is logged, and at the end the number of lost reports.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_lost = 0

    @override
    def begin(self, step: int) -> None:
        try:
            self._begin(step)
        except STORAGE_ERRORS as error:
            log.warning("%s cannot be written: %s", self._path, first_line(error))

    @override
    def write(self, step: int, split: str, values: Values) -> None:
        try:
            self._write(step, split, values)
        except STORAGE_ERRORS as error:
            if not self._num_lost:
                message = "%s cannot be written: %s. Training continues; the next report is tried."
                log.warning(message, self._path, first_line(error))
            self._num_lost += 1

    @override
    def end(self, step: int) -> None:
        if self._num_lost:
            log.warning("%s lacks %d report(s).", self._path, self._num_lost)

    @abc.abstractmethod
    def _begin(self, step: int) -> None: ...

    @abc.abstractmethod
    def _write(self, step: int, split: str, values: Values) -> None: ...


class JsonLines(FileWriter):
    """One JSON object per report, appended to `metrics.jsonl`.

    Every line of a split gets the values that `always` has for this split.
    """

    def __init__(self, path: str, always: Mapping[str, Values] | None = None) -> None:
        super().__init__(path)
        self._always = always or {}
        # None: all lines are valid. Else damaged lines, and lines of later steps, must be dropped.
        self._last_valid_step: float | None = None

    @override
    def _begin(self, step: int) -> None:
        # The steps after `step` will be repeated.
        if num_damaged := self._keep_lines(step):
            log.warning("%s has %d damaged line(s), which are removed.", self._path, num_damaged)

    def read(self) -> Sequence[Values]:
        """Returns the reports so far, without a damaged one."""
        return read_reports(self._path) if tf.io.gfile.exists(self._path) else []

    @override
    def _write(self, step: int, split: str, values: Values) -> None:
        report = {"step": step, "split": split, **values, **self._always.get(split, {})}
        line = json_text(report)
        if self._last_valid_step is not None:
            self._keep_lines(self._last_valid_step)
        # Until the write returns: a full disk may take only a part of the line.
        self._last_valid_step = math.inf
        with tf.io.gfile.GFile(self._path, "a") as file:
            file.write(f"{line}\n")
        self._last_valid_step = None

    def _keep_lines(self, last_valid_step: float) -> int:
        """Removes damaged lines, and lines of later steps; returns the number of damaged ones."""
        self._last_valid_step = last_valid_step
        content = b""
        if tf.io.gfile.exists(self._path):
            with tf.io.gfile.GFile(self._path, "rb") as file:
                content = file.read()
        lines = content.splitlines()
        steps = [step_of(line, math.nan) for line in lines]
        # NaN <= x is False for every x.
        kept = [n for n, step in zip(lines, steps, strict=True) if step <= last_valid_step]
        valid = b"".join(line + b"\n" for line in kept)
        if valid != content:
            replace_file(self._path, valid)
        self._last_valid_step = None
        return sum(map(math.isnan, steps))


class TensorBoard(FileWriter):
    """Scalars and histograms in `tensorboard/train` and `tensorboard/eval`; HParams beside them.

    `hparams` are the settings that TensorBoard's HParams page shows, with the `metrics` of "eval".
    """

    def __init__(
        self,
        directory: str,
        hparams: Mapping[str, bool | float | str] | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        super().__init__(directory)
        self._hparams, self._metric_names = hparams, metrics
        self._writers: dict[str, tf.summary.SummaryWriter] = {}

    @override
    def _begin(self, step: int) -> None:
        if self._hparams is None:
            return
        metrics = [hp.Metric(name, group="eval") for name in self._metric_names]
        summaries = [
            hp.hparams_config_pb([hp.HParam(name) for name in self._hparams], metrics),
            # One trial a directory, even if the run is resumed with another value.
            hp.hparams_pb(dict(self._hparams), trial_id=self._path),
        ]
        self._hparams = None  # Once a process, not again after a NaN.
        with self.writing("", step):
            for summary in summaries:
                tf.summary.experimental.write_raw_pb(summary.SerializeToString())

    @contextlib.contextmanager
    def writing(self, split: str, step: int) -> Iterator[None]:
        """Inside it tf.summary writes to `split`; on exit all is flushed."""
        try:
            # If the files were deleted, the former writer would write without an error.
            if not tf.io.gfile.exists(f"{self._path}/{split}"):
                self._writers.pop(split, None)
            if split not in self._writers:
                self._writers[split] = tf.summary.create_file_writer(f"{self._path}/{split}")
            with self._writers[split].as_default(step=step):
                yield
            self._writers[split].flush()
        except STORAGE_ERRORS:
            # TensorBoard stops reading a file at a damaged record: the next write needs a new file.
            self._writers.pop(split, None)
            # Otherwise each attempt to write to a full disk would leave an empty file.
            with contextlib.suppress(*STORAGE_ERRORS):
                directory = f"{self._path}/{split}"
                for name in tf.io.gfile.listdir(directory):
                    path = f"{directory}/{name}"
                    if name.startswith("events") and not tf.io.gfile.stat(path).length:
                        tf.io.gfile.remove(path)
            raise

    @override
    def _write(self, step: int, split: str, values: Values) -> None:
        # All values in one op: a call of tf.summary.scalar takes 0.5 ms.
        summary = summary_pb2.Summary()
        for name, value in values.items():
            if not isinstance(value, Mapping):
                summary.MergeFrom(scalar_pb(name, value))
                continue
            for worker, number in value.items():
                if isinstance(number, Mapping):
                    summary.MergeFrom(histogram_pb(f"{name}/{worker}", _samples(number)))
                else:
                    summary.MergeFrom(scalar_pb(f"{name}/{worker}", number))
        with self.writing(split, step):
            tf.summary.experimental.write_raw_pb(summary.SerializeToString())


def _samples(counts: Mapping[int, int]) -> npt.NDArray[np.int64]:
    # int64 is given because of a worker that has no counts yet.
    values = np.array(list(counts), np.int64)
    repeats = np.array(list(counts.values()), np.int64)
    return np.repeat(values, -(-repeats // max(1, repeats.sum() // 10_000)))
