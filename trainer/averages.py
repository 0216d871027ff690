"""Averages: an exponential moving average of each trained variable, kept beside it.

averages = Averages(variables, config.ema)      # in the strategy's scope
averages.update(0, variables[0], step)          # where the variable is, after its change
averages.variables                              # in the order of `variables`
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from strategies.base import read_now
from trainer.options import EmaConfig

Tensor = Any


class Averages:
    """Shadow variables, which begin as their variables do.

    Attributes:
        variables: They, in the order of those that they average.
    """

    def __init__(self, variables: Sequence[Any], ema: EmaConfig) -> None:
        """Makes them beside `variables`, so call it inside the strategy's scope."""
        self._ema = ema
        extended = tf.distribute.get_strategy().extended
        self.variables = []
        for variable in variables:
            with extended.colocate_vars_with(variable):
                shadow = tf.Variable(variable.read_value(), trainable=False, name="average")
            self.variables.append(shadow)

    def update(self, index: int, variable: Any, step: Tensor) -> None:
        """Moves the average of `variable`, the one at `index`, after the change of step `step` + 1.

        As one addition: asynchronous workers lose nothing of each other's.
        """
        decay = tf.constant(self._ema.decay, tf.float32)
        if self._ema.warmup:
            done = tf.cast(step, tf.float32)
            decay = tf.minimum(decay, (1 + done) / (10 + done))
        shadow = self.variables[index]
        difference = tf.convert_to_tensor(shadow) - read_now(variable)
        shadow.assign_sub(tf.cast(1 - decay, variable.dtype) * difference)
