"""Fused updates: Keras' SGD and Adam update of a variable as one TensorFlow op.

    update = fused_update(optimizer, step)      # None: call optimizer.update_step
    if update is not None and supports(variable, gradient):
        update(variable, gradient, rate)

Keras writes an update as a dozen ops. Each passes over the whole variable, and between two of them
another asynchronous worker may write. The fused op makes one pass and holds the variable's lock.
The formulas are the same, but in float32 the value of 1 - beta differs by a part in 20,000.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import keras
import tensorflow as tf

from data.system.compat.keras_optimizers import adam_slots, slot

# (variable, its dense gradient of the same dtype, learning rate): changes the variable.
Update: TypeAlias = Callable[[tf.Variable, tf.Tensor, tf.Tensor], None]


def fused_update(optimizer: keras.Optimizer, step: tf.Tensor) -> Update | None:
    """Returns the fused op that is equal to `optimizer.update_step`; None if there is none.

    `step` is the number of steps done. `optimizer` must be built. Derived classes that keep the
    formula, such as AdamW, are supported too.
    """
    if _has_formula_of(keras.optimizers.SGD, optimizer):
        return functools.partial(_sgd, optimizer)
    if _has_formula_of(keras.optimizers.Adam, optimizer) and not optimizer.amsgrad:
        number = tf.cast(step + 1, tf.float32)
        powers = tf.pow(optimizer.beta_1, number), tf.pow(optimizer.beta_2, number)
        return functools.partial(_adam, optimizer, powers)
    return None


def supports(variable: tf.Variable, gradient: tf.Tensor) -> bool:
    """Returns True if a fused op is equal to Keras. Not in 16 bits, where 1 - beta may be 0."""
    return bool(variable.dtype == gradient.dtype and variable.dtype.size >= 4)


def _has_formula_of(kind: type[keras.Optimizer], optimizer: keras.Optimizer) -> bool:
    """Returns True if `optimizer` overrides neither the update of `kind` nor what it calls."""
    return all(
        getattr(type(optimizer), name) is getattr(kind, name) and name not in vars(optimizer)
        for name in ("update_step", "assign", "assign_add", "assign_sub")
    )


def _sgd(
    optimizer: keras.Optimizer, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor
) -> None:
    rate = tf.cast(rate, variable.dtype)
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=gradient, use_locking=True
        )
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=slot(optimizer, optimizer.momentums, variable),
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, variable.dtype),
        use_nesterov=optimizer.nesterov,
        use_locking=True,
    )


def _adam(
    optimizer: keras.Optimizer,
    powers: tuple[tf.Tensor, tf.Tensor],
    variable: tf.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    """`powers` are beta_1 ** t and beta_2 ** t for step t."""
    dtype = variable.dtype
    first, second = adam_slots(optimizer, variable)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=first,
        v=second,
        beta1_power=tf.cast(powers[0], dtype),
        beta2_power=tf.cast(powers[1], dtype),
        lr=tf.cast(rate, dtype),
        beta1=tf.cast(optimizer.beta_1, dtype),
        beta2=tf.cast(optimizer.beta_2, dtype),
        epsilon=tf.cast(optimizer.epsilon, dtype),
        grad=gradient,
        use_locking=True,
    )
