"""What must be the same in all tasks of a run: code, versions, and what is trained.

    versions()                  # of the code that a task runs
    fingerprint(recipe)         # and of what it was told to train

Tasks of different versions may connect, and train something that none of them was asked for.
"""

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import keras
import tensorflow as tf

from trainer.config import Recipe, flatten

_PACKAGES = ("trainer", "strategies", "data")
# Where the data is may differ from host to host; what it is, is compared elsewhere.
_OF_THE_HOST = ("data_dir",)


@functools.cache
def versions() -> Mapping[str, str]:
    """Name -> version, or hash, of what this task runs."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for name in _PACKAGES for path in (root / name).rglob("*.py"))
    code = hashlib.sha256()
    for path in files:
        code.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {
        "code of this program": code.hexdigest()[:12],
        "keras": keras.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "tensorflow": tf.__version__,
    }


def fingerprint(recipe: Recipe) -> Mapping[str, str]:
    """`versions`, the config file's hash, and every field of the config."""
    fields = {
        f"config.{name}": json.dumps(value)
        for name, value in flatten(recipe.config).items()
        if name not in _OF_THE_HOST
    }
    config_file = hashlib.sha256(Path(recipe.path).read_bytes()).hexdigest()[:12]
    return {**versions(), "config file": config_file, **fields}


def as_number(value: object) -> int:
    """A hash of `value`, at most 2**52: what tasks can send each other and compare."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 12
