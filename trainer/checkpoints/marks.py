"""The mark of a checkpoint, `checkpoint.json`, which says if the checkpoint is complete.

    mark = complete_mark("model_dir/checkpoints/step-00001000")     # or DamagedError
    mark.saved.step, mark.files, mark.chain

The mark is written last. It has the size and checksum of each file, and a checksum of itself.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import google_crc32c

from data.system import files
from data.system.object_store import UnavailableError
from strategies.position import Position
from strategies.worker_stats import WorkerStats
from trainer.checkpoints.file_checks import contents_of
from trainer.checkpoints.identity import Identity
from trainer.checkpoints.retention import Chain
from trainer.exit_codes import first_line
from trainer.run_files import CHECKPOINT_MARK

# The length and the checksum of each file, as `contents_of` returns them.
Files: TypeAlias = Mapping[str, Mapping[str, int | str]]

# Errors of local files that may pass: no descriptor is free, or a file server does not answer.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT)


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


class UnreadableError(DamagedError):
    """The storage fails to read a file. It may be complete, so nothing is removed because of it."""


@dataclass(frozen=True)
class Mark:
    """The contents of checkpoint.json; only a best-* has a `score`."""

    name: str  # Of the checkpoint.
    saved: Saved
    identity: Identity
    files: Files
    score: float
    # True if lower values of the metric of `score` are better; None of earlier versions.
    is_lowest: bool | None
    checksum: str
    # The checkpoints with the rows of tables that this one lacks, the oldest first. Each is named
    # with the checksum of its mark: another checkpoint may be written under the same name.
    needs: Chain

    def score_of(self, metric: str, *, is_lowest: bool) -> float:
        """Returns `score`; -inf if it is of another metric, or of the other direction."""
        was_lowest = self.is_lowest
        # Early marks lack it. If lower is better, the score is -value, and few values are below 0.
        if was_lowest is None:
            was_lowest = math.copysign(1, self.score) < 0
        is_same = self.saved.config.get("best_metric", "loss") == metric and was_lowest == is_lowest
        return self.score if is_same else -math.inf

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
    """Returns the mark. Raises DamagedError if it is damaged, or a file has another size.

    The checkpoints that this one needs are looked at, too.
    """
    mark = own_mark(path)
    for need, checksum in mark.needs.items():
        try:
            needed = own_mark(files.join(files.parent(path), need))
        except DamagedError as error:
            raise type(error)(f"it needs {need}, which is not complete: {error}") from error
        if needed.checksum != checksum:
            raise DamagedError(f"it needs another {need} than the one that is there")
    return mark


def own_mark(path: str) -> Mark:
    """As `complete_mark`, without the checkpoints that are needed."""
    try:
        with _reading(f"{path}/{CHECKPOINT_MARK}", ": never finished, or half deleted"):
            mark = json.loads(files.read_text(f"{path}/{CHECKPOINT_MARK}"))
    except ValueError as error:
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
            is_lowest=mark.get("is_lowest"),
            checksum=str(mark["crc32c"]),
            needs=dict(mark.get("needs", {})),
        )
    # KeyError: a part is missing; the others: a part has another type.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{CHECKPOINT_MARK} is not one of this program: {error!r}") from error
    for file, contents in found.files.items():
        check_file(f"{path}/{file}", contents, reads=False)
    return found


def check_file(path: str, contents: Mapping[str, int | str], *, reads: bool = True) -> None:
    """Raises DamagedError if a file has another length, or with `reads` another checksum.

    Raises UnavailableError if it cannot be read now.
    """
    name = os.path.basename(path)
    with _reading(path):
        num_bytes = files.num_bytes_of(path)
        if num_bytes != contents["bytes"]:
            raise DamagedError(f"{name} has {num_bytes:,} bytes instead of {contents['bytes']:,}")
        if reads and contents_of(path) != contents:
            raise DamagedError(f"{name} has another checksum than when it was written")


@contextlib.contextmanager
def _reading(path: str, if_missing: str = "") -> Iterator[None]:
    """Raises DamagedError or UnavailableError for the errors of the storage inside it."""
    name = os.path.basename(path)
    try:
        yield
    except UnavailableError:
        raise
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing{if_missing}") from None
    except (OSError, files.DataError) as error:
        if isinstance(error, OSError) and error.errno in _PASSING:
            raise UnavailableError(error.errno, error.strerror, path) from error
        raise UnreadableError(f"{name} cannot be read ({first_line(error)})") from error
