"""Local steps: replicas train alone, and from time to time all average their changes.

    local = LocalSteps(trained, others, every=100, ...)     # in the strategy's scope
    learner.apply(local.own(gradients))     # in replica context, in each step

    rounds = LocalRounds(strategy, local, marks, ...)
    rounds.begin()
    for index, size in enumerate(sizes):
        ...                                     # a graph makes `size` local steps in all replicas
        rounds.weight = None                    # or a scalar, if replicas made unequal numbers
        if index < len(sizes) - 1:
            rounds.go_on()
    rounds.end()                                # all replicas are equal

With the mean D of all replicas' changes of a weight w, the outer step is Nesterov's momentum, with
-D as the gradient (Douillard et al., "DiLoCo", 2023, arXiv 2311.08105, algorithm 1; the formula is
that of torch.optim.SGD with nesterov=True):

    m <- outer_momentum * m + D
    w <- w_before + outer_learning_rate * (D + outer_momentum * m)

Other variables with decimals, such as the optimizer's slots, moving averages and moving statistics,
change by the mean. Where a weight has a constraint, it is applied to what each of the formulas here
gives: the mean of two unit vectors is shorter than they are. So all replicas are equal after an
average of all variables, which reports, evaluations and checkpoints come after: a checkpoint holds
one state, and a run may continue on another number of replicas.

`go_on` does not wait for the network: a thread sums the changes of a round while the next round
computes. The sum arrives at the end of that round, when a replica has made other changes already;
they are added (the update with delay of Streaming DiLoCo, arXiv 2501.18512, section 3.2, with all
of the old and all of the new changes):

    changes_k = w - start                       # of this replica, in round k
    average <- outer step of average with the mean of changes_(k-1) over all replicas
    w <- average + changes_k;    start <- w     # and the sum of changes_k begins

With `every_secs` workers make unequal numbers of steps. D is then weighted by these numbers: the
changes of a replica are multiplied by its `weight`, which is its number of steps / the mean number,
before they are summed. The step counter is set to the mean number.

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
from strategies.step_marks import StepMarks

# Tensors of each replica: what `strategy.run` returns, and takes.
_OfReplicas = Any
_Constraint = Callable[[tf.Tensor], tf.Tensor]
_Sum = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


class LocalSteps:
    """The outer step.

    Attributes:
        every_secs: About the time from one average to the next; 0 if steps are counted.
        last_step: Rounds by time end here at the latest; 0 if it is not known.
        overlap: True if a sum may be in flight while the next steps compute.
        weights: The trained variables.
        others: Other variables with decimals that replicas change alone, each its own copy.
        momenta: `m` of each weight; empty if the outer momentum is 0.
        counters: Whole numbers that each step changes by the same.
        changing: All variables that a step changes.
    """

    def __init__(
        self,
        trained: Sequence[tf.Variable],
        others: Sequence[tf.Variable],
        constraints: Sequence[_Constraint | None],
        last_step: int = 0,
        *,
        every: int,
        every_secs: float,
        outer_learning_rate: float,
        outer_momentum: float,
        overlap: bool,
    ) -> None:
        """Creates `momenta`. `others` are all variables that a step changes besides `trained`.

        `constraints` has a function of the value of each of `trained`, or None.
        The keywords are the fields of config.local_steps.
        """
        self.every_secs, self.last_step, self.overlap = every_secs, last_step, overlap
        self.weights = list(trained)
        self.others = [v for v in others if v.dtype.is_floating]
        self.counters = [v for v in others if not v.dtype.is_floating]
        self._constraints = list(constraints)
        self.momenta: list[tf.Variable] = []
        if outer_momentum:
            self.momenta = [tf.Variable(tf.zeros_like(v), trainable=False) for v in trained]
        self.changing = [*self.weights, *self.others, *self.momenta, *self.counters]
        self._every = every
        self._outer_learning_rate, self._outer_momentum = outer_learning_rate, outer_momentum

    def rounds(self, step: int, num_steps: int) -> list[int]:
        """Returns the numbers of steps up to each average, from `step` on, by `every`.

        The last average is the first one after `num_steps` steps.
        """
        every = self._every
        first = every - step % every
        return [first] + [every] * -((first - num_steps) // every)

    def own(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradients of a replica's mean loss, from its part of those of a batch.

        Called in replica context.
        """
        factor = tf.distribute.get_replica_context().num_replicas_in_sync
        return [None if each is None else tf.math.scalar_mul(factor, each) for each in gradients]

    def averaged(
        self, before: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the averages of `weights` and `others`, and the new values of `momenta`.

        `before` are the values after the last average, and `sums` the changes since then, summed
        over all replicas; both of `weights`, and then of all `others` or none. Called in replica
        context.
        """
        num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        kept, rate = self._outer_momentum, self._outer_learning_rate
        values, momenta = [], []
        for index, (old, total) in enumerate(zip(before, sums, strict=True)):
            mean = total / tf.cast(num_replicas, total.dtype)
            if index < len(self.momenta):
                momenta.append(kept * read_now(self.momenta[index]) + mean)
                mean += kept * momenta[-1]
            values.append(old + (rate * mean if index < len(self.weights) else mean))
        return [*self.constrained(values), *values[len(self.weights) :]], momenta

    def constrained(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the first `values`, those of `weights`, after the constraint of each."""
        pairs = zip(self._constraints, values, strict=False)
        return [value if limit is None else limit(value) for limit, value in pairs]


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
        `marks` keeps all that a step changes.
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
        self._start, changes = self._turn(self._average, self._start, self.weight)
        # Traced here: all workers number their sums in the order in which they trace them.
        summed = self._sum.get_concrete_function(changes)
        self._in_flight = in_background(lambda: summed(changes))
        return waited

    def end(self) -> float:
        """Called after the last round: makes all replicas equal. Returns as `go_on` does."""
        waited = self._arrive()
        self._end(self._average, self._start, self.weight)
        self._average = self._start = ()
        return waited

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
        self, average: Sequence[tf.Tensor], start: Sequence[tf.Tensor], weight: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """In replica context: adds the changes since `start` to `average`, as the weights.

        Returns these weights, with which the next round starts, and the changes to sum.
        """
        changes = _changes(self._local.weights, start)
        sums = [old + change for old, change in zip(average, changes, strict=True)]
        new = self._local.constrained(sums)
        self._assign(self._local.weights, new)
        return new, _weighted(changes, weight)

    @no_autograph
    def _averaged(
        self, average: Sequence[tf.Tensor], start: Sequence[tf.Tensor], weight: tf.Tensor | None
    ) -> None:
        """In replica context: sets all variables to equal values."""
        local = self._local
        others = self._marks.kept(local.others)
        changes = _weighted(_changes(local.weights, start), weight)
        # Of an optimizer's slots, 16 bits lose small values: Adam would divide by zero.
        exact = _weighted(_changes(local.others, others), weight)
        # With a weight, replicas have counted unequal numbers of steps.
        counters = [] if weight is None else local.counters
        counts = self._marks.kept(counters)
        exact += [tf.cast(counted, tf.float64) for counted in _changes(counters, counts)]
        sums = self._marks.begun(self._summed(changes, exact))
        before = [*average, *others]
        values, momenta = local.averaged(before, sums[: len(before)])
        new_counts = _mean_counts(counts, sums[len(before) :])
        variables = [*local.weights, *local.others, *local.momenta, *counters]
        self._assign(variables, [*values, *momenta, *new_counts])

    def _assign(self, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
        """In replica context: sets each replica's copies to its own values."""

        def assign_all(strategy: tf.distribute.Strategy, *tensors: tf.Tensor) -> None:
            for variable, value in zip(variables, tensors, strict=True):
                strategy.extended.update(variable, lambda v, new: v.assign(new), args=(value,))

        tf.distribute.get_replica_context().merge_call(assign_all, args=tuple(values))


def _weighted(changes: list[tf.Tensor], weight: tf.Tensor | None) -> list[tf.Tensor]:
    return changes if weight is None else [tf.cast(weight, c.dtype) * c for c in changes]


def _mean_counts(before: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """In replica context: `before`, and the mean of what all replicas have counted since."""
    num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return [
        old + tf.cast(tf.round(total / num_replicas), old.dtype)
        for old, total in zip(before, sums, strict=True)
    ]


def _changes(variables: Sequence[tf.Variable], before: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [read_now(variable) - old for variable, old in zip(variables, before, strict=True)]
