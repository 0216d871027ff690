"""What a data set was made from: sizes and times of the source's files, and options.

    now = origin("csv:a", options, "train.csv", "datasets/a")
    changes(then, now)      # ["train.csv was 1 file(s) of 9 bytes, changed ..., and is now ..."]

`data.prepare` keeps it as source.json in the data set.
"""

import datetime
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from data.prepare.catalog import files_read
from data.prepare.sources import Options, is_ignored
from data.system import files

FILE_NAME = "source.json"
Origin: TypeAlias = Mapping[str, Any]  # A JSON object: "options" and "files".


def origin(name: str, options: Options, source: str | None, data_dir: str) -> Origin:
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
        patterns = files_read(name, options)
        for entry in sorted(files.names_in(source)):
            path = files.join(source, entry)
            if any(fnmatch.fnmatch(entry.lower(), pattern.lower()) for pattern in patterns):
                stamps = list(_stamps(path, data_dir))
                if stamps:
                    num_bytes, times = map(list, zip(*stamps, strict=True))
                    found[entry] = [len(stamps), sum(num_bytes), max(times)]
    return {"options": options.complete(), "files": found}


def changes(then: Origin, now: Origin) -> list[str]:
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


def _stamps(path: str, data_dir: str) -> Iterator[tuple[int, int]]:
    if is_ignored(os.path.basename(path)) or files.absolute(path) == data_dir:
        return
    if files.is_url(path) or not os.path.isdir(path):
        yield files.stamp(path)
        return
    for directory, directories, names in os.walk(path):
        directories[:] = [
            name
            for name in directories
            if not is_ignored(name) and files.absolute(os.path.join(directory, name)) != data_dir
        ]
        for name in names:
            if not is_ignored(name):
                yield files.stamp(os.path.join(directory, name))


def _describe(entry: Sequence[int] | None) -> str:
    if entry is None:
        return "missing"
    count, num_bytes, time_ns = entry
    seconds, nanoseconds = divmod(time_ns, 10**9)
    time = datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"{count:,} file(s) of {num_bytes:,} bytes, changed {time}.{nanoseconds:09}"
