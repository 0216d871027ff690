"""The state of a run on its parameter servers, which the next chief takes over.

    recovery = ServerRecovery(cluster, store_progress, reached)     # in each chief
    found = recovery.take_over(variables, identity, lambda: 0)      # of a former chief, or None
    recovery.publish(variables, identity)           # from now on the next chief finds these

Each ps has two lists (`NamedTensors`): the handles of its variables, and a record, which is JSON
and says which variable is which. The record is the same on each ps, so it is found if any ps is
left.

A server learns of the death of a chief when its connections are closed, and then cancels the
chief's graphs. If the host of the chief is silent, its graphs continue to the end of a call. So the
next chief waits until nothing changes any more (`settled`).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf

from strategies.cluster.tf_config import Cluster
from strategies.lost_peers import losses_explained
from strategies.position import Reached
from strategies.ps.former_rounds import read_rounds, values_at
from strategies.ps.former_state import FormerState, FormerVariable, NamedTensors, ps_device
from strategies.ps.former_tickets import read_tickets
from strategies.ps.standby import Standby

log = logging.getLogger(__name__)

_READERS = {"synchronous": read_rounds, "asynchronous": read_tickets}
# Nothing has changed for this time: the servers have ended the work.
_QUIET_SECS = 0.5
# If something still changes after this time, the former chief lives.
_MOST_SECS = 30.0

# Stores how far the run has come, on the server of the step counter. Takes the saved variables, and
# returns what a next chief needs besides them: the executor's own variables, which it reads or
# frees, and facts, which are JSON values.
StoreProgress: TypeAlias = Callable[
    [Sequence[tf.Variable]], tuple[Sequence[tf.Variable], dict[str, object]]
]


class ServerRecovery:
    """The state of a run on servers, which stay when the chief dies, for the next chief."""

    def __init__(
        self, cluster: Cluster, store_progress: StoreProgress, reached: Callable[[], Reached]
    ) -> None:
        """Connects to no task yet, but needs a strategy that has connected.

        `reached` returns how far the run has come, when no step is in flight.
        """
        self._store_progress, self._reached = store_progress, reached
        self._devices = [ps_device(index) for index in sorted(cluster.jobs["ps"])]
        self._handles = [NamedTensors(device, "variables") for device in self._devices]
        self._records = [NamedTensors(device, "record") for device in self._devices]
        self._standby = Standby(self._devices)
        # The arguments of `publish`; before it, there are none.
        self._saved: Sequence[tf.Variable] = ()
        self._identity = ""
        self._former: FormerState | None = None

    @property
    def is_published(self) -> bool:
        """True if the next chief will look for the state of this one."""
        return bool(self._saved)

    def take_over(
        self, variables: Sequence[tf.Variable], identity: str, after_step: Callable[[], int]
    ) -> Reached | None:
        """Sets `variables` to the last complete step of a chief that has died.

        If a server was lost, sets them to the last copy for standby. Returns None, and changes no
        variable, if the servers have no state of the run `identity`, none of a complete step, or
        none of a step after `after_step`, which is called if there is one. Called before `start`.
        """
        with losses_explained():
            former = self._former = self._find()
            if former is None or not variables:
                return None
            if former.facts["identity"] != identity:
                log.warning(
                    "The servers hold the state of a run with another --model_dir, data, order or "
                    "model, whose chief died. It is dropped."
                )
                return None
            found, said = settled_values(former), "no complete step is lost"
            if found is None and (found := self._standby.find(former)):
                said = _described_loss(former.last_step(), found[0].step)
            if found is None:
                log.warning(
                    "The servers have no complete step of the former chief in their memory: a ps "
                    "was lost, or the former chief has died before its first step."
                )
            if found is None or found[0].step <= after_step():
                return None
            reached, values = found
            kept = f"{reached.step:,}"
            log.warning("The servers keep step %s of the former chief: %s.", kept, said)
            _assign(variables, values)
            return reached

    def publish(
        self, variables: Sequence[tf.Variable], identity: str, *, has_standby: bool = False
    ) -> None:
        """Lets the next chief of this run take `variables` over if this process dies.

        `variables` are all that a checkpoint has; if there are none, nothing is published.
        `identity` is the same in each process of a run. With `has_standby`, `copy_to_standby` will
        be called. Called once, after `start`.
        """
        places = {variable.device for variable in variables}
        if not places or not places.issubset(self._devices):
            return
        self._saved, self._identity = variables, identity
        with losses_explained():
            self._publish()
            self._standby.clear()
            if self._former:
                for variable in self._former.variables:
                    if variable.handle is not None:
                        variable.empty()
                self._former = None
            if has_standby:
                self._standby.begin(variables)

    def _publish(self) -> None:
        own, facts = self._store_progress(self._saved)
        facts |= {"identity": self._identity, "num_saved": len(self._saved)}
        variables = [*self._saved, *own]
        self._withdraw()
        for stored in self._handles:
            here = [v.handle for v in variables if v.device == stored.device]
            stored.store([tf.constant(len(here)), *here])
        places = [self._devices.index(variable.device) for variable in variables]
        dtypes = [variable.dtype.name for variable in variables]
        record = {"facts": facts, "places": places, "dtypes": dtypes, "ps": len(self._devices)}
        for stored in self._records:
            stored.store_json(record)

    def _withdraw(self) -> None:
        """Removes the records: a chief that comes now finds no state."""
        for stored in self._records:
            stored.clear()

    def _find(self) -> FormerState | None:
        """The state that was published; None if there is none.

        Raises tf.errors.OpError if a ps does not answer.
        """
        records = (stored.load_json() for stored in self._records)
        record = next((found for found in records if found), None)
        if record is None or record["ps"] != len(self._devices):
            return None
        places, handles = record["places"], []
        for ps, stored in enumerate(self._handles):
            number = places.count(ps)
            loaded = stored.load([tf.int32, *[tf.resource] * number])
            handles.append(iter(loaded[1:] if loaded else [None] * number))
        variables = [
            FormerVariable(self._devices[place], tf.as_dtype(dtype), next(handles[place]))
            for place, dtype in zip(places, record["dtypes"], strict=True)
        ]
        return FormerState(variables, record["facts"])

    @contextlib.contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Within it the next chief finds no state: the variables are set back."""
        self._withdraw()
        with losses_explained():
            self._standby.clear()
        yield
        if self._saved:
            self._publish()

    def copy_to_standby(self) -> None:
        """Copies the state to other servers, for `take_over` after the loss of a server."""
        if self._saved:
            with losses_explained():
                self._standby.copy(self._reached())

    def return_to_complete_step(self) -> Reached | None:
        """Sets the variables back to the step that the next chief would find; None if to none."""
        with losses_explained():
            former = self._find()
            found = settled_values(former) if former else None
            if found is None:
                return None
            reached, values = found
            _assign(self._saved, values)
        return reached


