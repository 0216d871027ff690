"""What only some commands need: the extras of pyproject.toml, and satellites, loaded by name.

    scipy_io = import_extra("scipy.io", "samples", "The data set svhn")
    raise UsageError(missing("The tracker wandb", "wandb", "wandb"))
    prepare = of_satellite("data.prepare.preparing", "prepare")

A command that lacks a package ends with exit code 2, and with the command that installs it. A
satellite, or core code that only some options or paths need, is loaded by name: all else works if
its folder is deleted.
"""

import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from data.system.errors import UsageError

_ROOT = Path(__file__).resolve().parents[2]


def install_command(extra: str) -> str:
    """The command that adds `extra` to this environment; it works in any directory."""
    what = [f"tf-distribution-trainer[{extra}]"]
    if (_ROOT / "pyproject.toml").is_file():  # A checkout, installed or not.
        what = ["-e", f"{_ROOT}[{extra}]", "-c", str(_ROOT / "constraints.txt")]
    return shlex.join([sys.executable, "-m", "pip", "install", *what])


def missing(what: str, package: str, extra: str) -> str:
    """The message that `what` needs `package`, which `extra` installs."""
    command = install_command(extra)
    return f"{what} needs the package {package}, which is not installed. Type: {command}"


def import_extra(module: str, extra: str, what: str) -> ModuleType:
    """Imports `module` for `what`.

    Raises:
        UsageError: it, or a package that it imports, is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(missing(what, error.name or module, extra)) from None


def of_satellite(module: str, name: str) -> Any:  # Any: a function or a class.
    """The function or class `name` of `module`."""
    return getattr(importlib.import_module(module), name)
