"""`config.jit_compile="auto"`: which models XLA compiles.

    choose_compilation(learner, recipe, inputs.train, is_cluster=False)

| trains | compiled | why |
| --- | --- | --- |
| one process, on GPUs | what XLA can compile | a step of ResNet-50 is up to 8 times as fast |
| one process, on CPUs | models with attention | 1.3 to 1.8 times as fast; a small CNN is slower |
| a cluster | nothing | sums of gradients could not overlap with the backward pass |

XLA merges operations on single elements, of which attention has many, and runs one kernel where
TensorFlow runs many. Its convolutions on CPUs are slower than TensorFlow's. If it lacks an
operation, the executor runs the same step without it (`Learner.stop_compiling`).
"""

import dataclasses

import tensorflow as tf
from keras import layers

from data.reader import Reader
from data.system.compat.function_names import number_functions_by_name
from data.system.compat.keras_layers import all_layers
from trainer.config import ConfigError, Recipe
from trainer.learner import Learner
from trainer.step.layer_options import Use, check_layers

_ATTENTION = (
    layers.AdditiveAttention,
    layers.Attention,
    layers.GroupQueryAttention,
    layers.MultiHeadAttention,
)


def choose_compilation(
    learner: Learner, recipe: Recipe, reader: Reader, *, is_cluster: bool
) -> None:
    """Has XLA compile `learner` if "auto" gains by it. Before the first step.

    `reader` reads the batches of training. If XLA may gain, but is not used, a note says why.
    """
    if recipe.config.jit_compile == "auto" and recipe.config.virtual_replicas:
        return  # It would depend on the strategy.
    if recipe.config.jit_compile == "auto":
        has_gpus = bool(tf.config.list_logical_devices("GPU"))
        has_attention = any(isinstance(layer, _ATTENTION) for layer in all_layers(learner.model))
        if not has_gpus and (is_cluster or not has_attention):
            return
        if why := _obstacle(learner, recipe, reader, is_cluster):
            learner.notes.append(
                f"XLA may make steps faster, but is not used: {why} With "
                "--config.jit_compile=False this line is not printed."
            )
            return
        learner.compile_with_xla(is_optional=True)
    if recipe.config.jit_compile:
        number_functions_by_name()


def _obstacle(learner: Learner, recipe: Recipe, reader: Reader, is_cluster: bool) -> str:
    """Why "auto" does not compile the step of `learner`; "" if nothing is known."""
    if learner.overrides_gradients:
        return "this Learner overrides `gradients`, and may compile parts of it itself."
    if learner.tables:
        return "the model has a ShardedEmbedding, of which XLA would read all rows."
    specs = tf.nest.flatten(reader.parsed_specs)
    if not all(spec.shape[1:].is_fully_defined() for spec in specs):
        return "the examples have different shapes, and XLA would compile each of them."
    compiled = dataclasses.replace(recipe.config, jit_compile=True)
    try:
        check_layers(learner.model, recipe.path, Use("mirrored", 1, compiled))
    except ConfigError as error:
        return str(error)
    if is_cluster:
        return "this is a cluster. Try --config.jit_compile=True."
    return ""
