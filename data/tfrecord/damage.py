"""Damaged records: found, counted, and left out if `on_corrupt` is "skip".

    for shard in examine("datasets/digits", "train"):
        print(shard.path, shard.num_good, *shard.damages)
    split = open_good("datasets/digits", "train")
    print(split.num_examples, "records;", split.num_skipped, "cannot be read")
    damages = verify(split)                     # damage since then

`split.open_split` stops at the first damaged header. Here every byte is read, and each run of good
records between damaged ones becomes a shard. So the order is a pure function of the good records.

After a damaged length, the next record can be found only by an index that was made before the
damage. Without such an index the rest of the file is lost: bytes that look like a record prove
nothing.
"""

import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np

from data.system import files
from data.system.files import SKIP, DataError
from data.tfrecord import framing as frames
from data.tfrecord import shard_names as names
from data.tfrecord import split as records
from data.tfrecord.crc import Int64s
from data.tfrecord.framing import BadRecord, Damage
from data.tfrecord.split import Shard, Split

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Run(NamedTuple):
    """Consecutive good records of a file, in bytes [begin, end)."""

    first_record: int
    num_records: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """The result of reading one file to its end. `num_bytes` is None if the file is missing."""

    path: str
    num_bytes: int | None
    runs: tuple[Run, ...]
    damages: tuple[Damage, ...]

    @property
    def num_good(self) -> int:
        """The number of records that can be read."""
        return sum(run.num_records for run in self.runs)


def open_split(data_dir: str, split: str, on_corrupt: str) -> Split:
    """Opens a split with all its records, or with `on_corrupt` "skip" its good records."""
    return open_good(data_dir, split) if on_corrupt == SKIP else records.open_split(data_dir, split)


def open_good(data_dir: str, split: str) -> Split:
    """The good records of `split`; its `damages` are the other records.

    The first time, every byte is read, and the result is saved as `.{split}.damage.json`. It is
    used until the size or modification time of a file or of the index changes, or dataset_info.json
    has other lengths. A damaged split is walked at each opening; if that takes long, copy it:
    `python -m data.inspect --data_dir=DIR --repair=NEW_DIR`.
    """
    data_dir = os.fspath(data_dir)
    reports = _saved_or_examined(data_dir, split)
    damages = tuple(damage for report in reports for damage in report.damages)
    if not damages:
        return records.open_split(data_dir, split)
    for damage in damages:
        if damage.num_records is None:
            raise DataError(
                f"{damage}. How many records are lost with it cannot be counted: neither "
                "dataset_info.json nor an index from before tells. Copy the file again; or copy "
                f"the other records: python -m data.inspect --data_dir={data_dir} --repair=NEW_DIR"
            )
    runs = [(report, run) for report in reports for run in report.runs]
    if not runs:
        raise DataError(f"No record of split {split!r} in {data_dir} can be read: {damages[0]}.")
    num_bytes = sum(run.end - run.begin for _, run in runs)
    num_good = sum(report.num_good for report in reports)
    chunk_examples = records.chunk_examples_for(num_good, num_bytes)
    shards = []
    for report, run in runs:
        file, starts = (report.path, report.num_bytes or 0), _starts(report.path, run)
        shards.append(records.shard_of(*file, starts, chunk_examples, run.first_record, run.end))
    return Split(split, tuple(shards), chunk_examples, damages)


def _starts(path: str, run: Run) -> Int64s:
    try:
        with files.open_file(path) as file:
            return frames.walk(file, path, run.begin, run.end, run.first_record)
    except BadRecord as error:
        raise DataError(f"{error.damage}: it was changed while it was read.") from None


def readable(items: Iterable[T]) -> Iterator[T]:
    """Yields what is made of records; a damaged record is a DataError."""
    try:
        yield from items
    except BadRecord as error:
        raise DataError(
            f"Records are corrupt ({error.damage}). To name all of them: "
            "python -m data.inspect --data_dir=DIR --verify"
        ) from None


