"""What cannot be read: found, counted, and left out where that is asked for.

    for shard in examine("datasets/digits", "train"):
        print(shard.path, shard.num_good, *shard.damages)
    split = open_good("datasets/digits", "train")
    print(split.num_examples, "records;", split.num_skipped, "cannot be read")

`data.records` finds the same damage and stops. Here every byte is read, and what is left is good
records: a run of them between two bad ones is a shard to `data.order`, whose order is then a pure
function of the good records alone.

Where a length is damaged, the next record can be found only by the index that was made while the
file was whole; without it, the rest of the file is lost. Bytes that merely look like a record are
not taken for one.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO, TypeVar

import numpy as np

from data import files, frames, names, records
from data.crc import Int64s
from data.files import SKIP, DataError
from data.frames import BadRecord, Damage
from data.records import Shard, Split

T = TypeVar("T")

_VERSION = 1

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive good records of a file: their first number, how many, and which bytes."""

    first_record: int
    num_records: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """One file, read whole. `num_bytes`: None if it is missing."""

    path: str
    num_bytes: int | None
    runs: tuple[Run, ...]
    damages: tuple[Damage, ...]

    @property
    def num_good(self) -> int:
        """Records that can be read."""
        return sum(run.num_records for run in self.runs)


def open_split(data_dir: str, split: str, on_corrupt: str) -> Split:
    """`records.open_split`, or with "skip" `open_good`.

    Raises:
        DataError: as they do.
    """
    return open_good(data_dir, split) if on_corrupt == SKIP else records.open_split(data_dir, split)


def open_good(data_dir: str, split: str) -> Split:
    """The records of `split` that can be read; its `damages` say which cannot, and how many.

    Of a split without damage this is `records.open_split`. Every byte is read the first time, and
    what was found is kept as `{split}.damage.json` for as long as no file's size or time of change
    is another. The files of a damaged split are walked over at each opening: write a good copy with
    `python -m data.inspect DIR --repair=NEW_DIR` if that takes long.

    Raises:
        DataError: nothing can be read, or what is lost cannot be counted.
    """
    data_dir = os.fspath(data_dir)
    reports = _kept_or_examined(data_dir, split)
    damages = tuple(damage for report in reports for damage in report.damages)
    if not damages:
        return records.open_split(data_dir, split)
    for damage in damages:
        if damage.num_records is None:
            raise DataError(
                f"{damage}. How many records are lost with it cannot be counted: neither "
                f"dataset_info.json nor an index from before tells. Copy the file again; or write "
                f"what is left elsewhere: python -m data.inspect {data_dir} --repair=NEW_DIR"
            )
    num_good = sum(report.num_good for report in reports)
    if not num_good:
        raise DataError(f"No record of split {split!r} in {data_dir} can be read: {damages[0]}.")
    num_bytes = sum(run.end - run.begin for report in reports for run in report.runs)
    chunk_examples = records.chunk_examples_for(num_good, num_bytes)
    shards = []
    for report in reports:
        for run in report.runs:
            assert report.num_bytes is not None
            starts = _starts(report.path, run)
            shards.append(
                Shard(
                    report.path,
                    report.num_bytes,
                    run.num_records,
                    np.ascontiguousarray(starts[::chunk_examples]),
                    records.frame_bytes_of(starts, run.end),
                    run.first_record,
                    run.end,
                )
            )
    return Split(split, tuple(shards), chunk_examples, damages)


def _starts(path: str, run: Run) -> Int64s:
    try:
        with files.open_file(path) as file:
            return frames.walk(file, path, run.begin, run.end, run.first_record)
    except BadRecord as error:
        raise DataError(f"{error.damage}: it was changed meanwhile.") from None


def readable(items: Iterable[T]) -> Iterator[T]:
    """What a dataset of records yields.

    Raises:
        DataError: in place of TensorFlow's error where a record is corrupt.
    """
    import tensorflow as tf

    try:
        yield from items
    except tf.errors.DataLossError as error:
        raise DataError(
            f"Records are corrupt ({error.message.splitlines()[0]}). To name all of them: "
            "python -m data.inspect DIR --verify"
        ) from None


def examine(data_dir: str, split: str) -> list[ShardReport]:
    """Reads every byte of `split`; what of each file is good, and what is not.

    Files that are missing, empty or cut short are damage too.

    Raises:
        DataError: there is no such split, or it is compressed.
    """
    paths = names.shard_paths(data_dir, split, missing_too=True)
    announced = names.shard_lengths_announced(data_dir, split)
    index = records.load_index(records.index_path(data_dir, split))
    by_name = dict(zip(index.names, range(len(index.names)), strict=True)) if index else {}
    reports = []
    for number, path in enumerate(paths):
        chunks: list[tuple[int, int]] = []
        num_expected = None
        indexed = by_name.get(os.path.basename(path))
        if index is not None and indexed is not None:
            num_expected = index.num_records[indexed]
            offsets = index.offsets[indexed].tolist()
            chunks = [(i * index.chunk_examples, offset) for i, offset in enumerate(offsets)]
        if announced is not None and len(announced) == len(paths):
            num_expected = announced[number]
        reports.append(_examine_shard(path, chunks, num_expected))
    return reports


