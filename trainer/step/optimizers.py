"""Keras' optimizers: which are supported, and why some are refused.

    optimizer, decay = optimizer_named("adamw", 0.001, 0.0)     # the Learner applies `decay`
    check_optimizer(optimizer)

`Learner` calls only an optimizer's `update_step` for each variable, or a fused op in its place: the
other parts of Keras' `apply` are wrong under tf.distribute, or fail. So an optimizer that has a
part of its formula elsewhere is refused, unless this module or the learner does that part.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override


class OptimizerError(ValueError):
    """An optimizer or a setting with which training would be wrong. Exit code 2."""


# Keras applies these settings outside `update_step`, where they are wrong or fail under
# tf.distribute: name -> (value when off, what to set instead).
_UNSUPPORTED = {
    "clipnorm": (None, "--config.clip.norm"),
    "global_clipnorm": (None, "--config.clip.global_norm"),
    "clipvalue": (None, "--config.clip.value"),
    "weight_decay": (None, "--config.weight_decay.rate, with which Adam is AdamW"),
    "adam_weight_decay": (None, "--config.weight_decay.rate"),
    "use_ema": (False, "--config.ema.decay"),
    "gradient_accumulation_steps": (None, "--config.micro_batches"),
    "loss_scale_factor": (None, "--config.precision"),
}

# The methods that `Learner` or `update_step` may call. If a class overrides another one of Keras'
# Optimizer, a part of its formula is never called, as Nadam's in `_backend_update_step`.
_CALLED = {
    "add_optimizer_variables",
    "add_variable",
    "add_variable_from_reference",
    "assign",
    "assign_add",
    "assign_sub",
    "build",
    "from_config",
    "get_config",
    "update_step",
}


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


def optimizer_named(
    name: str, learning_rate: float, weight_decay: float
) -> tuple[keras.Optimizer, float]:
    """Returns an optimizer of `supported_optimizers`, and the weight decay that Learner applies.

    `weight_decay` 0 is the default of that optimizer.
    """
    kind = supported_optimizers()[name]
    parameters = inspect.signature(kind).parameters
    off = {name: None for name in ("weight_decay", "adam_weight_decay") if name in parameters}
    if kind is keras.optimizers.AdamW:
        del off["weight_decay"]  # It cannot be created without.
    optimizer = kind(learning_rate=learning_rate, **off)
    optimizer.weight_decay = None
    return optimizer, weight_decay or parameters["weight_decay"].default or 0.0


def check_optimizer(optimizer: keras.Optimizer) -> None:
    """Raises OptimizerError if `Learner.apply` is not equal to `optimizer.apply`."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise OptimizerError(
            "LossScaleOptimizer is not supported: under tf.distribute it looks for overflow on one "
            "replica only. Return the inner optimizer from build_optimizer, and type "
            "--config.precision=mixed_float16: that scales the loss."
        )
    kind = type(optimizer)
    for name, (off, instead) in _UNSUPPORTED.items():
        if (value := getattr(optimizer, name, off)) != off:
            raise OptimizerError(
                f"{kind.__name__}({name}={value!r}) is not supported: Keras applies {name} "
                f"wrongly, or not at all, under tf.distribute. Make the optimizer with {name}={off}"
                f", and use {instead}."
            )
    if overridden := _overridden(kind):
        name = kind.__name__.lower()
        remedy = f"Use one of {', '.join(sorted(supported_optimizers()))}"
        if name in supported_optimizers():
            remedy = f"Leave build_optimizer out and type --config.optimizer={name}"
        raise OptimizerError(
            f"{kind.__name__} is not supported: a part of its formula is in "
            f"{', '.join(overridden)}, but only update_step is called, once for each variable. "
            f"{remedy}; or, in build_optimizer, a class that overrides only build and update_step."
        )


def _overridden(kind: type[keras.Optimizer]) -> list[str]:
    base = keras.Optimizer
    done_here = {"_backend_update_step"} if issubclass(kind, Nadam) else set()
    if issubclass(kind, keras.optimizers.Muon):
        done_here = {"_apply_weight_decay"}  # The weight decay is refused if it is on.
    own = {name for c in kind.__mro__ if c not in base.__mro__ for name in vars(c)}
    return sorted(
        name
        for name in own - _CALLED - done_here
        if not name.startswith("__") and callable(getattr(base, name, None))
    )


@functools.cache
def supported_optimizers() -> Mapping[str, type[keras.Optimizer]]:
    """Returns the optimizers that `optimizer_named` can create, by lower-case name."""
    # They need an inner optimizer, and are refused anyway.
    wrappers = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    kinds = {
        kind.__name__.lower(): Nadam if kind is keras.optimizers.Nadam else kind
        for kind in vars(keras.optimizers).values()
        if isinstance(kind, type) and issubclass(kind, keras.Optimizer)
        if kind is not keras.Optimizer and not issubclass(kind, wrappers)
    }
    # Not kind(): it would create variables, which stay on parameter servers.
    return {name: kind for name, kind in kinds.items() if not _overridden(kind)}
