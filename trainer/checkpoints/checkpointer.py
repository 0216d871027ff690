"""Checkpoints: what is saved, which task saves, and how a damaged checkpoint is skipped.

    checkpointer = Checkpointer("model_dir/checkpoints", learner, identity, keep=3)
    saved = checkpointer.restore()                      # the newest complete one, or None
    checkpointer.save(step, position, counts)           # only the chief; returns before it is done
    checkpointer.has_saved(step)                        # waits

A checkpoint is a directory, `step-00001000`, with TensorFlow's files and a mark, `checkpoint.json`,
which is written last. It is not complete if there is no mark, or if a file has another size or
checksum than the mark says. Tables have files of their own (table_files.py); with `complete_every`
above 1 a checkpoint may have only the rows that were changed, and needs earlier checkpoints, which
the mark names. Under multiworker only the chief saves and every worker restores, so
`model_dir` must be in a file system that all of them see. TensorFlow cannot open s3://: for it,
files are written to TMPDIR and uploaded, the mark last, and downloaded before they are read.

The training thread copies the variables (snapshot.py) and writes tables while no step is in flight.
One other thread writes the other files, checksums and the mark, and removes old checkpoints, one
save after the other. If a save fails, the error is logged, its files are removed, training
continues, and older checkpoints stay until a newer one is complete.
"""

import concurrent.futures
import contextlib
import difflib
import hashlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from data.system import files, object_store
from data.system.errors import UsageError
from data.system.object_store import UnavailableError
from data.system.scratch import plain_path, scratch_dir
from strategies.position import Position
from strategies.worker_stats import WorkerStats
from trainer.checkpoints.file_checks import (
    STORAGE_ERRORS,
    contents_of,
    damage_of,
    flush_to_disk,
)
from trainer.checkpoints.marks import (
    DamagedError,
    Mark,
    Saved,
    complete_mark,
    own_mark,
    signed,
)
from trainer.checkpoints.snapshot import Snapshot, tensorflow_variables
from trainer.checkpoints.table_files import PREFIX, StagedTables, read_tables
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.table import Rows, saved_variables
from trainer.exit_codes import first_line
from trainer.guards.fingerprint import keras_settings
from trainer.learner import Learner
from trainer.run_files import CHECKPOINT_MARK, checkpoints_in, step_in

