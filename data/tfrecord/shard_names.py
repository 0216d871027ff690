"""The files of a split: found by their names, and checked to be complete.

Known names: `NAME-SPLIT.tfrecord-00000-of-00003` (tensorflow-datasets), `SPLIT.tfrecord*`,
`SPLIT-00000-of-00003*` and `SPLIT-*.tfrecord`, also with `tfrec` or `tfrecords`. Without such files
the files in the directory `SPLIT/` are the shards, as of Spark: `SPLIT/part-r-00000`.
"""

import difflib
import json
import os
import re
from pathlib import Path
from shlex import quote

from data.system import files
from data.system.files import DataError, join
from data.system.object_store import UnavailableError

INDEX, DAMAGE = ".index.npz", ".damage.json"  # After the name of a split.
SPLIT_NAMES = ("train", "test", "val", "valid", "validation", "extra")
SPLIT_DIRS = (*SPLIT_NAMES, "training", "testing", "eval", "evaluation", "dev")
_NUMBERED = re.compile(r"(\d+)-of-(\d+)")
_SUFFIX, _PACKED = r"\.tfrec(?:ords?)?", r"(?:\.(?:gz|zlib|zz))?"
# The order matters: later patterns match names of earlier ones too, with another split.
_SPLIT_OF = (
    re.compile(rf"(?:.*-)?(?P<split>[^-.]+){_SUFFIX}-\d+-of-\d+{_PACKED}"),
    re.compile(rf"(?P<split>[^.]+?)[-.]\d+-of-\d+(?:{_SUFFIX})?{_PACKED}"),
    re.compile(rf"(?P<split>[^.]+?)[-_.]?\d+(?:-\d+)?{_SUFFIX}{_PACKED}"),
    re.compile(rf"(?:.*-)?(?P<split>[^-.]+){_SUFFIX}{_PACKED}"),
)
_WORDS = {
    "train": re.compile(r"(?i)(?<![a-z])train(?:ing)?(?![a-z])"),
    "test": re.compile(
        r"(?i)(?<![a-z])(?:test(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|dev)(?![a-z])"
    ),
}
# A file of any name that may hold records: not features.json, _SUCCESS or a hidden file.
_SHARD = re.compile(rf"[^._](?:[^.]*|.*{_SUFFIX}.*){_PACKED}")


def splits_in(data_dir: str, *, lost_too: bool = False) -> list[str]:
    """Names of the splits that have shards in `data_dir`.

    With `lost_too`, also the splits of which only an index or dataset_info.json is left.
    """
    names = _list(data_dir)
    splits = _split_names(names) or _split_dirs(data_dir, names)
    if lost_too:
        indexes = (name for name in names if name.endswith(INDEX))
        splits |= {name.removesuffix(INDEX).removeprefix(".") for name in indexes}
        splits |= {split for split, lengths in _announced(data_dir).items() if lengths}
    return sorted(splits)


def shard_paths(data_dir: str, split: str, *, missing_too: bool = False) -> list[str]:
    """Paths of the shards of `split`, in order and complete; no file is opened.

    Without `missing_too`, a missing shard of a numbered set is a DataError.
    """
    names = sorted(_list(data_dir))
    quoted = re.escape(split)
    for pattern in (
        rf"(?:.*-)?{quoted}{_SUFFIX}(?:-\d+-of-\d+)?{_PACKED}",
        rf"{quoted}[-.]\d+-of-\d+(?:{_SUFFIX})?{_PACKED}",
        rf"{quoted}[-_.]?[^.]*{_SUFFIX}{_PACKED}",
    ):
        if found := [name for name in names if re.fullmatch(pattern, name)]:
            # Without those of trainval, whose names begin with train, too.
            own = re.compile(rf"(?:.*-)?{quoted}(?![^\W\d_])")
            found = [name for name in found if own.match(name)] or found
            break
    else:
        found = [f"{split}/{name}" for name in _shards_below(data_dir, split)]
    if not found:
        raise DataError(nothing_found(data_dir, split))
    if len(found) == 1 and files.is_dir(path := join(data_dir, found[0])):
        raise DataError(f"{path} is a directory. To train on its files: --data_dir={quote(path)}")
    numbered = [(name, match) for name in found if (match := _NUMBERED.search(name))]
    if not numbered:
        return [join(data_dir, name) for name in found]
    sets = sorted({_NUMBERED.sub(rf"*-of-{match[2]}", name) for name, match in numbered})
    if len(sets) > 1 or len(numbered) < len(found):
        sets += [name for name in found if not _NUMBERED.search(name)]
        raise DataError(
            f"{data_dir} holds more than one set of {split!r} shards: {', '.join(sets)}. "
            "Keep one set in the directory."
        )
    present = {int(match[1]): name for name, match in numbered}
    sample, match = numbered[0]
    total = int(match[2])
    before, after, digits = sample[: match.start(1)], sample[match.end(1) :], len(match[1])
    missing = {i: f"{before}{i:0{digits}d}{after}" for i in range(total) if i not in present}
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
    return [join(data_dir, (present | missing)[i]) for i in range(total)]


