"""What must be equal in all tasks of a run: the code, the versions, and the config.

    versions()                  # of the code that this task runs
    shared_settings(recipe, wire_dtype=..., bucket_mb=...)  # what it trains, and how

Tasks of different versions or configs could connect, and train a model that no user asked for.
"""

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

from trainer.config import Recipe, flatten

_PACKAGES = ("trainer", "strategies", "data")


@functools.cache
def versions() -> Mapping[str, str]:
    """Maps each part of the software of this task to its version or hash. Imports TensorFlow."""
    import keras
    import tensorflow as tf

    return software(keras=keras.__version__, tensorflow=tf.__version__)


def software(**packages: str) -> Mapping[str, str]:
    """`versions` with given versions of packages, without TensorFlow's import."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(path for name in _PACKAGES for path in (root / name).rglob("*.py"))
    code = hashlib.sha256()
    for path in files:
        code.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {
        "code of this program": code.hexdigest()[:12],
        "python": ".".join(platform.python_version_tuple()[:2]),
        **packages,
    }


def shared_settings(recipe: Recipe, *, wire_dtype: str, bucket_mb: float | None) -> dict[str, str]:
    """The settings that must be equal in all tasks.

    A hash of the config file and of the files that it imports, each field of the config, and the
    flags that decide what tasks send.
    """
    fields = {
        f"--config.{name}": json.dumps(value)
        for name, value in flatten(recipe.config).items()
        if name != "data_dir"  # It may differ between hosts; the data is compared elsewhere.
    }
    code = hashlib.sha256()
    for path in map(Path, recipe.files):
        code.update(f"{path.name}\n".encode() + path.read_bytes())
    return {
        "config file": code.hexdigest()[:12],
        **fields,
        "--wire_dtype": wire_dtype,
        "--bucket_mb": str(bucket_mb),
    }


def as_number(value: object) -> int:
    """A hash of `value` below 2**52, which a float64 holds exactly, for tasks to compare."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 12
