"""Models of config files: what can be trained, and building a model from the specs of its inputs.

model = build_model(recipe, specs)      # of the functions of a config file
model = load_keras_file("model.keras")  # to predict, or for its weights
if not is_built(model):
    build_from_specs(model, specs, "my_model.py")
"""

import warnings

import keras
import tensorflow as tf

from data.system.compat.keras_layers import all_layers
from data.system.compat.keras_state import names_from_zero
from data.system.extras import of_satellite
from strategies.base import Batch
from trainer.config import Recipe
from trainer.config_file import check_eager, errors_explained
from trainer.learner.variables import is_trainable
from trainer.step.keras_losses import overrides
from trainer.step.options import ConfigError


def build_model(
    recipe: Recipe, input_specs: Batch = None, *, is_trained: bool = True
) -> keras.Model:
    """The model of `recipe`, built, in the precision that its config names.

    Its names are the same at each call, in each process. If `is_trained`, layers that `call` uses
    only with training=True have weights, too; otherwise it is the model as it predicts.

    float32 leaves Keras' policy as it is: a file may set one.
    """
    what, config = f"build_model(config) of {recipe.path}", recipe.config
    policy = keras.config.dtype_policy()
    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    try:
        with names_from_zero():
            with errors_explained(what):
                model = recipe.build_model(config)
                check_eager(what)
            _check_model(model, what)
            declared = declared_inputs(model)
            if declared is None and not is_built(model):
                if input_specs is None:
                    raise ConfigError(f"{what} must return a built model. Give it a keras.Input.")
                build_from_specs(model, input_specs, recipe.path)
            # Layers of Keras use all their weights in both modes.
            if is_trained and has_own_code(model) and not is_built(model):
                specs = input_specs if declared is None else declared
                build_from_specs(model, specs, recipe.path, training=True)
    finally:
        if config.precision != "float32":
            keras.config.set_dtype_policy(policy)
    if not is_trainable(model):
        raise ConfigError(
            f"{what} must return a keras.Model with weights to train, but {type(model).__name__} "
            "has none. Add a layer such as keras.layers.Dense."
        )
    return model


def _check_model(model: object, what: str) -> None:
    """Raises ConfigError if `model` cannot be trained here. `what` is the function that made it."""
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{what} must return a keras.Model, but returned {type(model).__name__}: {model!r}. "
            "Does it end with `return model`?"
        )
    for name, instead in _OVERRIDES.items():
        if overrides(model, name) and not overrides(model, "compute_loss"):
            raise ConfigError(
                f"{what} returned a {type(model).__name__}, whose class overrides {name}(). It "
                "would not be called: under tf.distribute the gradients are summed over replicas "
                f"before the optimizer changes the weights. {instead}"
            )


_OVERRIDES = {
    "train_step": "Keep the forward pass in `call`, and write the loss as "
    "`compute_loss(self, x, y, y_pred, sample_weight, training)`, which is called and returns a "
    "scalar; or as `loss(labels, outputs)` in the config file; or derive a class from Learner, "
    "which build_learner(config, **parts) returns. docs/keras.md shows a variational autoencoder.",
    "test_step": "Write the loss as `compute_loss(self, x, y, y_pred, sample_weight, training)`, "
    "and the metrics as `metrics` in the config file; or derive a class from Learner, and override "
    "its `evaluate`.",
}


def load_keras_file(path: str) -> keras.Model:
    """Loads a .keras file, without its optimizer. A damaged or foreign file may raise any error."""
    of_satellite("trainer.embeddings", "ShardedEmbedding")  # Keras then knows it by its name.
    return keras.models.load_model(path, compile=False)


def has_own_code(model: keras.Model) -> bool:
    """Returns True if a class of `model` or of its layers is none of Keras'."""
    return any(type(layer).__module__.partition(".")[0] != "keras" for layer in all_layers(model))


def is_built(model: keras.Model) -> bool:
    """Returns True if all layers of `model`, also those inside of layers, have their weights.

    `model.built` alone says nothing about the layers of a subclassed model that defines `build`.
    """
    return all(layer.built for layer in all_layers(model))


def declared_inputs(model: keras.Model) -> Batch:
    """The inputs that `model` declares, as its `call` takes them; None if it declares none."""
    if not getattr(model, "inputs", None):
        return None
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def declared_outputs(model: keras.Model, input_specs: Batch = None) -> Batch:
    """The outputs of `model`, tensors without values; None if they are not known.

    A subclassed model declares none: they follow from its inputs, if its `call` takes any number of
    examples.
    """
    if getattr(model, "outputs", None):
        return model.outputs[0] if isinstance(model, keras.Sequential) else model.output
    if input_specs is None:
        return None
    try:
        return model.compute_output_spec(keras_tensors(input_specs))
    except Exception:  # Whatever the model's `call` raises, where it needs a size.
        return None


def keras_tensors(specs: Batch) -> Batch:
    """Returns tensors without values for `specs`, of any number of examples."""
    return tf.nest.map_structure(
        lambda spec: keras.KerasTensor((None, *spec.shape[1:]), tf.as_dtype(spec.dtype).name), specs
    )


def build_from_specs(
    model: keras.Model, specs: Batch, path: str, *, training: bool = False
) -> None:
    """Calls `model` on inputs without values, which creates the weights of the layers it uses."""
    inputs = keras_tensors(specs)
    shapes = tf.nest.map_structure(lambda tensor: f"{tensor.dtype}{tensor.shape}", inputs)
    called = f"The model of {path}, called with {'training=True and ' if training else ''}"
    with warnings.catch_warnings(), errors_explained(f"{called}inputs {shapes},"):
        warnings.simplefilter("ignore", UserWarning)  # Keras', about the error that follows.
        if training:
            _TrainingCall(model).compute_output_spec(inputs)
        else:
            model(inputs)


class _TrainingCall(keras.Operation):
    """`model` in training, for inputs without values.

    In `model(inputs, training=True)` a Functional model would not tell its layers of `training`.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self._model = model

    def call(self, inputs: Batch) -> Batch:
        return self._model(inputs, training=True)
