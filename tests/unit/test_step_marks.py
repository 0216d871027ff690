"""After a sum has failed, the variables are those of the last complete step, or none is claimed."""

import time

import numpy as np
import pytest
import tensorflow as tf

from strategies.step_marks import StepMarks
from tests.unit.replicas import replicas

_FAILING_STEP = 3
_LATE_SECS = 0.3


class Steps:
    """Steps with two sums. The second fails in step 3, after the first has long arrived."""

    def __init__(self, num_replicas: int) -> None:
        self.strategy = replicas(num_replicas)
        with self.strategy.scope():
            self.first, self.second, self.seen = (tf.Variable([0.0, 0.0]) for _ in range(3))
            self.step = tf.Variable(0, dtype=tf.int64)
            self.last = tf.Variable(0.0)
        self.marks = StepMarks(self.strategy, self.step, [self.seen])
        self.fails_in = "sum"

    def run(self, num_steps: int) -> None:
        @tf.function
        def run_in_graph() -> None:
            for _ in tf.range(num_steps):
                with tf.control_dependencies([self.marks.complete()]):
                    one = tf.identity(1.0)
                self.strategy.run(self._step, args=(one,))
            self.marks.complete()

        run_in_graph()

    def _step(self, one: tf.Tensor) -> None:
        self.seen.assign_add([one, one])
        ones = tf.stack([one, one])
        gradients = self.marks.begun([ones, None, self._late("sum", ones)])

        def change(strategy: tf.distribute.Strategy, *of_replicas: tf.Tensor) -> list[tf.Tensor]:
            pairs = zip((self.first, self.second), of_replicas, strict=True)
            return [strategy.extended.update(v, add, args=(g,), group=False) for v, g in pairs]

        def add(variable: tf.Variable, gradient: tf.Tensor) -> tf.Tensor:
            return variable.assign_add(gradient)

        context = tf.distribute.get_replica_context()
        changed = context.merge_call(change, args=(gradients[0], gradients[2]))
        with tf.control_dependencies(tf.nest.flatten(changed)):
            counted = self.step.assign_add(1)
        with tf.control_dependencies([counted]):
            self.last.assign_add(self._late("after the count", one))

    def _late(self, place: str, value: tf.Tensor) -> tf.Tensor:
        def look(step: tf.Tensor) -> float:
            if self.fails_in == place and int(step) >= _FAILING_STEP - (place == "sum"):
                time.sleep(_LATE_SECS)
                raise ConnectionError("a worker was lost")
            return 0.0

        step = tf.convert_to_tensor(self.step)
        looked = tf.py_function(look, [step], tf.float32)  # noqa: TID251  # One process.
        return value + tf.ensure_shape(looked, [])

    def values(self, variable: tf.Variable) -> list[float]:
        """The first element of each copy."""
        copies = self.strategy.experimental_local_results(variable)
        return [float(np.ravel(copy.numpy())[0]) for copy in copies]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_failed_sum_changes_nothing_and_the_forward_pass_is_undone(num_replicas: int) -> None:
    steps = Steps(num_replicas)
    with pytest.raises(tf.errors.OpError, match="a worker was lost"):
        steps.run(10)
    assert steps.values(steps.seen) == [3.0] * num_replicas, "the forward pass was not reached"

    assert steps.marks.return_to_complete() == 2

    for variable in (steps.first, steps.second, steps.seen):
        assert steps.values(variable) == [2.0] * num_replicas


def test_no_step_is_claimed_after_a_failure_among_the_changes() -> None:
    steps = Steps(1)
    steps.fails_in = "after the count"
    with pytest.raises(tf.errors.OpError, match="a worker was lost"):
        steps.run(10)
    assert steps.values(steps.first) == [3.0], "the changes had not begun"
    assert steps.marks.return_to_complete() is None


def test_variables_are_of_the_last_step_between_two_calls() -> None:
    steps = Steps(1)
    steps.run(2)
    assert steps.marks.return_to_complete() == 2
    steps.step.assign(1)  # As when training goes back to a checkpoint.
    assert steps.marks.return_to_complete() is None


def test_gradients_are_returned_as_they_were() -> None:
    strategy = replicas(2)
    with strategy.scope():
        step = tf.Variable(7, dtype=tf.int64)
    marks = StepMarks(strategy, step, [])

    @tf.function
    def run() -> tf.Tensor:
        def on_replica() -> tf.Tensor:
            rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 3]), tf.constant([5, 2]))
            found, none = marks.begun([rows, None])
            assert none is None
            return found.values

        return strategy.run(on_replica)

    for result in strategy.experimental_local_results(run()):
        np.testing.assert_array_equal(result, np.ones([2, 2]))
