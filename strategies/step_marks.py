"""Marks of begun and complete steps: after a failure they tell if the variables are of one step.

    marks = StepMarks(strategy, learner.step, learner.forward_state)
    for index in tf.range(num_steps):
        done = marks.complete()                     # all changes of the former step are made
        with tf.control_dependencies([done]):
            ...
        gradients = all_reduced(...)                # may fail: a worker has died
        gradients = marks.begun(gradients)          # all sums have arrived; the changes begin
        learner.apply(gradients)
    marks.complete()
    ...
    step = marks.return_to_complete()               # after a failure: the step, or None

A collective op that fails stops its graph at any op. In TensorFlow, without these marks, the sum of
one bucket has then changed its variables, and the sum of the next one has not: the variables belong
to no step. With them the changes of a step begin when all its sums have arrived, and no collective
op follows until all are made. So a failure finds either none of the changes, or all.

The forward pass changes variables before the sums, such as the averages of batch normalisation.
Their values after the last complete step are kept. A kept value shares its memory with the variable
until the variable changes.
"""

from collections.abc import Sequence

import tensorflow as tf

from data.system.compat.autograph import no_autograph
from strategies.base import Tensor, read_now


class StepMarks:
    """If changes have begun, the last complete step, and the values of variables after it."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: tf.Variable,
        forward_state: Sequence[tf.Variable],
    ) -> None:
        """`step` counts complete steps. The gradients' computation may change `forward_state`.

        With local steps, `forward_state` is all that a step changes, and so has `step`, too.
        """
        self._strategy = strategy
        self._step = self._copies(step)[0]
        first = int(self._step.numpy())
        with tf.device("CPU:0"):
            self._is_changing = tf.Variable(False, trainable=False, name="is_changing")
            self._complete = tf.Variable(first, dtype=tf.int64, trainable=False, name="complete")
        # By the id of a variable of `forward_state`: the kept value, and the copies.
        self._kept: dict[int, tuple[tf.Variable, list[tf.Variable]]] = {}
        for variable in forward_state:
            copies = self._copies(variable)
            with tf.device(copies[0].device):
                kept = tf.Variable(copies[0].read_value(), trainable=False, name="kept")
            self._kept[id(variable)] = kept, copies

    @no_autograph
    def complete(self) -> tf.Operation:
        """Marks the last step as complete. In a graph, where all its changes are made.

        Returns the op that the next step must wait for.
        """
        # Also of a variable that the changes leave as it is, only after the sums have arrived.
        with tf.control_dependencies([read_now(self._is_changing)]):
            kept = [
                value.assign(copies[0].read_value()).op for value, copies in self._kept.values()
            ]
        with tf.control_dependencies(kept):
            complete = self._complete.assign(tf.cast(read_now(self._step), tf.int64)).op
        with tf.control_dependencies([complete]):
            return self._is_changing.assign(False).op

    @no_autograph
    def begun(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The same gradients, once all of them are there. In replica context."""

        def mark(_: tf.distribute.Strategy, *of_replicas: Tensor) -> tf.Tensor:
            parts = [self._strategy.experimental_local_results(each) for each in of_replicas]
            with tf.control_dependencies(tf.nest.flatten(parts, expand_composites=True)):
                begun = self._is_changing.assign(True).op
            with tf.control_dependencies([begun]):
                return tf.constant(0)

        present = tuple(gradient for gradient in gradients if gradient is not None)
        token = tf.distribute.get_replica_context().merge_call(mark, args=present)
        with tf.control_dependencies([token]):
            return [
                None
                if gradient is None
                else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                for gradient in gradients
            ]

    def kept(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """The kept values of `variables`, which are of the forward state."""
        return [read_now(self._kept[id(variable)][0]) for variable in variables]

    def return_to_complete(self) -> int | None:
        """The step of the variables, after the kept values are back; None if they are of none.

        No graph may run meanwhile.
        """
        if self._is_changing.numpy():
            return None
        for kept, copies in self._kept.values():
            for copy in copies:
                copy.assign(kept.read_value())
        step = int(self._step.numpy())
        return step if step == int(self._complete.numpy()) else None

    def _copies(self, variable: tf.Variable) -> list[tf.Variable]:
        """The copies of `variable` in this process."""
        return list(self._strategy.experimental_local_results(variable))
