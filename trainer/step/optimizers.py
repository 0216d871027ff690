"""Keras' optimizers: which are supported, and why some are refused.

    optimizer, decay = optimizer_named("adamw", 0.001, 0.0)     # the Learner applies `decay`
    adopted = adopt(keras.optimizers.Adam(clipnorm=1.0))        # its settings, for the Learner
    check_optimizer(adopted.optimizer)

`Learner` calls only an optimizer's `update_step` for each variable, or a fused op in its place: the
other parts of Keras' `apply` are wrong under tf.distribute, or fail. So settings of these parts are
taken over by the learner, where its formula is the same. An optimizer that has a part of its
formula elsewhere is refused.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from data.system.compat.keras_optimizers import (
    Nadam,
    ScheduleFreeAdamW,
    given_rate,
    is_decayed,
)
from data.system.errors import UsageError
from trainer.step.options import EmaConfig, LossScaleConfig, StepOptions, WeightDecayConfig


class OptimizerError(UsageError):
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
    "gradient_accumulation_steps": (None, "a larger --batch_size with --config.micro_batches"),
    "loss_scale_factor": (None, "--config.precision"),
}

# The clipping settings of Keras' optimizers, and the fields of ClipConfig with the same formula.
_CLIPS = {"clipnorm": "norm", "global_clipnorm": "global_norm", "clipvalue": "value"}

# Below it float32 loses digits. The smallest second moment of Adafactor.
_SMALLEST = 1e-37

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


class Adafactor(keras.optimizers.Adafactor):
    """Keras' Adafactor, but a second moment is never 0.

    It is the product of a mean of its row and a mean of its column. If neither has had a gradient,
    as the input of a dark pixel and the unit that never fires, both are 1e-30, and their product
    is 0 in float32. Keras then divides 0 by 0, and all of the variable becomes NaN.
    """

    @override
    def assign(self, variable: keras.Variable, value: tf.Tensor) -> None:
        # Only moments are assigned; the variable is subtracted from.
        super().assign(variable, tf.maximum(value, tf.cast(_SMALLEST, value.dtype)))


# Classes of Keras with a wrong formula, and the right ones.
_CORRECTED: Mapping[type[keras.Optimizer], type[keras.Optimizer]] = {
    keras.optimizers.Nadam: Nadam,
    keras.optimizers.Adafactor: Adafactor,
    keras.optimizers.ScheduleFreeAdamW: ScheduleFreeAdamW,
}


@dataclass
class Adopted:
    """An optimizer without the settings that `Learner` applies instead.

    Attributes:
        options: These settings; other options have their defaults.
        notes: A line for the user for each of these settings.
    """

    optimizer: keras.Optimizer
    options: StepOptions = field(default_factory=StepOptions)
    notes: list[str] = field(default_factory=list)


def made_optimizer(made: Any, name: str, learning_rate: float) -> keras.Optimizer:
    """Converts what a user's function made: an optimizer, its name, or a config dict of it.

    A name gets `learning_rate`. `name` says in errors which function made it.

    Raises OptimizerError if `made` is none of these.
    """
    if isinstance(made, keras.Optimizer):
        return made
    if isinstance(made, str) and made.lower() in supported_optimizers():
        return supported_optimizers()[made.lower()](learning_rate=learning_rate)
    if isinstance(made, Mapping):
        try:
            return keras.optimizers.get(dict(made))
        except Exception as error:  # Keras raises any error for a wrong config.
            raise OptimizerError(
                f"{name} is a dict of which Keras cannot make an optimizer: {error}. Write "
                "{'class_name': 'Adam', 'config': {'learning_rate': 0.001}}, for example."
            ) from error
    raise OptimizerError(
        f"{name} is {made!r}, but must be a keras.Optimizer, a config dict of one, or a name: "
        f"{', '.join(sorted(supported_optimizers()))}."
    )


def has_schedule(optimizer: keras.Optimizer) -> bool:
    """Returns True if the learning rate of `optimizer` is a schedule of Keras."""
    schedules = keras.optimizers.schedules.LearningRateSchedule
    return isinstance(given_rate(optimizer), schedules)


def adopt(optimizer: keras.Optimizer, variables: Sequence[keras.Variable] = ()) -> Adopted:
    """Moves settings that Keras applies wrongly under tf.distribute from `optimizer` to options.

    Only where the formula is the same for one device. `variables` are the trainable variables: the
    optimizer may exclude some from weight decay. Called before `optimizer` is built.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = adopt(optimizer.inner_optimizer, variables)
        inner.options.loss_scale = scale = LossScaleConfig(
            initial=float(optimizer.initial_scale), growth_steps=int(optimizer.dynamic_growth_steps)
        )
        now = f"{scale} if the model computes in float16; otherwise it is left out: it cancels"
        inner.notes.append(_note(inner.optimizer, "LossScaleOptimizer", now))
        return inner
    if (corrected := _CORRECTED.get(type(optimizer))) is not None:
        # The same object: a copy by `get_config` lacks `exclude_from_weight_decay`, and fails for
        # rates that are functions or classes of a config file.
        optimizer.__class__ = corrected
    adopted = Adopted(optimizer)
    for name, clip in _CLIPS.items():
        if value := getattr(optimizer, name):
            setattr(adopted.options.clip, clip, float(value))
            adopted.notes.append(_note(optimizer, f"{name}={value}", f"config.clip.{clip}={value}"))
            setattr(optimizer, name, None)
    _adopt_weight_decay(adopted, variables)
    if optimizer.use_ema and not optimizer.ema_overwrite_frequency:
        adopted.options.ema = ema = EmaConfig(optimizer.ema_momentum, from_first_step=True)
        adopted.notes.append(_note(optimizer, "use_ema=True", f"config.ema={ema}"))
        optimizer.use_ema = False
    if optimizer.loss_scale_factor:
        adopted.notes.append(
            f"{type(optimizer).__name__}(loss_scale_factor={optimizer.loss_scale_factor}): left "
            "out, because it cancels. In float16 the loss is scaled as config.loss_scale says."
        )
        optimizer.loss_scale_factor = None
    return adopted


