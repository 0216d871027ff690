"""Asynchronous steps, in graphs: a worker computes a gradient, and the servers apply it at once.

steps = AsynchronousSteps(
strategy, learner, source, Wire(), num_workers=2, max_staleness=None
)
unrolled, looped = steps.closures()     # of tickets; each returns `packed` metrics and ages
steps.applied                           # by each worker
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from strategies.base import Learner, Tensor, read_now
from strategies.closures import STEPS_PER_CLOSURE, Closure, packed
from strategies.packing import computed_with, read_together
from strategies.wire import Wire

# In place of a gradient's staleness, if it was too old.
DROPPED = -1


class AsynchronousSteps:
    """The graphs of asynchronous steps of `learner`.

    Attributes:
        applied: Gradients of each worker, a tf.Variable beside the step counter, int64 [workers].
    """

    def __init__(
        self,
        strategy: Any,
        learner: Learner,
        source: Any,
        wire: Wire,
        *,
        num_workers: int,
        max_staleness: int | None,
    ) -> None:
        """Where `strategy` has placed `learner`; on tickets of `source`, which the workers parse.

        A gradient that is older than `max_staleness` steps when it could be applied is dropped;
        None applies all.
        """
        self._strategy = strategy
        self._learner = learner
        self._source = source
        self._wire = wire
        self._max_staleness = max_staleness
        with strategy.scope(), strategy.extended.colocate_vars_with(learner.step):
            self.applied = tf.Variable(tf.zeros([num_workers], tf.int64), trainable=False)
        with tf.device(learner.step.device):
            name = f"applying-{os.getpid()}-{time.time_ns()}"
            self._locks = [tf.raw_ops.MutexV2(shared_name=f"{name}-{i}") for i in range(2)]

    def closures(self) -> tuple[Closure, Closure]:
        """A closure for tickets of STEPS_PER_CLOSURE batches, unrolled, and one for any other.

        They return what `unpacked` takes.

        Unrolled steps are faster than a loop in the graph, but each number of them is a graph of
        its own, and a graph takes seconds to trace and to send.
        """
        source, learner = self._source, self._learner
        step = self._free_step if self._max_staleness is None else self._bounded_step
        home = learner.step.device

        def this_worker() -> tuple[Tensor, Tensor]:
            """Its index, where it is called and where the steps are counted."""
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            with tf.device(home):
                return worker, tf.identity(worker)

        @tf.function(input_signature=[source.ticket_spec(STEPS_PER_CLOSURE)])
        def unrolled(ticket: Any) -> Tensor:
            batches = unstack(source.parse_ticket(ticket), STEPS_PER_CLOSURE)
            worker, worker_at_home = this_worker()
            sums: list[Tensor] = []
            ages: list[Tensor] = []
            for batch in batches:
                if self._wire.rounds:  # The next gradient comes after what this one has left.
                    with tf.control_dependencies(ages[-1:]):
                        batch = tf.nest.map_structure(tf.identity, batch)
                more, age = step(batch, worker_at_home)
                sums.append(more)
                ages.append(age)
            with tf.device(home):  # They travel as one.
                all_ages = tf.stack(ages)
            return packed(_applied(tf.stack(sums), all_ages), worker, all_ages)

        @tf.function(input_signature=[source.ticket_spec()])
        def looped(ticket: Any) -> Tensor:
            # Here, and not in the loop: in inner graphs it cannot be had.
            worker, worker_at_home = this_worker()
            stacked = source.parse_ticket(ticket)
            num_steps = tf.shape(ticket["gather"])[0]
            sums = tf.TensorArray(
                tf.float64, num_steps, element_shape=[len(learner.metric_names), 2]
            )
            ages = tf.TensorArray(tf.int64, num_steps, element_shape=[])
            for i in tf.range(num_steps):
                batch = tf.nest.map_structure(lambda t, i=i: t[i], stacked)
                more, age = step(batch, worker_at_home)
                sums = sums.write(i, more)
                ages = ages.write(i, age)
            all_ages = ages.stack()
            return packed(_applied(sums.stack(), all_ages), worker, all_ages)

        return Closure(unrolled), Closure(looped)

    def _free_step(self, batch: Any, worker: Tensor) -> tuple[Tensor, Tensor]:
        """One step of `worker`, by its index: its metrics, and its staleness or DROPPED, int64.

        Staleness is what the counter says at the application, less what it said before the
        variables were read: steps of others that this gradient does not know of.
        """
        before, arrived, sums = self._compute(batch)
        return sums, self._apply_and_count(arrived, worker, before)

    def _bounded_step(self, batch: Any, worker: Tensor) -> tuple[Tensor, Tensor]:
        """`_free_step`, unless the gradient is too old when it has arrived.

        Nobody else applies between that look and the application, in which only servers take part:
        a worker that stands still holds nobody up. A gradient that is dropped takes with it what it
        had of rests of --wire_dtype; what rounding took from it stays.
        """
        before, arrived, sums = self._compute(batch)
        waited_for = [*_tensors(arrived), worker]
        # TensorFlow frees a lock when somebody who waits for it is cancelled: when a worker ends.
        # Who comes in then waits for the second. Two are inside only where several workers end
        # while others stand in line.
        held = []
        with tf.device(self._learner.step.device):
            for lock in self._locks:
                with tf.control_dependencies(waited_for):
                    # Freed with the graph that has it, however that ends.
                    held.append(tf.raw_ops.MutexLock(mutex=lock))
                waited_for = held[-1:]
            with tf.control_dependencies(held):
                age = read_now(self._learner.step) - before
            # Below 0 where the counter was set back: the gradient is of what is no more.
            if (age < 0) | (age > self._max_staleness):
                age = tf.constant(DROPPED, tf.int64)
            else:
                age = self._apply_and_count(arrived, worker, before)
            done = age
            for lock in reversed(held):
                with tf.control_dependencies([done]):
                    done = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
            with tf.control_dependencies([done]):
                return sums, tf.identity(age)

    def _compute(self, batch: Any) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        """What the counter says; a gradient of variables read after it, sent; and its metrics."""
        learner = self._learner
        home = learner.step.device
        with tf.device(home):
            before = read_now(learner.step)
        (arrived,), values = read_together(learner.computed_with, [before], home)
        gradients, sums = computed_with(values, arrived, learner, self._strategy, batch)
        return before, self._wire.sent_to(learner.variables, gradients), sums

    def _apply_and_count(self, arrived: Sequence[Tensor], worker: Tensor, before: Tensor) -> Tensor:
        """Applies gradients that have `arrived`, and counts them as `worker`'s; their staleness.

        All of it where the counter is: an unrolled step sends gradients, and nothing comes back.
        """
        step = self._strategy.run(self._learner.apply, args=(arrived,))
        with tf.device(self._learner.step.device), tf.control_dependencies([step]):
            self.applied.scatter_nd_add([[worker]], tf.ones([1], tf.int64))
            return tf.cast(step - 1 - before, tf.int64)


def _applied(sums: Tensor, ages: Tensor) -> Tensor:
    """The sum of those of `sums`, [steps, metrics, 2], whose gradients were not dropped."""
    dropped = tf.equal(ages, DROPPED)[:, tf.newaxis, tf.newaxis]
    return tf.reduce_sum(tf.where(dropped, tf.zeros_like(sums), sums), axis=0)


def _tensors(gradients: Sequence[Tensor]) -> list[Tensor]:
    """What `gradients` consist of: rows are two tensors, and a variable may have none."""
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            tensors += [gradient.values, gradient.indices]
        elif gradient is not None:
            tensors.append(gradient)
    return tensors


def unstack(stacked: Any, num_batches: int) -> list[Any]:
    """Batches from tensors [num_batches, n, ...]."""
    return [tf.nest.map_structure(lambda t, i=i: t[i], stacked) for i in range(num_batches)]
