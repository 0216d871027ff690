"""Sources -> TFRecord shards.

    python -m data.prepare digits
    python -m data.prepare mnist --source=DIR            # any set of IDX files, by any name
    python -m data.prepare tfds:cifar10
    python -m data.prepare rewrite --source=DIR --out=OTHER_DIR

Written to datasets/NAME (--out=DIR changes that): shards with their index, and the metadata with
which `tfds.builder_from_directory` reads them too. Equal sources give equal bytes. A directory that
has its name is whole: everything is written beside it first, then renamed. Who comes second, in the
same moment or later, finds it done.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from absl import app, flags

from data import records
from data.records import DataError
from data.sources import Source, digits, idx, rewrite, tfds

_SHARD_BYTES = 128 << 20
_REPORT_EXAMPLES = 100_000


def prepare(name: str, out: str, source: str | None = None) -> None:
    """Make sure that `out` holds the data set `name`, whole; writes it only if it is not there.

    May be called by several processes at once, on several hosts that share a file system with
    locks: one writes, the others wait. Progress goes to stderr.

    Raises:
        DataError: the name or the source is wrong, or `out` holds something else.
    """
    out = os.path.abspath(out)
    if _is_prepared(name, out):
        _say(f"{out} already holds {name}: nothing to do. To write it again, remove it first.")
        return
    parent, base = os.path.split(out)
    os.makedirs(parent, exist_ok=True)
    with _lock(os.path.join(parent, f".{base}.lock"), f"{name} in {out}"):
        if _is_prepared(name, out):
            _say(f"{out} was written by another process meanwhile.")
            return
        # Whoever has the lock is the only one, so what lies here is of a process that was killed.
        partial = os.path.join(parent, f".{base}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _write(_open_source(name, source), partial)
            os.rename(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _say(f"{out} holds {name}.")


def _open_source(name: str, directory: str | None) -> Source:
    if name == "digits":
        return digits.source()
    if name == "rewrite":
        return rewrite.source(directory)
    kind, colon, rest = name.partition(":")
    if kind == "tfds" and rest:
        return tfds.source(rest, directory, quiet=not sys.stderr.isatty())
    if colon or not name.replace("_", "").replace("-", "").isalnum():
        raise DataError(
            f"There is no data set {name!r}. Known: digits, mnist, fashion_mnist, any name with "
            "--source=DIR of IDX files, tfds:NAME, rewrite."
        )
    if directory is None and name not in idx.DOWNLOADS:
        raise DataError(
            f"{name!r} is not a data set that can be made from nothing. Known: digits, "
            f"{', '.join(idx.DOWNLOADS)}, tfds:NAME. If you have it as IDX files: "
            f"python -m data.prepare {name} --source=DIR"
        )
    return idx.source(name, directory)


def _is_prepared(name: str, out: str) -> bool:
    """Whether `out` is a finished directory of this data set.

    Raises:
        DataError: it is something else, which must not be overwritten.
    """
    try:
        with open(os.path.join(out, "dataset_info.json"), encoding="utf-8") as file:
            info = json.load(file)
    except NotADirectoryError:
        raise DataError(f"{out} is a file. Give another --out, or remove it.") from None
    except FileNotFoundError:
        if os.path.isdir(out) and os.listdir(out):
            raise DataError(
                f"{out} is not empty, and holds no data set that this program wrote. Give another "
                f"directory (--out=DIR), or remove it: rm -r {out}"
            ) from None
        return False
    except ValueError:
        raise DataError(
            f"{out}/dataset_info.json is not JSON. Remove the directory and prepare it again: "
            f"rm -r {out}"
        ) from None
    # "mnist" from IDX files and "tfds:mnist/3.0.1" are the same data set.
    wanted = name.removeprefix("tfds:").partition("/")[0].partition(":")[0]
    if name != "rewrite" and info.get("name") != wanted:
        raise DataError(
            f"{out} holds {info.get('name')!r}, not {wanted!r}. Give another directory "
            f"(--out=DIR), or remove it: rm -r {out}"
        )
    return True


def _write(source: Source, out: str) -> None:
    """Shards, indexes and metadata of every split, into a directory that is not there yet."""
    os.makedirs(out)
    split_infos = []
    for split_name, split in sorted(source.splits.items()):
        num_shards = max(1, math.ceil(split.num_bytes / _SHARD_BYTES))
        written = records.write_shards(
            _reported(split.examples(), split.num_examples, split_name),
            out,
            source.name,
            split_name,
            num_shards,
            split.num_examples,
        )
        framing = records.HEADER_BYTES + records.FOOTER_BYTES
        num_bytes = sum(s.num_bytes - framing * s.num_records for s in written.shards)
        split_infos.append(
            {
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "name": split_name,
                "numBytes": str(num_bytes),
                "shardLengths": [str(length) for length in written.shard_lengths],
            }
        )
    info = {
        "fileFormat": "tfrecord",
        "name": source.name,
        "splits": split_infos,
        "version": "1.0.0",
    }
    for file_name, text in [
        *source.files.items(),
        ("dataset_info.json", json.dumps(info, indent=2) + "\n"),
    ]:
        with open(os.path.join(out, file_name), "w", encoding="utf-8") as file:
            file.write(text)


def _reported(examples: Iterable[bytes], total: int, split: str) -> Iterator[bytes]:
    """The examples, with a bar on a terminal, and a line now and then elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(examples, split, total, console=Console(stderr=True))
        return
    for count, example in enumerate(examples, 1):
        yield example
        if count % _REPORT_EXAMPLES == 0:
            _say(f"{split}: {count:,} of {total:,} examples")
    _say(f"{split}: {total:,} examples")


@contextlib.contextmanager
def _lock(path: str, what: str) -> Iterator[None]:
    """Held by one process at a time, and given back when the process ends, however it ends."""
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"Another process is writing {what}: waiting for it.")
                fcntl.flock(file, fcntl.LOCK_EX)
            # Who held it before has removed the file, and a third may have made a new one.
            if not _is_at(file, path):
                continue
            try:
                yield
            finally:
                os.remove(path)
            return


def _is_at(file: IO[str], path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        got = " ".join(argv[1:]) or "nothing"
        print(f"One NAME is needed, Received: {got}.\n\n{__doc__}", file=sys.stderr)
        return 2
    name = argv[1]
    try:
        prepare(name, flags.FLAGS.out or os.path.join("datasets", name), flags.FLAGS.source)
    except DataError as error:
        _say(f"data.prepare: {error}")
        return 2
    except OSError as error:
        _say(f"data.prepare: {error}. Nothing was written.")
        return 2
    return 0


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)  # type: ignore[no-any-return]
    except flags.Error as error:
        _say(f"data.prepare: {error}. --help lists the flags.")
        sys.exit(2)


if __name__ == "__main__":
    # Here, so that who imports this module does not get the flags.
    flags.DEFINE_string("source", None, "Directory of the files it is made from.")
    flags.DEFINE_string("out", None, "Directory to write; datasets/NAME by default.")
    app.run(_main, flags_parser=_parse_flags)
