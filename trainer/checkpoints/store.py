"""The directory with the checkpoints of a run: writes, reads and removes one at a time.

    store = Store("model_dir/checkpoints", staging, write_files, before_mark, on_progress)
    store.write("step-00001000", mark)                          # False if the storage fails
    with store.files_of("step-00001000", names) as local:       # whose checksums are right
        checkpoint.read(f"{local}/variables")
    store.remove("step-00001000")

Files are flushed to the disk before the mark is written. TensorFlow cannot open s3://: there files
are written to TMPDIR and uploaded, the mark last, and downloaded before they are read.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import tensorflow as tf

from data.system import files, object_store
from data.system.object_store import UnavailableError
from data.system.scratch import plain_path, scratch_dir
from trainer.checkpoints.file_checks import STORAGE_ERRORS, contents_of, flush_to_disk
from trainer.checkpoints.marks import (
    DamagedError,
    Files,
    Mark,
    UnreadableError,
    check_file,
    complete_mark,
    own_mark,
    signed,
)
from trainer.checkpoints.retention import Chain
from trainer.exit_codes import first_line
from trainer.run_files import CHECKPOINT_MARK, checkpoints_in

log = logging.getLogger(__name__)


@contextlib.contextmanager
def local_files(path: str, contents: Files) -> Iterator[str]:
    """Gives a directory that TensorFlow can read, with files of the checkpoint at `path`.

    Raises DamagedError if a file has not its `contents`, or UnavailableError if the files may be
    complete, but cannot be downloaded now.
    """
    with scratch_dir() if files.is_s3(path) else plain_path(path) as local:
        for file, expected in contents.items():
            if files.is_s3(path):
                # The check below names a file that is missing.
                with contextlib.suppress(FileNotFoundError):
                    object_store.download(f"{path}/{file}", f"{local}/{file}")
            check_file(f"{local}/{file}", expected)
        yield local


class Store:
    """The checkpoints in one directory. Several processes may use it.

    Attributes:
        directory: Where they are.
        staging: A directory for files of checkpoints that are not complete. The next start of the
            run removes it, with the files of a killed process.
        verified: The checkpoints that this process wrote or read: their checksums were right.
        skipped: The checkpoints that a restart skipped, with the stamps of their marks then: they
            do not count until a process writes them anew.
        unreadable: Those of `skipped` that may be complete, and are not removed.
    """

    def __init__(
        self,
        directory: str,
        staging: str,
        write_files: Callable[[str], None],
        before_mark: Callable[[], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Reads and writes nothing yet.

        `write_files` will write the files of a checkpoint to a directory that TensorFlow can open,
        and `before_mark` is called when they are complete. `on_progress` is called after each file,
        and before each part of an upload.
        """
        self.directory, self.staging = directory, staging
        self._write_files, self._before_mark = write_files, before_mark
        self._on_progress = on_progress
        self.verified: set[str] = set()
        self.skipped: dict[str, tuple[int, int]] = {}
        self.unreadable: set[str] = set()

    def path(self, name: str) -> str:
        """Returns the directory of a checkpoint."""
        return f"{self.directory}/{name}"

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all checkpoints, best-* first, each kind in the order of steps."""
        return [name for name in checkpoints_in(self.directory) if name.startswith(prefix)]

    def mark_if_complete(self, name: str) -> Mark | None:
        """Returns `complete_mark`; None if that raises, or if the checkpoint is in `skipped`."""
        with contextlib.suppress(DamagedError, FileNotFoundError):
            mark = complete_mark(self.path(name))
            if name not in self.skipped or self.skipped[name] != self._stamp(name):
                return mark
        return None

    def skip(self, name: str, error: DamagedError | None = None) -> None:
        """Adds a checkpoint, of which `error` is the damage, to `skipped`."""
        self.skipped[name] = self._stamp(name)
        if isinstance(error, UnreadableError):
            self.unreadable.add(name)

    def chain_of(self, name: str) -> Chain:
        """Returns `Mark.chain`; empty if the checkpoint, or one that it needs, is damaged."""
        mark = self.mark_if_complete(name)
        return mark.chain if mark else {}

    def chains(self) -> dict[str, Chain | None]:
        """Returns `Mark.chain` of each checkpoint; None if its files or mark are damaged.

        Leaves out those whose mark the storage fails to read.
        """
        chains: dict[str, Chain | None] = {}
        for name in self.names():
            try:
                chains[name] = own_mark(self.path(name)).chain
            except UnreadableError:
                pass
            except DamagedError:
                chains[name] = None
        return chains

    def files_of(self, name: str, contents: Files) -> AbstractContextManager[str]:
        """As `local_files`, of a checkpoint by its name."""
        return local_files(self.path(name), contents)

    def write(self, name: str, mark: Mapping[str, object], *, renames: bool = False) -> bool:
        """Writes a checkpoint, unless it is there; `mark` is all but its "files".

        With `renames`, another process may be writing the same step. Then the checkpoint is written
        in `staging`, and renamed when it is complete, unless it is at a URL, where no directory can
        be renamed in one operation.

        Returns False, and logs the reason, if the storage fails.
        """
        if renames and not files.is_url(self.directory):
            return self._write_and_rename(name, mark)
        path = self.path(name)
        if name in self.verified and self.mark_if_complete(name):
            return True
        try:
            if files.exists(path):
                self.remove(name)
            self._write(path, mark)
        except STORAGE_ERRORS as error:
            # A store that does not answer is not asked again: each request would wait for long.
            is_available = not isinstance(error, UnavailableError)
            text = "there is no complete checkpoint" if is_available else "earlier ones are kept"
            with contextlib.suppress(*STORAGE_ERRORS):
                if is_available and (newest := self.newest()):
                    text = f"the newest complete checkpoint is of step {newest.saved.step}"
            message = "%s could not be written: %s. The next save tries again; %s."
            log.warning(message, path, first_line(error), text)
            # If it cannot be removed it is skipped later, because it has no mark. With one, another
            # process has completed the step: a survivor.
            with contextlib.suppress(*STORAGE_ERRORS):
                if is_available and self.mark_if_complete(name) is None:
                    self.remove(name)
            return False
        self._has_written(name)
        return True

    def _write_and_rename(self, name: str, mark: Mapping[str, object]) -> bool:
        path = self.path(name)
        partial = f"{self.staging}/{files.partial_name(name)}"
        try:
            self._write(partial, mark)
            if self.mark_if_complete(name) is None:
                files.remove_tree(path)
            try:
                os.rename(partial, path)
            except OSError:
                if self.mark_if_complete(name) is None:
                    raise
            self._has_written(name)
            flush_to_disk(self.directory)
        except STORAGE_ERRORS as error:
            log.warning("%s could not be written: %s.", path, first_line(error))
            return False
        finally:
            files.remove_tree(partial)
        return True

    def newest(self) -> Mark | None:
        """Returns the mark of the newest step-* of `mark_if_complete`, or None."""
        marks = map(self.mark_if_complete, reversed(self.names("step-")))
        return next((mark for mark in marks if mark), None)

    def newest_readable(self) -> Mark | None:
        """As `newest`, but reads the files: their checksums are right, too."""
        while mark := self.newest():
            with contextlib.suppress(DamagedError):
                for name in mark.chain:
                    with self.files_of(name, own_mark(self.path(name)).files):
                        pass
                return mark
            self.skip(mark.name)
        return None

    def remove(self, name: str) -> None:
        """Removes a checkpoint, the mark first: half of one must not look like a damaged one."""
        path = self.path(name)
        mark = f"{path}/{CHECKPOINT_MARK}"
        if files.exists(mark):
            files.remove_file(mark)
        # Not files.remove_tree, which says nothing if it fails.
        remove_tree = object_store.remove_tree if files.is_s3(path) else tf.io.gfile.rmtree
        remove_tree(path)

    def _has_written(self, name: str) -> None:
        self.skipped.pop(name, None)
        self.unreadable.discard(name)
        self.verified.add(name)

    def _stamp(self, name: str) -> tuple[int, int]:
        return files.stamp(f"{self.path(name)}/{CHECKPOINT_MARK}")

    def _write(self, path: str, mark: Mapping[str, object]) -> None:
        is_s3, written = files.is_s3(path), {}
        with scratch_dir() if is_s3 else contextlib.nullcontext(path) as local:
            if not is_s3:
                tf.io.gfile.makedirs(path)
            self._write_files(local)
            for file in sorted(tf.io.gfile.listdir(local)):
                written[file] = contents_of(f"{local}/{file}")
                flush_to_disk(f"{local}/{file}")
                self._on_progress()
            if is_s3:
                object_store.upload_tree(local, path, self._on_progress)
        self._before_mark()
        content = json.dumps(signed({**mark, "files": written}), indent=2)
        target = f"{path}/{CHECKPOINT_MARK}"
        if is_s3:
            object_store.put(target, content.encode())
            return
        with tf.io.gfile.GFile(f"{target}.tmp", "w") as file:
            file.write(content)
        flush_to_disk(f"{target}.tmp")
        tf.io.gfile.rename(f"{target}.tmp", target)
        for directory in (path, self.directory):
            flush_to_disk(directory)
