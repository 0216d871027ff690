"""Writes a data set to a directory, complete or not at all.

    prepare("digits", "datasets/digits")
    write_new("datasets/b", "a copy of a", lambda: source)
    lines = repair("datasets/digits", ["train", "test"], "datasets/digits-repaired")

Several processes may call these functions at the same moment: one writes, the others wait for it.
"""

import contextlib
import datetime
import fnmatch
import functools
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from data.prepare import writing
from data.prepare.catalog import bare_name, check, files_read, open_source
from data.prepare.progress import progress
from data.prepare.sources import Options, Source, SourceSplit, is_ignored, joined, rewrite
from data.system import files, object_store
from data.system.cores import num_cores
from data.system.files import DataError
from data.system.locks import locked
from data.system.scratch import scratch_dir
from data.tfrecord import damage
from data.tfrecord.crc import FRAME_BYTES
from data.tfrecord.framing import read_records

_INFO = "dataset_info.json"  # Marks a directory as complete.
_ORIGIN = "source.json"  # What a data set was made from.
_SHARD_BYTES = 128 << 20
_MAX_PROCESSES = 8
_SHOWN_CHANGES = 5
# Never a command that removes the directory: it may hold files that this program did not write.
_GIVE_ANOTHER = "Give another directory: --data_dir=DIR."
_Origin: TypeAlias = Mapping[str, Any]  # A JSON object: "options" and "files".


