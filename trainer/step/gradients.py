"""Operations on gradients: conversion to dense tensors, clipping.

The gradient of an embedding is tf.IndexedSlices: rows and their indices, which may repeat. The
gradient of a variable that the loss does not depend on is None.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from trainer.step.options import ClipConfig

# Any: tf.Tensor | tf.IndexedSlices | None, but TensorFlow has no type information.
Gradient: TypeAlias = Any


def to_dense(gradient: Gradient, variable: tf.Variable) -> tf.Tensor:
    """Returns `gradient` with the shape of `variable`; rows with the same index are summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = gradient.values
    with tf.device(rows.device):
        return tf.math.unsorted_segment_sum(rows, gradient.indices, variable.shape[0])


def clip_gradients(
    gradients: Sequence[Gradient], variables: Sequence[tf.Variable], clip: ClipConfig
) -> Sequence[Gradient]:
    """Clips the `gradients` of `variables`, none of which is None, as ClipConfig says."""
    if not (clip.value or clip.norm or clip.global_norm):
        return gradients
    # Dense first: rows with the same index are one row, which has their sum.
    dense = [to_dense(g, v) for g, v in zip(gradients, variables, strict=True)]
    if clip.global_norm:
        clipped, _ = tf.clip_by_global_norm(dense, clip.global_norm)
        return list(clipped)
    clipped = []
    for gradient in dense:
        with tf.device(gradient.device):  # It may be on another task.
            if clip.value:
                gradient = tf.clip_by_value(gradient, -clip.value, clip.value)
            else:
                gradient = tf.clip_by_norm(gradient, clip.norm)
        clipped.append(gradient)
    return clipped
