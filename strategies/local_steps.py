"""Local steps: each replica trains alone, and from time to time all average their changes.

    local = LocalSteps(trained, others, every=100)      # in the strategy's scope
    learner.apply(local.own(gradients))     # `every` times; the next lines in replica context, too
    changes = [...]                         # of `local.weights` and `local.others` since then
    values, momenta = local.averaged(before, sums)      # `sums` of the changes over all replicas

With the mean D of all replicas' changes of a weight w, the outer step is Nesterov's momentum, with
-D as the gradient (Douillard et al., "DiLoCo", 2023, arXiv 2311.08105, algorithm 1; the formula is
that of torch.optim.SGD with nesterov=True):

    m <- outer_momentum * m + D
    w <- w_before + outer_learning_rate * (D + outer_momentum * m)

With `every_secs` workers make unequal numbers of steps. D is then weighted by these numbers: the
changes of a replica are multiplied by its number of steps / the mean number, before they are summed
(strategies/local_rounds.py). The step counter is set to the mean number.

Other variables with decimals, such as the optimizer's slots, moving averages and moving statistics,
change by the mean. So all replicas are equal after an average of all variables, which reports,
evaluations and checkpoints come after: a checkpoint holds one state, and a run may continue on
another number of replicas.
"""

from collections.abc import Sequence

import tensorflow as tf

from strategies.base import Tensor, read_now


class LocalSteps:
    """The outer step.

    Attributes:
        every_secs: About the time from one average to the next; 0 if steps are counted.
        last_step: Rounds by time end here at the latest; 0 if it is not known.
        overlaps: True if a sum may be in flight while the next steps compute.
        weights: The trained variables.
        others: Other variables with decimals that replicas change alone, each its own copy.
        momenta: `m` of each weight; empty if the outer momentum is 0.
        counters: Whole numbers that each step changes by the same.
    """

    def __init__(
        self,
        trained: Sequence[tf.Variable],
        others: Sequence[tf.Variable],
        last_step: int = 0,
        *,
        every: int = 0,
        every_secs: float = 0.0,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
        overlap: bool = False,
    ) -> None:
        """Creates `momenta`. `others` are all variables that a step changes besides `trained`.

        The other arguments are the options of config.local_steps.
        """
        self._every, self.every_secs, self.last_step = every, every_secs, last_step
        self.overlaps = overlap
        self._outer_momentum, self._outer_learning_rate = outer_momentum, outer_learning_rate
        self.weights = list(trained)
        self.others = [v for v in others if v.dtype.is_floating]
        self.counters = [v for v in others if not v.dtype.is_floating]
        self.momenta: list[tf.Variable] = []
        if outer_momentum:
            self.momenta = [tf.Variable(tf.zeros_like(v), trainable=False) for v in trained]

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

        def scaled(gradient: Tensor) -> Tensor:
            if isinstance(gradient, tf.IndexedSlices):
                return tf.IndexedSlices(
                    gradient.values * factor, gradient.indices, gradient.dense_shape
                )
            return None if gradient is None else gradient * factor

        return list(map(scaled, gradients))

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
        return values, momenta