def shard_lengths_announced(data_dir: str, split: str) -> list[int] | None:
    """The records of each shard by dataset_info.json; None if it does not say."""
    return _announced(data_dir).get(split)


def name_of(path: str, data_dir: str) -> str:
    """The name of a shard in `data_dir`, with that of its split's directory if it has one."""
    return path.removeprefix(data_dir).lstrip("/")


def word_of(purpose: str, name: str) -> str:
    """The word in the name of a file or directory that says that it is for "train" or "test".

    Words of evaluation count as "test". Without such a word: "".
    """
    found = _WORDS[purpose].search(name)
    return found[0] if found else ""


def saved_path(data_dir: str, split: str, suffix: str) -> str:
    """The file that keeps what was found about a split; `suffix` is INDEX or DAMAGE.

    Its name begins with a dot, so that patterns such as `train*` find shards only. A file without
    the dot, as it was written before, is read if it is the only one.
    """
    hidden, former = (join(data_dir, f"{dot}{split}{suffix}") for dot in (".", ""))
    return former if files.exists(former) and not files.exists(hidden) else hidden


def _announced(data_dir: str) -> dict[str, list[int]]:
    """The records of each shard of each split by dataset_info.json, which may be missing."""
    path = join(data_dir, "dataset_info.json")
    if not files.exists(path):
        return {}
    try:
        return {
            described["name"]: [int(length) for length in described["shardLengths"]]
            for described in json.loads(files.read_text(path))["splits"]
            if described.get("shardLengths") is not None
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}  # Another program's file. It is not needed for reading.


def nothing_found(data_dir: str, split: str) -> str:
    """Says what is in `data_dir` instead of `split`, and what to type."""
    names = sorted(_list(data_dir))
    needed = (
        f"needed is {split}.tfrecord or *-{split}.tfrecord-00000-of-00001; "
        "to write it: python -m data.prepare digits (or mnist, or tfds:NAME)"
    )
    if not names:
        return f"{data_dir} is empty: it holds no TFRecord shards; {needed}"
    if others := sorted(_split_names(names) or _split_dirs(data_dir, names)):
        to_train = next((name for name in others if word_of("train", name)), others[0])
        rest = [name for name in others if name != to_train] or others
        (near,) = difflib.get_close_matches(split, others, n=1, cutoff=0)
        to_evaluate = next((name for name in rest if word_of("test", name)), rest[-1])
        message = (
            f"{data_dir} has no split {split!r}, only {', '.join(others)}. Add the shards, or name "
            f"one of these: --split={quote(near)}, or in training --config.data.train_split="
            f"{quote(to_train)} or --config.data.eval_split={quote(to_evaluate)}."
        )
        unnamed = _any_names(data_dir)
        if set(others) & set(SPLIT_NAMES) or not unnamed:
            return message
        return f"{message} Or, if these are no splits: {_how_to_split(data_dir, unnamed)}"
    if below := _dirs_with_shards(data_dir):
        found = f"{below[0]} does: --data_dir={quote(below[0])}"
        return f"{data_dir} holds no TFRecord shards, but {found}"
    if unnamed := _any_names(data_dir):
        return (
            f"{data_dir} has files whose names do not tell the split ({', '.join(unnamed[:3])}"
            f"{', ...' * (len(unnamed) > 3)}): {_how_to_split(data_dir, unnamed)}"
        )
    known = f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
    return f"{data_dir} holds no TFRecord shards ({known}); {needed}"


