"""The files in which AutoGraph writes the functions that it has rewritten.

A process that ends with `os._exit` must remove them itself, and a line of them is no line of a
user. Seen with TensorFlow 2.21, `tensorflow/python/autograph/pyct/loader.py`. Can be deleted when
AutoGraph writes no files.
"""

import contextlib
import importlib.util
import os
import sys

_NAME = "__autograph_generated_file"


def is_generated(file: str) -> bool:
    """Returns True if AutoGraph wrote `file`."""
    return _NAME in file


def remove_generated_files() -> None:
    """Removes the modules that AutoGraph wrote, as Python does at a normal exit."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_NAME) and module.__file__:
            compiled = importlib.util.cache_from_source(module.__file__)
            for path in (module.__file__, compiled):
                with contextlib.suppress(OSError):
                    os.remove(path)
            with contextlib.suppress(OSError):  # Other processes may have files there.
                os.rmdir(os.path.dirname(compiled))
