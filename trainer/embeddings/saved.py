"""The tables of a checkpoint: files that are written and read in pieces.

    staged = StagedTables(tables, store, "CPU:0", on_piece, complete_every)
    staged.stage(1000, is_complete=False)
    staged.add_to("model_dir/checkpoints/step-00001000")    # a checkpoint gets the files
    staged.restore(mark, "model_dir/checkpoints/step-00001000")
    values = table_values("model_dir/checkpoints/step-00001000")     # {"0/rows": [n, width], ...}

The files `tables.index` and `tables.data-*` are those of a tf.train.Checkpoint. Tensors are named
by the number of the table:

| tensor | contents |
| --- | --- |
| `0/rows`, and a name for each optimizer slot | [n, ...], in the order of the ids |
| `0/changed` | int64 [n]: the ids of these rows, if the file has only those that were changed |
| `0/ids`, `0/use` | of a table of dynamic ids: all ids, and their use (`table.Index`) |

With `complete_every` above 1 a checkpoint may have only the rows that were changed since the one
before. Its chain, which its mark names, begins with a checkpoint that has all rows.

A process needs memory for one piece, and for the ids: tables may be larger than its memory.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system import files
from data.system.scratch import scratch_dir
from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.checkpoints.marks import DamagedError, Mark, complete_mark, own_mark
from trainer.checkpoints.retention import Chain
from trainer.checkpoints.store import Store, local_files
from trainer.embeddings.table import Ids, Table, ids_with_rows
from trainer.exit_codes import first_line

PREFIX = "tables"

_PIECE_BYTES = 64 << 20
_INDEX = ("ids", "use")
_CHANGED = "changed"

_Reader: TypeAlias = Any  # TensorFlow does not export the class.


class StagedTables:
    """The tables of one step, as files from which the checkpoints of this step are made.

    For s3:// the files are in TMPDIR. A process that is killed leaves them in `Store.staging`,
    which is in the file system of the checkpoints, so that local files are not copied.

    Attributes:
        chain: The chain of the newest checkpoint; empty if the next one must have all rows.
        needs: The checkpoints that the staged files need.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        store: Store,
        io_device: str,
        on_piece: Callable[[], None],
        complete_every: int,
    ) -> None:
        """Writes nothing yet; will call `on_piece` often. `io_device` has the files of `store`."""
        self._tables, self._store = tables, store
        self._io_device, self._on_piece = io_device, on_piece
        self._complete_every = complete_every
        self.chain: Chain = {}
        self.needs: Chain = {}
        self._names: list[str] = []
        self._stack = contextlib.ExitStack()
        self._directory = ""
        self._error: OSError | None = None
        self._changed: dict[int, Ids] = {}  # By the number of the table, since `forget_changes`.

    def stage(self, step: int, *, is_complete: bool) -> None:
        """Writes all rows, or those that were changed since `forget_changes`.

        All rows are written if `is_complete`; if `complete_every` checkpoints are in the chain; or
        if one of these is no longer there. No step may be in flight. `add_to` raises the error if
        a file cannot be written. Raises tf.errors.UnavailableError if a parameter server was lost.
        """
        self.remove()
        self.needs = {}
        if self.chain and not is_complete and len(self.chain) < self._complete_every:
            with contextlib.suppress(*STORAGE_ERRORS):
                if self._store.chain_of([*self.chain][-1]) == self.chain:
                    self.needs = self.chain
        try:
            if files.is_s3(self._store.staging):
                self._directory = self._stack.enter_context(scratch_dir())
            else:
                self._directory = f"{self._store.staging}/{files.partial_name('tables')}"
                self._stack.callback(files.remove_tree, self._directory)
                files.make_dirs(self._directory)
            self._write(step, changes_only=bool(self.needs))
            self._names = files.names_in(self._directory)
        except OSError as error:
            self._error = error

    def restore(self, mark: Mark, directory: str) -> None:
        """Sets the tables to those of a checkpoint with `mark`, whose files are in `directory`.

        Raises DamagedError; or OSError, ValueError or tf.errors.OpError if a file cannot be read.
        """
        with contextlib.ExitStack() as stack:
            directories = []
            for need in mark.needs:
                contents = own_mark(self._store.path(need)).files
                of_tables = {n: c for n, c in contents.items() if n.startswith(f"{PREFIX}.")}
                try:
                    directories.append(stack.enter_context(self._store.files_of(need, of_tables)))
                except DamagedError as error:
                    raise type(error)(f"it needs {need}, of which {error}") from error
            self._read([*directories, directory], mark.saved.step)
        for table in self._tables:
            table.take_changed_ids(table.index(), mark.saved.step)
        self.forget_changes()
        self.chain = mark.chain if mark.name.startswith("step-") else {}

    def forget_changes(self) -> None:
        """The next `stage` counts changes from the last one on."""
        self._changed.clear()

    def add_to(self, directory: str) -> None:
        """Adds the files to `directory`, as links where that is possible.

        Raises OSError or tf.errors.OpError if they cannot be added, or if `stage` has failed.
        """
        if self._error is not None:
            raise self._error
        for name in self._names:
            source, target = f"{self._directory}/{name}", f"{directory}/{name}"
            try:
                os.link(source, target)
            except OSError:  # A URL, another file system, or one without links.
                tf.io.gfile.copy(source, target, overwrite=True)

    def remove(self) -> None:
        """Removes the files. If that fails, the next start of the run does it."""
        self._error, self._names = None, []
        with contextlib.suppress(*STORAGE_ERRORS):
            self._stack.close()

    def _write(self, step: int, *, changes_only: bool) -> None:
        pieces: list[str] = []

        def save(tensors: Mapping[str, tf.Tensor], slices: Sequence[str]) -> None:
            pieces.append(f"{self._directory}/{PREFIX}-{len(pieces)}")
            with _write_errors_explained(), tf.device(self._io_device):
                tf.raw_ops.SaveV2(
                    prefix=pieces[-1],
                    tensor_names=list(tensors),
                    shape_and_slices=slices,
                    tensors=list(tensors.values()),
                )
            self._on_piece()

        for number, table in enumerate(self._tables):
            index = table.index()
            ids = table.ids(index)
            # Before the values are read: an update that comes later is marked again.
            changed = table.take_changed_ids(index, step)
            if number in self._changed:  # Some may have no row any more.
                changed = np.union1d(changed, self._changed[number])
                changed = changed[_is_in(changed, ids)]
            self._changed[number] = changed
            if changes_only:
                ids = changed
            of_table = index | ({_CHANGED: ids} if changes_only else {})
            if of_table:
                tensors = {f"{number}/{n}": tf.convert_to_tensor(v) for n, v in of_table.items()}
                save(tensors, [""] * len(tensors))
            for start, piece in _pieces(ids, table):
                values = table.values_of(piece)
                tensors = {f"{number}/{name}": value for name, value in values.items()}
                shapes = [[len(ids), *value.shape[1:]] for value in values.values()]
                save(tensors, [_slice(shape, start, len(piece)) for shape in shapes])
        # Joins the indices; the data stay in their files.
        with _write_errors_explained(), tf.device(self._io_device):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=pieces,
                destination_prefix=f"{self._directory}/{PREFIX}",
                delete_old_dirs=False,
            )

    def _read(self, directories: Sequence[str], step: int) -> None:
        """Sets the values of `step`. The first directory has all rows, others have changes.

        Raises OSError, ValueError or tf.errors.OpError if a file cannot be read.
        """
        readers = [tf.train.load_checkpoint(f"{directory}/{PREFIX}") for directory in directories]
        for number, table in enumerate(self._tables):
            index = _index(readers[-1], number)
            table.set_index(index, step)
            known = table.ids(index)
            for directory, reader in zip(directories, readers, strict=True):
                ids = _ids_of_rows(reader, number, known)
                shapes = reader.get_variable_to_shape_map()
                dtypes = reader.get_variable_to_dtype_map()
                names = [f"{number}/{name}" for name in table.value_names]
                for start, piece in _pieces(ids, table):
                    with tf.device(self._io_device):
                        values = tf.raw_ops.RestoreV2(
                            prefix=f"{directory}/{PREFIX}",
                            tensor_names=names,
                            shape_and_slices=[
                                _slice(shapes[name], start, len(piece)) for name in names
                            ],
                            dtypes=[dtypes[name] for name in names],
                        )
                    if index:  # An id may have lost its row since.
                        is_known = _is_in(piece, known)
                        piece = piece[is_known]
                        values = [tf.boolean_mask(value, is_known) for value in values]
                    table.set_values(piece, dict(zip(table.value_names, values, strict=True)))
                    self._on_piece()