def _adopt_weight_decay(adopted: Adopted, variables: Sequence[keras.Variable]) -> None:
    optimizer = adopted.optimizer
    rate = optimizer.weight_decay
    if isinstance(optimizer, keras.optimizers.Muon):
        if optimizer.adam_weight_decay != rate:
            return  # Two rates: check_optimizer refuses them.
        optimizer.adam_weight_decay = None
    optimizer.weight_decay = None
    excluded = [variable.path for variable in variables if not is_decayed(optimizer, variable)]
    if not rate or (variables and len(excluded) == len(variables)):
        return
    exclude = "|".join(f"^{re.escape(path)}$" for path in excluded)
    adopted.options.weight_decay = WeightDecayConfig(rate=float(rate), exclude=exclude)
    without = f", without {', '.join(excluded)}" if excluded else ""
    now = f"config.weight_decay.rate={rate}{without}"
    adopted.notes.append(_note(optimizer, f"weight_decay={rate}", now))


def _note(optimizer: keras.Optimizer, setting: str, now: object) -> str:
    return (
        f"{type(optimizer).__name__}, {setting}: Keras applies it wrongly under tf.distribute; "
        f"applied as {now}, to the sum over the replicas."
    )


def optimizer_named(
    name: str, learning_rate: float, weight_decay: float
) -> tuple[keras.Optimizer, float]:
    """Returns an optimizer of `supported_optimizers`, and the weight decay that Learner applies.

    `weight_decay` 0 is the default of that optimizer.
    """
    optimizer = supported_optimizers()[name](learning_rate=learning_rate)
    of_optimizer = adopt(optimizer).options.weight_decay.rate
    return optimizer, weight_decay or of_optimizer


def check_optimizer(optimizer: keras.Optimizer) -> None:
    """Raises OptimizerError if `Learner.apply` is not equal to `optimizer.apply`."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise OptimizerError(
            "LossScaleOptimizer is not supported: under tf.distribute it looks for overflow on one "
            "replica only. Give the inner optimizer, and type --config.precision=mixed_float16: "
            "that scales the loss."
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
    """Returns the methods of keras.Optimizer that `kind` overrides, and that are never called."""
    base = keras.Optimizer
    harmless = set(_CALLED)
    if issubclass(kind, Nadam):
        harmless.add("_backend_update_step")
    if issubclass(kind, keras.optimizers.Muon):
        harmless.add("_apply_weight_decay")  # The weight decay is refused if it is on.
    own = {name for c in kind.__mro__ if c not in base.__mro__ for name in vars(c)}
    return sorted(
        name
        for name in own - harmless
        if not name.startswith("__") and callable(getattr(base, name, None))
    )


@functools.cache
def supported_optimizers() -> Mapping[str, type[keras.Optimizer]]:
    """Returns the optimizers that `optimizer_named` can create, by lower-case name."""
    # They need an inner optimizer, and are refused anyway.
    wrappers = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    kinds = {
        kind.__name__.lower(): _CORRECTED.get(kind, kind)
        for kind in vars(keras.optimizers).values()
        if isinstance(kind, type) and issubclass(kind, keras.Optimizer)
        if kind is not keras.Optimizer and not issubclass(kind, wrappers)
    }
    # Not kind(): it would create variables, which stay on parameter servers.
    return {name: kind for name, kind in kinds.items() if not _overridden(kind)}
