"""When the servers have ended the work of a chief that died, and how far its run has come then.

    reached, values = settled_values(left) or ...   # waits; None without a complete step

A server learns of the death of a chief when its connections are closed, and then cancels the
chief's graphs. If the host of the chief is silent, its graphs continue to the end of a call.
"""

import time

import tensorflow as tf

from strategies.base import Reached
from strategies.ps.left_state import LeftState
from strategies.ps.left_tickets import read_tickets
from strategies.ps.sync.left_rounds import read_rounds, values_at

_READERS = {"synchronous": read_rounds, "asynchronous": read_tickets}
# Nothing has changed for this time: the servers have ended the work.
_QUIET_SECS = 0.5
# If something still changes after this time, the former chief lives.
_MOST_SECS = 30.0


def read_once(left: LeftState) -> Reached | None:
    """How far the run of `left` has come; None if it is in the middle of a step."""
    return None if left.variables is None else _READERS[left.facts["kind"]](left)


def settled_values(left: LeftState) -> tuple[Reached, list[tf.Tensor]] | None:
    """How far the run has come, and the values of the saved variables, on their servers.

    Waits for the end of the former chief's work. Returns None if the variables are of no complete
    step, if a server was lost, or if something has changed while the values were read.
    """
    reached = settled(left)
    values = None if reached is None else left_values(left, reached)
    if reached is None or values is None or read_once(left) != reached:
        return None
    return reached, values


def left_values(left: LeftState, reached: Reached) -> list[tf.Tensor] | None:
    """The values of the saved variables, on their servers; None if a server has not kept them.

    They share memory with the variables until these change.
    """
    if left.variables is None:
        return None
    if left.facts["kind"] == "synchronous":
        return values_at(left, reached.step)
    return [variable.value() for variable in left.variables[: left.facts["num_saved"]]]


def settled(left: LeftState) -> Reached | None:
    """`read_once`, when it does not change any more; None if it still changes after 30 s."""
    deadline = time.monotonic() + _MOST_SECS
    before = read_once(left)
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECS)
        now = read_once(left)
        if now == before:
            return now
        before = now
    return None
