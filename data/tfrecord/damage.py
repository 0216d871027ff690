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
from shlex import quote
from typing import NamedTuple

import numpy as np

from data.system import files
from data.system.files import DataError
from data.tfrecord import framing as frames
from data.tfrecord import shard_names as names
from data.tfrecord import split as records
from data.tfrecord.crc import FRAME_BYTES, HEADER_BYTES, Int64s
from data.tfrecord.framing import Damage
from data.tfrecord.split import Shard, Split

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


def open_good(data_dir: str, split: str) -> Split:
    """The good records of `split`; its `damages` are the other records.

    The first time, every byte is read, and the result is saved as `.{split}.damage.json`. It is
    used until the size or modification time of a file or of the index changes, or dataset_info.json
    has other lengths. A damaged split is walked at each opening; if that takes long, copy it:
    `python -m data.inspect --data_dir=DIR --repair=NEW_DIR`.
    """
    reports = _saved_or_examined(data_dir, split)
    damages = tuple(damage for report in reports for damage in report.damages)
    if not damages:
        return records.open_split(data_dir, split)
    for damage in damages:
        if damage.num_records is None:
            raise DataError(
                f"{damage}, and cannot be counted: neither dataset_info.json nor an index from "
                "before tells. Copy the file again; or copy "
                f"the other records: python -m data.inspect --data_dir={quote(data_dir)} "
                "--repair=NEW_DIR"
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
    return records.record_starts(path, run.end, files.parent(path), run.begin, run.first_record)


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
        report = _examine_shard(path, chunks, num_expected)
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
        report = _examine_shard(path, chunks, None)
        damages += [d for d in report.damages if (d.path, d.record) not in left_out]
        if not report.damages and not _is_indexed(report, shards[0], split.chunk_examples):
            reason = "the file is complete, but its index does not fit it: remove the index"
            damages.append(Damage(path, 0, 0, reason))
    return damages


def _chunks(shard: Shard, chunk_examples: int) -> list[tuple[int, int]]:
    """The record number and the byte offset of each chunk."""
    offsets = enumerate(shard.offsets.tolist())
    return [(shard.first_record + index * chunk_examples, offset) for index, offset in offsets]


def _examine_shard(
    path: str, chunks: list[tuple[int, int]], num_expected: int | None
) -> ShardReport:
    """`chunks`: (record number, byte offset) of some records, from an index without damage."""
    size = files.num_bytes_of(path) if files.exists(path) else None
    if size is None or (size == 0 and num_expected):
        reason = "it is missing" if size is None else "it is empty"
        return ShardReport(path, size, (), (Damage(path, 0, 0, reason, num_expected),))
    runs: list[Run] = []
    damages: list[Damage] = []
    record = at = first = begin = 0  # `first`, `begin`: of the run of good records at `record`.
    are_counted = True
    with frames.buffered(path) as file:
        while at < size:
            end = frames.end_of(file, at)
            is_inside = at < end <= size
            length = end - at - FRAME_BYTES
            if is_inside and frames.read_data(file, length, keeps=False) is not None:
                record, at = record + 1, end
                continue
            if record > first:
                runs.append(Run(first, record - first, begin, at))
            if is_inside:
                reason, following, begin = "the data does not fit its CRC", record + 1, end
            else:
                is_cut = end > 0 or size - at < HEADER_BYTES
                reason = frames.CUT_SHORT.format(size) if is_cut else frames.NO_LENGTH
                are_counted, begin = False, size
                following = max(record + 1, num_expected or 0)
                for number, offset in chunks:
                    is_after = number > record and at < offset < size
                    if is_after and offset < frames.end_of(file, offset) <= size:
                        following, begin = number, offset
                        break
            is_known = num_expected is not None or is_inside or begin < size
            num_lost = following - record if is_known else None
            damages.append(Damage(path, record, at, reason, num_lost))
            record = first = following
            at = begin
    if record > first:
        runs.append(Run(first, record - first, begin, at))
    if are_counted and num_expected is not None and record < num_expected:
        reason = f"the file ends between two records; {num_expected:,} were written"
        damages.append(Damage(path, record, size, reason, num_expected - record))
    return ShardReport(path, size, tuple(runs), tuple(damages))


def _is_indexed(report: ShardReport, shard: Shard, chunk_examples: int) -> bool:
    """Returns True if an index, which has `shard`, fits the records of an undamaged file."""
    starts = [_starts(report.path, run) for run in report.runs]  # None in an empty file.
    found = np.concatenate([*starts, shard.offsets[:0]])[::chunk_examples]
    counts = shard.num_bytes, shard.num_records
    return counts == (report.num_bytes, report.num_good) and np.array_equal(found, shard.offsets)


def _saved_or_examined(data_dir: str, split: str) -> list[ShardReport]:
    key = _key(data_dir, split)
    saved_in = names.saved_path(data_dir, split, names.DAMAGE)
    if (saved := _load(saved_in, key, data_dir)) is not None:
        return saved
    _log.info("Verifying every record of split %r in %s, once.", split, data_dir)
    reports = examine(data_dir, split)
    if not any(report.damages for report in reports):
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