class _WriteError(OSError):
    """A file cannot be written: unlike an error of reading a table, this does not end the run."""


@contextlib.contextmanager
def _write_errors_explained() -> Iterator[None]:
    try:
        yield
    except STORAGE_ERRORS as error:
        raise _WriteError(first_line(error)) from error


def table_directories(checkpoint: str) -> list[str]:
    """The directories with the tables of a checkpoint, its own last. Raises DamagedError."""
    checkpoint = checkpoint.rstrip("/")
    needs = complete_mark(checkpoint).needs
    return [*(files.join(files.parent(checkpoint), name) for name in needs), checkpoint]


def table_values(checkpoint: str, *, rows_only: bool = False) -> dict[str, npt.NDArray[np.generic]]:
    """The values of the tables of a checkpoint, by the names of the tensors. Needs memory for all.

    With `rows_only` without optimizer slots. Empty if there are no tables. Raises DamagedError; or
    OSError, ValueError or tf.errors.OpError if a file cannot be read.
    """
    values: dict[str, npt.NDArray[np.generic]] = {}
    if not files.exists(f"{checkpoint}/{PREFIX}.index"):
        return values
    with contextlib.ExitStack() as stack:
        readers = []
        for path in table_directories(checkpoint):
            of_tables = {k: v for k, v in own_mark(path).files.items() if k.startswith(PREFIX)}
            plain = stack.enter_context(local_files(path, of_tables))
            readers.append(tf.train.load_checkpoint(f"{plain}/{PREFIX}"))
        names = sorted({n for reader in readers for n in reader.get_variable_to_shape_map()})
        for number in sorted({int(name.partition("/")[0]) for name in names}):
            index = _index(readers[-1], number)
            values |= {f"{number}/{name}": value for name, value in index.items()}
            for name in [n for n in names if n.startswith(f"{number}/")]:
                kind = name.partition("/")[2]
                if kind in (*_INDEX, _CHANGED) or (rows_only and kind != "rows"):
                    continue
                value = None
                for reader in readers:
                    if not reader.has_tensor(name):  # No row was changed.
                        continue
                    rows = reader.get_tensor(name)
                    if value is None:
                        known = ids_with_rows(index, len(rows))
                        value = np.zeros((len(known), *rows.shape[1:]), rows.dtype)
                    ids = _ids_of_rows(reader, number, known)
                    is_known = _is_in(ids, known)
                    value[np.searchsorted(known, ids[is_known])] = rows[is_known]
                assert value is not None
                values[name] = value
    return values


