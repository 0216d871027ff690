"""What is saved, by whom, and how a broken one is survived.

    checkpointer = Checkpointer("model_dir/checkpoints", learner, identity, keep=3)
    saved = checkpointer.restore()                      # the newest whole one, or None
    checkpointer.save(step, position)                   # the chief alone

A checkpoint is a directory, `step-00001000`, with TensorFlow's files and `checkpoint.json`, written
last: a directory without it was never finished. Under multiworker only the chief saves and every
worker restores, so `model_dir` must be a file system that all of them see.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from strategies.base import Position
from trainer.learner import Learner

log = logging.getLogger(__name__)

_MARK = "checkpoint.json"


class ModelDirError(ValueError):
    """The model directory cannot be used for this run. Exit code 2."""


@dataclass(frozen=True)
class Saved:
    """Where a checkpoint stands: steps applied, and what of the data was not yet consumed."""

    step: int
    position: Position


class Checkpointer:
    """Saves and restores a learner. Every task may restore; the chief alone saves."""

    def __init__(
        self,
        directory: str,
        learner: Learner,
        identity: Mapping[str, Any],
        *,
        keep: int,
        io_device: str | None = None,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            directory: Of the checkpoints.
            learner: What is saved: model, optimizer and with it the step.
            identity: What must be the same for a run to go on from a checkpoint; JSON values.
            keep: How many of the newest are kept, besides the best.
            io_device: The device whose file system has `directory`.
        """
        self._directory = directory
        self._checkpoint = tf.train.Checkpoint(model=learner.model, optimizer=learner.optimizer)
        self._identity = json.loads(
            json.dumps({**identity, "variables": _variables(learner), "optimizer": _name(learner)})
        )
        self._keep = keep
        self._options = tf.train.CheckpointOptions(experimental_io_device=io_device)

    def save(self, step: int, position: Position) -> None:
        """Writes a checkpoint of `step`, then removes those that are too many."""
        self._write(f"step-{step:08d}", step, position, {})
        for name in self._names("step-")[: -self._keep]:
            tf.io.gfile.rmtree(f"{self._directory}/{name}")

    def save_best(self, step: int, position: Position, score: float) -> None:
        """Writes a checkpoint if `score` is the highest so far, then removes the former best."""
        former = self._names("best-")
        marks = [_read_mark(f"{self._directory}/{name}") for name in former]
        # A nan, here or there, is never better and never kept.
        if math.isnan(score) or any(mark and mark["score"] >= score for mark in marks):
            return
        self._write(f"best-{step:08d}", step, position, {"score": score})
        for name in former:
            if name != f"best-{step:08d}":
                tf.io.gfile.rmtree(f"{self._directory}/{name}")

    def check(self) -> None:
        """Returns if the newest whole checkpoint can be restored here, or there is none.

        Reads no variable.

        Raises:
            ModelDirError: as `restore`.
        """
        for name in reversed(self._names("step-")):
            path = f"{self._directory}/{name}"
            mark = _read_mark(path)
            if mark is not None:
                self._check_identity(path, mark["identity"])
                return

    def restore(self) -> Saved | None:
        """Restores the newest whole checkpoint; None if there is none.

        A broken one is reported and the one before it is used.

        Raises:
            ModelDirError: it is of another model, other data, or another order of the data.
        """
        for name in reversed(self._names("step-")):
            path = f"{self._directory}/{name}"
            mark = _read_mark(path)
            if mark is None:
                log.warning("%s is not whole; using the checkpoint before it.", path)
                continue
            self._check_identity(path, mark["identity"])
            try:
                status = self._checkpoint.read(f"{path}/variables", options=self._options)
            except (tf.errors.OpError, ValueError) as error:
                log.warning("%s cannot be read (%s); using the one before it.", path, error)
                continue
            status.assert_consumed()
            shares = tuple((b, first, last) for b, first, last in mark["open_shares"])
            return Saved(mark["step"], Position(mark["next_batch"], shares))
        return None

    def _write(self, name: str, step: int, position: Position, more: Mapping[str, float]) -> None:
        path = f"{self._directory}/{name}"
        if _read_mark(path) is not None:
            return
        if tf.io.gfile.exists(path):
            tf.io.gfile.rmtree(path)
        tf.io.gfile.makedirs(path)
        self._checkpoint.write(f"{path}/variables", options=self._options)
        mark = {
            "step": step,
            "next_batch": position.next_batch,
            "open_shares": position.open_shares,
            **more,
            "files": {f: _num_bytes(f"{path}/{f}") for f in sorted(tf.io.gfile.listdir(path))},
            "identity": self._identity,
        }
        with tf.io.gfile.GFile(f"{path}/{_MARK}.tmp", "w") as file:
            file.write(json.dumps(mark, indent=2))
        tf.io.gfile.rename(f"{path}/{_MARK}.tmp", f"{path}/{_MARK}")

    def _names(self, prefix: str) -> list[str]:
        """Names of the checkpoints, oldest first."""
        if not tf.io.gfile.isdir(self._directory):
            return []
        names = (name.rstrip("/") for name in tf.io.gfile.listdir(self._directory))
        return sorted(name for name in names if re.fullmatch(prefix + r"\d+", name))

    def _check_identity(self, path: str, saved: Mapping[str, Any]) -> None:
        different = [
            f"{name}: {_short(saved.get(name))} there, {_short(self._identity.get(name))} here"
            for name in saved.keys() | self._identity.keys()
            if saved.get(name) != self._identity.get(name)
        ]
        if different:
            raise ModelDirError(
                f"{path} is of another run, which this one cannot go on with:\n  "
                + "\n  ".join(different)
                + "\nGive another --model_dir, or the former settings."
            )


def _variables(learner: Learner) -> list[str]:
    return [
        f"{index} {variable.dtype}{list(variable.shape)}"
        for index, variable in enumerate(learner.model.variables)
    ]


def _name(learner: Learner) -> str:
    return type(learner.optimizer).__name__


def _read_mark(path: str) -> dict[str, Any] | None:
    """The contents of checkpoint.json if all the files it lists are there, else None."""
    try:
        with tf.io.gfile.GFile(f"{path}/{_MARK}") as file:
            mark = json.loads(file.read())
        whole = all(_num_bytes(f"{path}/{name}") == size for name, size in mark["files"].items())
    except (tf.errors.OpError, ValueError, KeyError):
        return None
    return mark if whole else None


def _num_bytes(path: str) -> int:
    return int(tf.io.gfile.stat(path).length)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:150]} ... ({len(text)} characters)"
