"""Lets Python run while TensorFlow connects the workers of a multiworker cluster.

    with interpreter_lock_released():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

TensorFlow 2.21 (`tfe_wrapper.cc`) holds Python's interpreter lock in the call that waits for the
other workers, unlike in its other calls that wait. Then no thread of this process runs: no signal
is handled, and a worker that does not answer is not noticed. The call also replaces the handler of
SIGTERM by one that only sets a flag of TensorFlow's. Can be deleted when threads run in that call.
"""

import contextlib
import ctypes
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework.errors import exception_type_from_error_code

from data.system.background import repeating

_SIGACTION_BYTES = 256  # At least the size of libc's struct.
_RESTORE_SECS = 0.01


@contextlib.contextmanager
def interpreter_lock_released() -> Iterator[None]:
    """Within it, the call that waits for the other workers releases the interpreter lock.

    SIGTERM's handler stays the present one: it is restored 100 times a second.
    """
    if sys.platform != "linux":  # The libraries have other names there.
        yield
        return
    libraries = Path(tf.sysconfig.get_lib())
    runtime = ctypes.CDLL(str(libraries / "libtensorflow_cc.so.2"))
    framework = ctypes.CDLL(str(libraries / "libtensorflow_framework.so.2"))
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    enable = ctypes.CFUNCTYPE(None, pointer, text, ctypes.c_size_t, pointer)(
        ("TFE_EnableCollectiveOps", runtime)
    )
    new_status = ctypes.CFUNCTYPE(pointer)(("TF_NewStatus", framework))
    code_of = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(("TF_GetCode", framework))
    message_of = ctypes.CFUNCTYPE(text, pointer)(("TF_Message", framework))
    delete_status = ctypes.CFUNCTYPE(None, pointer)(("TF_DeleteStatus", framework))
    pointer_of = ctypes.PYFUNCTYPE(pointer, ctypes.py_object, text)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )

    def enable_collective_ops(context: object, server_def: bytes) -> None:
        status = new_status()
        try:
            enable(pointer_of(context, None), server_def, len(server_def), status)
            if code := code_of(status):
                error = exception_type_from_error_code(code)
                raise error(None, None, message_of(status).decode())
        finally:
            delete_status(status)

    original = pywrap_tfe.TFE_EnableCollectiveOps
    pywrap_tfe.TFE_EnableCollectiveOps = enable_collective_ops
    try:
        with _sigterm_handler_kept():
            yield
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = original


@contextlib.contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    handler = ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(int(signal.SIGTERM), None, handler)
    # On a thread, because `signal.signal` works in the main thread only, which waits.
    with repeating(lambda: libc.sigaction(int(signal.SIGTERM), handler, None), _RESTORE_SECS):
        yield
