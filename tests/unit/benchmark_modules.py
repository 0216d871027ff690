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
        for flag, module in before:
            FLAGS[flag.name] = flag
            FLAGS.register_flag_by_module(module, flag)


def _taken_out() -> list[tuple[flags.Flag, str]]:
    """Removes and returns all flags but those of absl itself, with the modules that define them."""
    modules = {name: FLAGS.find_module_defining_flag(name) for name in list(FLAGS)}
    own = {name: module for name, module in modules.items() if not module.startswith("absl")}
    found = [(FLAGS[name], module) for name, module in own.items()]
    for name in own:
        delattr(FLAGS, name)
    return found
