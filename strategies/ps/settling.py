"""Waits until the servers have ended a dead chief's work; finds the step that was reached.

    reached, values = settled_values(former) or ...   # waits; None without a complete step

A server learns of the death of a chief when its connections are closed, and then cancels the
chief's graphs. If the host of the chief is silent, its graphs continue to the end of a call.
"""

import time

import tensorflow as tf

from strategies.position import Reached
from strategies.ps.former_rounds import read_rounds, values_at
from strategies.ps.former_state import FormerState
from strategies.ps.former_tickets import read_tickets

_READERS = {"synchronous": read_rounds, "asynchronous": read_tickets}
# Nothing has changed for this time: the servers have ended the work.
_QUIET_SECS = 0.5
# If something still changes after this time, the former chief lives.
_MOST_SECS = 30.0


def read_once(former: FormerState) -> Reached | None:
    """How far the run of `former` has come; None if it is in the middle of a step."""
    return None if former.variables is None else _READERS[former.facts["kind"]](former)


def settled_values(former: FormerState) -> tuple[Reached, list[tf.Tensor]] | None:
    """How far the run has come, and the values of the saved variables, on their servers.

    Waits for the end of the former chief's work. Returns None if the variables are of no complete
    step, if a server was lost, or if something has changed while the values were read.
    """
    reached = settled(former)
    values = None if reached is None else former_values(former, reached)
    if reached is None or values is None or read_once(former) != reached:
        return None
    return reached, values


def former_values(former: FormerState, reached: Reached) -> list[tf.Tensor] | None:
    """The values of the saved variables, on their servers; None if a server has not kept them.

    They share memory with the variables until these change.
    """
    if former.variables is None:
        return None
    if former.facts["kind"] == "synchronous":
        return values_at(former, reached.step)
    return [variable.value() for variable in former.variables[: former.facts["num_saved"]]]


def settled(former: FormerState) -> Reached | None:
    """`read_once`, when it does not change any more; None if it still changes after 30 s."""
    deadline = time.monotonic() + _MOST_SECS
    before = read_once(former)
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECS)
        now = read_once(former)
        if now == before:
            return now
        before = now
    return None