log = logging.getLogger(__name__)


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
            config: JSON values that `Saved.config` will have.
            io_device: The device whose file system has `directory`; None is the local one.
            is_shared: Another process may save at the same time: the chief of an earlier group of
                hosts. Then each checkpoint is renamed when it is complete, and a save removes
                only checkpoints of earlier steps. Not for URLs.
            complete_every: Each n-th checkpoint has complete tables. Above 1 the learner must mark
                changed rows (Options.marks_changed_rows).
            is_evaluator: The chief of the run is another process: it removes checkpoints that
                those of this one would need, so all of them are complete.
        """
        self.directory = self._directory = directory
        self._checkpoint = _checkpoint_of(learner)
        self._device = io_device or "CPU:0"
        self._tables = learner.saved_tables
        # The next start of the run removes it, with what a killed process has left.
        self.staging = f"{directory}/{'evaluator' if is_evaluator else 'claims'}"
        self._staged = StagedTables(self.staging, self._device, lambda: self.on_progress())
        self._complete_every = 1 if is_evaluator else complete_every
        # The checkpoints that together have the tables of the newest one; empty if the next one
        # must have complete tables. And those that the staged tables need. As `Mark.needs`.
        self._chain: Mapping[str, str] = {}
        self._needs: Mapping[str, str] = {}
        ours = {
            **keras_settings(),
            "variables": _specs(saved_variables(learner.model)),
            "optimizer": type(learner.optimizer).__name__,
            "optimizer's variables": _specs(learner.optimizer.variables),
            **{name: _specs(variables) for name, variables in learner.state.items()},
        }
        self._identity = json.loads(json.dumps({**identity, **ours}))
        self._data_keys = identity.keys()
        kinds = {"variables": saved_variables(learner.model), **learner.state}
        kinds["optimizer's variables"] = learner.optimizer.variables
        self._names_of = {kind: _names_of(variables) for kind, variables in kinds.items()}
        self._keep = keep
        self._config = dict(config or {})
        self._is_shared = is_shared
        self._damaged: set[str] = set()  # Checkpoints that `restore` skipped.
        # Checkpoints that this process wrote or read: their checksums were right, not only sizes.
        self._verified: set[str] = set()
        self._resumed_step = 0
        self._saved_step: int | None = None
        self._options = tf.train.CheckpointOptions(experimental_io_device=io_device)
        self._snapshot: Snapshot | None = None
        self._snapshot_step: int | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._writes: list[concurrent.futures.Future[None]] = []
        # Called on the other thread when all but the mark is written: a run that resumes from the
        # checkpoint then finds what was reported before it.
        self.before_mark: Callable[[], None] = lambda: None
        # Called often while tables are written and read.
        self.on_progress: Callable[[], None] = lambda: None

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables that a checkpoint has, in the same order in each process of a run.

        Empty if a checkpoint has something else, too.
        """
        variables = tensorflow_variables(self._checkpoint)
        for table in self._tables:
            if isinstance(table, DynamicTable):
                return []
            variables += table.variables
        return variables

    @property
    def run_identity(self) -> str:
        """The same in each process of this run; another one in other runs."""
        of_run = {"directory": files.absolute(self.directory), **self._identity}
        return hashlib.sha256(json.dumps(of_run, sort_keys=True).encode()).hexdigest()

    def prepare(self) -> None:
        """Makes the copies of the variables, and the graph which fills them.

        Otherwise the first save makes them. Under ps all tasks must answer when a graph is made.
        """
        if self._snapshot is None:
            self._snapshot = Snapshot(self._checkpoint, device=self._device)
            for table in self._tables:
                table.make_graphs()

    def save(self, step: int, position: Position, counts: WorkerStats) -> None:
        """Copies the variables, after a former write, and starts to write a checkpoint of `step`.

        When it is complete, others are removed: incomplete checkpoints; newer checkpoints that
        `restore` skipped; and the oldest beyond `keep`. If `is_shared`, no newer ones.
        """

        def write() -> None:
            name = f"step-{step:08d}"
            write_one = self._written_elsewhere if self._is_shared else self._written
            self._chain = {}  # Also if the storage fails below: then the next one is complete.
            if write_one(name, step, position, {"counts": counts}):
                self._saved_step = step
                self._chain = self._chain_to(name)
                self._rotate(name)

        self._write_later(step, write)
        self._staged.forget_changes()

    def save_for_restart(self, step: int, position: Position, counts: WorkerStats) -> None:
        """As `save`, but removes no other checkpoint. Any task may call it.

        Only the chief knows which of them are complete.
        """
        name = f"step-{step:08d}"

        def write() -> None:
            # Directories of URLs cannot be renamed in one operation.
            is_url = files.is_url(self._directory)
            write_one = self._written if is_url else self._written_elsewhere
            if write_one(name, step, position, {"counts": counts}):
                self._saved_step = step

        # Complete: checkpoints that it would need may have been removed by the chief.
        self._write_later(step, write, is_complete=True)

    def save_best(self, step: int, position: Position, score: float) -> None:
        """Saves as best-* if `score` is the highest so far; then removes the former best."""

        def is_best() -> bool:
            marks = map(self._mark_if_complete, self._names("best-"))
            # NaN is never better: neither as the new score nor as an old one.
            return not (math.isnan(score) or any(mark and mark.score >= score for mark in marks))

        def write() -> None:
            former = self._names("best-")
            if not is_best():
                return
            name = f"best-{step:08d}"
            if self._written(name, step, position, {"score": score}) and self._chain_to(name):
                for other in set(former) - {name}:
                    self._remove(other)

        if self._tables:  # Training waits while they are written.
            with contextlib.suppress(*STORAGE_ERRORS):
                if not is_best():
                    return
        self._write_later(step, write)

    def remove(self, step: int) -> None:
        """Removes the checkpoint of `step`, if there is one."""
        if self.has_saved(step):
            self._tolerating(lambda: self._remove(f"step-{step:08d}"))

    def wait(self) -> None:
        """Returns when all writes have ended."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()
        if self._tables:
            self._staged.remove()
            self._snapshot_step = None

    def has_saved(self, step: int) -> bool:
        """Returns True if the last checkpoint written or restored is of `step`, and exists; waits.

        It does not exist if the model directory was deleted during the run.
        """
        self.wait()
        return self._saved_step == step and self._mark_if_complete(f"step-{step:08d}") is not None

    def check(self) -> Saved | None:
        """As `restore`, but reads neither variables nor checksums, and restores nothing."""
        names = self._names("step-")
        for name in reversed(names):
            if mark := self._mark_if_complete(name):
                self._check_identity(name, mark)
                return mark.saved
        self._refuse_damaged(names)
        return None

    def newest(self) -> Saved | None:
        """Returns the progress of the newest checkpoint with complete files (by size), or None."""
        marks = map(self._mark_if_complete, reversed(self._names("step-")))
        return next((mark.saved for mark in marks if mark), None)

    def restore_step(self, step: int) -> bool:
        """As `restore`, of the checkpoint of `step`; False, with the reason logged, if damaged."""
        self.wait()
        try:
            self._read(f"step-{step:08d}")
        except DamagedError as error:
            log.warning("%s/step-%08d is not complete: %s.", self._directory, step, error)
            return False
        return True

    def names(self) -> list[str]:
        """Returns the names of all checkpoints, best-* first, each kind in the order of steps."""
        return checkpoints_in(self._directory)

    def restore_model(self, name: str) -> Saved:
        """Restores the checkpoint `name`, even if it is of another data set or data order.

        Raises ModelDirError if it is damaged, or of another model or optimizer.
        """
        try:
            return self._read(name, self._data_keys)
        except DamagedError as error:
            raise ModelDirError(f"{self._directory}/{name} cannot be read: {error}.") from error

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
        self._verified.clear()
        self._saved_step = None
        names = [n for n in self._names("step-") if at_most is None or step_in(n) <= at_most]
        for name in reversed(names):
            try:
                saved = self._read(name)
            except DamagedError as error:
                path = f"{self._directory}/{name}"
                log.warning("%s is not complete: %s. Using the one before it.", path, error)
                self._damaged.add(name)
            else:
                self._resumed_step = self._saved_step = saved.step
                return saved
        self._refuse_damaged(names)
        return None

    def _read(self, name: str, ignored: Collection[str] = ()) -> Saved:
        """Restores a checkpoint. Its identity may differ in the keys `ignored`.

        Raises DamagedError, or ModelDirError if it is of another run.
        """
        path = f"{self._directory}/{name}"
        # The copy is outdated now, even if the next save is of the same step.
        self._snapshot_step = None
        mark = complete_mark(path)
        self._check_identity(name, mark, ignored)
        if self._tables and not mark.has_table_files:
            raise ModelDirError(
                f"{path} was written by an earlier version of this program, which kept tables in "
                "another way. Give another --model_dir."
            )
        with _local_copy(path, mark.files) as local:
            for file, contents in mark.files.items():
                if damage := damage_of(f"{local}/{file}", contents):
                    raise DamagedError(damage)
            try:
                status = self._checkpoint.read(f"{local}/variables", options=self._options)
                self._read_tables(name, mark, local)
            except tf.errors.UnavailableError:
                raise  # The files may be complete.
            except (tf.errors.OpError, ValueError) as error:
                raise DamagedError(f"it cannot be read ({first_line(error)})") from error
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
        self._verified.add(name)
        return mark.saved

    def _read_tables(self, name: str, mark: Mark, local: str) -> None:
        """Sets the tables to those of checkpoint `name`, whose own files are in `local`."""
        if not self._tables:
            return
        with contextlib.ExitStack() as stack:
            directories = []
            for need in mark.needs:
                path = f"{self._directory}/{need}"
                contents = own_mark(path).files
                of_tables = {n: c for n, c in contents.items() if n.startswith(f"{PREFIX}.")}
                directories.append(stack.enter_context(_local_copy(path, of_tables)))
                for file, content in of_tables.items():
                    if damage := damage_of(f"{directories[-1]}/{file}", content):
                        raise DamagedError(f"it needs {need}, of which {damage}")
            paths, step = [*directories, local], mark.saved.step
            read_tables(paths, self._tables, self._device, self.on_progress, step=step)
        for table in self._tables:
            table.take_changed_ids(table.index(), step)
        self._staged.forget_changes()
        is_step = name.startswith("step-")
        self._chain = {**mark.needs, name: mark.checksum} if is_step else {}

    def _chain_to(self, name: str) -> Mapping[str, str]:
        """The checkpoints with the tables of `name`, as `Mark.needs`; empty if damaged."""
        mark = self._mark_if_complete(name)
        return {**mark.needs, name: mark.checksum} if mark else {}

    def _stage(self, step: int, *, is_complete: bool) -> None:
        """Writes the tables to files that checkpoints of `step` get."""
        needs = self._chain
        # Other processes may remove what is needed.
        if is_complete or self._is_shared or len(needs) >= self._complete_every:
            needs = {}
        if needs:
            try:
                is_there = self._chain_to([*needs][-1]) == needs
            except STORAGE_ERRORS:
                is_there = False
            needs = needs if is_there else {}
        self._needs = needs
        self._staged.write(self._tables, step, changes_only=bool(needs))

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
            if self._tables:
                self._stage(step, is_complete=is_complete)
            self._snapshot_step = step
        self._writes.append(self._writer.submit(self._tolerating, write))

    def _tolerating(self, write: Callable[[], None]) -> None:
        # An error in reading or removing old checkpoints does not end the run.
        try:
            write()
        except STORAGE_ERRORS as error:
            log.warning("%s could not be tidied: %s", self._directory, first_line(error))

    def _written(
        self, name: str, step: int, position: Position, more: Mapping[str, object]
    ) -> bool:
        """Writes the copy as checkpoint `name`. If this fails, logs it and returns False."""
        path = f"{self._directory}/{name}"
        if name in self._verified and self._mark_if_complete(name):
            return True
        try:
            if files.exists(path):
                self._remove(name)
            self._write(path, step, position, more)
        except STORAGE_ERRORS as error:
            # What does not answer is not asked again: each request waits until it gives up.
            is_available = not isinstance(error, UnavailableError)
            text = "there is no complete checkpoint" if is_available else "earlier ones are kept"
            with contextlib.suppress(*STORAGE_ERRORS):
                if is_available and (newest := self.newest()):
                    text = f"the newest complete checkpoint is of step {newest.step}"
            message = "%s could not be written: %s. The next save tries again; %s."
            log.warning(message, path, first_line(error), text)
            # If it cannot be removed it is skipped later, because it has no mark.
            with contextlib.suppress(*STORAGE_ERRORS):
                if is_available:
                    self._remove(name)
            return False
        self._verified.add(name)
        return True

    def _written_elsewhere(
        self, name: str, step: int, position: Position, more: Mapping[str, object]
    ) -> bool:
        """As `_written`, but in another directory that is renamed when it is complete.

        A process that cannot be reached may be writing the same step.
        """
        path = f"{self._directory}/{name}"
        partial = f"{self._directory}/claims/{files.partial_name(name)}"
        try:
            self._write(partial, step, position, more)
            if name in self._damaged or self._mark_if_complete(name) is None:
                files.remove_tree(path)
            try:
                os.rename(partial, path)
            except OSError:
                if self._mark_if_complete(name) is None:
                    raise
            self._damaged.discard(name)
            self._verified.add(name)
            flush_to_disk(self._directory)
        except STORAGE_ERRORS as error:
            log.warning("%s could not be written: %s.", path, first_line(error))
            return False
        finally:
            files.remove_tree(partial)
        return True

    def _write(self, path: str, step: int, position: Position, more: Mapping[str, object]) -> None:
        assert self._snapshot is not None, "_write_later takes it"
        with _staged(path) as local:
            self._snapshot.write(f"{local}/variables", self._options)
            if self._tables:
                self._staged.add_to(local)
            written = {}
            for file in sorted(tf.io.gfile.listdir(local)):
                written[file] = contents_of(f"{local}/{file}")
                flush_to_disk(f"{local}/{file}")
        mark = {
            "step": step,
            "next_batch": position.next_batch,
            "open_shares": position.open_sub_batches,
            "skipped": position.skipped,
            **more,
            "names": self._names_of,
            "needs": self._needs,
            "files": written,
            "identity": self._identity,
            "config": self._config,
        }
        self.before_mark()
        content = json.dumps(signed(mark), indent=2)
        if files.is_s3(path):
            object_store.put(f"{path}/{CHECKPOINT_MARK}", content.encode())
            return
        with tf.io.gfile.GFile(f"{path}/{CHECKPOINT_MARK}.tmp", "w") as file:
            file.write(content)
        flush_to_disk(f"{path}/{CHECKPOINT_MARK}.tmp")
        tf.io.gfile.rename(f"{path}/{CHECKPOINT_MARK}.tmp", f"{path}/{CHECKPOINT_MARK}")
        for directory in (path, self._directory):
            flush_to_disk(directory)

    def _rotate(self, just_written: str) -> None:
        marks = {name: self._readable_mark(name) for name in self.names()}
        checksums = {name: mark.checksum for name, mark in marks.items() if mark}
        needing = [name for name in marks if name.startswith("best-") or name == just_written]
        needed = {need for name in needing if (mark := marks[name]) for need in mark.needs}
        useful: dict[str, Mark] = {}
        incomplete = []  # They need others that are damaged, or cannot be read now.
        for name, mark in marks.items():
            is_best = name.startswith("best-")
            if is_best or (self._is_shared and step_in(name) > step_in(just_written)):
                continue
            was_skipped = step_in(name) > self._resumed_step and name not in self._verified
            if mark is None or was_skipped:
                if name not in needed:
                    self._remove(name)
            elif all(checksums.get(need) == checksum for need, checksum in mark.needs.items()):
                useful[name] = mark
            else:
                incomplete.append(name)
        others = [name for name in useful if name != just_written]
        old = others[: max(0, len(others) + 1 - self._keep)]
        kept = [name for name in useful if name not in old]
        # A damaged one damages all that need it.
        base_of = {name: next(iter(mark.needs), name) for name, mark in useful.items()}
        if self._keep > 1 and len({base_of[name] for name in kept}) == 1:
            kept += [name for name in old if base_of[name] != base_of[kept[0]]][-1:]
        needed |= {need for name in kept for need in useful[name].needs}
        too_old = [name for name in incomplete if kept and step_in(name) < step_in(kept[0])]
        for name in [*too_old, *old]:
            if name not in needed and name not in kept:
                self._remove(name)

    def _remove(self, name: str) -> None:
        # The mark first: if this is killed, the other files must not look like a damaged one.
        mark = f"{self._directory}/{name}/{CHECKPOINT_MARK}"
        if files.exists(mark):
            files.remove_file(mark)
        if files.is_s3(mark):
            object_store.remove_tree(f"{self._directory}/{name}")
        else:
            tf.io.gfile.rmtree(f"{self._directory}/{name}")

    def _names(self, prefix: str) -> list[str]:
        return [name for name in checkpoints_in(self._directory) if name.startswith(prefix)]

    def _mark_if_complete(self, name: str) -> Mark | None:
        with contextlib.suppress(DamagedError):
            return complete_mark(f"{self._directory}/{name}")
        return None

    def _readable_mark(self, name: str) -> Mark | None:
        """As `_mark_if_complete`, whether or not the checkpoints that it needs are complete."""
        with contextlib.suppress(DamagedError):
            return own_mark(f"{self._directory}/{name}")
        return None

    def _refuse_damaged(self, names: Sequence[str]) -> None:
        """Raises ModelDirError if a checkpoint of `names`, all of which are damaged, has a mark."""
        paths = [f"{self._directory}/{name}" for name in reversed(names)]
        # Without a mark it was never finished, and is not damaged.
        damaged = [path for path in paths if files.exists(f"{path}/{CHECKPOINT_MARK}")]
        if damaged:
            raise ModelDirError(
                f"{self._directory} has checkpoints, but none can be read: {', '.join(damaged)}. "
                "Put a copy of one in their place, or give another --model_dir to begin anew."
            )

    def _check_identity(self, name: str, mark: Mark, ignored: Collection[str] = ()) -> None:
        # Former versions recorded no settings of Keras: theirs are not known.
        saved, ours = {**keras_settings(), **mark.identity}, self._identity
        keys = sorted((saved.keys() | ours.keys()) - set(ignored))
        if saved.get("variables") != ours["variables"]:
            keys = [key for key in keys if key != "optimizer's variables"]  # A consequence.
        different = []
        for key in keys:
            left, right = saved.get(key), ours.get(key)
            if left == right:
                continue
            if isinstance(left, list) and isinstance(right, list):
                names = mark.names.get(key, []), self._names_of.get(key, [])
                different += [f"{key}: {s}" for s in _variable_differences((left, right), names)]
            else:
                different.append(f"{key}: {_short(left)} there, {_short(right)} here")
        if different:
            raise ModelDirError(
                f"{self._directory}/{name} is of another run, which this one cannot continue:\n  "
                + "\n  ".join(different)
                + "\nGive another --model_dir, or the former settings."
            )


def _checkpoint_of(learner: Learner) -> tf.train.Checkpoint:
    # Tables, and their slots, have files of their own.
    state = {
        name: [v for v in variables if not isinstance(v, Rows)]
        for name, variables in learner.state.items()
    }
    checkpoint = tf.train.Checkpoint(model=learner.model, optimizer=learner.optimizer, **state)
    reached = {id(node) for node in tf.train.TrackableView(checkpoint).descendants()}
    # keras.random.SeedGenerator is not a Trackable: the state of dropout would be left out.
    checkpoint.missed = {
        str(index): variable
        for index, variable in enumerate(saved_variables(learner.model))
        if not isinstance(variable, Rows | DynamicTable)
        and id(variable) not in reached
        and id(getattr(variable, "value", None)) not in reached
    }
    return checkpoint


@contextlib.contextmanager
def _staged(path: str) -> Iterator[str]:
    """A directory to write files to, which are in `path` at the end: `path` if it is not s3://."""
    if not files.is_s3(path):
        tf.io.gfile.makedirs(path)
        yield path
        return
    with scratch_dir() as local:
        yield local
        object_store.upload_tree(local, path)


