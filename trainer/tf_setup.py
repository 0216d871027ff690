"""Settings that must precede TensorFlow's import, and the import itself.

configure_logging()
set_environment()
import_tensorflow()
"""

import gc
import importlib
import logging
import os
import sys

from data.system.compat.generated_files import keep_generated_in_memory
from data.system.compat.grpc_environment import set_grpc_environment
from data.system.compat.keras_file import refused_file
from data.system.compat.memory_optimizer import turn_memory_optimizer_off
from data.system.compat.program_cache import set_program_cache
from data.system.compat.quiet import quiet_tensorflow
from data.system.compat.scikit_learn import SCIKIT_LEARN, scikit_learn_left_out
from data.system.errors import UsageError
from data.system.linux import check_threads
from data.system.scratch import check_temp_dir


def set_environment() -> None:
    """Sets what TensorFlow, Keras and the libraries that they import read at their import.

    Raises UsageError if there is no directory for temporary files, or too few threads.
    """
    check_temp_dir()
    check_threads()
    quiet_tensorflow()
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.pop("TF_USE_LEGACY_KERAS", None)  # Otherwise tf.keras would be Keras 2.
    # Keras imports pandas, which imports pyarrow, if they are installed. pyarrow would start a
    # thread, which a fork server must not have. A setting of the user stays.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    set_grpc_environment()
    set_program_cache()


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

    The garbage collector is off meanwhile: the objects of 3,000 modules are no garbage.
    """
    if "keras" in sys.modules or SCIKIT_LEARN in sys.modules:  # A config file may import them.
        _change_tensorflow()
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        with scikit_learn_left_out():
            importlib.import_module("tensorflow")
            _change_tensorflow()
            importlib.import_module("keras")
    except (AssertionError, ValueError) as error:
        path = refused_file(error)
        if path is None:
            raise
        raise UsageError(
            f"TensorFlow or Keras refuses {path}: "
            f"{str(error) or 'a value is of a wrong type'}. Valid values are, for example, "
            '{"floatx": "float32", "epsilon": 1e-07, "image_data_format": "channels_last"}.'
        ) from error
    finally:
        gc.freeze()  # Later collections skip the modules, too.
        if collects:
            gc.enable()


def _change_tensorflow() -> None:
    turn_memory_optimizer_off()
    keep_generated_in_memory()
