"""Loss scaling: what keeps small gradients above zero where a model computes in float16.

    scale = LossScale(config.loss_scale)            # in the strategy's scope
    gradients = unscaled(tape.gradient(loss * now, variables), now)     # now = scale.read()
    is_finite = all_finite(summed)                  # of the sum, so that all replicas decide alike
    scale.adjust(strategy, is_finite)               # where variables may change

Micikevicius et al., "Mixed Precision Training", 2018. A gradient that overflowed changes nothing
but the scale, which is halved; after `growth_steps` good ones it is doubled. Asynchronous workers
may halve or double it twice for one reason: then it takes a little longer to find its level.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from strategies.base import read_now
from trainer.options import LossScaleConfig

Tensor = Any

# Below it nothing is gained: what overflows unscaled does not fit float16 at all.
_LEAST = 1.0


class LossScale:
    """A factor of the loss that follows what float16 can hold.

    Attributes:
        variables: What a checkpoint must have: the scale, the good steps since it changed, and the
            steps that were skipped in all.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        """Makes the variables, so call it inside the strategy's scope."""
        self._growth_steps = config.growth_steps
        self._scale = tf.Variable(float(config.initial), trainable=False, name="loss_scale")
        self._good = tf.Variable(0, trainable=False, dtype=tf.int64, name="good_steps")
        self._skipped = tf.Variable(0, trainable=False, dtype=tf.int64, name="skipped_steps")
        self.variables = [self._scale, self._good, self._skipped]

    def read(self) -> Tensor:
        """The scale now. Another worker may change it before the gradient is there."""
        return tf.convert_to_tensor(self._scale)

    def adjust(self, strategy: Any, is_finite: Tensor) -> list[Tensor]:
        """Changes the scale after a step whose gradient `is_finite`, or is not.

        In cross-replica context. Returns what has to be done before the step counts.
        """

        def scale(variable: Tensor) -> Tensor:
            now = read_now(variable)
            grows = tf.convert_to_tensor(self._good) + 1 >= self._growth_steps
            # Where doubling overflows float32, the scale stays.
            grows = tf.logical_and(grows, tf.math.is_finite(2 * now))
            grown = tf.where(grows, 2 * now, now)
            variable.assign(tf.where(is_finite, grown, tf.maximum(now / 2, _LEAST)))
            return read_now(variable)

        def good(variable: Tensor) -> Tensor:
            # As additions: asynchronous workers lose no count.
            variable.assign_add(tf.where(is_finite, tf.ones([], tf.int64), -read_now(variable)))
            now = read_now(variable)
            variable.assign_sub(tf.where(now >= self._growth_steps, now, tf.zeros_like(now)))
            return read_now(variable)

        def skipped(variable: Tensor) -> Tensor:
            variable.assign_add(tf.cast(tf.logical_not(is_finite), tf.int64))
            return read_now(variable)

        changes = zip(self.variables, (scale, good, skipped), strict=True)
        return [strategy.extended.update(v, change, group=False) for v, change in changes]

    @property
    def num_skipped(self) -> int:
        """Steps whose gradient overflowed, in the whole run."""
        return int(self._skipped.numpy())

    @property
    def is_least(self) -> bool:
        """Whether it cannot be lowered."""
        return float(self._scale.numpy()) <= _LEAST

    def report(self) -> Mapping[str, float | int]:
        """What a report of training says of it."""
        return {"loss_scale": float(self._scale.numpy()), "skipped_steps": self.num_skipped}


def unscaled(gradients: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """`gradients` of a loss that was scaled by `scale`, None where there is none."""
    # By default a power of two, so that nothing is rounded.
    return [None if g is None else _times(g, 1 / scale) for g in gradients]


def all_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Whether every number of every gradient is finite, a scalar."""
    are_finite = []
    for gradient in gradients:
        numbers = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        with tf.device(numbers.device):  # It may have been sent there.
            are_finite.append(tf.reduce_all(tf.math.is_finite(numbers)))
    return tf.reduce_all(are_finite)


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
