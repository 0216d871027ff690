"""The state of Keras that all models of a thread share: the numbers in names, and the seeds.

`keras.utils.clear_session` is the public way to begin anew, but it deletes the state, and cannot
set it back. Keras 3.15, `keras/src/backend/common/global_state.py`. Can be deleted when Keras has a
public scope for names and seeds.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator

from keras.src.backend.common import global_state

_NUMBERS = "object_name_uids"


@contextlib.contextmanager
def names_from_zero() -> Iterator[None]:
    """Within it Keras numbers layers, inputs and variables as in a new process.

    So a model has the same names at each build, in each process and under each strategy.
    """
    former = global_state.get_global_attribute(_NUMBERS)
    global_state.set_global_attribute(_NUMBERS, collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute(_NUMBERS, former)


@contextlib.contextmanager
def keras_state_kept() -> Iterator[None]:
    """Within it Keras counts its names from 0, as in a new process, with its own seeds.

    So a second run has the names and the random numbers of the first.
    """
    former = global_state.GLOBAL_STATE_TRACKER
    ours = threading.local()
    # What the user has set, such as the dtype policy, holds here too.
    vars(ours).update({name: value for name, value in vars(former).items() if name != _NUMBERS})
    global_state.GLOBAL_STATE_TRACKER = ours
    try:
        yield
    finally:
        global_state.GLOBAL_STATE_TRACKER = former
