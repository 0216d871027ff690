"""The directory with the checkpoints of a run: writes, reads and removes one at a time.

    store = Store("model_dir/checkpoints", "model_dir/checkpoints/claims")
    store.write("step-00001000", Contents(write_files, mark))   # False if the storage fails
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import tensorflow as tf

from data.system import files, object_store
from data.system.object_store import UnavailableError
from data.system.scratch import plain_path, scratch_dir
from trainer.checkpoints.file_checks import (
    STORAGE_ERRORS,
    contents_of,
    damage_of,
    flush_to_disk,
)
from trainer.checkpoints.marks import DamagedError, Mark, complete_mark, own_mark, signed
from trainer.checkpoints.retention import Chain
from trainer.exit_codes import first_line
from trainer.run_files import CHECKPOINT_MARK, checkpoints_in

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint that is to be written."""

    # Writes the files to a directory that TensorFlow can open.
    write_files: Callable[[str], None]
    # Returns the mark without its "files". Called when all other files are written.
    mark: Callable[[], Mapping[str, object]]


class Store:
    """The checkpoints in one directory. Several processes may use it.

    Attributes:
        directory: Where they are.
        staging: A directory for files of checkpoints that are not complete. The next start of the
            run removes it, with the files of a killed process.
        verified: The checkpoints that this process wrote or read: their checksums were right, not
            only their sizes.
        damaged: The checkpoints that a restart skipped.
    """

    def __init__(self, directory: str, staging: str) -> None:
        """Reads and writes nothing yet."""
        self.directory, self.staging = directory, staging
        self.verified: set[str] = set()
        self.damaged: set[str] = set()

    def path(self, name: str) -> str:
        """Returns the directory of a checkpoint."""
        return f"{self.directory}/{name}"

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all checkpoints, best-* first, each kind in the order of steps."""
        return [name for name in checkpoints_in(self.directory) if name.startswith(prefix)]

    def mark_if_complete(self, name: str) -> Mark | None:
        """Returns the mark; None if a file, or a checkpoint that it needs, is damaged by size."""
        with contextlib.suppress(DamagedError):
            return complete_mark(self.path(name))
        return None

    def chain_of(self, name: str) -> Chain:
        """Returns `Mark.chain`; empty if the checkpoint, or one that it needs, is damaged."""
        mark = self.mark_if_complete(name)
        return mark.chain if mark else {}

    def chains(self) -> dict[str, Chain | None]:
        """Returns `Mark.chain` of each checkpoint; None if its files or mark are damaged."""
        chains: dict[str, Chain | None] = dict.fromkeys(self.names())
        for name in chains:
            with contextlib.suppress(DamagedError):
                chains[name] = own_mark(self.path(name)).chain
        return chains

    @contextlib.contextmanager
    def files_of(self, name: str, contents: Mapping[str, Mapping[str, int | str]]) -> Iterator[str]:
        """Gives a directory that TensorFlow can read, with files of a checkpoint.

        Raises DamagedError if a file has not its `contents`, or UnavailableError if the files may
        be complete, but cannot be downloaded now.
        """
        with _local_copy(self.path(name), contents) as local:
            for file, expected in contents.items():
                if damage := damage_of(f"{local}/{file}", expected):
                    raise DamagedError(damage)
            yield local

    def write(self, name: str, contents: Contents) -> bool:
        """Writes a checkpoint in its place, unless it is there. If this fails, logs it; False."""
        path = self.path(name)
        if name in self.verified and self.mark_if_complete(name):
            return True
        try:
            if files.exists(path):
                self.remove(name)
            self._write(path, contents)
        except STORAGE_ERRORS as error:
            # A store that does not answer is not asked again: each request would wait for long.
            is_available = not isinstance(error, UnavailableError)
            text = "there is no complete checkpoint" if is_available else "earlier ones are kept"
            with contextlib.suppress(*STORAGE_ERRORS):
                if is_available and (newest := self.newest()):
                    text = f"the newest complete checkpoint is of step {newest.saved.step}"
            message = "%s could not be written: %s. The next save tries again; %s."
            log.warning(message, path, first_line(error), text)
            # If it cannot be removed it is skipped later, because it has no mark.
            with contextlib.suppress(*STORAGE_ERRORS):
                if is_available:
                    self.remove(name)
            return False
        self.verified.add(name)
        return True

    def write_and_rename(self, name: str, contents: Contents) -> bool:
        """As `write`, but in `staging`: the directory is renamed when it is complete. Not for URLs.

        For a process that others cannot reach: another one may be writing the same step.
        """
        path = self.path(name)
        partial = f"{self.staging}/{files.partial_name(name)}"
        try:
            self._write(partial, contents)
            if name in self.damaged or self.mark_if_complete(name) is None:
                files.remove_tree(path)
            try:
                os.rename(partial, path)
            except OSError:
                if self.mark_if_complete(name) is None:
                    raise
            self.damaged.discard(name)
            self.verified.add(name)
            flush_to_disk(self.directory)
        except STORAGE_ERRORS as error:
            log.warning("%s could not be written: %s.", path, first_line(error))
            return False
        finally:
            files.remove_tree(partial)
        return True

    def newest(self) -> Mark | None:
        """Returns the mark of the newest step-* whose files have their sizes, or None."""
        marks = map(self.mark_if_complete, reversed(self.names("step-")))
        return next((mark for mark in marks if mark), None)

    def remove(self, name: str) -> None:
        """Removes a checkpoint, the mark first.

        If the process is killed meanwhile, the other files must not look like a damaged one.
        """
        path = self.path(name)
        mark = f"{path}/{CHECKPOINT_MARK}"
        if files.exists(mark):
            files.remove_file(mark)
        # Not files.remove_tree, which says nothing if it fails.
        remove_tree = object_store.remove_tree if files.is_s3(path) else tf.io.gfile.rmtree
        remove_tree(path)

    def _write(self, path: str, contents: Contents) -> None:
        with _uploaded(path) as local:
            contents.write_files(local)
            written = {}
            for file in sorted(tf.io.gfile.listdir(local)):
                written[file] = contents_of(f"{local}/{file}")
                flush_to_disk(f"{local}/{file}")
        mark = json.dumps(signed({**contents.mark(), "files": written}), indent=2)
        if files.is_s3(path):
            object_store.put(f"{path}/{CHECKPOINT_MARK}", mark.encode())
            return
        partial = f"{path}/{CHECKPOINT_MARK}.tmp"
        with tf.io.gfile.GFile(partial, "w") as file:
            file.write(mark)
        flush_to_disk(partial)
        tf.io.gfile.rename(partial, f"{path}/{CHECKPOINT_MARK}")
        for directory in (path, self.directory):
            flush_to_disk(directory)


@contextlib.contextmanager
def _uploaded(path: str) -> Iterator[str]:
    """Gives a directory whose files are in `path` at the end: `path` itself if it is not s3://."""
    if not files.is_s3(path):
        tf.io.gfile.makedirs(path)
        yield path
        return
    with scratch_dir() as local:
        yield local
        object_store.upload_tree(local, path)


@contextlib.contextmanager
def _local_copy(path: str, names: Iterable[str]) -> Iterator[str]:
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
