"""The data sets that `python -m data.prepare NAME` can write, and the source of each.

    check("folder:pets", Options(seed=1))                   # a DataError if it is wrong
    source = open_source("folder:pets", "pictures", Options(seed=1))
    bare_name("folder:pets")                                # "pets"

Each source is one file in `sources/`.
"""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple, cast

from data.prepare.sources import Options, Source
from data.prepare.sources.csv_files import SUFFIXES
from data.prepare.sources.idx import DOWNLOADS, FILES
from data.system import files
from data.system.extras import import_extra
from data.system.files import DataError
from data.tfrecord.shard_names import SPLIT_DIRS


class _Entry(NamedTuple):
    options: tuple[str, ...]  # The names of the Options that it takes.
    made_from: str = ""  # What --source must be; "" if no --source is needed.
    reads: tuple[str, ...] = ("*",)  # Patterns of the names that are read in a directory.
    extra: str = ""  # Of pyproject.toml, which installs the packages that the module imports.
    module: str = ""  # In `sources`, imported when it is needed; by default the name or the kind.


_IMAGES, _SPLITTING = ("layout",), ("test_fraction", "seed")
_IDX = _Entry(_IMAGES, f"the IDX files {FILES}", ("*-ubyte", "*-ubyte.gz"), module="idx")
_CIFAR = _Entry((*_IMAGES, "allow_partial"), "its binary version, unpacked", module="cifar")
# Fixed names, and kinds for KIND:NAME.
_NAMES = {
    "digits": _Entry(_IMAGES),
    "svhn": _Entry(_IMAGES, "train_32x32.mat and test_32x32.mat", ("*.mat",), "samples"),
    "clicks": _Entry(("num_clicks", "id_scale", *_SPLITTING)),
    "diabetes": _Entry(_SPLITTING, extra="samples"),
    **dict.fromkeys(("cifar10", "cifar100"), _CIFAR),
    "rewrite": _Entry(
        ("splits",),
        "a directory of shards (with --data_dir=OTHER_DIR)",
        ("*.tfrec*", *SPLIT_DIRS, "features.json", "dataset_info.json", "*.labels.txt"),
    ),
    **{
        name: _IDX._replace(made_from=f"{_IDX.made_from} from {url}")
        for name, url in DOWNLOADS.items()
    },
}


_TABLE = ("label", *_SPLITTING)
_TYPED = (*_TABLE, "missing", "text", "integer", "float")
_ARROW = (*_TYPED, "columns", "split_column")
_KINDS = {
    "folder": _Entry(_SPLITTING, "class folders of PNG or JPEG files"),
    "csv": _Entry(
        (*_TYPED, "header", "lists", "delimiter", "encoding"),
        "a CSV file, or a directory with train.csv and test.csv",
        tuple(f"*{suffix}" for suffix in SUFFIXES),
    ),
    "npz": _Entry(_TABLE, "an NPZ file, or a directory with train.npz and test.npz", ("*.npz",)),
    "parquet": _Entry(
        (*_ARROW, "splits"), "a Parquet file, or a directory of such files", extra="parquet"
    ),
    "python": _Entry(
        (*_ARROW, "processes"), "what a function returns: FILE.py:FUNCTION", extra="parquet"
    ),
    "text": _Entry(("test_fraction", "length"), "a text file, or a directory of text files"),
    "tfds": _Entry((), extra="tfds"),
}
_KNOWN = (
    f"{', '.join(_NAMES)}, any name with --source=DIR of IDX files, "
    f"{', '.join(f'{kind}:NAME' for kind in _KINDS)}"
)
# The name of a directory below datasets/, so it has no "/" and is not "..".
_BARE_NAME = re.compile(r"\w[\w.-]*")


def bare_name(name: str) -> str:
    """NAME of KIND:NAME, without the version: "mnist" of "tfds:mnist/3.0.1"."""
    kind, colon, following = name.partition(":")
    bare = following if colon and kind in _KINDS else name
    return re.split("[/:]", bare)[0] if kind == "tfds" else bare


def check(name: str, options: Options) -> None:
    """Raises DataError if `name` is not well formed, or would ignore an option. Reads no file."""
    kind, colon, following = name.partition(":")
    if kind in _KINDS and not following:
        raise DataError(f"{kind!r} needs a name: python -m data.prepare {kind}:NAME")
    if (colon and kind not in _KINDS) or not _BARE_NAME.fullmatch(bare_name(name)):
        raise DataError(
            f"There is no data set {name!r}. Known: {_KNOWN}. NAME has letters, digits, '_', '-' "
            "and '.', and does not begin with '-' or '.'."
        )
    known = _entry(name).options
    for option, value in options.given().items():
        if option not in known:
            flag = f"--{option}={value}" if value is not False else f"--no{option}"
            takes = f"takes {', '.join(f'--{x}' for x in known)}" if known else "takes no options"
            raise DataError(f"{flag} would be ignored: {name} {takes}. Leave it out.")


def _entry(name: str) -> _Entry:
    """The entry of a name that `check` accepts: an unknown name may be of IDX files."""
    kind, colon, _ = name.partition(":")
    return _KINDS[kind] if colon else _NAMES.get(name, _IDX)


def files_read(name: str, options: Options) -> tuple[str, ...]:
    """Patterns of the names of files and directories that are read in the source of `name`."""
    if options.splits and ":" not in name:
        patterns = [part.partition("=")[2] for part in options.splits.split(",")]
        return tuple(pattern.partition("/")[0] for pattern in patterns)
    return _entry(name).reads


def nearest(name: str, others: Sequence[str] = ()) -> str:
    """The known name, or one of `others`, that was probably meant; empty if `name` is known."""
    near = [] if name in _NAMES else difflib.get_close_matches(name, [*others, *_NAMES], n=1)
    return near[0] if near else ""


def open_source(name: str, path: str | None, options: Options) -> Source:
    """The source of data set `name`, which `check` accepts. No example is read yet."""
    kind, colon, following = name.partition(":")
    if not colon and path is None and name not in _NAMES:
        near = nearest(name)
        meant = f" Did you mean {near}?" if near else ""
        raise DataError(
            f"There is no data set {name!r}.{meant} Known: {_KNOWN}. If you have it as IDX files: "
            f"python -m data.prepare {name} --source=DIR"
        )
    entry = _entry(name)
    if path is None and entry.made_from:
        raise DataError(
            f"{name} is made from {entry.made_from}, and --source does not say where. "
            f"python -m data.prepare {name} --source=PATH"
        )
    if path is not None and not entry.made_from and not colon:
        raise DataError(f"--source={path} would be ignored: {name} has no files. Leave it out.")
    if path is not None and kind != "python" and not files.exists(path):
        raise DataError(f"There is no --source={path}. Give a file or directory that exists.")
    module = f"data.prepare.sources.{entry.module or kind}"
    found = import_extra(module, entry.extra, f"The data set {name}")
    try:
        return cast(Source, found.source(following or name, path or "", options))
    except NotADirectoryError:
        raise DataError(
            f"--source={path} is a file, and {name} is made from {entry.made_from}. Give their "
            "directory: --source=DIR"
        ) from None
