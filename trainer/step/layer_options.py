"""Options of Keras' layers that would be ignored, or would train something else, here.

    check_layers(learner.model, "my_model.py", Use("ps", num_workers=2, config=recipe.config))

Keras' layers are written for a step that reads each variable when the layer uses it, and assigns it
at once. Here a step may be computed at values that were read before (parameter servers, XLA), in
parts (`micro_batches`), or on several replicas. The table has the layers for which that matters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import keras

from data.system.compat.keras_layers import all_layers, own
from trainer.step.options import ConfigError

if TYPE_CHECKING:
    from trainer.config import Config


class Use(NamedTuple):
    """Where and how a model is trained."""

    strategy: str
    num_workers: int
    config: "Config"


class _Row(NamedTuple):
    """Which layers, where they are wrong, and why: the words after the name of the layer."""

    has_it: Callable[[keras.Layer], bool]
    is_wrong: Callable[[Use], bool]
    why: str


_COMPUTES_ALONE: Mapping[str, Callable[[Use], bool]] = {
    "jit_compile=True": lambda use: use.config.jit_compile is True,
    "local_steps": lambda use: use.config.local_steps.chosen != "",
    "virtual_replicas": lambda use: use.config.virtual_replicas > 0,
}
_TABLE: Sequence[_Row] = (
    _Row(
        lambda layer: layer.trainable and getattr(layer, "synchronized", False),
        lambda use: use.strategy == "ps" and use.num_workers > 1,
        "is synchronized=True, but workers of --strategy=ps exchange nothing in the forward pass: "
        "each would normalise over its own examples. Type --strategy=multiworker or "
        "--strategy=mirrored, or leave synchronized out.",
    ),
    *(
        _Row(
            lambda layer: getattr(layer, "synchronized", False),
            is_set,
            f"is synchronized=True: it communicates with other replicas in each step, but with "
            f"config.{option} each replica computes alone. Leave one of them out.",
        )
        for option, is_set in _COMPUTES_ALONE.items()
    ),
    _Row(
        lambda layer: any(v.aggregation != "none" for v in own(layer, "non_trainable_variables")),
        lambda use: use.config.virtual_replicas > 0,
        "has a variable with an aggregation, whose value depends on the number of replicas. Leave "
        "aggregation, or config.virtual_replicas, out.",
    ),
    _Row(
        lambda layer: isinstance(layer, keras.layers.RNN) and layer.stateful,
        lambda use: True,
        "is stateful=True, but the examples of a batch do not continue those of the batch before, "
        "and Keras keeps the state outside the variables of the model, so that no checkpoint would "
        "have it. Leave stateful out, and put longer sequences into the examples.",
    ),
    _Row(
        lambda layer: isinstance(layer, keras.layers.SpectralNormalization),
        lambda use: (
            use.strategy == "ps"
            or use.config.jit_compile is True
            or use.config.micro_batches > 1
            or use.config.virtual_replicas > 0
        ),
        "assigns its kernel in the forward pass. A gradient that is computed at values that were "
        "read before, as under --strategy=ps and with config.jit_compile, or in parts, as with "
        "config.micro_batches and config.virtual_replicas, would be another one. Type "
        "--strategy=multiworker or --strategy=mirrored, and leave these options out.",
    ),
    _Row(
        lambda layer: any(v.aggregation == "sum" for v in own(layer, "non_trainable_variables")),
        lambda use: True,
        "has a variable with aggregation='sum'. States of layers are averaged over replicas, so "
        "that its value would depend on their number. Leave aggregation out, and count in "
        "`metrics`.",
    ),
    _Row(
        lambda layer: any(v.overwrite_with_gradient for v in own(layer, "trainable_variables")),
        lambda use: True,
        "computes in float8. Keras assigns the scales of float8 in `optimizer.apply`, which is not "
        "called under tf.distribute: they would be trained as weights. Give the layer another "
        "dtype; --config.precision=mixed_bfloat16 computes in 16 bits.",
    ),
)


def check_layers(model: keras.Model, path: str, use: Use) -> None:
    """Raises ConfigError if a layer of `model`, of the config file `path`, is wrong in `use`."""
    for layer in all_layers(model):
        for row in _TABLE:
            if row.is_wrong(use) and row.has_it(layer):
                name = type(layer).__name__
                raise ConfigError(f"{name} {layer.name!r} of {path} {row.why}")
