"""What an Executor uses of a learner whose replicas train alone between two sums.

    learner.apply(local.own(gradients))         # in replica context, in each step
    values, momenta = local.averaged(before, sums)      # after each of `local.rounds(step, 100)`

trainer/learner/local_steps.py has the formula.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf


class LocalSteps(Protocol):
    """The average of replicas that train alone between two sums."""

    @property
    def every_secs(self) -> float:
        """About the time from one average to the next; 0 if `rounds` counts steps."""

    @property
    def last_step(self) -> int:
        """Rounds by time end here at the latest; 0 if it is not known."""

    @property
    def weights(self) -> Sequence[tf.Variable]:
        """The trained variables."""

    @property
    def others(self) -> Sequence[tf.Variable]:
        """What replicas change besides `weights` alone, each its own copy."""

    @property
    def momenta(self) -> Sequence[tf.Variable]:
        """What the outer step changes besides `weights`."""

    @property
    def counters(self) -> Sequence[tf.Variable]:
        """Whole numbers that each step changes by the same."""

    @property
    def overlaps(self) -> bool:
        """True if the next steps begin while a sum is in flight."""

    def rounds(self, step: int, num_steps: int) -> list[int]:
        """Returns the numbers of steps up to each average; together `num_steps` or a few more."""

    def own(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns what a replica applies in a local step, from its part of a batch's gradient."""

    def averaged(
        self, before: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns equal values of `weights` and `others`, and of `momenta`.

        `sums` are the summed changes since `before`. Both may be of `weights` alone.
        """
