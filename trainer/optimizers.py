"""Optimizers: Keras' own, by name, and why some are refused.

    optimizer, decay = optimizer_named("adamw", 0.001, 0.0)     # decay: what Learner has to apply
    check_optimizer(optimizer)

`Learner` calls an optimizer's `update_step` for each variable, or a kernel of the same formula
(trainer/updates.py), and no other part of it: what Keras does around that is wrong under
tf.distribute, or fails. So an optimizer that keeps a part of its maths elsewhere is refused, unless
that part is done here or by the learner.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class OptimizerError(ValueError):
    """An optimizer, or a setting of it or of the model, that would train wrongly. Exit code 2."""


# Keras applies these outside `update_step`, where they are wrong or fail under tf.distribute: what
# they are when off, and what to set instead.
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

# What of an optimizer's class `Learner` calls, or `update_step` may call. A class that overrides
# another method of Keras' Optimizer keeps a part of its maths where nobody calls it: Nadam in
# `_backend_update_step`, MultiOptimizer in `apply`.
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
    """Keras' Nadam, with its product of momenta computed from the step in place of a variable.

    Keras multiplies a variable once a step, outside `update_step`; asynchronous workers would
    overwrite each other's products. The product of u_1 to u_t, where u_i = beta_1 * (1 - 0.5 *
    0.96 ** i), is a function of t (Dozat, "Incorporating Nesterov Momentum into Adam", 2016).
    """

    def build(self, var_list: Any) -> None:
        """As Keras', without that variable."""
        if not self.built:
            keras.Optimizer.build(self, var_list)
            names = ["momentum", "velocity"]
            self._momentums, self._velocities = self.add_optimizer_variables(var_list, names)

    def _backend_update_step(self, *arguments: Any) -> None:
        """Not Nadam's: there is no variable to multiply."""
        keras.Optimizer._backend_update_step(self, *arguments)

    @property
    def _u_product(self) -> Any:
        """The product up to the step that is being done; `update_step` reads it."""
        # In float32 the factors beyond are 1.
        factors = 1 - 0.5 * 0.96 ** np.arange(1, 513)
        products = tf.constant(np.concatenate([[1.0], np.cumprod(factors)]), tf.float32)
        step = tf.cast(self.iterations.value, tf.int64) + 1
        powers = tf.pow(tf.constant(self.beta_1, tf.float32), tf.cast(step, tf.float32))
        return powers * tf.gather(products, tf.minimum(step, 512))


def optimizer_named(
    name: str, learning_rate: float, weight_decay: float
) -> tuple[keras.Optimizer, float]:
    """The optimizer of a name in `supported_optimizers`, and the weight decay to apply beside it.

    `weight_decay` 0 is what the name stands for.
    """
    kind = supported_optimizers()[name]
    off = {name: None for name in _parameters(kind) if name == "adam_weight_decay"}
    if kind is not keras.optimizers.AdamW:
        off["weight_decay"] = None
    if not weight_decay:
        weight_decay = _parameters(kind)["weight_decay"].default or 0.0
    optimizer = kind(learning_rate=learning_rate, **off)
    # AdamW cannot be made without.
    optimizer.weight_decay = None
    return optimizer, weight_decay


def check_optimizer(optimizer: keras.Optimizer) -> None:
    """Returns if `Learner.apply` does all that `optimizer` would have done.

    Raises:
        OptimizerError: it has a setting that would be ignored, or that fails under tf.distribute;
            or its class does more than `update_step`.
    """
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
            f"{kind.__name__} is not supported: a part of its maths is in "
            f"{', '.join(overridden)}, but only update_step is called, once for each variable. "
            f"{remedy}; or, in build_optimizer, a class that overrides only build and update_step."
        )


def _overridden(kind: type[keras.Optimizer]) -> list[str]:
    """Methods of Keras' Optimizer that `kind` overrides and that nobody would call."""
    base = keras.Optimizer
    done_here = {"_backend_update_step"} if issubclass(kind, Nadam) else set()
    if issubclass(kind, keras.optimizers.Muon):
        # Only decay, which is refused if it is on.
        done_here = {"_apply_weight_decay"}
    own = {name for c in kind.__mro__ if c not in base.__mro__ for name in vars(c)}
    return sorted(
        name
        for name in own - _CALLED - done_here
        if not name.startswith("__") and callable(getattr(base, name, None))
    )


@functools.cache
def supported_optimizers() -> Mapping[str, type[keras.Optimizer]]:
    """Keras' optimizers that `optimizer_named` makes, by lower-case name."""
    # They do not work without an optimizer inside, and are refused anyway.
    wrappers = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    supported: dict[str, type[keras.Optimizer]] = {}
    for value in vars(keras.optimizers).values():
        if not isinstance(value, type) or not issubclass(value, keras.Optimizer):
            continue
        if value is keras.Optimizer or issubclass(value, wrappers):
            continue
        kind = Nadam if value is keras.optimizers.Nadam else value
        # Not kind(): that makes variables, and on parameter servers they would stay.
        if not _overridden(kind):
            supported[value.__name__.lower()] = kind
    return supported


def _parameters(kind: type[keras.Optimizer]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters
