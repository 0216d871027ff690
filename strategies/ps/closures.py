"""Closures for the coordinator: how many steps each has, how it is scheduled, what it returns.

    most = closure_size(num_steps, num_workers, secs_per_step)
    for size in closure_sizes(num_steps, most, source.ticket_runs(first_batch)):
        ...
    closure = Closure(function)                     # a function of a ticket; returns packed(...)
    value = closure.schedule(coordinator, ticket)   # for each ticket
    coordinator.join()
    totals, worker, ages = unpacked(fetched(value), num_totals)

The chief does all of this for each closure while the worker waits, so it must be fast.
"""

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system.compat.scheduled_closures import as_scheduled
from strategies.lost_peers import PeerLostError
from strategies.ps.former_tickets import DROPPED

# The most steps in a closure, which costs a few milliseconds in addition to its steps.
STEPS_PER_CLOSURE = 16
# In a closure of long steps.
FEW_STEPS = 4

# The most CPU time in which a graph of several steps may be traced.
_MAX_TRACE_SECS = 20.0
# The most time for a closure of several steps. A stop request is answered when each worker has
# ended the closure that it has begun, and one more.
_CLOSURE_SECS = 8.0
_COPY_AGAIN_SECS = 1.0
_DROPPED_SECS = 0.01


class Closure:
    """A tf.function with an input signature, which workers run.

    The coordinator traces the function once. After that it gets the concrete function: otherwise it
    would look that up again for each closure, which takes longer than the rest of scheduling.

    Attributes:
        function: The tf.function.
        trace_secs: The CPU time of this process in tracing; 0 before.
    """

    def __init__(self, function: tf.types.experimental.PolymorphicFunction) -> None:
        self.function = function
        self._concrete: tf.types.experimental.ConcreteFunction | None = None
        self.trace_secs = 0.0

    @property
    def is_traced(self) -> bool:
        """True if `schedule` does not have to trace."""
        return self._concrete is not None

    def schedule(
        self, coordinator: tf.distribute.coordinator.ClusterCoordinator, ticket: object
    ) -> tf.distribute.coordinator.RemoteValue:
        """Gives the function and `ticket` to the next idle worker; returns the remote result."""
        self.trace(coordinator.strategy)
        return coordinator.schedule(self._concrete, args=(ticket,))

    def trace(self, strategy: tf.distribute.Strategy) -> None:
        """Traces the function, which also sends it to all tasks; later calls do nothing."""
        if self._concrete is None:
            started = time.process_time()
            # In the scope, as the coordinator would do it.
            with strategy.scope(), as_scheduled(strategy):
                self._concrete = self.function.get_concrete_function()
            self.trace_secs = time.process_time() - started


def closure_size(num_steps: int, num_workers: int, secs_per_step: float | None) -> int:
    """The most steps in each closure, when `num_steps` follow.

    A step takes a worker `secs_per_step`; None if that is not known yet. Each worker gets at least
    one closure, if there are enough steps.
    """
    size = 1
    if secs_per_step is not None:
        several = (STEPS_PER_CLOSURE, FEW_STEPS)
        size = next((n for n in several if n * secs_per_step <= _CLOSURE_SECS), 1)
    return max(1, min(size, num_steps // num_workers))


def closure_sizes(num_steps: int, most: int, runs: Iterator[tuple[int, int]]) -> Iterator[int]:
    """Yields the number of steps of each closure; the sum is `num_steps`.

    A closure has at most `most` steps, and does not cross the border of two `runs`, (first batch,
    number of batches), each of which is read in one piece.
    """
    left = num_steps
    while left:
        in_run = min(next(runs)[1], left)
        left -= in_run
        while in_run:
            size = min(in_run, most)
            yield size
            in_run -= size


def pays_unrolling(num_steps: int, trace_secs: float) -> bool:
    """Returns True if a graph of `num_steps` steps is traced fast enough to be of use.

    `trace_secs` was the time for one step in a loop; 0 if it is not known yet. An unrolled step
    saves about a millisecond, and reads variables while the gradients before it are sent.
    """
    return num_steps > 1 and 0 < trace_secs * num_steps <= _MAX_TRACE_SECS


def packed(totals: tf.Tensor, worker: tf.Tensor, ages: tf.Tensor) -> tf.Tensor:
    """The results of a training closure as one tensor, because each tensor is a transfer.

    The metric totals of each step, [steps, num_totals], are summed, without dropped gradients.
    Indices of workers and ages of gradients have fewer than the 53 bits that float64 can hold.
    """
    dropped = tf.equal(ages, DROPPED)[:, tf.newaxis]
    applied = tf.reduce_sum(tf.where(dropped, tf.zeros_like(totals), totals), axis=0)
    parts = [worker[tf.newaxis], ages, applied]
    return tf.concat([tf.cast(part, tf.float64) for part in parts], axis=0)


def unpacked(
    result: npt.NDArray[np.float64], num_totals: int
) -> tuple[npt.NDArray[np.float64], int, npt.NDArray[np.int64]]:
    """What `packed` has packed: metric totals, index of the worker, age of each gradient."""
    worker, ages, totals = np.split(result, [1, len(result) - num_totals])
    return totals, int(worker[0]), ages.astype(np.int64)


def fetched(value: tf.distribute.coordinator.RemoteValue) -> npt.NDArray[np.float64]:
    """The result of a closure as a NumPy array or scalar; the function must not return None.

    Waits until the coordinator has it: if the worker is lost before, another worker computes it.

    Raises:
        PeerLostError: the function returned, but its result was lost on the way.
    """
    copy_error: Exception | None = None
    was_dropped = False
    while True:
        try:
            result: npt.NDArray[np.float64] | None = value.fetch()
        except Exception as error:
            if was_dropped:
                raise PeerLostError("The result of a worker was lost", error) from error
            # A failed closure raises the same object each time. Any other error is of this copy:
            # the worker was lost, which the coordinator notices itself.
            if error is copy_error or not isinstance(error, tf.errors.OpError):
                raise
            copy_error = error
            time.sleep(_COPY_AGAIN_SECS)
        else:
            if result is not None:
                return result
            # If a closure fails after its function returned, the coordinator drops the result, and
            # sets the error a moment later.
            was_dropped = True
            time.sleep(_DROPPED_SECS)
