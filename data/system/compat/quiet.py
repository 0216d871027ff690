"""TensorFlow without the lines that it prints at start-up, for every command of this program.

    quiet_tensorflow()
    import tensorflow as tf

| line | printed | removed by |
| --- | --- | --- |
| CPU features ("rebuild"), other INFO, WARNING | after settings are read | TF_CPP_MIN_LOG_LEVEL=2 |
| "oneDNN custom operations are on" | before any setting is read | a filter |
| "Could not find cuda drivers" | before any setting is read | a filter |
| "All log messages before absl::InitializeLog()" | before any setting is read | a filter |
| "failed call to cuInit", an ERROR | at the first look for devices | a filter |

Seen with TensorFlow 2.21. Can be deleted when the level in the environment removes these lines.
A higher level would also remove the last line, but with it every later error of the C++ runtime. So
the filter covers only the import and, on a machine without a GPU, one look for devices. With
TF_CPP_MIN_LOG_LEVEL=0 or 1 in the environment, all lines of that level are shown.
"""

import contextlib
import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TextIO

_START_UP_LINES = re.compile(
    rb"All log messages before absl::InitializeLog\(\) is called|oneDNN custom operations are on"
    rb"|Could not find cuda drivers|failed call to cuInit"
)
# NVIDIA's driver, also on Jetson and in WSL, and AMD's.
_GPU_DEVICES = ("nvidia*", "nvhost*", "dxg", "kfd")


def quiet_tensorflow() -> None:
    """Makes the first import of TensorFlow quiet, whenever that comes. Imports nothing itself."""
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    is_registered = any(isinstance(finder, _QuietImport) for finder in sys.meta_path)
    if level not in ("0", "1") and "tensorflow" not in sys.modules and not is_registered:
        sys.meta_path.insert(0, _QuietImport())


class _QuietImport(MetaPathFinder):
    """Finds `tensorflow` once, as the other finders do, but with a loader that filters."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_quietly(module: ModuleType) -> None:
            importlib.import_module("absl.logging")  # Its handler keeps the stream that it finds.
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # No place for a file: show the lines.
                    stack.enter_context(_start_up_lines_removed())
                execute(module)
                if not _has_gpu_device():
                    # Here, so that its error is filtered. Where there is a GPU a process may have
                    # to fork before the driver starts, and an error of the driver is of interest.
                    module.config.list_physical_devices("GPU")

        spec.loader.exec_module = execute_quietly  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _start_up_lines_removed() -> Iterator[None]:
    """Holds back what is written to descriptor 2, and then writes it without start-up lines.

    Python's own `sys.stderr` is not held back. If the import kills the process (a CPU without
    AVX), its last words are lost: TF_CPP_MIN_LOG_LEVEL=0 shows them.
    """
    python_stderr = sys.stderr
    with tempfile.TemporaryFile() as held, os.fdopen(os.dup(2), "w", buffering=1) as real_stderr:
        sys.stderr = real_stderr
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real_stderr.fileno(), 2)
            sys.stderr = python_stderr
            _give_stream_to_logger(real_stderr, python_stderr)
            held.seek(0)
            with contextlib.suppress(OSError):  # Nobody reads descriptor 2 any more.
                for line in held:
                    if not _START_UP_LINES.search(line):
                        os.write(2, line)


def _give_stream_to_logger(former: TextIO, now: TextIO) -> None:
    """TensorFlow's logger keeps the stream of its import, unless logging was set up before."""
    for handler in logging.getLogger("tensorflow").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is former:
            handler.setStream(now)


def _has_gpu_device() -> bool:
    """Returns True if a driver may be there: in doubt, as on systems without these files."""
    if sys.platform != "linux":
        return True
    return any(next(Path("/dev").glob(pattern), None) for pattern in _GPU_DEVICES)
