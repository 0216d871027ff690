"""Writes the readable records of a data set to a new directory: `data.inspect --repair`.

lines = repair("datasets/digits", ["train", "test"], "datasets/digits-repaired")
"""

import itertools
from collections.abc import Iterator, Sequence

from data.prepare.preparing import write_new
from data.prepare.sources import Source, SourceSplit, joined
from data.prepare.sources.rewrite import metadata_files, name_in
from data.system import files
from data.system.files import DataError
from data.tfrecord import damage
from data.tfrecord.framing import read_records


def repair(data_dir: str, splits: Sequence[str], out: str) -> list[str]:
    """Copies the readable records of `splits` to `out`; returns lines that say what is left out."""
    out = files.absolute(out)
    if files.exists(out) and (not files.is_dir(out) or files.names_in(out)):
        raise DataError(f"--repair={out} is there already. Give a new directory: --repair=NEW_DIR")
    reports = {name: damage.examine(data_dir, name) for name in splits}
    lines = []
    good = {}
    for name, shards in reports.items():
        num_good = sum(shard.num_good for shard in shards)
        found = [item for shard in shards for item in shard.damages]
        num_lost = sum(item.num_records or 0 for item in found)
        has_unknown = any(item.num_records is None for item in found)
        unknown = " and some that cannot be counted" if has_unknown else ""
        lines.append(f"{name}: {num_good:,} records copied, {num_lost:,}{unknown} left out")
        lines += [f"  {item}{damage.also_lost(item)}" for item in found]
        if num_good:
            good[name] = _good_split(shards, num_good)
    if not good:
        raise DataError(f"No record in {data_dir} can be read.\n" + "\n".join(lines))
    source = Source(name_in(data_dir, next(iter(good))), good, metadata_files(data_dir))
    write_new(out, f"the readable records of {data_dir}", lambda: source)
    return lines


def _good_split(shards: Sequence[damage.ShardReport], num_good: int) -> SourceSplit:
    runs = [(shard.path, run) for shard in shards for run in shard.runs]

    def records_of(number: int, low: int, high: int) -> Iterator[bytes]:
        path, run = runs[number]
        found = read_records(path, run.begin, run.end, run.first_record)
        return damage.readable(itertools.islice(found, low, high))

    return SourceSplit(
        num_good,
        sum(run.end - run.begin for _, run in runs),
        joined([run.num_records for _, run in runs], records_of),
    )
