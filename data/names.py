"""Which files are the shards of a split: found by their names, and proved complete.

Known names: `NAME-SPLIT.tfrecord-00000-of-00003` (tensorflow-datasets), `SPLIT.tfrecord*`,
`SPLIT-00000-of-00003*` and `SPLIT-*.tfrecord`.
"""

import json
import os
import re

from data import files
from data.files import DataError, join

_NUMBERED = re.compile(r"(\d+)-of-(\d+)")


# In this order: what follows the first would match the names before it, with another split.
_SPLIT_OF = (
    re.compile(r"(?:.*-)?(?P<split>[^-.]+)\.tfrecords?-\d+-of-\d+(?:\.gz)?"),
    re.compile(r"(?P<split>[^.]+?)[-.]\d+-of-\d+(?:\.tfrecords?)?(?:\.gz)?"),
    re.compile(r"(?P<split>[^.]+?)[-_.]?\d+\.tfrecords?(?:\.gz)?"),
    re.compile(r"(?:.*-)?(?P<split>[^-.]+)\.tfrecords?(?:\.gz)?"),
)


def splits_in(data_dir: str) -> list[str]:
    """Names of the splits that have shards in `data_dir`.

    Raises:
        DataError: the directory is missing or cannot be read.
    """
    return sorted(_split_names(_list(data_dir)))


def shard_paths(data_dir: str, split: str, *, missing_too: bool = False) -> list[str]:
    """Paths of the shards of `split`, in order and complete; they are not opened.

    `missing_too`: those of a numbered set that are missing are listed like the others.

    Raises:
        DataError: the directory or the split is missing, or one of its shards.
    """
    return [join(data_dir, name) for name in _shard_names(data_dir, split, missing_too)]


def shard_lengths_announced(data_dir: str, split: str) -> list[int] | None:
    """How many records each shard was written with; None where no dataset_info.json tells."""
    path = join(data_dir, "dataset_info.json")
    if not files.exists(path):
        return None
    try:
        info = json.loads(files.read_text(path))
        for described in info["splits"]:
            if described["name"] == split:
                return [int(length) for length in described["shardLengths"]]
    except (KeyError, TypeError, ValueError):
        pass  # Not needed for reading: another program's, or none at all.
    return None


def _shard_names(data_dir: str, split: str, missing_too: bool) -> list[str]:
    """The file names of `split`, in order, proved complete."""
    names = sorted(_list(data_dir))
    quoted = re.escape(split)
    patterns = [
        re.compile(rf"(?:.*-)?{quoted}\.tfrecords?(?:-\d+-of-\d+)?(?:\.gz)?"),
        re.compile(rf"{quoted}[-.]\d+-of-\d+(?:\.tfrecords?)?(?:\.gz)?"),
        re.compile(rf"{quoted}[-_.]?[^.]*\.tfrecords?(?:\.gz)?"),
    ]
    for pattern in patterns:
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            break
    else:
        raise DataError(_nothing_found(data_dir, split, names))
    numbered = [(name, match) for name in found if (match := _NUMBERED.search(name))]
    if not numbered:
        return found
    sets = sorted({_NUMBERED.sub(rf"*-of-{match[2]}", name) for name, match in numbered})
    if len(sets) > 1 or len(numbered) < len(found):
        others = [name for name in found if name not in {name for name, _ in numbered}]
        raise DataError(
            f"{data_dir} holds more than one set of {split!r} shards: "
            f"{', '.join(sets + others)}. Keep one set in the directory."
        )
    total = int(numbered[0][1][2])
    present = {int(match[1]): name for name, match in numbered}
    sample, match = numbered[0]
    missing = {
        i: sample[: match.start(1)] + f"{i:0{len(match[1])}d}" + sample[match.end(1) :]
        for i in range(total)
        if i not in present
    }
    if missing and not missing_too:
        raise DataError(
            f"{data_dir} has {len(present)} of the {total} shards of split {split!r}; "
            f"{len(missing)} missing, the first is {min(missing.values())}. "
            f"Copy what is missing, or prepare it again: {prepare_again(data_dir)}"
        )
    if len(present) != len(numbered) or max(present) >= total:
        raise DataError(
            f"{data_dir} has {len(numbered)} files for the {total} numbered shards of split "
            f"{split!r}: keep exactly numbers 0 to {total - 1}."
        )
    return [(present | missing)[i] for i in range(total)]


def _nothing_found(data_dir: str, split: str, names: list[str]) -> str:
    needed = (
        f"needed is {split}.tfrecord or *-{split}.tfrecord-00000-of-00001; "
        "to write it: python -m data.prepare digits (or mnist, or tfds:NAME)"
    )
    if not names:
        return f"{data_dir} is empty; {needed}"
    others = _split_names(names)
    if others:
        return (
            f"{data_dir} has no split {split!r}, only {', '.join(sorted(others))}. "
            "Name one of those in the config, or add the shards."
        )
    below = _dirs_with_shards(data_dir, names)
    if below:
        return f"{data_dir} holds no TFRecord shards, but {below[0]} does: --data_dir={below[0]}"
    return f"{data_dir} holds no TFRecord shards ({', '.join(names[:3])}, ...); {needed}"


def _split_names(names: list[str]) -> set[str]:
    return {split for name in names if (split := _split_of(name))}


def _split_of(name: str) -> str | None:
    """The split that a file is of, by its name; None if that is no shard's."""
    matches = (pattern.fullmatch(name) for pattern in _SPLIT_OF)
    return next((match["split"] for match in matches if match), None)


def _dirs_with_shards(data_dir: str, names: list[str]) -> list[str]:
    """Directories one or two levels below that hold shards: NAME/VERSION of tensorflow-datasets."""
    if files.is_url(data_dir):
        return []
    found = []
    for name in names:
        for root, dirs, inside in os.walk(os.path.join(data_dir, name)):
            if any(_split_of(file) for file in inside):
                found.append(root)
            if root != os.path.join(data_dir, name):
                dirs.clear()
    return sorted(found)


def _list(data_dir: str) -> list[str]:
    try:
        return files.names_in(data_dir)
    except FileNotFoundError:
        raise DataError(
            f"There is no directory {data_dir}. "
            f"Write the data there first: {prepare_again(data_dir)}, "
            "or give the directory that holds your TFRecord shards: --data_dir=DIR"
        ) from None
    except NotADirectoryError:
        raise DataError(
            f"{data_dir} is a file; --data_dir needs the directory that holds the shards: "
            f"--data_dir={files.parent(data_dir) or '.'}"
        ) from None
    except PermissionError:
        raise DataError(
            f"{data_dir} cannot be read by this user (permission denied): chmod -R a+rX {data_dir}"
        ) from None
    except OSError as error:
        raise DataError(f"{data_dir} cannot be listed: {error.strerror}") from None


def prepare_again(data_dir: str) -> str:
    """The command that writes such a directory, for messages."""
    return (
        f"python -m data.prepare NAME --out={data_dir or '.'} (NAME: digits, mnist, tfds:NAME, ...)"
    )
