"""Small tensors that travel between processes as one: each transfer has a price of its own.

    arrived = carried(tensors, to=device)
    (step,), values = read_together(learner.computed_with, [step], device)
    gradients, metrics = computed_with(values, step, learner, strategy, batch)
    metrics = evaluated_with(values, learner, strategy, batch)

A transfer costs about as much as sending 100 KB, so the weights and biases of a layer, and the few
numbers that go with them, are sent as the bytes of one tensor. What is large is sent where it is
used: all of a kernel, but of a table of embeddings the rows that the batch needs.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from data.graphs import converted, plain
from strategies.base import Learner, Tensor, read_now

# What is larger travels alone: to copy it would cost more than to send it.
_LARGE_BYTES = 1 << 20


@plain
def carried(tensors: Sequence[Tensor], *, at: str = "", to: str = "") -> list[Tensor]:
    """`tensors`, which are on device `at`, on device `to`; empty is the one of the graph's caller.

    Shapes must be known, or the tensor travels alone.
    """
    together = [index for index, tensor in enumerate(tensors) if is_small(tensor)]
    if len(together) < 2:
        together = []
    arrived = list(tensors)
    with _on(to):
        for index, tensor in enumerate(tensors):
            if index not in together:
                arrived[index] = tf.identity(tensor)
    if not together:
        return arrived
    with _on(at):
        parcel = tf.concat([_to_bytes(tensors[index]) for index in together], axis=0)
    with _on(to):
        sizes = [num_bytes(tensors[index]) for index in together]
        for index, part in zip(together, tf.split(tf.identity(parcel), sizes), strict=True):
            arrived[index] = _from_bytes(part, tensors[index])
    return arrived


@plain
def read_together(
    variables: Sequence[Any], beside: Sequence[Tensor], device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """`beside`, which are on `device`, and the values of `variables`, read after them.

    Both where the graph is called; but large values stay where they are.
    """
    places = {device: list[int]()}
    values: list[Tensor] = [None] * len(variables)
    for index, variable in enumerate(variables):
        if is_small(variable):
            places.setdefault(variable.device, []).append(index)
        else:
            with tf.device(variable.device), tf.control_dependencies(beside):
                values[index] = read_now(variable)
    arrived: list[Tensor] = []
    for place, indices in places.items():
        with tf.device(place), tf.control_dependencies(beside):
            found = [read_now(variables[index]) for index in indices]
        first = list(beside) if place == device else []
        found = carried([*first, *found], at=place)
        arrived += found[: len(first)]
        for index, value in zip(indices, found[len(first) :], strict=True):
            values[index] = value
    return arrived, values


@plain
def computed_with(
    values: Sequence[Tensor], after: Tensor, learner: Learner, strategy: Any, batch: Any
) -> tuple[Sequence[Tensor], Tensor]:
    """A worker's gradient and its metrics at `values`, of `learner.computed_with`.

    Where that is empty, the learner reads its own, after `after`.
    """

    def compute(batch: Any, values: Sequence[Tensor], after: Tensor) -> Any:
        # In here: the strategy runs it on a thread, which knows of no scopes from outside.
        if values:
            with _rows_taken_from_tables():
                return learner.gradients_at(batch, values)
        with tf.control_dependencies([after]):
            return converted(learner.gradients)(batch)

    found = strategy.run(compute, args=(batch, values, after))
    gradients, sums = found
    return gradients, sums


@plain
def evaluated_with(values: Sequence[Tensor], learner: Learner, strategy: Any, batch: Any) -> Tensor:
    """A worker's metrics at `values`, of `learner.evaluated_with`; its own where that is empty."""

    def evaluate(batch: Any, values: Sequence[Tensor]) -> Tensor:
        if not values:
            return converted(learner.evaluate)(batch)
        with _rows_taken_from_tables():
            return learner.evaluate_at(batch, values)

    return strategy.run(evaluate, args=(batch, values))


@contextlib.contextmanager
def _rows_taken_from_tables() -> Iterator[None]:
    """In it rows are gathered where their table is, unless they are as much as that.

    A table that stays on its server does not travel then.
    """

    def device_of(op: Any) -> Any:
        if op.type != "GatherV2":
            return op.device
        rows, table = op.outputs[0], op.inputs[0]
        known = rows.shape.is_fully_defined() and table.shape.is_fully_defined()
        if known and num_bytes(rows) >= num_bytes(table):
            return op.device
        return _outside_of_branches(table).device or op.device

    with tf.zeros([]).graph.device(device_of):
        yield


def _outside_of_branches(tensor: Tensor) -> Tensor:
    """What `tensor` is in the graph where it was computed, if a branch of that has captured it."""
    while tensor.op.type == "Placeholder":
        found = [outer for outer, inner in tensor.graph.captures if inner is tensor]
        if not found or not hasattr(found[0], "op"):
            break
        tensor = found[0]
    return tensor


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    if device:
        with tf.device(device):
            yield
    else:
        yield


def is_small(tensor: Any) -> bool:
    """Whether it pays to send `tensor`, or the value of a variable, together with others."""
    known = tensor.shape.is_fully_defined() and tensor.dtype not in (tf.string, tf.bool)
    return bool(known and num_bytes(tensor) < _LARGE_BYTES)


def num_bytes(tensor: Tensor) -> int:
    """Of a tensor, or of a variable's value, whose shape is known."""
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)


def _to_bytes(tensor: Tensor) -> Tensor:
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _from_bytes(part: Tensor, like: Tensor) -> Tensor:
    cut = [-1] if like.dtype.size == 1 else [-1, like.dtype.size]
    return tf.reshape(tf.bitcast(tf.reshape(part, cut), like.dtype), like.shape)
