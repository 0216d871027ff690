"""Which functions AutoGraph rewrites on their way into a graph: users', and hardly any of ours.

AutoGraph makes `if` and `for` work on tensors, by rewriting each function that is called while a
graph is made. That took more than half of the CPU from TensorFlow's import to the first step.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])

_OURS = ("data", "strategies", "trainer")
# Of no function: what is called with it is rewritten.
_OUTSIDE = tf.__internal__.autograph.control_status_ctx()


def plain(function: Function) -> Function:
    """Decorates a function that goes into graphs as it is, with all that it calls.

    It says tf.cond and tf.while_loop where it means them, and `converted` where it calls what a
    user has written.
    """
    undecorated: Function = tf.autograph.experimental.do_not_convert(function)
    return undecorated


def converted(function: Function) -> Function:
    """`function`, to be called from one that is `plain`: rewritten, if it is a user's."""
    if (getattr(function, "__module__", None) or "").partition(".")[0] in _OURS:
        return function
    rewritten: Function = tf.__internal__.autograph.tf_convert(function, _OUTSIDE)
    return rewritten
