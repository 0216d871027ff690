"""Keras' import without scikit-learn's.

Keras 3.15 (`keras/src/wrappers`) imports scikit-learn, and with it SciPy, if it is installed, to
offer wrappers for it: 1 s of CPU. Can be deleted when `import keras` leaves it out.
"""

import contextlib
import sys
from collections.abc import Iterator

SCIKIT_LEARN = "sklearn"


@contextlib.contextmanager
def scikit_learn_left_out() -> Iterator[None]:
    """Within it, an import of scikit-learn fails. Call this before scikit-learn is imported."""
    sys.modules[SCIKIT_LEARN] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[SCIKIT_LEARN]
