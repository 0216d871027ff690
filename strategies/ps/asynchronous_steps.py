"""The graphs of asynchronous training: a worker computes gradients, and the servers apply them."""

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf

from data.tickets import TicketSource
from strategies import locks
from strategies.base import Batch, Learner, Tensor, present, read_now
from strategies.gradients.coalescing import is_small, read_together
from strategies.gradients.compression import Compression
from strategies.ps.closures import FEW_STEPS, STEPS_PER_CLOSURE, Closure, packed
from strategies.ps.former_tickets import DROPPED, EMPTY_ROW, LOG_ROWS, log_place
from strategies.ps.worker_step import compute_gradients, send_to_servers


@dataclasses.dataclass
class Sent:
    """The gradients of a step.

    Attributes:
        sent: On the worker, as they are sent.
        arrived: On the servers, in the order of the variables.
        counter: The step counter, read when the first of them has arrived. None: not read.
    """

    sent: Sequence[Tensor]
    arrived: Sequence[Tensor]
    counter: Tensor | None = None

    def first_to_arrive(self, device: str) -> list[Tensor]:
        """A gradient that is computed early; of small ones, which travel together, one on `device`.

        The backward pass begins with the last variable.
        """
        tensors = present(self.arrived)
        large = [tensor for tensor in tensors if not is_small(tensor)]
        here = [tensor for tensor in tensors if tensor.device == device]
        return (large or here or tensors)[-1:]