def examine(data_dir: str, split: str) -> list[ShardReport]:
    """Reads every byte of `split`; missing and truncated files are damage too."""
    paths = names.shard_paths(data_dir, split, missing_too=True)
    announced = names.shard_lengths_announced(data_dir, split)
    index = records.load_index(data_dir, split)
    indexed = {shard.path: shard for shard in index.shards} if index else {}
    reports = []
    for number, path in enumerate(paths):
        chunks: list[tuple[int, int]] = []
        num_expected = None
        if index is not None and path in indexed:
            num_expected = indexed[path].num_records
            chunks = _chunks(indexed[path], index.chunk_examples)
        if announced is not None and len(announced) == len(paths):
            num_expected = announced[number]
        report, _ = _examine_shard(path, chunks, num_expected)
        if report.num_bytes and not report.runs:
            frames.refuse_compressed(path, data_dir)
        reports.append(report)
    return reports


def verify(split: Split) -> list[Damage]:
    """Reads every byte of an opened split; returns the damage that it does not leave out.

    A file whose size has changed is not read. An index that does not fit a complete file is damage.
    """
    damages = records.changed_files(split)
    changed = {damage.path for damage in damages}
    left_out = {(damage.path, damage.record) for damage in split.damages}
    for path, group in itertools.groupby(split.shards, lambda shard: shard.path):
        if path in changed:
            continue
        shards = list(group)
        chunks = [chunk for shard in shards for chunk in _chunks(shard, split.chunk_examples)]
        report, starts = _examine_shard(path, chunks, None)
        damages += [d for d in report.damages if (d.path, d.record) not in left_out]
        is_as_indexed = len(starts) == shards[0].num_records and np.array_equal(
            starts[:: split.chunk_examples], shards[0].offsets
        )
        if not report.damages and not is_as_indexed:
            reason = "the file is complete, but its index does not fit it: remove the index"
            damages.append(Damage(path, 0, 0, reason))
    return damages


def _chunks(shard: Shard, chunk_examples: int) -> list[tuple[int, int]]:
    """The record number and the byte offset of each chunk."""
    offsets = enumerate(shard.offsets.tolist())
    return [(shard.first_record + index * chunk_examples, offset) for index, offset in offsets]


def _examine_shard(
    path: str, chunks: list[tuple[int, int]], num_expected: int | None
) -> tuple[ShardReport, Int64s]:
    """Also returns the offsets of the first records, up to a damaged length.

    `chunks`: (record number, byte offset) of some records, from an index without damage.
    """
    size = files.num_bytes_of(path) if files.exists(path) else None
    if size is None or (size == 0 and num_expected):
        reason = "it is missing" if size is None else "it is empty"
        damage = Damage(path, 0, 0, reason, num_expected)
        return ShardReport(path, size, (), (damage,)), np.zeros(0, np.int64)
    walked, damages = _walk_over(path, size, chunks, num_expected)
    num_known = max((n + len(starts) for n, starts, _ in walked), default=0)
    if not damages and num_expected is not None and num_known < num_expected:
        reason = f"the file ends between two records; {num_expected:,} were written"
        damages.append(Damage(path, num_known, size, reason, num_expected - num_known))
    runs: list[Run] = []
    for first_record, starts, end in walked:
        bad = frames.content_damage(path, starts, first_record)
        damages += bad
        runs += _runs_between(first_record, starts, end, [damage.record for damage in bad])
    damages.sort(key=lambda damage: damage.record)
    first = walked[0][1] if walked else np.zeros(0, np.int64)
    return ShardReport(path, size, tuple(runs), tuple(damages)), first


def _walk_over(
    path: str, size: int, chunks: list[tuple[int, int]], num_expected: int | None
) -> tuple[list[tuple[int, Int64s, int]], list[Damage]]:
    """Runs of records found by headers, (first number, offsets, end), and the gaps."""
    walked: list[tuple[int, Int64s, int]] = []
    damages: list[Damage] = []
    record, begin = 0, 0
    with files.open_file(path) as file:
        while begin < size:
            try:
                starts = frames.walk(file, path, begin, size, record)
            except BadRecord as error:
                bad = error.damage
                if len(error.before):
                    walked.append((record, error.before, bad.offset))
            else:
                walked.append((record, starts, size))
                break
            for record, begin in chunks:
                follows = record > bad.record and bad.offset < begin < size
                if follows and _is_header(file, path, begin, size, record):
                    num_lost: int | None = record - bad.record
                    break
            else:
                begin = size
                num_lost = None if num_expected is None else max(1, num_expected - bad.record)
            damages.append(dataclasses.replace(bad, num_records=num_lost))
    return walked, damages


