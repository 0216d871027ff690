"""Synchronous parameter servers: what workers run, and what combines their gradients, in graphs.

    rounds = Rounds(learner, source, strategy, wire, lanes=lanes, num_slots=3)
    coordinator.schedule(*rounds.shift(slot, ...))      # a closure for each worker
    rounds.conduct(...)                                 # meanwhile, on the ps

No Python and no chief takes part in a round. A worker's closure is a *shift*: it takes *orders*
from the queue of its *slot*, one after the other, and each is a share to compute. The *conductor*,
a loop on the parameter server that counts the steps, gives the orders:

| who | does | where |
| --- | --- | --- |
| conductor | gives an order to each slot that waits | strategies/ps_conductor.py |
| shift | reads the variables; stages its gradient, and sends a message | strategies/ps_shift.py |
| conductor | takes the first n that are timely; applies their sum | |
| conductor | gives the shares of gradients that came too late out again | |

They meet at the staging area and the queues (strategies/ps_staging.py). An order carries the step,
and comes before the variables are read: what is computed on variables of two steps is tagged with
the older one, and dropped. A worker that dies between two of its variables leaves no message, and
no tag where its gradient is not whole. And one that was given up but still writes changes a tag
first, so a round that reads after that notices, and does that share again.

A shift ends with an order that is its *last*, so that closures of evaluation find idle workers. If
the worker dies, the coordinator gives the shift to another one or waits for it to come back; the
shift begins with a message, and the conductor gives it the share again that was lost.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from strategies.base import Learner, Tensor
from strategies.packing import is_small
from strategies.ps_conductor import Conductor
from strategies.ps_shift import Shift
from strategies.ps_staging import ENDING, NOTHING, NUDGE, STOP, Staging
from strategies.wire import Wire

# Shares in one iteration of a shift, if the rounds of its call are at least _LONG times as many: up
# to three more are skipped. Where `run` has fewer they take long, or someone wants them to be few.
_UNROLLED = 4
_LONG = 8


class Rounds:
    """The graphs, and the queues and staging area that they meet at."""

    def __init__(
        self,
        learner: Learner,
        source: Any,
        strategy: Any,
        wire: Wire,
        *,
        lanes: Sequence[range],
        num_slots: int,
    ) -> None:
        """`lanes` are those of each share of a batch of `source`; there are `num_slots` workers."""
        self._source = source
        self._lanes = lanes
        self.staging = Staging(learner, strategy, num_slots=num_slots)
        # What is large is sent of skipped shares too.
        most = _UNROLLED if all(map(is_small, learner.variables)) else 1
        self._shifts = {
            number: Shift(learner, source, strategy, wire, self.staging, lanes, num_unrolled=number)
            for number in {1, most}
        }
        self.conduct = Conductor(learner, source, strategy, self.staging, lanes).graph

    def ticket(self, first_batch: int, num_batches: int) -> npt.NDArray[np.object_]:
        """The tickets of these batches, of one window, for shifts: bytes [shares, parts]."""
        return np.array(
            [
                [
                    tf.io.serialize_tensor(part).numpy()
                    for _, part in sorted(
                        self._source.ticket(first_batch, num_batches, share).items()
                    )
                ]
                for share in self._lanes
            ],
            object,
        )

    def shift(
        self, slot: int, starts: Tensor, tickets: Tensor, num_rounds: int
    ) -> tuple[Any, tuple[Any, ...]]:
        """A graph for a worker and its arguments, see `Shift`; for some `num_rounds`."""
        shift = self._shifts[max(self._shifts) if num_rounds >= _LONG * _UNROLLED else 1]
        return shift.graph, shift.arguments(slot, starts, tickets)

    def end(self, slot: int) -> None:
        """Ends the shift of `slot` when it has done what it was ordered before."""
        with tf.device(self.staging.home):
            if not int(self.staging.num_given(slot).numpy()):
                self.staging.give(slot, tf.constant([ENDING], tf.int64))

    def forget_orders(self, slot: int) -> None:
        """Takes back what no shift of `slot` has taken."""
        self.staging.forget_orders(slot)

    def nudge(self) -> None:
        """From now on each order is the last of its shift, and shifts that wait end.

        So that a worker which is there can take the shift of one that is not.
        """
        self._tell(NUDGE)

    def stop(self) -> None:
        """Ends `conduct`, wherever it is."""
        self._tell(STOP)

    def _tell(self, kind: int) -> None:
        # As many as are waited for at most.
        self.staging.send_kinds([kind] + [NOTHING] * (len(self._lanes) - 1))
