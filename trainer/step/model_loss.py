"""The loss of a model whose class overrides Keras' `compute_loss`, as one value per example.

    if overrides(model, "compute_loss"):
        loss = ModelLoss(model)
    values = loss(labels, outputs, weights, inputs, training=True)      # [B]

`compute_loss` returns a scalar: the mean over the examples that it gets, with the penalties of the
layers if it adds `self.losses`. Each example gets this scalar as its loss. So the sum over the
examples of a replica, divided by the batch size of all replicas, is the part of the replica.
"""

import keras
import tensorflow as tf

from data.system.compat.keras_compile import compute_loss
from strategies.base import Batch
from trainer.step.options import ConfigError


def overrides(model: keras.Model, method: str) -> bool:
    """Returns True if the class of `model` has its own `method` of keras.Model."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


class ModelLoss:
    """Calls `compute_loss` of a model."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __call__(
        self,
        labels: Batch,
        outputs: Batch,
        weights: Batch | None = None,
        inputs: Batch = None,
        *,
        training: bool = False,
    ) -> tf.Tensor:
        """Returns the loss of each of these examples, [B].

        Raises ConfigError if `compute_loss` returns no scalar.
        """
        value = compute_loss(self._model, inputs, labels, outputs, weights, training=training)
        if not tf.is_tensor(value) or value.shape.rank != 0:
            came = f"shape {value.shape}" if tf.is_tensor(value) else repr(value)
            raise ConfigError(
                f"compute_loss() of {type(self._model).__name__} returned {came}, but must return "
                "a scalar, the mean over the examples: `return keras.ops.mean(...)`."
            )
        num_examples = tf.shape(tf.nest.flatten((labels, outputs))[0])[0]
        return tf.fill([num_examples], value)
