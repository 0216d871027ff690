"""What must be equal in all tasks of a run: code, versions, settings and config.

ours = {**versions(), **process_settings(), **shared_settings(recipe, transfer)}
"""

import ast
import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from data.system.compat.keras_file import keras_file
from strategies.transfer import Transfer
from trainer.config import ConfigError, Recipe, flatten

log = logging.getLogger(__name__)

_PACKAGES = ("trainer", "strategies", "data")
# The settings of keras.json that decide the numbers of a model, and Keras' defaults. The program
# sets the backend.
KERAS_DEFAULTS: Mapping[str, object] = {
    "keras.config.floatx": "float32",
    "keras.config.epsilon": 1e-07,
    "keras.config.image_data_format": "channels_last",
}
# Variables that choose kernels of other rounding. Not XLA's flags: they also hold directories.
_VARIABLES = ("TF_ENABLE_ONEDNN_OPTS", "TF_DETERMINISTIC_OPS", "NVIDIA_TF32_OVERRIDE")


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


def keras_settings() -> dict[str, object]:
    """The present values of the settings in KERAS_DEFAULTS."""
    import keras

    return {name: getattr(keras.config, name.rpartition(".")[2])() for name in KERAS_DEFAULTS}


def process_settings() -> dict[str, object]:
    """The settings of this process, outside the config, that change numbers.

    Those of Keras, and variables of the environment that choose kernels of other rounding.
    """
    import keras

    return {
        **keras_settings(),
        "keras.config.dtype_policy": keras.config.dtype_policy().name,
        **{name: os.environ.get(name, "not set") for name in _VARIABLES},
    }


def log_keras_settings() -> None:
    """Logs the settings of Keras that are not its defaults, in one line."""
    found = {name: v for name, v in keras_settings().items() if v != KERAS_DEFAULTS[name]}
    if found:
        listed = ", ".join(f"{name} is {value}" for name, value in found.items())
        log.warning("%s, which is not Keras' default: see %s, and your code.", listed, keras_file())


def check_keras_settings(recorded: Mapping[str, object], model_dir: str) -> None:
    """Raises ConfigError if Keras has other settings than the run in `model_dir` had.

    `recorded` are those of the run; former versions recorded none, so that nothing is compared.
    """
    for name, value in keras_settings().items():
        needed = recorded.get(name, value)
        if value != needed:
            setting = name.rpartition(".")[2]
            raise ConfigError(
                f"{name} is {value!r} here, but was {needed!r} in the run {model_dir}, so that its "
                f"model would compute other numbers. Set {setting} to {needed!r} in {keras_file()}."
            )


def shared_settings(recipe: Recipe, transfer: Transfer) -> dict[str, str]:
    """The settings that must be equal in all tasks.

    A hash of the config file and of the files that it imports, whatever their names, each field of
    the config, and the flags that decide what tasks send.
    """
    fields = {
        f"--config.{name}": json.dumps(value)
        for name, value in flatten(recipe.config).items()
        if name != "data_dir"  # It may differ between hosts; the data is compared elsewhere.
    }
    code = hashlib.sha256()
    for content in map(Path.read_bytes, map(Path, recipe.files)):
        # Not the empty `__init__.py` of a package: elsewhere an equal file may be in no package.
        if any(not isinstance(node, ast.Expr) for node in ast.parse(content).body):
            code.update(f"{len(content)}\n".encode() + content)
    return {
        "config file": code.hexdigest()[:12],
        **fields,
        **{f"--{name}": str(value) for name, value in vars(transfer).items()},
    }


def as_number(value: object) -> int:
    """A hash of `value` below 2**52, which a float64 holds exactly, for tasks to compare."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 12
