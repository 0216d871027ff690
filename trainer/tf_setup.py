"""Settings that must precede TensorFlow's import, and the import itself.

configure_logging()
set_environment()
keep_freed_memory()
import_tensorflow()
"""

import ctypes
import gc
import importlib
import logging
import os
import re
import sys
import traceback

from data.system.errors import UsageError
from data.system.quiet import quiet_tensorflow
from data.system.scratch import check_temp_dir

_WRAPPED = "sklearn"
_READS_SETTINGS = re.compile(r"keras/(src/backend/config|backend|backend_config)\.py$")
_GRPC_OPTIONS = "TF_GRPC_DEFAULT_OPTIONS"  # name=value,name=value
_USES_PROXY = "grpc.enable_http_proxy"
# Where TensorFlow keeps programs that XLA has compiled: in this process's memory.
PROGRAM_CACHE = "ram://compiled"
_XLA_OPTIONS = "TF_XLA_FLAGS"
_CACHE_OPTION = "--tf_xla_persistent_cache_directory"
# Not tried on GPUs, where an error of the cache would end the step. An entry has no computation to
# compare: its name has the computation's hash.
_CACHE_OPTIONS = (
    f"{_CACHE_OPTION}={PROGRAM_CACHE} --tf_xla_persistent_cache_device_types=CPU"
    " --tf_xla_disable_strict_signature_checks"
)
# Of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_NEVER, _PAD_BYTES = -1, 64 << 20
_FEW_CORES = 4  # Measured on 2.


def set_environment() -> None:
    """Sets what TensorFlow and Keras read when they are imported.

    Raises UsageError if there is no directory for temporary files.
    """
    check_temp_dir()
    quiet_tensorflow()
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.pop("TF_USE_LEGACY_KERAS", None)  # Otherwise tf.keras would be Keras 2.
    # Otherwise a call to a task that is not up yet fails instead of waiting for it.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    # Tasks connect to each other directly, as peers.py does. Otherwise gRPC uses the proxy of
    # grpc_proxy, https_proxy or http_proxy, which cannot reach them. Downloads still use it.
    options = os.environ.get(_GRPC_OPTIONS, "")
    if _USES_PROXY not in options:
        os.environ[_GRPC_OPTIONS] = ",".join(filter(None, [options, f"{_USES_PROXY}=0"]))
    # TensorFlow reads these at the first look for devices, which may precede the command line of a
    # task: trainer/compiled_programs.py fills the cache later.
    flags = os.environ.get(_XLA_OPTIONS, "")
    if _CACHE_OPTION not in flags and flags.strip()[:1] in ("", "-"):  # It may name a file.
        os.environ[_XLA_OPTIONS] = f"{flags} {_CACHE_OPTIONS}".strip()


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next tensor; has no effect with another libc.

    By default glibc often returns a freed tensor of more than 128 KiB to the system, and the next
    step faults each of its pages in again: half of the time of a small model's step. With this
    setting a process keeps the memory of its peak, or more, because each thread's arena keeps its
    own peak. Arenas of threads cannot hold more than 64 MiB per tensor. So on a few cores, where
    threads rarely wait for each other, all threads share the main arena, which can. `MALLOC_*`
    variables and GLIBC_TUNABLES take precedence.
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


def configure_logging(*, is_quiet: bool = False) -> None:
    """Logs to standard error; from TensorFlow, and with `is_quiet`, only warnings and errors.

    Must precede TensorFlow's import, which adds a handler if there is none. The import also sets
    the levels of TensorFlow's loggers, so the handler must filter.
    """
    level = logging.WARNING if is_quiet else logging.INFO
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", force=True)
    logging.getLogger().handlers[0].addFilter(
        lambda record: record.name not in ("absl", "tensorflow") or record.levelno > logging.INFO
    )


def import_tensorflow() -> None:
    """Imports TensorFlow and Keras in 3 s of CPU instead of 5 s.

    Keras imports scikit-learn, and with it SciPy, if it is installed, to offer wrappers for it.
    That import is prevented here; a later import of scikit-learn works. The garbage collector is
    off meanwhile: the objects of 3,000 modules are no garbage.
    """
    if "keras" in sys.modules or _WRAPPED in sys.modules:  # A config file may import them.
        _keep_sums_as_they_are()
        return
    collects = gc.isenabled()
    gc.disable()
    sys.modules[_WRAPPED] = None  # type: ignore[assignment]  # An import of it fails.
    try:
        importlib.import_module("tensorflow")
        _keep_sums_as_they_are()
        importlib.import_module("keras")
    except (AssertionError, ValueError) as error:
        # Both read keras.json, and refuse a wrong value without the name of the file.
        directory = os.environ.get("KERAS_HOME", os.path.join("~", ".keras"))
        path = os.path.expanduser(os.path.join(directory, "keras.json"))
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if not os.path.exists(path) or not _READS_SETTINGS.search(raised_in):
            raise
        raise UsageError(
            f"TensorFlow or Keras refuses {path}: "
            f"{str(error) or 'a value is of a wrong type'}. Valid values are, for example, "
            '{"floatx": "float32", "epsilon": 1e-07, "image_data_format": "channels_last"}.'
        ) from error
    finally:
        del sys.modules[_WRAPPED]
        gc.freeze()  # Later collections skip the modules, too.
        if collects:
            gc.enable()


def _keep_sums_as_they_are() -> None:
    """Turns TensorFlow's memory optimizer off, before anything uses TensorFlow's context.

    It assumes that every device has 256 MB. In a graph that needs more, it replaces a sum of large
    tensors by additions to a temporary variable: the sum depends on timing, and a loop on a server
    fails (AlreadyExistsError). On CPUs the optimizer has no other effect.
    """
    from tensorflow.core.protobuf.config_pb2 import ConfigProto
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
    from tensorflow.python.eager import context

    config = ConfigProto()
    config.graph_options.rewrite_options.memory_optimization = RewriterConfig.NO_MEM_OPT
    # tf.config.optimizer.set_experimental_options does not know this one.
    context.context()._config = config
