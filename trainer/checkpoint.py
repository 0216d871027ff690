"""What is saved, by whom, and how a broken one is survived.

    checkpointer = Checkpointer("model_dir/checkpoints", learner, identity, keep=3)
    saved = checkpointer.restore()                      # the newest whole one, or None
    checkpointer.save(step, position, counts)           # the chief alone

A checkpoint is a directory, `step-00001000`, with TensorFlow's files and `checkpoint.json`, written
last: a directory without it was never finished, and one whose files have other sizes than it says
was damaged later. Neither is whole. Under multiworker only the chief saves and every worker
restores, so `model_dir` must be a file system that all of them see.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from strategies.base import Position
from strategies.counts import Counts
from trainer.exits import first_line
from trainer.learner import Learner

log = logging.getLogger(__name__)

_MARK = "checkpoint.json"


class ModelDirError(ValueError):
    """The model directory cannot be used for this run. Exit code 2."""


@dataclass(frozen=True)
class Saved:
    """Where a checkpoint stands: steps applied, and what of the data was not yet consumed.

    `counts` are what Executor.counts said; JSON has made strings of its keys.
    """

    step: int
    position: Position
    counts: Counts = field(default_factory=dict)


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
        self._checkpoint = _everything(learner)
        ours = {
            "variables": _described(learner.model.variables),
            "optimizer": type(learner.optimizer).__name__,
            "optimizer's variables": _described(learner.optimizer.variables),
        }
        self._identity = json.loads(json.dumps({**identity, **ours}))
        self._keep = keep
        # What this process wrote or has read: known to be sound, not only to have the right sizes.
        self._known: set[str] = set()
        self._resumed_step = 0
        self._options = tf.train.CheckpointOptions(experimental_io_device=io_device)

    def save(self, step: int, position: Position, counts: Counts) -> None:
        """Writes a checkpoint of `step`, then removes those that are too many or of no use.

        Of no use are those that are not whole, and those that `restore` passed over: newer than
        where this process began, but not its own.
        """
        just_written = f"step-{step:08d}"
        self._write(just_written, step, position, {"counts": counts})
        useful = []
        for name in self._names("step-"):
            passed_over = _step(name) > self._resumed_step and name not in self._known
            if passed_over or _read_mark(f"{self._directory}/{name}") is None:
                self._remove(name)
            elif name != just_written:
                useful.append(name)
        for name in useful[: max(0, len(useful) + 1 - self._keep)]:
            self._remove(name)

    def save_best(self, step: int, position: Position, score: float) -> None:
        """Writes a checkpoint if `score` is the highest so far, then removes the former best."""
        former = self._names("best-")
        marks = [_read_mark(f"{self._directory}/{name}") for name in former]
        # A nan, here or there, is never better and never kept.
        if math.isnan(score) or any(mark and mark.score >= score for mark in marks):
            return
        self._write(f"best-{step:08d}", step, position, {"score": score})
        for name in former:
            if name != f"best-{step:08d}":
                self._remove(name)

    def check(self) -> Saved | None:
        """Where the newest whole checkpoint stands, if it can be restored here; None without one.

        Reads no variable.

        Raises:
            ModelDirError: as `restore`.
        """
        broken = []
        for name in reversed(self._names("step-")):
            path = f"{self._directory}/{name}"
            mark = _read_mark(path)
            if mark is not None:
                self._check_identity(path, mark.identity)
                return mark.saved
            broken += _if_marked(path)
        self._refuse_if_any(broken)
        return None

    def newest(self) -> Saved | None:
        """Where the newest checkpoint stands whose files have their sizes; None without one."""
        for name in reversed(self._names("step-")):
            if mark := _read_mark(f"{self._directory}/{name}"):
                return mark.saved
        return None

    def restore_step(self, step: int) -> bool:
        """Restores the checkpoint of `step`; False, with the reason in the log, if it is broken.

        Raises:
            ModelDirError: as `restore`.
        """
        name = f"step-{step:08d}"
        mark = _read_mark(f"{self._directory}/{name}")
        return mark is not None and self._read(name, mark)

    def restore(self) -> Saved | None:
        """Restores the newest whole checkpoint; None if none was ever finished.

        A broken one is reported and the one before it is used.

        Raises:
            ModelDirError: it is of another model, optimizer, other data, or another order of the
                data; or there are checkpoints, and all are broken.
            tf.errors.UnavailableError: a parameter server is gone.
        """
        broken = []
        for name in reversed(self._names("step-")):
            path = f"{self._directory}/{name}"
            mark = _read_mark(path)
            if mark is None:
                log.warning("%s is not whole; using what is before it.", path)
                broken += _if_marked(path)
                continue
            if self._read(name, mark):
                self._resumed_step = mark.saved.step
                return mark.saved
            broken.append(path)
        self._refuse_if_any(broken)
        return None

    def _read(self, name: str, mark: "_Mark") -> bool:
        """Restores a checkpoint whose files have their sizes; False if they cannot be read."""
        path = f"{self._directory}/{name}"
        self._check_identity(path, mark.identity)
        try:
            status = self._checkpoint.read(f"{path}/variables", options=self._options)
        except tf.errors.UnavailableError:
            # Says nothing about the files.
            raise
        except (tf.errors.OpError, ValueError) as error:
            log.warning("%s cannot be read: %s", path, error)
            return False
        try:
            status.assert_consumed()
        except AssertionError as error:
            # Or TensorFlow would report it once more when the run ends.
            status.expect_partial()
            raise ModelDirError(
                f"{path} has variables of the same shapes, but of a model or optimizer put "
                f"together in another way: {first_line(error)}. Give another --model_dir, or "
                "the former model and optimizer."
            ) from error
        self._known.add(name)
        return True

    def _write(self, name: str, step: int, position: Position, more: Mapping[str, Any]) -> None:
        path = f"{self._directory}/{name}"
        if name in self._known and _read_mark(path) is not None:
            return
        if tf.io.gfile.exists(path):
            self._remove(name)
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
        self._known.add(name)

    def _remove(self, name: str) -> None:
        # The mark first: what is left if this is killed must not pass for a damaged checkpoint.
        mark = f"{self._directory}/{name}/{_MARK}"
        if tf.io.gfile.exists(mark):
            tf.io.gfile.remove(mark)
        tf.io.gfile.rmtree(f"{self._directory}/{name}")

    def _names(self, prefix: str) -> list[str]:
        """Names of the checkpoints, oldest first."""
        if not tf.io.gfile.isdir(self._directory):
            return []
        names = (name.rstrip("/") for name in tf.io.gfile.listdir(self._directory))
        return sorted(name for name in names if re.fullmatch(prefix + r"\d+", name))

    def _refuse_if_any(self, broken: Sequence[str]) -> None:
        if broken:
            raise ModelDirError(
                f"{self._directory} has checkpoints, but none can be read: {', '.join(broken)}. "
                "Put a copy of one in their place, or give another --model_dir to begin anew."
            )

    def _check_identity(self, path: str, saved: Mapping[str, Any]) -> None:
        different = [
            f"{name}: {_short(saved.get(name))} there, {_short(self._identity.get(name))} here"
            for name in sorted(saved.keys() | self._identity.keys())
            if saved.get(name) != self._identity.get(name)
        ]
        if different:
            raise ModelDirError(
                f"{path} is of another run, which this one cannot go on with:\n  "
                + "\n  ".join(different)
                + "\nGive another --model_dir, or the former settings."
            )


def _everything(learner: Learner) -> tf.train.Checkpoint:
    """What decides how training goes on: all variables of the model and the optimizer."""
    checkpoint = tf.train.Checkpoint(model=learner.model, optimizer=learner.optimizer)
    reached = {id(node) for node in tf.train.TrackableView(checkpoint).descendants()}
    # keras.random.SeedGenerator is not a Trackable: the state of dropout would be left out.
    checkpoint.missed = {
        str(index): variable
        for index, variable in enumerate(learner.model.variables)
        if id(variable) not in reached and id(variable.value) not in reached
    }
    return checkpoint


def _described(variables: Sequence[Any]) -> list[str]:
    return [
        f"{index} {variable.dtype}{list(variable.shape)}"
        for index, variable in enumerate(variables)
    ]


@dataclass(frozen=True)
class _Mark:
    """What checkpoint.json says; `score` is of the best alone."""

    saved: Saved
    identity: Mapping[str, Any]
    score: float


def _read_mark(path: str) -> _Mark | None:
    """The contents of checkpoint.json if it and all the files it lists are whole, else None."""
    try:
        with tf.io.gfile.GFile(f"{path}/{_MARK}") as file:
            mark = json.loads(file.read())
        step, next_batch = int(mark["step"]), int(mark["next_batch"])
        shares = tuple((int(b), int(first), int(last)) for b, first, last in mark["open_shares"])
        identity, files = dict(mark["identity"]), dict(mark["files"])
        counts, score = dict(mark.get("counts", {})), float(mark.get("score", -math.inf))
        whole = all(_num_bytes(f"{path}/{name}") == size for name, size in files.items())
    # KeyError: lacks a part; TypeError: it, or a part of it, is of another kind.
    except (tf.errors.OpError, ValueError, KeyError, TypeError):
        return None
    saved = Saved(step, Position(next_batch, shares), counts)
    return _Mark(saved, identity, score) if whole else None


def _if_marked(path: str) -> list[str]:
    """`path` if it was finished once; without a mark, what wrote it was killed."""
    return [path] if tf.io.gfile.exists(f"{path}/{_MARK}") else []


def _step(name: str) -> int:
    return int(name.partition("-")[2])


def _num_bytes(path: str) -> int:
    return int(tf.io.gfile.stat(path).length)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:150]} ... ({len(text)} characters)"
