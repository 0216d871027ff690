"""`config.jit_compile="auto"`: which models XLA compiles.

    choose_compilation(learner, recipe, inputs.train)

| device | compiled | why |
| --- | --- | --- |
| GPU | what XLA can compile | a step of ResNet-50 is up to 8 times as fast |
| CPU | models with attention | a Transformer is 1.8 times as fast; a small CNN is slower |

XLA merges operations on single elements, of which attention has many, and runs one kernel where
TensorFlow runs many. Its convolutions on CPUs are slower than TensorFlow's.
"""

import re
from typing import TYPE_CHECKING

import keras
import tensorflow as tf
from keras import layers

from data.reader import Reader
from strategies.base import Batch
from trainer.compiled_programs import number_functions_by_name
from trainer.config_file import errors_explained
from trainer.exit_codes import first_line
from trainer.step.options import ConfigError

if TYPE_CHECKING:
    from trainer.config import Recipe
    from trainer.learner import Learner

# What TensorFlow says: "unsupported operations ... on XLA_CPU_JIT: DecodeJpeg (No registered ...".
_LACKING = re.compile(r"unsupported operations .* on XLA_\w+: (\w+)")
_ATTENTION = (
    layers.AdditiveAttention,
    layers.Attention,
    layers.GroupQueryAttention,
    layers.MultiHeadAttention,
)


def choose_compilation(learner: "Learner", recipe: "Recipe", reader: Reader) -> None:
    """Has XLA compile `learner` if the config asks for it, or if "auto" gains by it.

    `reader` reads the batches of training. If XLA would gain, but cannot compile the step, a note
    of the learner says why.

    Raises ConfigError if jit_compile=True, and XLA cannot compile the step; or if augment fails.
    """
    config = recipe.config
    if config.jit_compile is False:
        return
    is_given = config.jit_compile is True
    if not (is_given or tf.config.list_logical_devices("GPU") or _has_attention(learner.model)):
        return
    with errors_explained(f"augment(inputs, labels, seeds) of {recipe.path}"):
        specs = reader.training_specs
    why = "" if is_given else _obstacle(learner, specs)
    if not why and _has_one_shape(specs):
        batch = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([config.batch_size, *spec.shape[1:]], spec.dtype), specs
        )
        if error := learner.xla_error(batch):
            why = _described(error)
    if not why:
        number_functions_by_name()
        learner.compile_with_xla()
    elif is_given:
        raise ConfigError(
            f"config.jit_compile=True, but XLA cannot compile the step: {why} Leave it out, "
            "or use other operations in the model, the loss or the metrics."
        )
    else:
        learner.notes.append(
            f"XLA does not compile this step, which would be faster: {why} With "
            "--config.jit_compile=False this line is not printed."
        )


def _described(error: Exception) -> str:
    lacking = _LACKING.search(str(error))
    if lacking is None:
        return first_line(error)
    return "it takes text." if lacking[1] == "_Arg" else f"XLA lacks the operation {lacking[1]}."


def _has_attention(model: keras.Model) -> bool:
    return any(isinstance(layer, _ATTENTION) for layer in model._flatten_layers())


def _has_one_shape(specs: Batch) -> bool:
    """Returns True if all batches have the same shapes, so that XLA compiles once."""
    return all(spec.shape[1:].is_fully_defined() for spec in tf.nest.flatten(specs))


def _obstacle(learner: "Learner", specs: Batch) -> str:
    """Why "auto" does not compile the step of `learner`; "" if nothing is known."""
    if learner.overrides_gradients:
        return "its Learner overrides `gradients`, and may compile parts of it itself."
    if learner.tables:
        return "it has a ShardedEmbedding, of which XLA would read all rows."
    if not _has_one_shape(specs):
        return "its examples have different shapes, and XLA would compile each one."
    for layer in learner.model._flatten_layers():
        if getattr(layer, "synchronized", False):
            return f"{layer.name!r} is synchronized=True, and XLA compiles each replica alone."
        if isinstance(layer, layers.SpectralNormalization):
            return f"{layer.name!r} assigns its kernel in the forward pass."
    return ""
