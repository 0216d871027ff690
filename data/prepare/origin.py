"""What a data set was made from: sizes and times of the source's files, and options.

    now = origin(options, "train.csv", "train.csv", ("*.csv",), "datasets/a")
    changes(then, now)      # ["train.csv was 1 file(s) of 9 bytes, changed ..., and is now ..."]

`data.prepare` keeps it as source.json in the data set.
"""

import datetime
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from data.prepare.sources import Options
from data.system import files

FILE_NAME = "source.json"
Origin: TypeAlias = Mapping[str, Any]  # A JSON object: "options" and "files".
_IGNORED = ("Thumbs.db", "desktop.ini")  # Written by programs that only show a directory.


def origin(
    options: Options,
    source: str | None,
    file: str | None,
    patterns: Sequence[str],
    data_dir: str,
) -> Origin:
    """The files and directories directly in directory `source` whose names fit `patterns`.

    If `source` is no directory: `file`, which it names; if it is None, no files. Of a directory,
    the total of all files below it counts. `data_dir` does not count: it may be below `source`.
    """
    found: dict[str, list[int]] = {}
    if source is not None and not files.is_dir(source):
        found[os.path.basename(source)] = [1, *files.stamp(file or source)]
    elif source is not None:
        for name in sorted(files.names_in(source)):
            path = files.join(source, name)
            if any(fnmatch.fnmatch(name.lower(), pattern.lower()) for pattern in patterns):
                stamps = list(_stamps(path, data_dir))
                if stamps:
                    num_bytes, times = map(list, zip(*stamps, strict=True))
                    found[name] = [len(stamps), sum(num_bytes), max(times)]
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
    if _is_ignored(os.path.basename(path)) or files.absolute(path) == data_dir:
        return
    if files.is_url(path) or not os.path.isdir(path):
        yield files.stamp(path)
        return
    for directory, directories, names in os.walk(path):
        directories[:] = [
            name
            for name in directories
            if not _is_ignored(name) and files.absolute(os.path.join(directory, name)) != data_dir
        ]
        for name in names:
            if not _is_ignored(name):
                yield files.stamp(os.path.join(directory, name))


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name in _IGNORED


def _describe(entry: Sequence[int] | None) -> str:
    if entry is None:
        return "missing"
    count, num_bytes, time_ns = entry
    seconds, nanoseconds = divmod(time_ns, 10**9)
    time = datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"{count:,} file(s) of {num_bytes:,} bytes, changed {time}.{nanoseconds:09}"