def _examine_shard(
    path: str, chunks: list[tuple[int, int]], num_expected: int | None
) -> ShardReport:
    """`chunks`: record number and byte offset of some records, from before any damage."""
    if not files.exists(path):
        return ShardReport(path, None, (), (Damage(path, 0, 0, "it is missing", num_expected),))
    size = files.num_bytes_of(path)
    if size == 0:
        return ShardReport(path, 0, (), (Damage(path, 0, 0, "it is empty", num_expected),))
    walked, damages = _walk_over(path, size, chunks, num_expected)
    num_known = max((n + len(starts) for n, starts, _ in walked), default=0)
    if not damages and num_expected is not None and num_known < num_expected:
        reason = f"the file ends between two records; {num_expected:,} were written"
        damages.append(Damage(path, num_known, size, reason, num_expected - num_known))
    runs: list[Run] = []
    for first_record, starts, end in walked:
        numbers = first_record + np.arange(len(starts))
        bad = frames.content_damage(path, starts, numbers)
        damages += bad
        runs += _runs_between(first_record, starts, end, [damage.record for damage in bad])
    damages.sort(key=lambda damage: damage.record)
    return ShardReport(path, size, tuple(runs), tuple(damages))


def _walk_over(
    path: str, size: int, chunks: list[tuple[int, int]], num_expected: int | None
) -> tuple[list[tuple[int, Int64s, int]], list[Damage]]:
    """Runs of records that headers lead to (first number, where each begins, end), and the gaps."""
    walked: list[tuple[int, Int64s, int]] = []
    damages: list[Damage] = []
    record, begin = 0, 0
    with files.open_file(path) as file:
        while begin < size:
            try:
                starts = frames.walk(file, path, begin, size, record)
            except BadRecord as error:
                bad = error.damage
                if bad.record == 0:
                    frames.refuse_gzip(path)
                if len(error.before):
                    walked.append((record, error.before, bad.offset))
            else:
                walked.append((record, starts, size))
                break
            following = [
                (number, offset)
                for number, offset in chunks
                if number > bad.record and bad.offset < offset < size
            ]
            for record, begin in following:
                if _is_header(file, path, begin, size, record):
                    num_lost: int | None = record - bad.record
                    break
            else:
                begin = size
                num_lost = None if num_expected is None else max(1, num_expected - bad.record)
            damages.append(dataclasses.replace(bad, num_records=num_lost))
    return walked, damages


def _is_header(file: BinaryIO, path: str, begin: int, size: int, record: int) -> bool:
    """Whether a record begins there, by the CRC of its length."""
    try:
        frames.walk(file, path, begin, size, record)
    except BadRecord as error:
        return error.damage.offset > begin
    return True


def _runs_between(first_record: int, starts: Int64s, end: int, bad: list[int]) -> Iterator[Run]:
    """The runs that are left of consecutive records without the bad ones."""
    bounds = np.append(starts, end)
    first = 0
    for index in [*(record - first_record for record in bad), len(starts)]:
        if index > first:
            yield Run(first_record + first, index - first, int(bounds[first]), int(bounds[index]))
        first = index + 1


def _kept_or_examined(data_dir: str, split: str) -> list[ShardReport]:
    """`examine`, or what it found before in the same files."""
    path = files.join(data_dir, f"{split}.damage.json")
    key = _key(data_dir, split)
    kept = _load(path, key, data_dir)
    if kept is not None:
        return kept
    _log.info("Verifying every record of split %r in %s, once.", split, data_dir)
    reports = examine(data_dir, split)
    if not any(report.damages for report in reports):
        _remove_foreign_index(data_dir, split, reports)
        records.open_split(data_dir, split)  # Makes the index, whose stamp is kept too.
    document = {
        **key,
        "index": _index_stamp(data_dir, split),
        "shards": [
            {
                "name": os.path.basename(report.path),
                "num_bytes": report.num_bytes,
                "runs": [dataclasses.astuple(run) for run in report.runs],
                "damages": [
                    {key: value for key, value in vars(damage).items() if key != "path"}
                    for damage in report.damages
                ],
            }
            for report in reports
        ],
    }
    try:
        files.replace_file(path, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        _log.warning(
            "What is damaged in %s was not kept (%s): every process that opens it verifies all "
            "records again. Make the directory writable once.",
            data_dir,
            error.strerror,
        )
    return reports


def _remove_foreign_index(data_dir: str, split: str, reports: list[ShardReport]) -> None:
    """An index that does not lead to the records of whole files is of other files."""
    path = records.index_path(data_dir, split)
    index = records.load_index(path)
    if index is None:
        return
    for report, num_bytes, offsets in zip(reports, index.num_bytes, index.offsets, strict=False):
        (run,) = report.runs
        found = _starts(report.path, run)[:: index.chunk_examples]
        if num_bytes != report.num_bytes or not np.array_equal(found, offsets):
            _log.warning("%s does not fit %s, which is whole: removed.", path, report.path)
            files.remove_file(path)
            return


def _key(data_dir: str, split: str) -> dict[str, object]:
    """What must be the same for what was found to be still true."""
    paths = names.shard_paths(data_dir, split, missing_too=True)
    return {
        "version": _VERSION,
        "files": [[os.path.basename(path), *files.stamp(path)] for path in paths],
        "announced": names.shard_lengths_announced(data_dir, split),
        # Behind a damaged length it is what leads to the next record.
        "index": _index_stamp(data_dir, split),
    }


def _index_stamp(data_dir: str, split: str) -> list[int]:
    return list(files.stamp(records.index_path(data_dir, split)))


def _load(path: str, key: dict[str, object], data_dir: str) -> list[ShardReport] | None:
    """The kept reports, or None where there are none for these files."""
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be read (%s): verifying again.", path, error)
        return None
    return reports
