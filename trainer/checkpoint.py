"""What is saved, by whom, and how a broken one is survived.

    checkpointer = Checkpointer("model_dir/checkpoints", learner, identity, keep=3)
    saved = checkpointer.restore()                      # the newest whole one, or None
    checkpointer.save(step, position, counts)           # the chief alone; returns before it is done
    checkpointer.has_saved(step)                        # waits

A checkpoint is a directory, `step-00001000`, with TensorFlow's files and `checkpoint.json`, written
last: a directory without it was never finished, and one whose files are not of the sizes and
checksums that it says was damaged later. Neither is whole. Under multiworker only the chief saves
and every worker restores, so `model_dir` must be a file system that all of them see.

| what | on |
| --- | --- |
| copying the variables (trainer/snapshot.py) | the thread that trains, while no step is in flight |
| files, checksums, the mark, removing old ones | one other thread, one checkpoint after the other |

A save that fails costs no more than that checkpoint: it is reported, what was half written is
removed, training goes on, and older checkpoints stay until a newer one is whole.
"""

import concurrent.futures
import contextlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import tensorflow as tf

from strategies.base import Position
from strategies.counts import Counts
from trainer.exits import first_line
from trainer.learner import Learner
from trainer.progress import CHECKPOINT_MARK
from trainer.snapshot import Snapshot
from trainer.storage import (
    STORAGE_ERRORS,
    contents_of,
    damage_of,
    flush_to_disk,
    size_damage_of,
)

