"""Tells if TensorFlow has been used in this process, without importing or using it.

No public function says so without initialising the devices (TensorFlow 2.21,
`tensorflow/python/eager/context.py`). Can be deleted when one does.
"""

import sys


def has_tensors() -> bool:
    """Returns True if TensorFlow has initialised its devices, which the first tensor does."""
    context = sys.modules.get("tensorflow.python.eager.context")
    current = context.context_safe() if context else None
    return current is not None and current._context_handle is not None
