"""Models of config files: what can be trained, and building a model from the specs of its inputs.

check_model(model, "build_model(config) of my_model.py")
if not is_built(model):
    build_from_specs(model, specs, "my_model.py")
"""

import warnings

import keras
import tensorflow as tf

from strategies.base import Batch
from trainer.config_file import errors_explained
from trainer.step.model_loss import overrides
from trainer.step.options import ConfigError


def check_model(model: object, what: str) -> None:
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


def has_own_code(model: keras.Model) -> bool:
    """Returns True if a class of `model` or of its layers is none of Keras'."""
    return any(
        type(layer).__module__.partition(".")[0] != "keras" for layer in model._flatten_layers()
    )


def is_built(model: keras.Model) -> bool:
    """Returns True if all weights of `model` exist: it has Keras inputs, or all layers are built.

    `model.built` alone says nothing about the layers of a subclassed model that defines `build`.
    """
    return bool(getattr(model, "inputs", None)) or all(
        layer.built for layer in model._flatten_layers()
    )


def build_from_specs(model: keras.Model, specs: Batch, path: str) -> None:
    """Calls `model` on inputs without values, which creates the weights of all its layers."""
    inputs = tf.nest.map_structure(
        lambda spec: keras.KerasTensor((None, *spec.shape[1:]), spec.dtype.name), specs
    )
    shapes = tf.nest.map_structure(lambda spec: f"{spec.dtype.name}{spec.shape}", specs)
    with (
        warnings.catch_warnings(),
        errors_explained(f"The model of {path}, called with inputs {shapes},"),
    ):
        warnings.simplefilter("ignore", UserWarning)  # Keras', about the error that follows.
        model(inputs)
