"""Closures for the coordinator: how large they are, how they are handed over, what comes back.

    closure = Closure(function)                     # of a ticket; returns packed(...)
    value = closure.schedule(coordinator, ticket)   # for each ticket
    coordinator.join()
    sums, worker, ages = unpacked(fetched(value), sums_shape)

A closure of few steps pays for all of this on the chief, while its worker waits.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from strategies.base import PeerLostError, Tensor

# Steps in one closure, at most. A closure costs a few milliseconds on top of its steps.
STEPS_PER_CLOSURE = 16


class Closure:
    """A function for workers. The coordinator traces it; then it is handed the graph.

    It would look for the graph anew each time, which takes it longer than all else.
    """

    def __init__(self, function: Any) -> None:
        """Of a tf.function with an input signature."""
        self._function = function
        self._graph: Any = None

    def schedule(self, coordinator: Any, *args: Any) -> Any:
        """Hands it to the next idle worker, with `args`; returns the remote value."""
        if self._graph is not None:
            return coordinator.schedule(self._graph, args=args)
        value = coordinator.schedule(self._function, args=args)
        with coordinator.strategy.scope():  # As it was traced, or it would be once more.
            self._graph = self._function.get_concrete_function()
        return value


def closure_sizes(num_steps: int, num_workers: int, runs: Iterator[tuple[int, int]]) -> list[int]:
    """How many steps each closure takes; they sum to `num_steps`.

    At least one closure a worker where there are enough steps. A closure stays inside one of
    `runs`, (first batch, number of batches), which are read at once.
    """
    sizes: list[int] = []
    most = max(1, min(STEPS_PER_CLOSURE, num_steps // num_workers))
    left = num_steps
    for _, in_run in runs:
        in_run = min(in_run, left)
        left -= in_run
        while in_run:
            sizes.append(min(in_run, most))
            in_run -= sizes[-1]
        if not left:
            break
    return sizes


def packed(sums: Tensor, worker: Tensor, ages: Tensor) -> Tensor:
    """What a closure of training returns, as one: each result is a transfer of its own.

    Numbers of workers and ages of gradients have less than the 53 bits that float64 keeps.
    """
    parts = [worker[tf.newaxis], ages, tf.reshape(sums, [-1])]
    return tf.concat([tf.cast(part, tf.float64) for part in parts], axis=0)


def unpacked(
    result: npt.NDArray[np.float64], sums_shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.float64], int, npt.NDArray[np.int64]]:
    """The sums of the metrics, float64 [metrics, 2]; the worker; what it says of each step."""
    num_sums = math.prod(sums_shape)
    worker, ages, sums = np.split(result, [1, len(result) - num_sums])
    return sums.reshape(sums_shape), int(worker[0]), ages.astype(np.int64)


def fetched(value: Any) -> Any:
    """What the function of a closure returned, which must not be None; of its remote `value`.

    Raises:
        PeerLostError: the function returned, but its result was lost on the way.
    """
    result = value.fetch()
    if result is not None:
        return result
    # The coordinator takes back the result of a closure that failed after its function returned,
    # and sets its error a moment later.
    while True:
        try:
            value.fetch()
        except Exception as error:
            raise PeerLostError("The result of a worker was lost", error) from error
        time.sleep(0.01)