def _is_header(file: BinaryIO, path: str, begin: int, size: int, record: int) -> bool:
    try:
        frames.walk(file, path, begin, size, record)
    except BadRecord as error:
        return error.damage.offset > begin
    return True


def _runs_between(first_record: int, starts: Int64s, end: int, bad: list[int]) -> Iterator[Run]:
    bounds = np.append(starts, end)
    first = 0
    for index in [*(record - first_record for record in bad), len(starts)]:
        if index > first:
            yield Run(first_record + first, index - first, int(bounds[first]), int(bounds[index]))
        first = index + 1


def _saved_or_examined(data_dir: str, split: str) -> list[ShardReport]:
    key = _key(data_dir, split)
    saved_in = names.saved_path(data_dir, split, names.DAMAGE)
    if (saved := _load(saved_in, key, data_dir)) is not None:
        return saved
    _log.info("Verifying every record of split %r in %s, once.", split, data_dir)
    reports = examine(data_dir, split)
    if not any(report.damages for report in reports):
        _remove_foreign_index(data_dir, split, reports)
        records.open_split(data_dir, split)  # Writes the index, whose stamp is saved too.
    document = {
        **key,
        "index": _key(data_dir, split)["index"],
        "shards": [
            {
                "name": names.name_of(report.path, data_dir),
                "num_bytes": report.num_bytes,
                "runs": report.runs,
                "damages": [
                    {key: value for key, value in vars(damage).items() if key != "path"}
                    for damage in report.damages
                ],
            }
            for report in reports
        ],
    }
    path = files.join(data_dir, f".{split}{names.DAMAGE}")
    try:
        files.replace_file(path, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        why = f"{error.strerror}, so every process verifies all records again"
        _log.warning("%s was not saved (%s). Make the directory writable once.", path, why)
    return reports


def _remove_foreign_index(data_dir: str, split: str, reports: list[ShardReport]) -> None:
    """Removes an index that does not fit the records of undamaged files."""
    if (index := records.load_index(data_dir, split)) is None:
        return
    for report, shard in zip(reports, index.shards, strict=False):
        starts = [_starts(report.path, run) for run in report.runs]  # None in an empty file.
        found = np.concatenate([*starts, shard.offsets[:0]])[:: index.chunk_examples]
        if shard.num_bytes != report.num_bytes or not np.array_equal(found, shard.offsets):
            path = records.index_path(data_dir, split)
            _log.warning("%s does not fit %s, which is complete: removed.", path, report.path)
            files.remove_file(path)
            return


def _key(data_dir: str, split: str) -> dict[str, object]:
    """Saved reports are used while these facts are unchanged."""
    paths = names.shard_paths(data_dir, split, missing_too=True)
    return {
        "version": 2,  # 1 counted an empty file as damaged.
        "files": [[names.name_of(path, data_dir), *files.stamp(path)] for path in paths],
        "announced": names.shard_lengths_announced(data_dir, split),
        # After a damaged length, the index leads to the next record.
        "index": list(files.stamp(records.index_path(data_dir, split))),
    }


def _load(path: str, key: dict[str, object], data_dir: str) -> list[ShardReport] | None:
    if not files.exists(path):
        return None
    try:
        document = json.loads(files.read_text(path))
        if {name: document.get(name) for name in key} != key:
            return None
        reports = []
        for shard in document["shards"]:
            shard_path = files.join(data_dir, shard["name"])
            runs = tuple(Run(*run) for run in shard["runs"])
            damages = tuple(Damage(path=shard_path, **damage) for damage in shard["damages"])
            reports.append(ShardReport(shard_path, shard["num_bytes"], runs, damages))
        return reports
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be read (%s): verifying again.", path, error)
        return None


def also_lost(found: Damage) -> str:
    """Says how many records are lost with the damaged one; "" if none is."""
    if found.num_records is None:
        return "; an unknown number of records is lost"
    return f"; {found.num_records:,} records are lost" if found.num_records > 1 else ""
