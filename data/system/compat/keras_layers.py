"""The layers inside of layers, what a layer owns itself, its losses, and the maker of a tensor.

`model.layers` and `layer.variables` are the public names for the first level, and for everything
below. Keras 3.15, `keras/src/layers/layer.py`. Can be deleted when Keras has public names for
what is here.
"""

from typing import Any

import keras
import tensorflow as tf


def all_layers(model: keras.Layer, *, include_self: bool = True) -> list[keras.Layer]:
    """The layers of `model`, also those inside of layers; `model` is the first."""
    return list(model._flatten_layers(include_self=include_self))


def own(layer: keras.Layer, kind: str) -> list[Any]:
    """What `layer` has itself, without layers inside: "trainable_variables" or another `kind`."""
    return list(getattr(layer, f"_{kind}"))


def keep_losses(model: keras.Layer) -> None:
    """Makes `model.losses` have all losses that were added in this keras.StatelessScope, if any.

    Keras remembers which layer added a loss in one set for all threads. If replicas of one process
    take turns in the forward pass, the call of one clears what another has added.
    """
    if (scope := keras.src.backend.get_stateless_scope()) is not None:
        for layer in all_layers(model):
            layer._loss_ids.clear()
        model._loss_ids.update(map(id, scope.losses))


def maker_of(tensor: keras.KerasTensor) -> keras.Operation:
    """The layer or operation that makes `tensor` in a Functional model."""
    return tensor._keras_history.operation


def select_mask(source: tf.Tensor, selected: tf.Tensor, is_selected: tf.Tensor) -> None:
    """Gives `selected` the part of the mask of `source`, if it has one, where `is_selected`."""
    mask = keras.src.backend.get_keras_mask(source)
    if mask is not None:
        keras.src.backend.set_keras_mask(selected, tf.boolean_mask(mask, is_selected))
