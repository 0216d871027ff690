"""Private parts of keras.Optimizer: its rate as given, its slots, its exclusions.

`update_step` is public, but the fused ops and the Learner need the parts. Keras 3.15,
`keras/src/optimizers/base_optimizer.py`. Can be deleted when Keras has public names for these.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override


def given_rate(optimizer: keras.Optimizer) -> Any:
    """The learning rate as a variable, a LearningRateSchedule or a function; None if unknown."""
    return getattr(optimizer, "_learning_rate", None)


def is_decayed(optimizer: keras.Optimizer, variable: keras.Variable) -> bool:
    """Returns True if `optimizer` does not exclude `variable` from weight decay."""
    return bool(optimizer._use_weight_decay(variable))


def adam_slots(optimizer: keras.Optimizer, variable: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
    """The handles of Adam's first and second moment of `variable`."""
    first, second = optimizer._momentums, optimizer._velocities
    return slot(optimizer, first, variable), slot(optimizer, second, variable)


def slot(
    optimizer: keras.Optimizer, slots: Sequence[keras.Variable], variable: tf.Variable
) -> tf.Tensor:
    """The handle of the one of `slots`, of `optimizer`, that belongs to `variable`."""
    return slots[optimizer._get_variable_index(variable)].value.handle


class Nadam(keras.optimizers.Nadam):
    """Keras' Nadam, but with the product of momenta as a function of the step, not a variable.

    Keras multiplies a variable once per step, outside `update_step`; asynchronous workers would
    overwrite each other's products. The product of u_1 to u_t, where u_i = beta_1 * (1 - 0.5 *
    0.96 ** i), is a function of t (Dozat, "Incorporating Nesterov Momentum into Adam", 2016).
    """

    @override
    def build(self, var_list: Sequence[keras.Variable]) -> None:
        if not self.built:
            keras.Optimizer.build(self, var_list)
            names = ["momentum", "velocity"]
            self._momentums, self._velocities = self.add_optimizer_variables(var_list, names)

    @override
    def _backend_update_step(self, *arguments: object) -> None:
        # Keras' Nadam would multiply the variable.
        keras.Optimizer._backend_update_step(self, *arguments)

    @property
    def _u_product(self) -> tf.Tensor:
        """The product up to the current step, a float32 scalar; `update_step` reads it."""
        # In float32 all later factors are 1.
        factors = 1 - 0.5 * 0.96 ** np.arange(1, 513)
        products = tf.constant(np.concatenate([[1.0], np.cumprod(factors)]), tf.float32)
        step = tf.cast(self.iterations.value, tf.int64) + 1
        powers = tf.pow(tf.constant(self.beta_1, tf.float32), tf.cast(step, tf.float32))
        return powers * tf.gather(products, tf.minimum(step, 512))


class ScheduleFreeAdamW(keras.optimizers.ScheduleFreeAdamW):
    """Keras' ScheduleFreeAdamW, but `x` follows from the `z` before the step.

    Keras takes `z` after the step in its place, since a tf.Variable is read where it is used. The
    formula (Defazio et al., "The Road Less Scheduled", 2024, arXiv 2405.15682), with z in the slot
    `momentum`, Adam's direction d in step t, and y, the variable:

        x <- (y - (1 - beta_1) z) / beta_1
        z <- z - rate * d
        x <- x + (z - x) / t
        y <- (1 - beta_1) z + beta_1 x
    """

    @override
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index, kind = self._get_variable_index(variable), variable.dtype
        momentum, velocity = self._momentums[index], self._velocities[index]
        step = tf.cast(self.iterations.value + 1, kind)
        rate = tf.cast(learning_rate, kind)
        if self.warmup_steps:
            rate *= tf.minimum(step / self.warmup_steps, 1)
        before = tf.identity(momentum.value)
        averaged = (variable - (1 - self.beta_1) * before) / self.beta_1
        self.assign_add(velocity, (1 - self.beta_2) * (gradient**2 - velocity.value))
        unbiased = velocity.value / (1 - tf.pow(tf.cast(self.beta_2, kind), step))
        change = -rate * gradient / (tf.sqrt(unbiased) + self.epsilon)
        self.assign_add(momentum, change)
        # Additions, so that concurrent updates by asynchronous workers are all counted.
        moved = (before + change - averaged) / step
        self.assign_add(variable, (1 - self.beta_1) * change + self.beta_1 * moved)
