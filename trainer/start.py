"""What comes before TensorFlow's import, and the import itself.

configure_logging()
set_environment()
keep_freed_memory()
import_tensorflow()         # where TensorFlow is needed at last
"""

import ctypes
import gc
import importlib
import logging
import os
import sys

_WRAPPED = "sklearn"

# Of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_NEVER, _PAD_BYTES = -1, 64 << 20
# Measured on 2.
_FEW_CORES = 4


def set_environment() -> None:
    """What TensorFlow and Keras read when they are imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # Otherwise a call to a task that is not up yet fails instead of waiting for it.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next tensor; elsewhere it does nothing.

    By default a tensor of more than 128 KiB is often given back to the system when it is freed,
    and the next step takes each of its pages anew: that took half of the time of a small model's
    step. From then on a process holds what it used at its peak, or more: threads have arenas, and
    each holds what it had at its own. Arenas of threads cannot hold tensors of more than 64 MiB,
    which are given back as ever; so on a few cores, where threads seldom wait for each other, all
    share the process's own, which can. `MALLOC_*` of the environment and GLIBC_TUNABLES go before
    this.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_TOP_PAD, _PAD_BYTES)
    if len(os.sched_getaffinity(0)) <= _FEW_CORES:
        mallopt(_M_ARENA_MAX, 1)


def configure_logging() -> None:
    """Logs to standard error, of TensorFlow warnings alone.

    Before TensorFlow's import, which adds a handler of its own where there is none. Its loggers'
    levels are set by the import, so that which lines to leave out is for the handler to know.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    logging.getLogger().handlers[0].addFilter(
        lambda record: record.name not in ("absl", "tensorflow") or record.levelno > logging.INFO
    )


def import_tensorflow() -> None:
    """Imports TensorFlow and Keras: 2 s of CPU less than the plain imports, of 5 s.

    Without scikit-learn, which Keras offers wrappers for and imports if it is installed, SciPy with
    it; who needs it later can import it as ever. And without looking for garbage again and again
    among the objects of 3,000 modules, none of which is any.
    """
    if "keras" in sys.modules or _WRAPPED in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    sys.modules[_WRAPPED] = None  # type: ignore[assignment]  # An import of it fails.
    try:
        importlib.import_module("tensorflow")
        importlib.import_module("keras")
    finally:
        del sys.modules[_WRAPPED]
        gc.freeze()  # Later looks for garbage pass over the modules, too.
        if collects:
            gc.enable()
