"""What an Executor uses of a learner whose replicas train alone between two sums.

    learner.apply(local.own(gradients))         # in replica context, in each step
    local.average(before, sums)                 # after `steps_to_average` steps

trainer/learner/local_steps.py has the formula.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf


class LocalSteps(Protocol):
    """The average of replicas that train alone between two sums."""

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """What replicas change alone, each its own copy."""

    @property
    def momenta(self) -> Sequence[tf.Variable]:
        """What `average` changes besides `variables`; one for each weight, the first of these."""

    @property
    def counters(self) -> Sequence[tf.Variable]:
        """Other variables that a step changes, by the same on all replicas."""

    def steps_to_average(self, step: int) -> int:
        """Returns the number of steps, one or more, from `step` to the next average."""

    def own(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns what a replica applies in a local step, from its part of a batch's gradient."""

    def average(self, before: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> None:
        """Makes all copies of `variables` equal, with the summed changes since `before`."""
