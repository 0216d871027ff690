"""The text of --version, to paste into a bug report. Imports none of the packages that it names."""

import glob
import importlib.metadata
import platform
import sys

from data.system.cores import num_cores

_PROGRAM = "tf-distribution-trainer"
_PACKAGES = ("tensorflow", "keras", "numpy")


def describe_version() -> str:
    """This program, TensorFlow, Keras, Python and the machine, a line each."""
    packages = ", ".join(f"{name} {version_of(name)}" for name in _PACKAGES)
    gpus = glob.glob("/dev/nvidia[0-9]*")
    return "\n".join(
        [
            f"{_PROGRAM} {version_of(_PROGRAM)}",
            f"{packages}, Python {platform.python_version()}",
            f"{platform.platform()}, {num_cores()} core(s), {len(gpus)} NVIDIA GPU(s)",
            f"{sys.executable}",
        ]
    )


def version_of(name: str) -> str:
    """The version of an installed package, or "(not installed)"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