log = logging.getLogger(__name__)


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
        # Averages of the weights, for example; most runs have none.
        for name, variables in learner.state.items():
            ours[name] = _described(variables)
        self._identity = json.loads(json.dumps({**identity, **ours}))
        self._keep = keep
        # What this process wrote or has read: known to be sound, not only to have the right sizes.
        self._known: set[str] = set()
        self._resumed_step = 0
        self._saved_step: int | None = None
        self._device = io_device or "CPU:0"
        self._options = tf.train.CheckpointOptions(experimental_io_device=io_device)
        self._snapshot: Snapshot | None = None
        self._snapshot_step: int | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._writes: list[concurrent.futures.Future[None]] = []

    def save(self, step: int, position: Position, counts: Counts) -> None:
        """Copies the variables, and has a checkpoint of `step` written; waits for a former write.

        When it is whole, those are removed that are too many or of no use: those that are not
        whole, and those that `restore` passed over, newer than where this process began, but not
        its own.
        """

        def write() -> None:
            if self._written(f"step-{step:08d}", step, position, {"counts": counts}):
                self._saved_step = step
                self._rotate(f"step-{step:08d}")

        self._write_later(step, write)

    def save_best(self, step: int, position: Position, score: float) -> None:
        """As `save`, but only if `score` is the highest so far; then the former best is removed."""

        def write() -> None:
            former = self._names("best-")
            marks = [_mark_if_whole(f"{self._directory}/{name}") for name in former]
            # A nan, here or there, is never better and never kept.
            if math.isnan(score) or any(mark and mark.score >= score for mark in marks):
                return
            name = f"best-{step:08d}"
            if self._written(name, step, position, {"score": score}):
                for other in former:
                    if other != name:
                        self._remove(other)

        self._write_later(step, write)

    def wait(self) -> None:
        """Returns when nothing is being written any more."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def has_saved(self, step: int) -> bool:
        """Whether the step that was last written or restored as a whole is `step`; waits for it."""
        self.wait()
        return self._saved_step == step

    def check(self) -> Saved | None:
        """Where the newest whole checkpoint stands, if it can be restored here; None without one.

        Reads no variable and no checksum.

        Raises:
            ModelDirError: as `restore`.
        """
        broken = []
        for name in reversed(self._names("step-")):
            path = f"{self._directory}/{name}"
            mark = _mark_if_whole(path)
            if mark is not None:
                self._check_identity(path, mark.identity)
                return mark.saved
            broken += _if_marked(path)
        self._refuse_if_any(broken)
        return None

    def newest(self) -> Saved | None:
        """Where the newest checkpoint stands whose files have their sizes; None without one."""
        for name in reversed(self._names("step-")):
            if mark := _mark_if_whole(f"{self._directory}/{name}"):
                return mark.saved
        return None

    def restore_step(self, step: int) -> bool:
        """Restores the checkpoint of `step`; False, with the reason in the log, if it is broken.

        Raises:
            ModelDirError: as `restore`.
        """
        self.wait()
        try:
            self._read(f"step-{step:08d}")
        except _BrokenError as error:
            log.warning("%s/step-%08d is not whole: %s.", self._directory, step, error)
            return False
        return True

    def restore(self, at_most: int | None = None) -> Saved | None:
        """Restores the newest whole checkpoint; None if none was ever finished.

        A broken one is reported and the one before it is used. With `at_most` those of later steps
        are passed over.

        Raises:
            ModelDirError: it is of another model, optimizer, other data, or another order of the
                data; or there are checkpoints, and all are broken.
            tf.errors.UnavailableError: a parameter server is gone.
        """
        self.wait()
        self._known.clear()
        self._saved_step = None
        broken = []
        for name in reversed(self._names("step-")):
            if at_most is not None and _step(name) > at_most:
                continue
            path = f"{self._directory}/{name}"
            try:
                saved = self._read(name)
            except _BrokenError as error:
                log.warning("%s is not whole: %s. Using what is before it.", path, error)
                broken += _if_marked(path)
            else:
                self._resumed_step = self._saved_step = saved.step
                return saved
        self._refuse_if_any(broken)
        return None

    def _read(self, name: str) -> Saved:
        """Restores a checkpoint.

        Raises:
            _BrokenError: it is not whole, or cannot be read.
            ModelDirError: it is of another run.
        """
        path = f"{self._directory}/{name}"
        # What is written next is another state, even if it is of the same step.
        self._snapshot_step = None
        mark = _whole_mark(path)
        self._check_identity(path, mark.identity)
        for file, contents in mark.files.items():
            if damage := damage_of(f"{path}/{file}", contents):
                raise _BrokenError(damage)
        try:
            status = self._checkpoint.read(f"{path}/variables", options=self._options)
        except tf.errors.UnavailableError:
            # Says nothing about the files.
            raise
        except (tf.errors.OpError, ValueError) as error:
            raise _BrokenError(f"it cannot be read ({first_line(error)})") from error
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
        return mark.saved

    def _write_later(self, step: int, write: Callable[[], None]) -> None:
        """Copies the variables if they are not those of `step` already; calls `write` on a thread.

        A checkpoint and a best one of the same step share a copy.
        """
        if self._snapshot_step != step:
            # What is copied may not change while it is written.
            self.wait()
            self._snapshot_step = None
            if self._snapshot is None:
                self._snapshot = Snapshot(self._checkpoint, device=self._device)
            else:
                self._snapshot.take()
            self._snapshot_step = step
        self._writes.append(self._writer.submit(self._reporting, write))

    def _reporting(self, write: Callable[[], None]) -> None:
        """Calls `write`; what it cannot look at or remove is no reason to end a run."""
        try:
            write()
        except STORAGE_ERRORS as error:
            log.warning("%s could not be tidied: %s", self._directory, first_line(error))

    def _written(self, name: str, step: int, position: Position, more: Mapping[str, Any]) -> bool:
        """Writes the copy of the variables as checkpoint `name`; False, reported, if it fails."""
        path = f"{self._directory}/{name}"
        if name in self._known and _mark_if_whole(path) is not None:
            return True
        try:
            if tf.io.gfile.exists(path):
                self._remove(name)
            self._write(path, step, position, more)
        except STORAGE_ERRORS as error:
            kept = None
            with contextlib.suppress(*STORAGE_ERRORS):
                kept = self.newest()
            log.warning(
                "%s could not be written: %s. The next save tries again; %s.",
                path,
                first_line(error),
                f"the newest whole checkpoint is of step {kept.step}" if kept else "there is none",
            )
            # It has no mark, so nobody is harmed if it stays where nothing can be removed.
            with contextlib.suppress(*STORAGE_ERRORS):
                self._remove(name)
            return False
        self._known.add(name)
        return True

    def _write(self, path: str, step: int, position: Position, more: Mapping[str, Any]) -> None:
        assert self._snapshot is not None, "was taken before"
        tf.io.gfile.makedirs(path)
        self._snapshot.write(f"{path}/variables", self._options)
        files = {}
        for file in sorted(tf.io.gfile.listdir(path)):
            files[file] = contents_of(f"{path}/{file}")
            flush_to_disk(f"{path}/{file}")
        mark = {
            "step": step,
            "next_batch": position.next_batch,
            "open_shares": position.open_shares,
            "skipped": position.skipped,
            **more,
            "files": files,
            "identity": self._identity,
        }
        with tf.io.gfile.GFile(f"{path}/{CHECKPOINT_MARK}.tmp", "w") as file:
            file.write(json.dumps(signed(mark), indent=2))
        flush_to_disk(f"{path}/{CHECKPOINT_MARK}.tmp")
        tf.io.gfile.rename(f"{path}/{CHECKPOINT_MARK}.tmp", f"{path}/{CHECKPOINT_MARK}")
        for directory in (path, self._directory):
            flush_to_disk(directory)

    def _rotate(self, just_written: str) -> None:
        useful = []
        useless = []
        for name in self._names("step-"):
            passed_over = _step(name) > self._resumed_step and name not in self._known
            if passed_over or _mark_if_whole(f"{self._directory}/{name}") is None:
                useless.append(name)
            elif name != just_written:
                useful.append(name)
        for name in (*useless, *useful[: max(0, len(useful) + 1 - self._keep)]):
            self._remove(name)

    def _remove(self, name: str) -> None:
        # The mark first: what is left if this is killed must not pass for a damaged checkpoint.
        mark = f"{self._directory}/{name}/{CHECKPOINT_MARK}"
        if tf.io.gfile.exists(mark):
            tf.io.gfile.remove(mark)
        tf.io.gfile.rmtree(f"{self._directory}/{name}")

    def _names(self, prefix: str) -> list[str]:
        """Names of the checkpoints, oldest first."""
        return _names_in(self._directory, prefix)

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


def _names_in(directory: str, prefix: str) -> list[str]:
    if not tf.io.gfile.isdir(directory):
        return []
    names = (name.rstrip("/") for name in tf.io.gfile.listdir(directory))
    return sorted(name for name in names if re.fullmatch(prefix + r"\d+", name))


def _everything(learner: Learner) -> tf.train.Checkpoint:
    """What decides how training goes on: all variables of model, optimizer and learner."""
    state = {name: list(variables) for name, variables in learner.state.items()}
    checkpoint = tf.train.Checkpoint(model=learner.model, optimizer=learner.optimizer, **state)
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


class _BrokenError(Exception):
    """A checkpoint is not whole; says which file is wrong, and how."""


@dataclass(frozen=True)
class _Mark:
    """What checkpoint.json says; `score` is of the best alone."""

    saved: Saved
    identity: Mapping[str, Any]
    files: Mapping[str, Mapping[str, int | str]]
    score: float


def signed(mark: Mapping[str, Any]) -> dict[str, Any]:
    """`mark` as JSON gives it back, with a checksum of all else that it says."""
    said = json.loads(json.dumps({key: value for key, value in mark.items() if key != "crc32c"}))
    canonical = json.dumps(said, sort_keys=True).encode()
    return {**said, "crc32c": f"{google_crc32c.value(canonical):08x}"}


def _whole_mark(path: str) -> _Mark:
    """What checkpoint.json says if it is whole, and the files it lists are there in their sizes.

    Raises:
        _BrokenError: it is not; or they are not.
    """
    try:
        with tf.io.gfile.GFile(f"{path}/{CHECKPOINT_MARK}") as file:
            mark = json.loads(file.read())
    except tf.errors.NotFoundError:
        raise _BrokenError(
            f"{CHECKPOINT_MARK} is missing: never finished, or half deleted"
        ) from None
    except (*STORAGE_ERRORS, ValueError) as error:
        raise _BrokenError(f"{CHECKPOINT_MARK} cannot be read ({first_line(error)})") from error
    try:
        if mark["crc32c"] != signed(mark)["crc32c"]:
            raise _BrokenError(f"{CHECKPOINT_MARK} has another checksum than when it was written")
        shares = tuple((int(b), int(first), int(last)) for b, first, last in mark["open_shares"])
        skipped = tuple(map(int, mark["skipped"]))
        position = Position(int(mark["next_batch"]), shares, skipped)
        saved = Saved(int(mark["step"]), position, dict(mark.get("counts", {})))
        score = float(mark.get("score", -math.inf))
        found = _Mark(saved, dict(mark["identity"]), dict(mark["files"]), score)
    # KeyError: lacks a part; TypeError: it, or a part of it, is of another kind.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _BrokenError(f"{CHECKPOINT_MARK} is not one of this program: {error!r}") from error
    for file, contents in found.files.items():
        if damage := size_damage_of(f"{path}/{file}", contents):
            raise _BrokenError(damage)
    return found


def _mark_if_whole(path: str) -> _Mark | None:
    try:
        return _whole_mark(path)
    except _BrokenError:
        return None


def _if_marked(path: str) -> list[str]:
    """`path` if it was finished once; without a mark, what wrote it was killed."""
    return [path] if tf.io.gfile.exists(f"{path}/{CHECKPOINT_MARK}") else []


def _step(name: str) -> int:
    return int(name.partition("-")[2])


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:150]} ... ({len(text)} characters)"
