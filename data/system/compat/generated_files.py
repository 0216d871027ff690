"""Keeps the functions that AutoGraph rewrites in memory, not in files.

AutoGraph writes each function to a file in TMPDIR, and removes it only when Python itself ends the
process: a killed process leaves its files. Seen with TensorFlow 2.21,
`tensorflow/python/autograph/pyct/loader.py`. Can be deleted, except for `is_generated`, when
AutoGraph writes no files.
"""

import itertools
import linecache
import os
import sys
import tempfile
from types import ModuleType

_NAME = "__autograph_generated_file"
_NUMBERS = itertools.count()


def is_generated(file: str) -> bool:
    """Returns True if AutoGraph has made the code of `file`."""
    return _NAME in file


def keep_generated_in_memory() -> None:
    """Replaces AutoGraph's loader. Tracebacks show the lines as they do with files."""
    # Here, because this module is imported before TensorFlow.
    from tensorflow.python.autograph.pyct import loader

    loader.load_source = _load_source


def _load_source(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    name = f"{_NAME}{os.getpid()}_{next(_NUMBERS)}"
    # Absolute, as debuggers need it.
    file = os.path.join(tempfile.gettempdir(), f"{name}.py")
    module = ModuleType(name)
    module.__file__ = file
    # Without a time of change it stays, although there is no such file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    sys.modules[name] = module
    return module, file
