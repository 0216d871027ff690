"""The worker loops that run for the chief of synchronous parameter servers.

loops = WorkerLoops(buffers.end_loop)
loops.begin(slot, remote_value)         # after the coordinator has scheduled it
reasons = loops.take_ended()            # {slot: EndReason}
loops.drain()                           # ends all, and waits for them
"""

import concurrent.futures
from collections.abc import Callable, Collection
from typing import Any  # Any: futures of different results.

import tensorflow as tf

from data.system.background import in_background
from strategies.lost_peers import losses_explained
from strategies.ps.closures import fetched

# How long loops may take to end by themselves before they are told to end.
_SHUTDOWN_GRACE_SECS = 0.05
# How often they are told.
POLL_SECS = 1.0


class WorkerLoops:
    """`running` has the future EndReason of each worker slot whose loop was not seen to end."""

    def __init__(self, end: Callable[[int], None]) -> None:
        """`end` tells the loop of a worker slot to end after the assignments in its queue."""
        self._end = end
        self.running: dict[int, concurrent.futures.Future[int]] = {}

    def begin(self, slot: int, remote_value: tf.distribute.coordinator.RemoteValue) -> None:
        """Waits for the loop of `slot` from now on, on a thread."""
        self.running[slot] = in_background(lambda: int(fetched(remote_value)))

    def take_ended(self) -> dict[int, int]:
        """Forgets the loops that have ended; returns their EndReasons.

        Raises:
            PeerLostError: a loop failed because a parameter server was lost.
        """
        ended = {slot: future for slot, future in self.running.items() if future.done()}
        for slot in ended:
            del self.running[slot]
        with losses_explained():
            return {slot: future.result() for slot, future in ended.items()}

    def wait_for_any(self, other: concurrent.futures.Future[Any], timeout_secs: float) -> None:
        """Waits until a loop or `other` has ended."""
        futures: list[concurrent.futures.Future[Any]] = [other, *self.running.values()]
        concurrent.futures.wait(futures, timeout_secs, concurrent.futures.FIRST_COMPLETED)

    def wait_for_all(self, slots: Collection[int], secs_per_round: float) -> None:
        """Waits until the loops of `slots`, which have their last assignment, have ended.

        Returns after the time of four rounds at most, and after a second in any case.
        """
        timeout_secs = min(POLL_SECS, max(_SHUTDOWN_GRACE_SECS, 4 * secs_per_round))
        futures = [future for slot, future in self.running.items() if slot in slots]
        concurrent.futures.wait(futures, timeout=timeout_secs)

    def end_all(self) -> None:
        """Tells all loops to end, after some time to end by themselves.

        Must be called again until no loop is left: the worker that was told may have died, and
        another one may have taken over its loop.
        """
        concurrent.futures.wait(self.running.values(), timeout=_SHUTDOWN_GRACE_SECS)
        self.take_ended()
        with losses_explained():
            for slot in self.running:
                self._end(slot)

    def drain(self) -> None:
        """Ends all loops, and returns when none is left."""
        while self.running:
            self.end_all()
            concurrent.futures.wait(self.running.values(), timeout=POLL_SECS)
