"""Checkpoints: what is saved, which task saves, and how a damaged checkpoint is skipped.

    checkpointer = Checkpointer("model_dir/checkpoints", learner, identity, keep=3)
    saved = checkpointer.restore()                      # the newest complete one, or None
    checkpointer.save(step, position, counts)           # only the chief; returns before it is done
    checkpointer.has_saved(step)                        # waits

A checkpoint is a directory, `step-00001000`, with TensorFlow's files and a mark, which is written
last (marks.py). Tables have files of their own; a checkpoint may need earlier ones for them.

The training thread copies the variables (snapshot.py) and writes tables while no step is in flight.
One other thread writes the other files, checksums and the mark, and removes old checkpoints, one
save after the other. If a save fails, the error is logged, its files are removed, training
continues, and older checkpoints stay until a newer one is complete.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf

from data.system import files
from data.system.errors import UsageError
from strategies.lost_peers import LOSSES
from strategies.position import Position
from strategies.worker_stats import WorkerStats
from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.checkpoints.identity import DYNAMIC_SLOTS, Identity, differences, identity_of, refusal
from trainer.checkpoints.marks import DamagedError, Mark, Saved, UnreadableError, complete_mark
from trainer.checkpoints.retention import outdated
from trainer.checkpoints.snapshot import Snapshot, checkpoint_of, tensorflow_variables
from trainer.checkpoints.store import Store
from trainer.exit_codes import first_line
from trainer.guards.fingerprint import keras_settings
from trainer.learner import Learner
from trainer.learner.variables import refresh_constants, saved_variables
from trainer.run_files import CHECKPOINT_MARK, step_in

log = logging.getLogger(__name__)

# Keys in `Saved.config`: the learning rate with which the run, or its last resume, has begun; and
# the last step of which callbacks were told.
GIVEN_RATE, _BEGUN_STEP = "given_rate", "begun_step"


class ModelDirError(UsageError):
    """The model directory cannot be used for this run. Exit code 2."""


class Checkpointer:
    """Saves and restores a learner. Every task may restore; only the chief saves."""

    def __init__(
        self,
        directory: str,
        learner: Learner,
        identity: Mapping[str, object],
        *,
        keep: int,
        config: Mapping[str, object] | None = None,
        io_device: str | None = None,
        is_shared: bool = False,
        complete_every: int = 1,
        is_evaluator: bool = False,
    ) -> None:
        """Reads and writes nothing yet.

        Args:
            directory: The directory of the checkpoints.
            learner: Its model, its optimizer with the step, and its `state` are saved.
            identity: JSON values that must be equal for a run to continue from a checkpoint.
            keep: The number of newest checkpoints that are not removed.
            config: JSON values that `Saved.config` will have, besides the GIVEN_RATE.
            io_device: The device whose file system has `directory`; None is the local one.
            is_shared: The chief of an earlier group of hosts may save at the same time. Then
                `Store.write` renames, and a save removes only checkpoints of earlier steps.
            complete_every: Each n-th checkpoint has complete tables. Above 1 the learner must mark
                changed rows (Options.marks_changed_rows).
            is_evaluator: The chief of the run is another process, which may remove checkpoints
                that a new one needs. So each checkpoint of an evaluator has complete tables.
        """
        self.directory = directory
        self._model = learner.model
        self._checkpoint = checkpoint_of(learner)
        self._device = io_device or "CPU:0"
        # "claims" also has the lock files of survivors.py.
        self.staging = f"{directory}/{'evaluator' if is_evaluator else 'claims'}"
        self._store = Store(
            directory,
            self.staging,
            self._write_files,
            lambda: self.before_mark(),
            # Otherwise a step that stalls during a write would not be noticed.
            lambda: self.on_progress() if self._is_waiting else None,
        )
        # Other processes may remove the checkpoints that a new one would need.
        every = 1 if is_evaluator or is_shared else complete_every
        self._tables = tables = learner.tables
        self._staged = (  # None without tables.
            tables.staged(self._store, self._device, lambda: self.on_progress(), every)
            if tables
            else None
        )
        settings = {**identity, **keras_settings(), "optimizer": type(learner.optimizer).__name__}
        kinds = {
            "variables": saved_variables(learner.model),
            "optimizer's variables": learner.optimizer.variables,
            **learner.state,
            **({DYNAMIC_SLOTS: tables.dynamic_slots()} if tables else {}),
        }
        self._identity = identity_of(settings, kinds)
        self._data_keys = identity.keys()
        self._keep = keep
        self._config = {**(config or {}), GIVEN_RATE: learner.optimizer_rate}
        self._is_shared = is_shared
        self._resumed_step = 0
        self._saved_step: int | None = None
        self._options = tf.train.CheckpointOptions(experimental_io_device=io_device)
        self._snapshot: Snapshot | None = None
        self._snapshot_step: int | None = None
        # The last step of which callbacks were told; None if unknown. A checkpoint has it.
        self.begun_step: int | None = None
        self._snapshot_begun_step: int | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._writes: list[concurrent.futures.Future[None]] = []
        self._is_waiting = False
        # Called on the other thread when all but the mark is written: a run that resumes from the
        # checkpoint then finds what was reported before it.
        self.before_mark: Callable[[], None] = lambda: None
        # Called often while tables are written and read, and while training waits for a write.
        self.on_progress: Callable[[], None] = lambda: None

    @property
    def variables(self) -> list[tf.Variable]:
        """All that a checkpoint has, in one order in all processes; [] if not all are variables."""
        variables = tensorflow_variables(self._checkpoint)
        for layer in self._tables:
            if layer.is_dynamic:
                return []
            variables += layer.table.variables
        return variables

    @property
    def run_identity(self) -> str:
        """A hash that is equal in all processes of this run, and different in other runs."""
        values = {"directory": files.absolute(self.directory), **self._identity.values}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def prepare(self) -> None:
        """Makes the copies of the variables, and the graph which fills them.

        Otherwise the first save makes them. Under ps all tasks must answer when a graph is made.
        """
        if self._snapshot is None:
            self._snapshot = Snapshot(self._checkpoint, device=self._device)
            for layer in self._tables:
                layer.table.make_graphs()

    def save(self, step: int, position: Position, counts: WorkerStats) -> None:
        """Copies the variables, after a former write, and starts to write a checkpoint of `step`.

        When it is complete, `retention.outdated` says which others are removed.
        """
        name = f"step-{step:08d}"

        def write() -> None:
            if self._staged:
                self._staged.chain = {}  # If the storage fails below, the next one has all rows.
            mark = self._mark(step, position, counts=counts)
            if self._store.write(name, mark, renames=self._is_shared):
                self._saved_step = step
                if self._staged:
                    self._staged.chain = self._store.chain_of(name)
                for other in outdated(
                    self._store.chains(),
                    name,
                    keep=self._keep,
                    verified=self._store.verified,
                    unreadable=self._store.unreadable,
                    resumed_step=self._resumed_step,
                    is_shared=self._is_shared,
                ):
                    self._store.remove(other)

        self._write_later(step, write)
        if self._staged:
            self._staged.forget_changes()

    def save_for_restart(
        self, step: int, position: Position, counts: WorkerStats, *, is_complete: bool = True
    ) -> None:
        """As `save`, but any task may call it, and it removes no other checkpoint.

        Only the chief knows which others are complete. So `is_complete` may be False only for the
        chief: then tables may have only the rows that were changed.
        """

        def write() -> None:
            mark = self._mark(step, position, counts=counts)
            if self._store.write(f"step-{step:08d}", mark, renames=True):
                self._saved_step = step

        self._write_later(step, write, is_complete=is_complete)

    def save_best(
        self, step: int, position: Position, score: float, *, is_lowest: bool = False
    ) -> None:
        """Saves as best-* if `score` is the best of this metric and direction; removes others."""
        name, metric = f"best-{step:08d}", str(self._config.get("best_metric", "loss"))

        def is_best() -> bool:
            marks = filter(None, map(self._store.mark_if_complete, self._store.names("best-")))
            former = [mark.score_of(metric, is_lowest=is_lowest) for mark in marks]
            # NaN is never better: neither as the new score nor as an old one.
            return not (math.isnan(score) or any(other >= score for other in former))

        def write() -> None:
            former = self._store.names("best-")
            if not is_best():
                return
            mark = self._mark(step, position, score=score, is_lowest=is_lowest)
            if self._store.write(name, mark) and self._store.mark_if_complete(name):
                for other in set(former) - {name}:
                    self._store.remove(other)

        if self._staged:  # Training waits while they are written.
            with contextlib.suppress(*STORAGE_ERRORS):
                if not is_best():
                    return
        self._write_later(step, write)

    def remove(self, step: int) -> None:
        """Removes the checkpoint of `step`, if there is one."""
        if self.has_saved(step):
            self._tolerating(lambda: self._store.remove(f"step-{step:08d}"))

    def wait(self) -> None:
        """Returns when all writes have ended."""
        writes, self._writes = self._writes, []
        self._is_waiting = True
        try:
            for write in writes:
                write.result()
        finally:
            self._is_waiting = False
        if self._staged:
            self._staged.remove()
            self._snapshot_step = None

    def has_saved(self, step: int) -> bool:
        """Waits; returns True if the last checkpoint written or read is of `step`, and exists."""
        self.wait()
        name = f"step-{step:08d}"
        return self._saved_step == step and self._store.mark_if_complete(name) is not None

    def check(self) -> Saved | None:
        """As `restore`, but reads neither variables nor checksums, and restores nothing."""
        if mark := self._store.newest():
            self._check_identity(mark.name, mark)
            return mark.saved
        self._refuse_damaged(self._store.names("step-"))
        return None

    def newest(self, *, reads: bool = False) -> Saved | None:
        """Returns the progress of the newest checkpoint that is complete and not skipped, or None.

        Sizes of files are compared; with `reads` also checksums.
        """
        mark = self._store.newest_readable() if reads else self._store.newest()
        return mark.saved if mark else None

    def restore_step(self, step: int) -> bool:
        """As `restore`, of the checkpoint of `step`; False, with the reason logged, if damaged."""
        self.wait()
        try:
            self._read(f"step-{step:08d}")
        except DamagedError as error:
            log.warning("%s/step-%08d is not complete: %s.", self.directory, step, error)
            return False
        return True

    def restore_model(self, name: str) -> Saved:
        """Restores the checkpoint `name`, even if it is of another data set or data order.

        Raises ModelDirError if it is damaged, or of another model or optimizer.
        """
        try:
            return self._read(name, self._data_keys)
        except DamagedError as error:
            raise ModelDirError(f"{self.directory}/{name} cannot be read: {error}.") from error

    def restore(self, at_most: int | None = None) -> Saved | None:
        """Restores the newest complete checkpoint; returns None if none was ever finished.

        A damaged one is logged, and the one before it is used. Checkpoints of steps after `at_most`
        are skipped.

        Raises:
            ModelDirError: it is of another model, optimizer, data set or data order; or all
                checkpoints are damaged.
            tf.errors.UnavailableError: a parameter server was lost.
            object_store.UnavailableError: the checkpoints cannot be read now.
        """
        self.wait()
        self._store.verified.clear()
        self._store.skipped.clear()
        self._store.unreadable.clear()
        self._saved_step = None
        names = self._store.names("step-")
        while names and at_most is not None and step_in(names[-1]) > at_most:
            self._store.skip(names.pop())
        for name in reversed(names):
            try:
                saved = self._read(name)
            except DamagedError as error:
                path = f"{self.directory}/{name}"
                log.warning("%s is not complete: %s. Using the one before it.", path, error)
                self._store.skip(name, error)
            else:
                self._resumed_step = self._saved_step = saved.step
                return saved
        self._refuse_damaged(names)
        return None

    def _read(self, name: str, ignored: Collection[str] = ()) -> Saved:
        """Restores a checkpoint. Its identity may differ in the keys `ignored`.

        Raises DamagedError, or ModelDirError if it is of another run.
        """
        path = f"{self.directory}/{name}"
        # The copy is outdated now, even if the next save is of the same step.
        self._snapshot_step = None
        mark = complete_mark(path)
        self._check_identity(name, mark, ignored)
        with self._store.files_of(name, mark.files) as local:
            try:
                status = self._checkpoint.read(f"{local}/variables", options=self._options)
                if self._staged:
                    self._staged.restore(mark, local)
            except (*LOSSES, tf.errors.ResourceExhaustedError):
                raise  # The files may be complete.
            except (tf.errors.OpError, ValueError) as error:
                raise UnreadableError(f"it cannot be read ({first_line(error)})") from error
        try:
            status.assert_consumed()
        except AssertionError as error:
            # Otherwise TensorFlow would warn again when the process ends.
            status.expect_partial()
            raise ModelDirError(
                f"{path} has variables of the same shapes, but its model or optimizer was put "
                f"together in another way: {first_line(error)}. Give another --model_dir, or the "
                "former model and optimizer."
            ) from error
        refresh_constants(self._model)
        self.begun_step = mark.saved.config.get(_BEGUN_STEP)
        self._store.verified.add(name)
        return mark.saved

    def _write_later(
        self, step: int, write: Callable[[], None], *, is_complete: bool = False
    ) -> None:
        """Copies the variables, unless the copy is of `step`; calls `write` on the other thread.

        With `is_complete` the checkpoint has complete tables.
        """
        if self._snapshot_step != step:
            # The copy must not change while it is written.
            self.wait()
            self._snapshot_step = None
            if self._snapshot is None:
                self.prepare()
            else:
                self._snapshot.take()
            if self._staged:
                self._staged.stage(step, is_complete=is_complete)
            self._snapshot_step, self._snapshot_begun_step = step, self.begun_step
        self._writes.append(self._writer.submit(self._tolerating, write))

    def _tolerating(self, write: Callable[[], None]) -> None:
        # An error in reading or removing old checkpoints does not end the run.
        try:
            write()
        except STORAGE_ERRORS as error:
            log.warning("%s could not be tidied: %s", self.directory, first_line(error))

    def _write_files(self, directory: str) -> None:
        assert self._snapshot is not None, "_write_later takes it"
        self._snapshot.write(f"{directory}/variables", self._options)
        if self._staged:
            self._staged.add_to(directory)

    def _mark(self, step: int, position: Position, **more: object) -> Mapping[str, object]:
        """Returns the mark of a checkpoint of the copied variables and the staged tables."""
        return {
            "step": step,
            "next_batch": position.next_batch,
            "open_shares": position.open_sub_batches,
            "skipped": position.skipped,
            **more,
            "names": self._identity.names,
            "needs": self._staged.needs if self._staged else {},
            "identity": self._identity.values,
            "config": {**self._config, _BEGUN_STEP: self._snapshot_begun_step},
        }

    def _refuse_damaged(self, names: Sequence[str]) -> None:
        """Raises ModelDirError if a checkpoint of `names`, all of which are damaged, has a mark."""
        paths = [f"{self.directory}/{name}" for name in reversed(names)]
        # Without a mark it was never finished, and is not damaged.
        damaged = [path for path in paths if files.exists(f"{path}/{CHECKPOINT_MARK}")]
        if damaged:
            raise ModelDirError(
                f"{self.directory} has checkpoints, but none can be read: {', '.join(damaged)}. "
                "Put a copy of one in their place, or give another --model_dir to begin anew."
            )

    def _check_identity(self, name: str, mark: Mark, ignored: Collection[str] = ()) -> None:
        ours = self._identity
        # Former versions recorded neither: these are not compared.
        slots = ours.values.get(DYNAMIC_SLOTS)
        values = {**keras_settings(), DYNAMIC_SLOTS: slots, **mark.identity.values}
        saved = Identity(values, mark.identity.names)
        untrained = [la.table.path for la in self._tables if la.is_dynamic and not la.trainable]
        if untrained:  # If they were trained before, their slots are not read.
            saved, ignored = saved.without_slots(untrained, ours), {*ignored, DYNAMIC_SLOTS}
        if lines := differences(saved, ours, ignored):
            raise ModelDirError(refusal(self._store.path(name), lines))
