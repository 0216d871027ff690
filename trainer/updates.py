"""Updates in one op: what Keras' SGD and Adam do to a variable, as TensorFlow's own kernels do it.

    update = fused_update(optimizer)        # None: call optimizer.update_step
    prepared = update.prepare(step)         # once a step
    update.apply(variable, gradient, rate, prepared)

Keras writes an update as a dozen ops, each of which passes over the whole variable, and between
which another worker of an asynchronous parameter server may write. A kernel passes once, and holds
the variable's lock. The formulas are the same (tests/unit/test_updates.py), but that 1 less a beta
differs in float32 by a part in 20,000.
"""

import abc
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

Tensor = Any


class FusedUpdate(abc.ABC):
    """One optimizer's update of one variable in one op."""

    def __init__(self, optimizer: keras.Optimizer) -> None:
        """Uses the settings and variables of `optimizer`, which is built."""
        self._optimizer = optimizer

    def prepare(self, step: Tensor) -> Sequence[Tensor]:
        """What depends on the number of steps done alone: scalars, for `apply` to all variables."""
        return ()

    def suits(self, variable: Tensor, gradient: Tensor) -> bool:
        """Whether `apply` does what Keras does: not in 16 bits, where 1 less a beta may be 0."""
        return bool(variable.dtype == gradient.dtype and variable.dtype.size >= 4)

    @abc.abstractmethod
    def apply(
        self, variable: Tensor, gradient: Tensor, rate: Tensor, prepared: Sequence[Tensor]
    ) -> None:
        """Changes `variable` by `gradient`, dense and of its dtype."""

    def _slot(self, slots: Sequence[Any], variable: Tensor) -> Any:
        return slots[self._optimizer._get_variable_index(variable)].value.handle


class _Sgd(FusedUpdate):
    def apply(
        self, variable: Tensor, gradient: Tensor, rate: Tensor, prepared: Sequence[Tensor]
    ) -> None:
        optimizer, dtype = self._optimizer, variable.dtype
        if optimizer.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle,
                alpha=tf.cast(rate, dtype),
                delta=gradient,
                use_locking=True,
            )
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self._slot(optimizer.momentums, variable),
            lr=tf.cast(rate, dtype),
            grad=gradient,
            momentum=tf.cast(optimizer.momentum, dtype),
            use_nesterov=optimizer.nesterov,
            use_locking=True,
        )


class _Adam(FusedUpdate):
    def prepare(self, step: Tensor) -> Sequence[Tensor]:
        """The powers of the betas for the step after `step`."""
        number = tf.cast(step + 1, tf.float32)
        return tf.pow(self._optimizer.beta_1, number), tf.pow(self._optimizer.beta_2, number)

    def apply(
        self, variable: Tensor, gradient: Tensor, rate: Tensor, prepared: Sequence[Tensor]
    ) -> None:
        optimizer, dtype = self._optimizer, variable.dtype
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._slot(optimizer._momentums, variable),
            v=self._slot(optimizer._velocities, variable),
            beta1_power=tf.cast(prepared[0], dtype),
            beta2_power=tf.cast(prepared[1], dtype),
            lr=tf.cast(rate, dtype),
            beta1=tf.cast(optimizer.beta_1, dtype),
            beta2=tf.cast(optimizer.beta_2, dtype),
            epsilon=tf.cast(optimizer.epsilon, dtype),
            grad=gradient,
            use_locking=True,
        )


def fused_update(optimizer: keras.Optimizer) -> FusedUpdate | None:
    """The kernel that does what `optimizer.update_step` does; None if there is none.

    Derived classes that keep the formula, as AdamW does, have it too.
    """
    if _is_as_in(keras.optimizers.SGD, optimizer):
        return _Sgd(optimizer)
    if _is_as_in(keras.optimizers.Adam, optimizer) and not optimizer.amsgrad:
        return _Adam(optimizer)
    return None


def _is_as_in(kind: type[keras.Optimizer], optimizer: keras.Optimizer) -> bool:
    """Whether `optimizer` has the formula of `kind`, and all that this calls."""
    return all(
        getattr(type(optimizer), name) is getattr(kind, name) and name not in vars(optimizer)
        for name in ("update_step", "assign", "assign_add", "assign_sub")
    )
