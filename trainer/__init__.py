"""What happens: `python -m trainer`, from the command line to the last checkpoint.

`__main__.py` parses the command line, `task.py` runs one task from top to bottom, and `loop.py` is
the training loop. `learner/` has the maths of a step, which all strategies share. Read `task.py`
first, then `loop.py`. `connecting.py` and `in_cluster.py` choose the strategy.

    import trainer
    result = trainer.train("configs/digits.py", strategy="mirrored", train_steps=200)

`__all__` is the public interface of Python; docs/python.md describes it. Its modules are imported
when a name is first used: `import trainer` is fast, and does not import TensorFlow.
"""

import importlib.machinery
import importlib.util
import os
import pathlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.system.errors import RunFailed as RunFailed
    from data.system.errors import TrainerError as TrainerError
    from data.system.errors import UsageError as UsageError
    from trainer.api.result import Result as Result
    from trainer.api.result import load_run as load_run
    from trainer.api.training import train as train
    from trainer.config import Config as Config
    from trainer.config import DataConfig as DataConfig
    from trainer.hooks.base import Hook as Hook
    from trainer.hooks.base import PeriodicHook as PeriodicHook
    from trainer.hooks.writers import Writer as Writer
    from trainer.learner import Learner as Learner
    from trainer.step.options import ClipConfig as ClipConfig
    from trainer.step.options import EarlyStoppingConfig as EarlyStoppingConfig
    from trainer.step.options import EmaConfig as EmaConfig
    from trainer.step.options import LocalStepsConfig as LocalStepsConfig
    from trainer.step.options import LossScaleConfig as LossScaleConfig
    from trainer.step.options import PenaltyConfig as PenaltyConfig
    from trainer.step.options import ScheduleConfig as ScheduleConfig
    from trainer.step.options import WarmStartConfig as WarmStartConfig
    from trainer.step.options import WeightDecayConfig as WeightDecayConfig

# The public names by the modules that define them.
_NAMES = {
    "data.system.errors": ("RunFailed", "TrainerError", "UsageError"),
    "trainer.api.result": ("Result", "load_run"),
    "trainer.api.training": ("train",),
    "trainer.config": ("Config", "DataConfig"),
    "trainer.hooks.base": ("Hook", "PeriodicHook"),
    "trainer.hooks.writers": ("Writer",),
    "trainer.learner": ("Learner",),
    "trainer.step.options": (
        *("ClipConfig", "EarlyStoppingConfig", "EmaConfig", "LocalStepsConfig", "LossScaleConfig"),
        *("PenaltyConfig", "ScheduleConfig", "WarmStartConfig", "WeightDecayConfig"),
    ),
}
_PUBLIC = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_PUBLIC)  # `__getattr__` defines them.


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def _import_packages() -> None:
    """Imports the other packages of this program by their place.

    Otherwise a user's ./data, which Python finds first with `python -m`, would hide ours.
    """
    root = pathlib.Path(__file__).resolve().parents[1]
    for name in ("data", "strategies"):
        if name not in sys.modules:
            spec = importlib.machinery.PathFinder.find_spec(name, [str(root)])
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        elif str(root / name) not in map(
            os.path.realpath, getattr(sys.modules[name], "__path__", ())
        ):
            found = getattr(sys.modules[name], "__file__", None) or name
            raise ImportError(
                f"{found} is imported already, and hides the package {name!r} of this program. "
                "Rename it.",
                name=name,
            )


_import_packages()