def _how_to_split(data_dir: str, names: list[str]) -> str:
    """The command that makes splits of the files `names` in `data_dir`, for messages."""
    first, last = min(names), max(names)
    ending = os.path.splitext(first)[1]
    same = ending if all(name.endswith(ending) for name in names) else ""
    prefix = os.path.commonprefix(names).removesuffix(same)  # noqa: RUF071  # Of names, not paths.
    pattern = f"{prefix}*{same}"
    example = f"test={last},train={pattern}" if len(names) > 1 else f"train={first},test=PATTERN"
    for split, other in (("train", "test"), ("test", "train")):
        words = [word_of(split, name) for name in names]
        if "" in words and len(found := {word for word in words if word}) == 1:
            example = f"{split}=*{found.pop()}*,{other}=*"
            break
    return (
        "say once which files are which split; a file belongs to the first pattern that it fits: "
        f"python -m data.prepare rewrite --source={quote(data_dir)} "
        f"--data_dir={quote(f'{data_dir}-splits')} --splits={quote(example)}"
    )


def _split_names(names: list[str]) -> set[str]:
    """The splits that the names of shards say."""
    splits = set()
    for name in names:
        matches = (pattern.fullmatch(name) for pattern in _SPLIT_OF)
        if match := next(filter(None, matches), None):
            splits.add(match["split"])
    return splits


def _split_dirs(data_dir: str, names: list[str]) -> set[str]:
    """The directories of splits that hold shards."""
    return {name for name in SPLIT_DIRS if name in names and _shards_below(data_dir, name)}


def _shards_below(data_dir: str, split: str) -> list[str]:
    """The names of the files in `data_dir`/`split` that may hold records, in order."""
    directory = join(data_dir, split)
    return _any_names(directory) if split and files.is_dir(directory) else []


def _any_names(directory: str) -> list[str]:
    """The names of the files in a directory that may hold records, in order."""
    return sorted(name for name in files.files_in(directory) if _SHARD.fullmatch(name))


def _dirs_with_shards(data_dir: str) -> list[str]:
    """The directories one or two levels below `data_dir` to give as --data_dir."""
    top = Path(data_dir)
    if files.is_url(data_dir):
        return []
    below = [*top.glob("*/"), *top.glob("*/*/")]
    found = [path for path in below if _split_names([inside.name for inside in path.glob("*")])]
    return sorted(str(path.parent if path.name.lower() in SPLIT_DIRS else path) for path in found)


def _list(data_dir: str) -> list[str]:
    try:
        return files.names_in(data_dir)
    except UnavailableError:
        raise
    except FileNotFoundError:
        raise DataError(
            f"There is no directory {data_dir}. Write the data there: {prepare_again(data_dir)}, "
            "or give the directory that holds your TFRecord shards: --data_dir=DIR"
        ) from None
    except NotADirectoryError:
        raise DataError(
            f"{data_dir} is a file; --data_dir needs the directory that holds the shards: "
            f"--data_dir={quote(files.parent(data_dir) or '.')}"
        ) from None
    except OSError as error:
        if isinstance(error, PermissionError) and not files.is_url(data_dir):
            denied = f"{data_dir} cannot be read by this user (permission denied)"
            raise DataError(f"{denied}: chmod -R a+rX {quote(data_dir)}") from None
        raise DataError(f"{data_dir} cannot be listed: {error.strerror}") from None


def prepare_again(data_dir: str) -> str:
    """The command that writes the data of `data_dir`, for messages.

    It needs another directory if files of another program are there.
    """
    is_foreign = not files.exists(join(data_dir, "dataset_info.json")) and (
        files.is_dir(data_dir) and bool(files.names_in(data_dir))
    )
    directory = "OTHER_DIR" if is_foreign else quote(data_dir or ".")
    return (
        f"python -m data.prepare NAME --data_dir={directory} (NAME: digits, mnist, tfds:NAME, ...)"
    )
