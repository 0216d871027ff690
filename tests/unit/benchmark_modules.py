"""Imports a benchmark without its flags: the trainer has flags of the same names.

network = imported("benchmarks.network")
"""

import importlib
from types import ModuleType

from absl import flags
from absl.flags import FLAGS


def imported(name: str) -> ModuleType:
    """The module `name`; absl.flags.FLAGS is as it was before."""
    before = _taken_out()
    try:
        return importlib.import_module(name)
    finally:
        _taken_out()
        for flag_name, flag in before.items():
            FLAGS[flag_name] = flag


def _taken_out() -> dict[str, flags.Flag]:
    """Removes and returns all flags but those of absl itself, by name."""
    found = {
        name: FLAGS[name]
        for name in list(FLAGS)
        if not str(FLAGS.find_module_defining_flag(name)).startswith("absl")
    }
    for name in found:
        delattr(FLAGS, name)
    return found