@dataclasses.dataclass(eq=False)
class AsynchronousSteps:
    """The graphs: a worker computes a gradient, and the servers apply it immediately.

    `strategy` has placed the variables of `learner`; workers parse tickets of `source`.
    """

    strategy: tf.distribute.ParameterServerStrategy
    learner: Learner
    source: TicketSource
    compression: Compression
    num_workers: int
    max_staleness: int | None
    read_dtype: str

    def __post_init__(self) -> None:
        strategy, step = self.strategy, self.learner.step
        # `applied` counts the applied gradients of each worker; former_tickets.py has the log.
        with strategy.scope(), strategy.extended.colocate_vars_with(step):
            self.applied = tf.Variable(tf.zeros([self.num_workers], tf.int64), trainable=False)
            with tf.device(step.device):
                rows = tf.tile(tf.constant([EMPTY_ROW], tf.int64), [LOG_ROWS, 1])
            self.log = tf.Variable(rows, trainable=False)
        with tf.device(step.device):
            self._locks = locks.make_locks("applying")

    def closures(self) -> tuple[dict[int, Closure], Closure]:
        """Closures of unrolled steps, by their number; and one with a loop, for any number.

        They return the argument of `unpacked`. Unrolled steps are faster than a loop in the graph.
        But each number of unrolled steps needs a graph, which takes seconds to trace and to send.
        """
        source, learner = self.source, self.learner
        step = self._unbounded_step if self.max_staleness is None else self._bounded_step
        step_device = learner.step.device

        def begin(ticket: dict[str, Tensor]) -> tuple[Batch, Tensor, Tensor]:
            """The batches of `ticket`, stacked; the worker's index; the origin of the first step.

            An origin, int64 [2] on the step device, is the worker's index and a batch's number.
            """
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            first = ticket["first"]
            stacked = source.parse_ticket({k: v for k, v in ticket.items() if k != "first"})
            origin = tf.stack([tf.cast(worker, tf.int64), first])  # One tensor is one transfer.
            with tf.device(step_device):
                return stacked, worker, tf.identity(origin)

        def origin_of(index: int | Tensor, first: Tensor) -> Tensor:
            with tf.device(step_device):
                return first + tf.stack([tf.constant(0, tf.int64), tf.cast(index, tf.int64)])

        def spec(num_batches: int | None = None) -> dict[str, tf.TensorSpec]:
            return {**source.ticket_spec(num_batches), "first": tf.TensorSpec([], tf.int64)}

        def unrolled(num_steps: int, ticket: dict[str, Tensor]) -> Tensor:
            stacked, worker, first = begin(ticket)
            totals: list[Tensor] = []
            ages: list[Tensor] = []
            former: Sent | None = None
            for i in range(num_steps):
                batch = tf.nest.map_structure(lambda t, i=i: t[i], stacked)
                step_totals, age, former = step(batch, origin_of(i, first), former)
                totals.append(step_totals)
                ages.append(age)
            with tf.device(step_device):  # The ages travel as one tensor.
                all_ages = tf.stack(ages)
            return packed(tf.stack(totals), worker, all_ages)

        @tf.function(input_signature=[spec()])
        def looped(ticket: dict[str, Tensor]) -> Tensor:
            # Called outside of the loop, because inner graphs do not know the worker's index.
            stacked, worker, first = begin(ticket)
            num_steps = tf.shape(ticket["gather"])[0]
            totals = tf.TensorArray(tf.float64, num_steps, element_shape=[learner.num_totals])
            ages = tf.TensorArray(tf.int64, num_steps, element_shape=[])
            for i in tf.range(num_steps):
                batch = tf.nest.map_structure(lambda t, i=i: t[i], stacked)
                step_totals, age, _ = step(batch, origin_of(i, first), None)
                totals = totals.write(i, step_totals)
                ages = ages.write(i, age)
            return packed(totals.stack(), worker, ages.stack())

        several = {
            size: Closure(
                tf.function(functools.partial(unrolled, size), input_signature=[spec(size)])
            )
            for size in (STEPS_PER_CLOSURE, FEW_STEPS)
        }
        return several, Closure(looped)

    def _unbounded_step(
        self, batch: Batch, origin: Tensor, former: Sent | None
    ) -> tuple[Tensor, Tensor, Sent]:
        """One step on the `batch` of `origin`: metric totals, staleness (int64), gradients.

        Staleness is the step counter at the application, less the counter before the variables were
        read: the number of steps of other workers that this gradient does not know of.

        `former` is the step before it in the same graph. Each variable is read when the gradient of
        `former` has been applied to it, not when all have: variables of this step and gradients of
        `former` travel at the same time, in opposite directions. So the counter is read before
        `former` is counted; `former` does not count as a step of another worker.
        """
        if former is None or former.counter is None:
            before = self._read_counter()
        else:
            # Not on the worker: variables are read after this, so each step would wait for it.
            with tf.device(self.learner.step.device):
                before = former.counter + 1
        sent, totals = self._compute(batch, before, former)
        # Before the gradient is applied: the graph orders reads and changes as they are created.
        with tf.control_dependencies(sent.first_to_arrive(self.learner.step.device)):
            sent.counter = self._read_counter()
        return totals, self._apply_and_count(sent.arrived, origin, before), sent

    def _bounded_step(
        self, batch: Batch, origin: Tensor, former: Sent | None
    ) -> tuple[Tensor, Tensor, Sent]:
        """`_unbounded_step`, but returns DROPPED if the gradient is too old when it arrives.

        No other gradient is applied between that check and the application. Only servers take part
        in both, so a worker that is unresponsive blocks no other worker. A dropped gradient also
        loses the residual that was added to it; its own residual stays. Variables are read when
        `former` is applied: an earlier read would make gradients older.
        """
        before = self._read_counter()
        sent, totals = self._compute(batch, before, former)
        arrived = sent.arrived
        with tf.device(self.learner.step.device):
            held = locks.take(self._locks, [origin, *present(arrived)])
            with tf.control_dependencies(held):
                age = read_now(self.learner.step) - before
            # The age is below 0 if the counter was set back since the variables were read.
            if (age < 0) | (age > self.max_staleness):
                age = tf.constant(DROPPED, tf.int64)
            else:
                age = self._apply_and_count(arrived, origin, before)
            with tf.control_dependencies([locks.free(held, age)]):
                return totals, tf.identity(age), sent

    def _read_counter(self) -> Tensor:
        with tf.device(self.learner.step.device):
            return read_now(self.learner.step)

    def _compute(self, batch: Batch, before: Tensor, former: Sent | None) -> tuple[Sent, Tensor]:
        """Gradients at variables read after the counter `before`; metric totals."""
        learner = self.learner
        inputs, device = learner.gradient_inputs, learner.step.device
        (arrived,), values = read_together(inputs, [before], device, self.read_dtype)
        if former is not None and self.compression.is_lossy:
            # The residual of one step goes into the next step.
            with tf.control_dependencies(present(former.sent)):
                batch = tf.nest.map_structure(tf.identity, batch)
        gradients, totals = compute_gradients(
            values, arrived, learner, self.strategy, batch, self.read_dtype
        )
        sent = self.compression.compress_all(gradients)
        return Sent(sent, send_to_servers(learner.variables, gradients, sent)), totals

    def _apply_and_count(self, arrived: Sequence[Tensor], origin: Tensor, before: Tensor) -> Tensor:
        """Applies gradients that have `arrived`, counts and logs them; returns the staleness.

        All ops are on the device of the step counter: an unrolled step sends gradients, and gets
        nothing back.
        """
        step = self.strategy.run(self.learner.apply, args=(arrived,))
        with tf.device(self.learner.step.device), tf.control_dependencies([step]):
            worker, batch = tf.unstack(origin)
            age = tf.cast(step - 1 - before, tf.int64)
            self.applied.scatter_nd_add([[worker]], tf.ones([1], tf.int64))
            self.log.scatter_nd_update([log_place(batch)], [tf.stack([batch, worker, age])])
            return age
