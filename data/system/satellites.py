"""Functions of satellites, which are loaded by name when they are called.

    prepare = of_satellite("data.prepare.preparing", "prepare")

A satellite starts runs or looks at them; training does not need it. No import statement names one,
so its folder can be deleted: then only what calls its functions fails, with one message.
"""

import importlib
from typing import Any

from data.system.errors import UsageError


def of_satellite(module: str, name: str) -> Any:  # Any: a function or a class.
    """The function or class `name` of `module`. Raises UsageError if its folder is deleted."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # A package that the module imports is not installed.
        raise UsageError(
            f"This needs {error.name}, which was deleted from this copy of the program. Put its "
            "folder back."
        ) from None
