"""What comes before TensorFlow's import, and the import itself.

set_environment()
import_tensorflow()         # where TensorFlow is needed at last
"""

import importlib
import os
import sys

_WRAPPED = "sklearn"


def set_environment() -> None:
    """What TensorFlow and Keras read when they are imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # Otherwise a call to a task that is not up yet fails instead of waiting for it.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")


def import_tensorflow() -> None:
    """Imports TensorFlow and Keras, without scikit-learn, which Keras offers wrappers for.

    If it is installed Keras imports it, SciPy with it: a quarter of the time until a task can begin
    (3.1 s in place of 4.0 s of CPU). Who needs it later can import it as ever.
    """
    if "keras" in sys.modules or _WRAPPED in sys.modules:
        return
    sys.modules[_WRAPPED] = None  # type: ignore[assignment]  # An import of it fails.
    try:
        importlib.import_module("tensorflow")
        importlib.import_module("keras")
    finally:
        del sys.modules[_WRAPPED]
