"""Exponential moving average (EMA) of the weights, in shadow variables.

    ema = ExponentialMovingAverage(variables, config.ema)   # in the strategy's scope
    ema.update(0, variables[0], step)       # on the device of the variable, after its change
    ema.shadow_variables                    # in the order of `variables`

shadow <- decay * shadow + (1 - decay) * weight, after each step. With warm-up the decay of the step
after `t` steps is min(decay, (1 + t) / (10 + t)), as in TensorFlow 1's
tf.train.ExponentialMovingAverage(decay, num_updates=t).
"""

from collections.abc import Sequence

import tensorflow as tf

from strategies.base import read_now
from trainer.step.options import EmaConfig


class ExponentialMovingAverage:
    """`shadow_variables`, which start with the values of `variables`, on the same devices."""

    def __init__(self, variables: Sequence[tf.Variable], ema: EmaConfig) -> None:
        self._ema = ema
        extended = tf.distribute.get_strategy().extended
        self.shadow_variables = []
        for variable in variables:
            with extended.colocate_vars_with(variable):
                shadow = tf.Variable(variable.read_value(), trainable=False, name="average")
            self.shadow_variables.append(shadow)

    def update(self, index: int, variable: tf.Variable, step: tf.Tensor) -> None:
        """Updates the average of `variable`, at `index`; `step` steps were done before.

        It is one addition, so concurrent updates by asynchronous workers are all counted.
        """
        decay = tf.constant(self._ema.decay, tf.float32)
        if self._ema.warmup:
            done = tf.cast(step, tf.float32)
            decay = tf.minimum(decay, (1 + done) / (10 + done))
        if self._ema.from_first_step:
            decay = tf.where(tf.equal(step, 0), 0.0, decay)
        shadow = self.shadow_variables[index]
        difference = tf.convert_to_tensor(shadow) - read_now(variable)
        shadow.assign_sub(tf.cast(1 - decay, variable.dtype) * difference)
