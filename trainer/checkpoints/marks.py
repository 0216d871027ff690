"""The mark of a checkpoint, `checkpoint.json`, which says if the checkpoint is complete.

    mark = complete_mark("model_dir/checkpoints/step-00001000")     # or DamagedError
    mark.saved.step, mark.files, mark.chain

The mark is written last. It has the size and checksum of each file, and a checksum of itself.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import google_crc32c
import tensorflow as tf

from data.system import files
from data.system.object_store import UnavailableError
from strategies.position import Position
from strategies.worker_stats import WorkerStats
from trainer.checkpoints.file_checks import STORAGE_ERRORS, damage_of
from trainer.checkpoints.identity import Identity
from trainer.checkpoints.retention import Chain
from trainer.exit_codes import first_line
from trainer.run_files import CHECKPOINT_MARK

# The length and the checksum of each file, as `contents_of` returns them.
Files: TypeAlias = Mapping[str, Mapping[str, int | str]]


@dataclass(frozen=True)
class Saved:
    """The progress that a checkpoint holds: steps applied, position in the data, worker_stats."""

    step: int
    position: Position
    counts: WorkerStats = field(default_factory=dict)  # JSON has converted the keys to strings.
    # The config that it was saved with, as in config.json, with an absolute data_dir; early
    # versions saved none.
    config: Mapping[str, Any] = field(default_factory=dict)


class DamagedError(Exception):
    """A checkpoint is not complete; the message names the file and the damage."""


@dataclass(frozen=True)
class Mark:
    """The contents of checkpoint.json; only a best-* has a `score`."""

    name: str  # Of the checkpoint.
    saved: Saved
    identity: Identity
    files: Files
    score: float
    checksum: str
    # The checkpoints with the rows of tables that this one lacks, the oldest first. Each is named
    # with the checksum of its mark: another checkpoint may be written under the same name.
    needs: Chain
    has_table_files: bool  # False of early versions, which kept tables among variables.

    @property
    def chain(self) -> Chain:
        """The checkpoints that together hold the tables: `needs`, and this one last."""
        return {**self.needs, self.name: self.checksum}


def signed(mark: Mapping[str, object]) -> dict[str, object]:
    """Returns `mark` as it is after a round trip through JSON, with a checksum of its contents."""
    contents = json.loads(json.dumps({**mark, "crc32c": None}))
    del contents["crc32c"]
    canonical = json.dumps(contents, sort_keys=True).encode()
    return {**contents, "crc32c": f"{google_crc32c.value(canonical):08x}"}


def complete_mark(path: str) -> Mark:
    """Returns the mark.

    Raises DamagedError if it is damaged, or a file of it, or of a checkpoint that it needs, has
    another size.
    """
    mark = own_mark(path)
    for need, checksum in mark.needs.items():
        try:
            needed = own_mark(files.join(files.parent(path), need))
        except DamagedError as error:
            raise DamagedError(f"it needs {need}, which is not complete: {error}") from error
        if needed.checksum != checksum:
            raise DamagedError(f"it needs another {need} than the one that is there")
    return mark


def own_mark(path: str) -> Mark:
    """As `complete_mark`, without the checkpoints that are needed."""
    try:
        mark = json.loads(files.read_text(f"{path}/{CHECKPOINT_MARK}"))
    except UnavailableError:
        raise
    except (FileNotFoundError, tf.errors.NotFoundError):
        message = f"{CHECKPOINT_MARK} is missing: never finished, or half deleted"
        raise DamagedError(message) from None
    except (*STORAGE_ERRORS, ValueError) as error:
        raise DamagedError(f"{CHECKPOINT_MARK} cannot be read ({first_line(error)})") from error
    try:
        if mark["crc32c"] != signed(mark)["crc32c"]:
            raise DamagedError(f"{CHECKPOINT_MARK} has another checksum than when it was written")
        shares = tuple((int(b), int(first), int(last)) for b, first, last in mark["open_shares"])
        skipped = tuple(map(int, mark["skipped"]))
        position = Position(int(mark["next_batch"]), shares, skipped)
        counts, config = dict(mark.get("counts", {})), dict(mark.get("config", {}))
        found = Mark(
            name=os.path.basename(path),
            saved=Saved(int(mark["step"]), position, counts, config),
            # Early versions have no names.
            identity=Identity(dict(mark["identity"]), dict(mark.get("names", {}))),
            files=dict(mark["files"]),
            score=float(mark.get("score", -math.inf)),
            checksum=str(mark["crc32c"]),
            needs=dict(mark.get("needs", {})),
            has_table_files="needs" in mark,
        )
    # KeyError: a part is missing; the others: a part has another type.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{CHECKPOINT_MARK} is not one of this program: {error!r}") from error
    for file, contents in found.files.items():
        if damage := damage_of(f"{path}/{file}", contents, reads=False):
            raise DamagedError(damage)
    return found
