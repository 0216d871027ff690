"""Local steps: each replica trains alone, and from time to time all average their changes.

    local = LocalSteps(options.local_steps, trained, others)    # in the strategy's scope
    learner.apply(local.own(gradients))     # `every` times; the next lines in replica context, too
    changes = [...]                         # of `local.variables` since the last average
    local.average(before, sums)             # `sums` of the changes over all replicas

With the mean D of all replicas' changes of a weight w, the outer step is Nesterov's momentum, with
-D as the gradient (Douillard et al., "DiLoCo", 2023, arXiv 2311.08105, algorithm 1; the formula is
that of torch.optim.SGD with nesterov=True):

    m <- outer_momentum * m + D
    w <- w_before + outer_learning_rate * (D + outer_momentum * m)

Other variables with decimals, such as the optimizer's slots, moving averages and moving statistics,
change by the mean. So all replicas are equal after an average: a checkpoint holds one state, and a
run may continue on another number of replicas.
"""

from collections.abc import Sequence

import tensorflow as tf

from data.system.compat.autograph import no_autograph
from strategies.base import read_now
from trainer.step.gradients import Gradient
from trainer.step.options import LocalStepsConfig


class LocalSteps:
    """The outer step.

    Attributes:
        every: The number of steps from one average to the next.
        variables: What replicas change alone, each its own copy: weights, then others.
        momenta: `m` of each weight.
        counters: Other variables that a step changes, by the same on all replicas.
    """

    def __init__(
        self,
        options: LocalStepsConfig,
        trained: Sequence[tf.Variable],
        others: Sequence[tf.Variable],
    ) -> None:
        """Creates `momenta`. `others` are all variables that a step changes besides `trained`."""
        self.every = options.every
        self.variables = [*trained, *(v for v in others if v.dtype.is_floating)]
        self.counters = [v for v in others if not v.dtype.is_floating]
        self.momenta = [tf.Variable(tf.zeros_like(v), trainable=False) for v in trained]
        self._options = options

    def steps_to_average(self, step: int) -> int:
        """Returns the number of steps, one or more, from `step` to the next average."""
        return self.every - step % self.every

    def own(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Returns the gradients of a replica's mean loss, from its part of those of a batch.

        Called in replica context.
        """
        factor = tf.distribute.get_replica_context().num_replicas_in_sync

        def scaled(gradient: Gradient) -> Gradient:
            if isinstance(gradient, tf.IndexedSlices):
                return tf.IndexedSlices(
                    gradient.values * factor, gradient.indices, gradient.dense_shape
                )
            return None if gradient is None else gradient * factor

        return list(map(scaled, gradients))

    @no_autograph
    def average(self, before: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> None:
        """Sets all copies of `variables` to equal values.

        `before` are the values after the last average, and `sums` the changes since then, summed
        over all replicas; both in the order of `variables`. Called in replica context.
        """
        context = tf.distribute.get_replica_context()
        num_replicas = context.num_replicas_in_sync

        def change_all(strategy: tf.distribute.Strategy, *tensors: tf.Tensor) -> None:
            changes = zip(
                self.variables, tensors[: len(before)], tensors[len(before) :], strict=True
            )
            for index, (variable, old, mean) in enumerate(changes):
                if index < len(self.momenta):
                    arguments = (old, mean, self.momenta[index])
                    strategy.extended.update(variable, self._step, args=arguments)
                else:
                    strategy.extended.update(variable, _add, args=(old, mean))

        means = [total / tf.cast(num_replicas, total.dtype) for total in sums]
        context.merge_call(change_all, args=(*before, *means))

    def _step(
        self, weight: tf.Variable, before: tf.Tensor, mean: tf.Tensor, momentum: tf.Variable
    ) -> None:
        kept = self._options.outer_momentum
        new = kept * read_now(momentum) + mean
        momentum.assign(new)
        weight.assign(before + self._options.outer_learning_rate * (mean + kept * new))


def _add(variable: tf.Variable, before: tf.Tensor, mean: tf.Tensor) -> None:
    variable.assign(before + mean)