def settled_values(former: FormerState) -> tuple[Reached, list[tf.Tensor]] | None:
    """How far the run has come, and the values of the saved variables, on their servers.

    Waits for the end of the former chief's work. Returns None if the variables are of no complete
    step, if a server was lost, or if something has changed while the values were read.
    """
    reached = settled(former)
    if reached is None:
        return None
    # They share memory with the variables until these change.
    if former.facts["kind"] == "synchronous":
        values = values_at(former, reached.step)
    else:
        values = [variable.value() for variable in former.saved]
    return None if values is None or read_once(former) != reached else (reached, values)


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


def read_once(former: FormerState) -> Reached | None:
    """How far the run of `former` has come; None if it is in the middle of a step."""
    if any(variable.handle is None for variable in former.variables):  # A ps has lost its own.
        return None
    return _READERS[former.facts["kind"]](former)


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Sets `variables` on their servers. A value that is on the same server does not travel."""
    for variable, value in zip(variables, values, strict=True):
        with tf.device(variable.device):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _described_loss(last_step: int | None, copied_step: int) -> str:
    """What is lost if `last_step` (None: not known) was made, and a copy is of `copied_step`."""
    if last_step is None:
        return "the steps after this copy are lost; how many, only the lost ps knew"
    return f"the {last_step - copied_step:,} step(s) after this copy are lost"
