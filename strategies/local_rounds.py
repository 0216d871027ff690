"""Rounds of local steps, each followed by an average of what the replicas have changed.

    rounds = LocalRounds(strategy, local, marks, ...)
    rounds.begin()
    for index, size in enumerate(sizes):
        ...                                     # a graph makes `size` local steps in all replicas
        rounds.weight = None                    # or a scalar, if replicas made unequal numbers
        if index < len(sizes) - 1:
            rounds.go_on()
    rounds.end()                                # all replicas are equal

`go_on` does not wait for the network: a thread sums the changes of a round while the next round
computes. The sum arrives at the end of that round, when a replica has made other changes already;
they are added (the update with delay of Streaming DiLoCo, arXiv 2501.18512, section 3.2, with all
of the old and all of the new changes):

    changes_k = w - start                       # of this replica, in round k
    average <- outer step of average with the mean of changes_(k-1) over all replicas
    w <- average + changes_k;    start <- w     # and the sum of changes_k begins

If replicas make unequal numbers of steps, they multiply what they sum by their `weight`: the mean
of all weights is 1.

`end` waits for that sum, and for one of the last changes. The sums of `go_on` are of weights alone:
what else a step changes, such as the optimizer's slots, each replica keeps until `end`.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from data.system.background import in_background
from data.system.compat.autograph import no_autograph
from strategies.base import Tensor, read_now
from strategies.local_steps import LocalSteps
from strategies.step_marks import StepMarks

# Tensors of each replica: what `strategy.run` returns, and takes.
_OfReplicas = Any
_Sum = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


class LocalRounds:
    """The averages of one executor, and the sum that is in flight between two of its rounds.

    Attributes:
        weight: This process's steps in the last round / the mean number of all processes, a float32
            scalar; None if all make as many.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        local: LocalSteps,
        marks: StepMarks,
        summed: _Sum,
        summed_in_background: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Both functions return sums over all replicas, in replica context.

        `summed` also takes tensors that are sent exactly, and is part of the time of a step.
        `marks` keeps all that a step changes; first `local.weights`, then `local.others`.
        """
        self._local, self._marks, self._summed = local, marks, summed
        self.weight: tf.Tensor | None = None
        self._in_flight: concurrent.futures.Future[_OfReplicas] | None = None
        self._average: _OfReplicas = ()
        self._start: _OfReplicas = ()

        def in_replicas(function: Callable[..., Any]) -> Any:
            def run(*arguments: _OfReplicas) -> _OfReplicas:
                return strategy.run(no_autograph(function), args=arguments)

            return tf.function(run, autograph=False)

        @tf.function(autograph=False)
        def begin() -> _OfReplicas:
            with tf.control_dependencies([marks.complete()]):
                return strategy.run(no_autograph(lambda: marks.kept(local.weights)))

        @tf.function(autograph=False)
        def end(*arguments: _OfReplicas) -> None:
            strategy.run(self._averaged, args=arguments)
            marks.complete()

        self._begin, self._end = begin, end
        self._settle, self._turn = in_replicas(self._settled), in_replicas(self._turned)
        self._sum = in_replicas(summed_in_background)

    def begin(self) -> None:
        """Keeps the variables, which are equal on all replicas."""
        self._in_flight = None
        self._average = self._start = self._begin()

    def go_on(self) -> float:
        """Called between two rounds. Returns the seconds for which it waited for a sum."""
        waited = self._arrive()
        self._start, changes = self._turn(self._average, self._start, *self._weights())
        # Traced here: all workers number their sums in the order in which they trace them.
        summed = self._sum.get_concrete_function(changes)
        self._in_flight = in_background(lambda: summed(changes))
        return waited

    def end(self) -> float:
        """Called after the last round: makes all replicas equal. Returns as `go_on` does."""
        waited = self._arrive()
        self._end(self._average, self._start, *self._weights())
        self._average = self._start = ()
        return waited

    def _weights(self) -> list[tf.Tensor]:
        return [] if self.weight is None else [self.weight]

    def _arrive(self) -> float:
        """Waits for the sum in flight, and makes the outer step with it."""
        if self._in_flight is None:
            return 0.0
        began = time.monotonic()
        sums = self._in_flight.result()
        waited = time.monotonic() - began
        self._in_flight, self._average = None, self._settle(self._average, sums)
        return waited

    def _settled(self, average: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """In replica context: the outer step of `average`; changes the momenta."""
        new, momenta = self._local.averaged(average, sums)
        self._assign(self._local.momenta, momenta)
        return new

    def _turned(
        self, average: Sequence[tf.Tensor], start: Sequence[tf.Tensor], *weight: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """In replica context: adds the changes since `start` to `average`, as the weights.

        Returns these weights, with which the next round starts, and the changes to sum.
        """
        changes = _changes(self._local.weights, start)
        new = [old + change for old, change in zip(average, changes, strict=True)]
        self._assign(self._local.weights, new)
        return new, _weighted(changes, *weight)

    @no_autograph
    def _averaged(
        self, average: Sequence[tf.Tensor], start: Sequence[tf.Tensor], *weight: tf.Tensor
    ) -> None:
        """In replica context: sets all variables to equal values."""
        local = self._local
        equal = [*local.weights, *local.others]
        others = self._marks.kept(equal)[len(local.weights) :]
        changes = _weighted(_changes(local.weights, start), *weight)
        # Of an optimizer's slots, 16 bits lose small values: Adam would divide by zero.
        exact = _weighted(_changes(local.others, others), *weight)
        counts: list[tf.Tensor] = []
        if weight:  # Replicas have counted unequal numbers of steps.
            before = [*equal, *local.momenta]
            counts = self._marks.kept([*before, *local.counters])[len(before) :]
            exact += [tf.cast(c, tf.float64) for c in _changes(local.counters, counts)]
        sums = self._marks.begun(self._summed(changes, exact))
        values, momenta = local.averaged([*average, *others], sums[: len(equal)])
        self._assign([*equal, *local.momenta], [*values, *momenta])
        if counts:
            self._assign(local.counters, _mean_counts(counts, sums[len(equal) :]))

    def _assign(self, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
        """In replica context: sets each replica's copies to its own values."""

        def assign_all(strategy: tf.distribute.Strategy, *tensors: tf.Tensor) -> None:
            for variable, value in zip(variables, tensors, strict=True):
                strategy.extended.update(variable, lambda v, new: v.assign(new), args=(value,))

        tf.distribute.get_replica_context().merge_call(assign_all, args=tuple(values))


def _weighted(changes: list[tf.Tensor], *weight: tf.Tensor) -> list[tf.Tensor]:
    return [tf.cast(factor, c.dtype) * c for factor in weight for c in changes] or changes


def _mean_counts(before: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """In replica context: `before`, and the mean of what all replicas have counted since."""
    num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return [
        old + tf.cast(tf.round(total / num_replicas), old.dtype)
        for old, total in zip(before, sums, strict=True)
    ]


def _changes(variables: Sequence[tf.Variable], before: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [read_now(variable) - old for variable, old in zip(variables, before, strict=True)]
