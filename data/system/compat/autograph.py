"""Decides which functions AutoGraph rewrites in graphs: those of users, few of this program.

    @no_autograph
    def parse_all(self, serialized):                # goes into graphs unchanged
        return autograph(self._parse)(serialized)   # a user's function is rewritten

AutoGraph makes `if` and `for` work on tensors, by rewriting each function that is called while a
graph is made. That took more than half of the CPU from TensorFlow's import to the first step.
`tf.autograph.experimental.do_not_convert` also leaves out what a function calls, and TensorFlow
2.21 has no public function that rewrites a user's function within it. Can be deleted when it has.
"""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., object])

_OURS = ("data", "strategies", "trainer")
# The status outside of all functions: functions that are called under it are rewritten.
_OUTSIDE = tf.__internal__.autograph.control_status_ctx()


def no_autograph(function: Function) -> Function:
    """Decorates a function that goes into graphs unchanged, with all functions that it calls.

    The function must write tf.cond and tf.while_loop itself, and call functions that users wrote
    through `autograph`.
    """
    undecorated: Function = tf.autograph.experimental.do_not_convert(function)
    return undecorated


def autograph(function: Function) -> Function:
    """`function`, rewritten if a user wrote it: for calls from a `no_autograph` function."""
    if (getattr(function, "__module__", None) or "").partition(".")[0] in _OURS:
        return function
    rewritten: Function = tf.__internal__.autograph.tf_convert(function, _OUTSIDE)
    return rewritten