def prepare(
    name: str,
    data_dir: str,
    source: str | None = None,
    options: Options | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes the data set `name` to `data_dir`, unless it is there already.

    With `overwrite` it is written in any case. The former data set is removed when the new one is
    complete; at a URL it is removed before. If `options` is None, a data set that was written with
    any options is accepted.

    Several processes may call this at once, on several hosts that share a file system with locks.
    A URL has no locks: only one process may write to it. Progress goes to stderr.
    """
    given = options or Options()
    check(name, given)
    if source and files.is_s3(source):
        raise DataError(
            f"--source={source} cannot be read: a source must be local files. Type, for example: "
            f"aws s3 cp --recursive {source} DIR, and give --source=DIR."
        )
    data_dir = files.absolute(data_dir)
    if source and files.absolute(source) == data_dir:
        raise DataError(f"--source={source} is the directory to write, too. {_GIVE_ANOTHER}")

    is_done = functools.partial(_is_prepared, name, data_dir, source, options, overwrite)
    if is_done():
        _say(f"{data_dir} already holds {name}. Add --overwrite to write it again.")
        return

    def make_source() -> Source:
        # Before it is read: what changes meanwhile differs from this afterwards.
        now = _origin(name, given, source, data_dir)
        opened = open_source(name, source, given)
        text = json.dumps(now, indent=2) + "\n"
        return opened._replace(files={**opened.files, _ORIGIN: text})

    write_new(data_dir, name, make_source, is_done, overwrite=overwrite)


def write_new(
    data_dir: str,
    what: str,
    make_source: Callable[[], Source],
    is_done: Callable[[], bool] = lambda: False,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a source to `data_dir`, completely or not at all.

    A local directory is written under another name and renamed. A directory at a URL cannot be
    renamed in one operation, so dataset_info.json, which marks it as complete, is written last. For
    s3:// all is written to TMPDIR first.
    `is_done` returns True if another process has written `data_dir`. `what`: named in messages.
    `overwrite`: a data set that is there is replaced.
    """
    data_dir = files.absolute(data_dir)
    partial = data_dir = data_dir if files.is_url(data_dir) else os.path.realpath(data_dir)
    with contextlib.ExitStack() as stack:
        if files.is_s3(data_dir):
            partial = stack.enter_context(scratch_dir())
        elif not files.is_url(data_dir):
            parent, base = os.path.split(data_dir)
            partial = os.path.join(parent, f".{base}.partial")
            stack.enter_context(_directory(parent))
            lock = os.path.join(parent, f".{base}.lock")
            wait = f"Another process is writing {what} in {data_dir}: waiting for it."
            stack.enter_context(locked(lock, functools.cache(lambda: _say(wait))))
            stack.callback(os.remove, lock)
            # This process has the lock, so a directory that exists is left of a process that died.
            replaced = os.path.join(parent, f".{base}.replaced")
            files.remove_tree(partial)
            files.remove_tree(replaced)
        if is_done():
            _say(f"{data_dir} was written by another process meanwhile.")
            return
        to_remove = _files_of_former(data_dir) if overwrite else []
        source = make_source()
        for note in (*source.notes, *_notes_on_splits(source)):
            _say(note)
        try:
            if partial == data_dir:
                for path in to_remove:
                    files.remove_file(path)
            _write(source, partial)
            if files.is_s3(data_dir):
                for path in to_remove:
                    files.remove_file(path)
                for file in sorted(os.listdir(partial), key=lambda file: file == _INFO):
                    object_store.upload(os.path.join(partial, file), files.join(data_dir, file))
            elif partial != data_dir:
                if to_remove:
                    os.rename(data_dir, replaced)
                os.rename(partial, data_dir)
                files.remove_tree(replaced)
        except BaseException:
            files.remove_tree(partial)
            raise
    _say(f"{data_dir} holds {what}.")


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
        lines += [f"  {item}" for item in found]
        if num_good:
            good[name] = _good_split(shards, num_good)
    if not good:
        raise DataError(f"No record in {data_dir} can be read.\n" + "\n".join(lines))
    source = Source(
        rewrite.name_in(data_dir, next(iter(good))), good, rewrite.metadata_files(data_dir)
    )
    write_new(out, f"the readable records of {data_dir}", lambda: source)
    return lines


def _good_split(shards: Sequence[damage.ShardReport], num_good: int) -> SourceSplit:
    runs = [(shard.path, run) for shard in shards for run in shard.runs]

    def records_of(number: int, low: int, high: int) -> Iterator[bytes]:
        path, run = runs[number]
        found = read_records(path, run.begin, run.end, run.first_record)
        return itertools.islice(found, low, high)

    return SourceSplit(
        num_good,
        sum(run.end - run.begin for _, run in runs),
        joined([run.num_records for _, run in runs], records_of),
    )


def _is_prepared(
    name: str, data_dir: str, source: str | None, options: Options | None, overwrite: bool
) -> bool:
    """Returns True if `data_dir` holds this data set completely, False if it is to be written.

    Raises DataError if it holds something else, or was made from other files or options.
    """
    try:
        info = json.loads(files.read_text(files.join(data_dir, _INFO)))
    except NotADirectoryError:
        raise DataError(f"{data_dir} is a file. {_GIVE_ANOTHER}") from None
    except FileNotFoundError:
        if files.is_dir(data_dir) and files.names_in(data_dir):
            raise DataError(
                f"{data_dir} is not empty, and holds no data set that this program wrote. "
                f"{_GIVE_ANOTHER}"
            ) from None
        return False
    except ValueError:
        raise DataError(
            f"{data_dir}/dataset_info.json is not JSON. {_GIVE_ANOTHER} Or remove it first."
        ) from None
    # "mnist" from IDX files and "tfds:mnist/3.0.1" are the same data set.
    wanted = bare_name(name)
    if name == "rewrite":
        if source is None or not files.exists(source):
            return not overwrite
        wanted = rewrite.name_in(source, options=options)
    if (found := _name_in(info)) != wanted:
        raise DataError(f"{data_dir} holds {found!r}, not {wanted!r}. {_GIVE_ANOTHER}")
    if overwrite:
        return False
    try:
        then = json.loads(files.read_text(files.join(data_dir, _ORIGIN)))
        then = {"options": dict(then["options"]), "files": dict(then["files"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return True  # Of another program, or of a former version: nothing is known.
    now = dict(_origin(name, options or Options(), source, data_dir))
    if options is None:
        now["options"] = then["options"]
    if source is None:
        now["files"] = then["files"]
    if changed := _changes(then, now):
        more = f"; and {len(changed) - _SHOWN_CHANGES} more" * (len(changed) > _SHOWN_CHANGES)
        raise DataError(
            f"{data_dir} holds {name}, but not of this source and these options: "
            f"{'; '.join(changed[:_SHOWN_CHANGES])}{more}. Add --overwrite to write it again; or, "
            f"to keep it, give the former options and leave --source out. {_GIVE_ANOTHER}"
        )
    return True


def _name_in(info: object) -> object:
    """The name of a data set in its dataset_info.json; None if there is none."""
    return info.get("name") if isinstance(info, dict) else None


def _origin(name: str, options: Options, source: str | None, data_dir: str) -> _Origin:
    """Describes the options, and the number, size and last change of the files in `source`.

    These are the files and directories directly in directory `source` that data set `name` reads; a
    directory has the total of all files below it. `data_dir` may be below it, and is left out. If
    `source` is no directory, it is one file; if it is None, there are no files.
    """
    found: dict[str, list[int]] = {}
    if source is not None and not files.is_dir(source):
        is_function = name.startswith("python:")  # FILE.py:FUNCTION
        file = source.rpartition(":")[0] if is_function else source
        found[os.path.basename(source)] = [1, *files.stamp(file or source)]
    elif source is not None:
        top = files.absolute(source)
        patterns = [pattern.lower() for pattern in files_read(name, options)]

        def is_left_out(path: str) -> bool:
            entry = os.path.basename(path)
            fits = any(fnmatch.fnmatch(entry.lower(), pattern) for pattern in patterns)
            return is_ignored(entry) or (files.parent(path) == top and not fits)

        if files.is_url(top):
            every = {files.join(top, entry) for entry in files.names_in(top)} - {data_dir}
            paths = sorted(path for path in every if not is_left_out(path))
        else:
            paths = files.files_below(top, is_left_out, data_dir)
        for path in paths:
            entry = path.removeprefix(top).lstrip("/").partition("/")[0]
            count, total, latest = found.get(entry, [0, 0, -1])
            num_bytes, time_ns = files.stamp(path)
            found[entry] = [count + 1, total + num_bytes, max(latest, time_ns)]
    return {"options": options.complete(), "files": found}


def _changes(then: _Origin, now: _Origin) -> list[str]:
    """What differs, one text for each file and option."""
    differences = [
        f"--{name} was {then['options'].get(name)}, and is now {value}"
        for name, value in now["options"].items()
        if then["options"].get(name) != value
    ]
    for name in sorted(then["files"].keys() | now["files"].keys()):
        before, after = (_describe(side["files"].get(name)) for side in (then, now))
        if before != after:
            differences.append(f"{name} was {before}, and is now {after}")
    return differences


def _describe(entry: Sequence[int] | None) -> str:
    if entry is None:
        return "missing"
    count, num_bytes, time_ns = entry
    seconds, nanoseconds = divmod(time_ns, 10**9)
    time = datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"{count:,} file(s) of {num_bytes:,} bytes, changed {time}.{nanoseconds:09}"


def _files_of_former(data_dir: str) -> list[str]:
    """The files of the data set in `data_dir`. The first one marks the directory as complete."""
    if not files.exists(files.join(data_dir, _INFO)):
        return []
    name = _name_in(json.loads(files.read_text(files.join(data_dir, _INFO))))
    ours = re.compile(
        rf"(dataset_info|features|source|clicks)\.json|.*\.labels\.txt|"
        rf".*\.(index\.npz|damage\.json)(\.partial-.*)?|{re.escape(str(name))}-.*\.tfrecord.*"
    )
    names = sorted(files.names_in(data_dir), key=lambda file: file != _INFO)
    if others := [file for file in names if not ours.fullmatch(file)]:
        raise DataError(
            f"{data_dir} also holds {', '.join(others[:_SHOWN_CHANGES])}, which data.prepare did "
            f"not write: --overwrite would remove it. Move it away. {_GIVE_ANOTHER}"
        )
    return [files.join(data_dir, file) for file in names]


def _notes_on_splits(source: Source) -> Iterator[str]:
    """If there is no split "test": the flag that chooses another split for evaluation."""
    if "test" not in source.splits:
        split = next((name for name in source.splits if name != "train"), "train")
        divide = ", or give --source of the training data alone, which is then divided"
        yield (
            f"There is no split test. Train with --config.data.eval_split={split}"
            f"{divide if split == 'train' else ''}."
        )


def _write(source: Source, data_dir: str) -> None:
    files.make_dirs(data_dir)
    splits = []
    for split_name, split in sorted(source.splits.items()):
        with progress(split_name, split.num_examples, "examples") as report:
            written = writing.write_split(
                split.examples,
                data_dir,
                source.name,
                split_name,
                math.ceil(split.num_bytes / _SHARD_BYTES),
                split.num_examples,
                min(num_cores(), _MAX_PROCESSES),
                report,
            )
        if not sys.stderr.isatty():  # The bar says it.
            _say(f"{split_name}: {split.num_examples:,} examples")
        num_bytes = sum(s.num_bytes - FRAME_BYTES * s.num_records for s in written.shards)
        splits.append(
            {
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "name": split_name,
                "numBytes": str(num_bytes),
                "shardLengths": [str(length) for length in written.shard_lengths],
            }
        )
    info = {"fileFormat": "tfrecord", "name": source.name, "splits": splits, "version": "1.0.0"}
    # The last file marks the directory as complete.
    texts = {**source.files, _INFO: json.dumps(info, indent=2) + "\n"}
    for file_name, text in texts.items():
        files.replace_file(files.join(data_dir, file_name), text.encode())


@contextlib.contextmanager
def _directory(path: str) -> Iterator[None]:
    """Creates a directory and its parents; at the end removes what it created, if it is empty."""
    created = [path for path in (path, *map(str, Path(path).parents)) if not os.path.exists(path)]
    os.makedirs(path, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Not empty.
            for directory in created:
                os.rmdir(directory)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
