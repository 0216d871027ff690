"""Small tensors sent between processes as one tensor, because each transfer has a fixed cost.

    arrived = sent_together(tensors, to=device)
    (step,), values = read_together(variables, [step], device)

The fixed cost equals that of sending about 100 KB. So the weights and biases of a layer, and small
metadata such as the step, are sent as the bytes of one tensor. A large tensor is sent to the device
that uses it: a kernel completely, but only those rows of an embedding table that the batch needs.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from data.system.compat.autograph import no_autograph
from strategies.base import Tensor, num_bytes, read_now

# A larger tensor is sent alone: copying it into a bucket costs more than a separate transfer.
_LARGE_BYTES = 1 << 20


class Bucket(NamedTuple):
    """Tensors that have arrived on `device`: gradients, by index of the variable, and metadata."""

    device: str
    gradients: dict[int, Tensor]
    metadata: list[Tensor]


@no_autograph
def buckets(
    variables: Sequence[Tensor],
    sent: Sequence[Tensor],
    metadata: Sequence[Tensor] = (),
    devices: Iterable[str] = (),
) -> list[Bucket]:
    """Sends each dense gradient to the device of its variable, in one bucket a device.

    `sent` are compressed gradients of all `variables`, in their order; sparse ones are left out.
    `metadata` is sent to each of these devices, and to `devices`, with or without gradients.
    """
    places: dict[str, list[int]] = {device: [] for device in devices}
    for index, (variable, gradient) in enumerate(zip(variables, sent, strict=True)):
        if gradient is not None and not isinstance(gradient, tf.IndexedSlices):
            places.setdefault(variable.device, []).append(index)
    found = []
    for device, indices in places.items():
        arrived = sent_together([*metadata, *(sent[index] for index in indices)], to=device)
        gradients = dict(zip(indices, arrived[len(metadata) :], strict=True))
        found.append(Bucket(device, gradients, arrived[: len(metadata)]))
    return found


@no_autograph
def sent_together(tensors: Sequence[Tensor], *, at: str = "", to: str = "") -> list[Tensor]:
    """Sends `tensors` from device `at` to device `to`; "" is the device of the graph's caller.

    All small tensors are sent as one. A tensor of unknown shape is sent alone.
    """
    together = [index for index, tensor in enumerate(tensors) if is_small(tensor)]
    if len(together) < 2:
        together = []
    with tf.device(to):
        arrived = [t if i in together else tf.identity(t) for i, t in enumerate(tensors)]
    if not together:
        return arrived
    with tf.device(at):
        bucket = tf.concat([_to_bytes(tensors[index]) for index in together], axis=0)
    with tf.device(to):
        sizes = [num_bytes(tensors[index]) for index in together]
        for index, part in zip(together, tf.split(tf.identity(bucket), sizes), strict=True):
            arrived[index] = _from_bytes(part, tensors[index])
    return arrived


@no_autograph
def read_together(
    variables: Sequence[tf.Variable],
    metadata: Sequence[Tensor],
    device: str,
    dtype: str = "float32",
) -> tuple[list[Tensor], list[Tensor]]:
    """Sends `metadata`, which is on `device`, and the values of `variables`, to the graph's caller.

    The variables are read after `metadata` is computed. Large values stay on their devices, and are
    sent when they are used. Values of trainable float32 variables are rounded to the type named
    `dtype` before they are sent, and arrive as float32. Tables of Keras' Embedding layers are not:
    only a few of their rows are sent.
    """
    places = {device: list[int]()}
    values: list[Tensor] = [None] * len(variables)
    for index, variable in enumerate(variables):
        if is_small(variable):
            places.setdefault(variable.device, []).append(index)
        else:
            with tf.device(variable.device), tf.control_dependencies(metadata):
                value = _rounded(read_now(variable), variable, dtype)
            values[index] = tf.cast(value, variable.dtype)
    arrived: list[Tensor] = []
    for place, indices in places.items():
        with tf.device(place), tf.control_dependencies(metadata):
            read = [(read_now(variables[index]), variables[index]) for index in indices]
            found = [_rounded(value, variable, dtype) for value, variable in read]
        first = list(metadata) if place == device else []
        found = sent_together([*first, *found], at=place)
        arrived += found[: len(first)]
        for index, value in zip(indices, found[len(first) :], strict=True):
            values[index] = tf.cast(value, variables[index].dtype)
    return arrived, values


def _rounded(value: Tensor, variable: tf.Variable, dtype: str) -> Tensor:
    # Keras gives this name to the table of an Embedding layer.
    is_table = variable.name.rpartition("/")[2].startswith("embeddings")
    is_rounded = variable.trainable and variable.dtype == tf.float32 and not is_table
    return tf.cast(value, dtype) if is_rounded else value


def is_small(tensor: Tensor | tf.Variable) -> bool:
    """True if sending `tensor` (or a variable's value) together with others saves time."""
    known = tensor.shape.is_fully_defined() and tensor.dtype not in (tf.string, tf.bool)
    return bool(known and num_bytes(tensor) < _LARGE_BYTES)


def _to_bytes(tensor: Tensor) -> Tensor:
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _from_bytes(part: Tensor, like: Tensor) -> Tensor:
    cut = [-1] if like.dtype.size == 1 else [-1, like.dtype.size]
    return tf.reshape(tf.bitcast(tf.reshape(part, cut), like.dtype), like.shape)
