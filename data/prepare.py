"""Sources -> TFRecord shards.

    python -m data.prepare digits
    python -m data.prepare mnist --source=DIR            # any set of IDX files, by any name
    python -m data.prepare cifar10 --source=DIR          # cifar100 and svhn too
    python -m data.prepare folder:NAME --source=DIR      # DIR/CLASS/IMAGE.png, or .jpg
    python -m data.prepare csv:NAME --source=FILE --label=COLUMN
    python -m data.prepare npz:NAME --source=FILE --label=COLUMN
    python -m data.prepare tfds:cifar10
    python -m data.prepare rewrite --source=DIR --out=OTHER_DIR

Written to datasets/NAME (--out=DIR changes that; it may be a URL): shards with their index, and the
metadata with which `tfds.builder_from_directory` reads them too. Equal sources give equal bytes. A
directory that has its name is whole: everything is written beside it first, then renamed; at a URL
it is whole when it has its dataset_info.json. Who comes second, in the same moment or later, finds
it done.

Examples are read as they are written, so memory does not grow with their number, but for 8 bytes
of each that go to the index, the paths of a folder's images and the labels of IDX and SVHN.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from absl import app, flags

from data import files, writing
from data.cores import num_cores
from data.crc import FRAME_BYTES
from data.files import DataError
from data.flags import parse_flags
from data.sources import (
    LAYOUTS,
    TEST_FRACTION,
    Options,
    Source,
    SourceSplit,
    cifar,
    csv,
    digits,
    folder,
    idx,
    npz,
    rewrite,
    svhn,
    tfds,
)

_SHARD_BYTES = 128 << 20
_REPORT_EXAMPLES = 100_000
_REFRESH_EXAMPLES = 256
_MAX_PROCESSES = 8

_IMAGES, _SPLITTING = ("layout",), ("test_fraction", "seed")
# Known names, and kinds for KIND:NAME, each with the options that mean something there.
_NAMES = {"digits": _IMAGES, "svhn": _IMAGES, **dict.fromkeys(cifar.KINDS, _IMAGES), "rewrite": ()}
_KINDS = {
    "folder": _SPLITTING,
    "csv": ("label", *_SPLITTING),
    "npz": ("label", *_SPLITTING),
    "tfds": (),
}
_KNOWN = (
    f"{', '.join((*_NAMES, *idx.DOWNLOADS))}, any name with --source=DIR of IDX files, "
    f"{', '.join(f'{kind}:NAME' for kind in _KINDS)}"
)


def prepare(
    name: str,
    out: str,
    source: str | None = None,
    options: Options | None = None,
    num_processes: int = 0,
) -> None:
    """Make sure that `out` holds the data set `name`, whole; writes it only if it is not there.

    May be called by several processes at once, on several hosts that share a file system with
    locks: one writes, the others wait. A URL has no locks: there one process must do it. Progress
    goes to stderr. The files are the same whatever `num_processes` write them; 0 is one for each
    core, at most 8, and no more than there are shards (128 MB each).

    Raises:
        DataError: the name or the source is wrong, or `out` holds something else.
    """
    options = options or Options()
    _check_options(name, options)
    out = files.absolute(out)
    if _is_prepared(name, out):
        unlike = ", whatever its options were" if options.given() else ""
        _say(f"{out} already holds {name}{unlike}: nothing to do. Remove it to write it again.")
        return
    write_new(
        out,
        name,
        lambda: open_source(name, source, options),
        lambda: _is_prepared(name, out),
        num_processes,
    )


def write_new(
    out: str,
    what: str,
    make_source: Callable[[], Source],
    is_done: Callable[[], bool],
    num_processes: int = 0,
) -> None:
    """Write a source to `out`, at once or not at all; `is_done` tells if another process has.

    At a URL a directory cannot be renamed at once: what makes it a data set, dataset_info.json, is
    written last.

    Raises:
        DataError: from `make_source`, `is_done`, or reading the source.
    """
    out = files.absolute(out)
    if files.is_url(out):
        source = make_source()
        try:
            _write(source, out, num_processes)
        except BaseException:
            files.remove_tree(out)
            raise
        _say(f"{out} holds {what}.")
        return
    parent, base = os.path.split(out)
    os.makedirs(parent, exist_ok=True)
    with _lock(os.path.join(parent, f".{base}.lock"), f"{what} in {out}"):
        if is_done():
            _say(f"{out} was written by another process meanwhile.")
            return
        # Whoever has the lock is the only one, so what lies here is of a process that was killed.
        partial = os.path.join(parent, f".{base}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _write(make_source(), partial, num_processes)
            os.rename(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _say(f"{out} holds {what}.")


def default_out(name: str) -> str:
    """datasets/NAME, without the kind: where `dataset` of a config looks for it."""
    return os.path.join("datasets", _bare_name(name))


def _bare_name(name: str) -> str:
    """NAME of KIND:NAME, and without a version: "mnist" of "tfds:mnist/3.0.1"."""
    kind, colon, rest = name.partition(":")
    bare = rest if colon and kind in _KINDS else name
    return bare.partition("/")[0].partition(":")[0]


def _check_options(name: str, options: Options) -> None:
    """Returns if every option that was given means something to this data set.

    Raises:
        DataError: one would be ignored.
    """
    kind, colon, _ = name.partition(":")
    known = _KINDS.get(kind, ()) if colon else _NAMES.get(name, _IMAGES)
    for option, value in options.given().items():
        if option not in known:
            takes = f"takes {', '.join(f'--{x}' for x in known)}" if known else "takes no options"
            raise DataError(f"--{option}={value} would be ignored: {name} {takes}. Leave it out.")


def open_source(name: str, path: str | None, options: Options) -> Source:
    """The source that the command line calls `name`, looked at but not read.

    Raises:
        DataError: there is none of that name, or its files are wrong.
    """
    kind, _, rest = name.partition(":")
    if kind in _KINDS and not rest:
        raise DataError(
            f"{kind!r} needs a name for the data set: python -m data.prepare {kind}:NAME"
        )
    if kind == "tfds":
        return tfds.source(rest, path, quiet=not sys.stderr.isatty())
    if not (rest or name).replace("_", "").replace("-", "").isalnum() or (
        rest and kind not in _KINDS
    ):
        raise DataError(f"There is no data set {name!r}. Known: {_KNOWN}.")
    if kind == "folder":
        return folder.source(rest, path, options)
    if kind == "csv":
        return csv.source(rest, path, options)
    if kind == "npz":
        return npz.source(rest, path, options)
    if name == "digits":
        return digits.source(options)
    if name == "rewrite":
        return rewrite.source(path)
    if name == "svhn":
        return svhn.source(name, path, options)
    if name in cifar.KINDS:
        return cifar.source(name, path, options)
    if path is None and name not in idx.DOWNLOADS:
        raise DataError(
            f"{name!r} is not a data set that can be made from nothing. Known: {_KNOWN}. If you "
            f"have it as IDX files: python -m data.prepare {name} --source=DIR"
        )
    return idx.source(name, path, options)


def _is_prepared(name: str, out: str) -> bool:
    """Whether `out` is a finished directory of this data set.

    Raises:
        DataError: it is something else, which must not be overwritten.
    """
    try:
        info = json.loads(files.read_text(files.join(out, "dataset_info.json")))
    except NotADirectoryError:
        raise DataError(f"{out} is a file. Give another --out, or remove it.") from None
    except FileNotFoundError:
        if files.is_dir(out) and files.names_in(out):
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
    wanted = _bare_name(name)
    if name != "rewrite" and info.get("name") != wanted:
        raise DataError(
            f"{out} holds {info.get('name')!r}, not {wanted!r}. Give another directory "
            f"(--out=DIR), or remove it: rm -r {out}"
        )
    return True


def _write(source: Source, out: str, num_processes: int) -> None:
    """Shards, indexes and metadata of every split, into a directory that has nothing yet."""
    files.make_dirs(out)
    split_infos = []
    num_processes = num_processes or _num_processes(source)
    for split_name, split in sorted(source.splits.items()):
        num_shards = _num_shards(split)
        with _reported(split_name, split.num_examples) as report:
            written = writing.write_split(
                split.examples,
                out,
                source.name,
                split_name,
                num_shards,
                split.num_examples,
                num_processes,
                report,
            )
        num_bytes = sum(s.num_bytes - FRAME_BYTES * s.num_records for s in written.shards)
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
        files.replace_file(files.join(out, file_name), text.encode())


@contextlib.contextmanager
def _reported(split: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many examples are written: a bar on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        # Without a thread of its own: processes are forked while it is shown.
        with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
            task = progress.add_task(split, total=total)

            def advance(count: int) -> None:
                if count % _REFRESH_EXAMPLES == 0 or count == total:
                    progress.update(task, completed=count, refresh=True)

            yield advance
        return
    said = 0

    def say_now_and_then(count: int) -> None:
        nonlocal said
        if count >= said + _REPORT_EXAMPLES:
            said = count
            _say(f"{split}: {count:,} of {total:,} examples")

    yield say_now_and_then
    _say(f"{split}: {total:,} examples")


def _num_shards(split: SourceSplit) -> int:
    return max(1, math.ceil(split.num_bytes / _SHARD_BYTES))


def _num_processes(source: Source) -> int:
    """As many as there are cores, but each writes a shard at least."""
    num_shards = max(map(_num_shards, source.splits.values()))
    return max(1, min(num_cores(), _MAX_PROCESSES, num_shards))


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
    name, values = argv[1], flags.FLAGS
    options = Options(values.label, values.test_fraction, values.seed, values.layout)
    try:
        prepare(name, values.out or default_out(name), values.source, options)
    except DataError as error:
        _say(f"data.prepare: {error}")
        return 2
    except OSError as error:
        _say(f"data.prepare: {error}. Nothing was written.")
        return 2
    return 0


if __name__ == "__main__":
    # Here, so that who imports this module does not get the flags.
    flags.DEFINE_string("source", None, "Directory, or file, that it is made from.")
    flags.DEFINE_string("out", None, "Directory to write; datasets/NAME by default.")
    flags.DEFINE_string("label", None, "csv, npz: the column that is the label.")
    flags.DEFINE_float(
        "test_fraction",
        None,
        f"Part that becomes the test split, where the source has none; {TEST_FRACTION} by default.",
    )
    flags.DEFINE_integer("seed", None, "Of the choice of test examples; 0 by default.")
    flags.DEFINE_enum(
        "layout",
        None,
        LAYOUTS,
        "Of images in a record: `image`, or `image_raw` with sizes, as TensorFlow 1's MNIST "
        "programs wrote it; tfds by default.",
    )
    app.run(_main, flags_parser=parse_flags("data.prepare"))