def _index(reader: _Reader, number: int) -> dict[str, Ids]:
    names = {name: f"{number}/{name}" for name in _INDEX}
    return {n: reader.get_tensor(full) for n, full in names.items() if reader.has_tensor(full)}


def _ids_of_rows(reader: _Reader, number: int, known: Ids) -> Ids:
    """The ids of the rows in one file; `known` are those of a table with a fixed number."""
    if reader.has_tensor(f"{number}/{_CHANGED}"):
        changed: Ids = reader.get_tensor(f"{number}/{_CHANGED}")
        return changed
    return ids_with_rows(_index(reader, number), len(known))


def _is_in(ids: Ids, known: Ids) -> npt.NDArray[np.bool_]:
    """Returns True for each of `ids` that is in `known`, which is sorted."""
    if not len(known):
        return np.zeros(ids.shape, bool)
    places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.asarray(known[places] == ids)


def _pieces(ids: Ids, table: Table) -> Iterator[tuple[int, Ids]]:
    """The parts of `ids` whose values are in memory at the same time, with their first index."""
    size = max(1, _PIECE_BYTES // table.row_bytes)
    for start in range(0, len(ids), size):
        yield start, ids[start : start + size]


def _slice(shape: Sequence[int], start: int, size: int) -> str:
    """TensorFlow's description of `size` rows, from `start` on, of a tensor of `shape`."""
    slices = ":".join([f"{start},{size}", *["-"] * (len(shape) - 1)])
    return f"{' '.join(map(str, shape))} {slices}"