@contextlib.contextmanager
def _local_copy(path: str, names: Iterable[str]) -> Iterator[str]:
    """A directory that TensorFlow can read, with the files `names` of `path`.

    Raises UnavailableError if the files may be complete, but cannot be downloaded now.
    """
    if not files.is_s3(path):
        with plain_path(path) as local:
            yield local
        return
    with scratch_dir() as local:
        for name in names:
            # A file that is missing now is named by the check of the files.
            with contextlib.suppress(FileNotFoundError):
                object_store.download(f"{path}/{name}", f"{local}/{name}")
        yield local


def _specs(variables: Sequence[keras.Variable | tf.Variable | Rows]) -> list[str]:
    return [
        " ".join([f"{index} {v.dtype}{list(v.shape)}", *getattr(v, "slot_names", ())])
        for index, v in enumerate(variables)
    ]


def _names_of(variables: Sequence[keras.Variable | tf.Variable | Rows]) -> list[str]:
    return [getattr(variable, "path", variable.name) for variable in variables]


def _variable_differences(
    specs: tuple[Sequence[str], Sequence[str]], names: tuple[Sequence[str], Sequence[str]]
) -> list[str]:
    """A line for each variable that only one side has, or that has another shape there.

    Variables are matched by their order and shapes: Keras numbers layers anew in each process.
    """
    shapes = [[spec.partition(" ")[2] for spec in side] for side in specs]
    named = [
        [f"{name} {shape}" for name, shape in zip(side_names, side, strict=True)]
        if len(side_names) == len(side)
        else [f"variable {index} {shape}" for index, shape in enumerate(side)]
        for side_names, side in zip(names, shapes, strict=True)
    ]
    lines = []
    matcher = difflib.SequenceMatcher(None, shapes[0], shapes[1], autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        there, here = named[0][i:i_end], named[1][j:j_end]
        for one, other in itertools.zip_longest(there, here):
            if one and other:
                lines.append(f"{one} there, {other} here")
            else:
                lines.append(f"{one} only there" if one else f"{other} only here")
    return lines


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:150]} ... ({len(text)} characters)"
