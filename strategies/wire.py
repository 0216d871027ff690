"""How gradients travel: as they are, or rounded to 16 bits with error feedback (`--wire_dtype`).

    wire = Wire("bfloat16", num_senders=2)
    gradients = wire.all_reduced(gradients)             # in a replica: the sum over all
    gradients = wire.sent_to(variables, gradients)      # in a worker: at the parameter servers

What rounding takes from a gradient is kept by the one who sends it, and added to its next one
(Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes", 2019):

    sent = rounded(gradient + rest);    rest = gradient + rest - sent

so that what is too small for the type comes later. A gradient that is dropped, or skipped because
it overflowed, takes what it had of rests with it. The rests are the processes' own and are not
saved: a task that is started again begins with none, and goes on from a checkpoint up to the
rounding of one gradient, not bit for bit. A sum over replicas is rounded too, which nobody keeps.
"""

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from data.graphs import plain
from strategies.base import Learner, Tensor
from strategies.exchange import Exchange
from strategies.packing import carried

_numbers = itertools.count()


class Parcel(NamedTuple):
    """What is on `device` now: gradients, by the index of their variable, and what was beside."""

    device: str
    gradients: dict[int, Tensor]
    beside: list[Tensor]


class Wire:
    """What happens to a gradient between the replica that computes it and those that use it.

    Gradients that are rows of an embedding travel as they are: the rest would be as large as the
    whole table, and those of rows that never occur again would never arrive. So does what has 16
    bits already.
    """

    def __init__(
        self, dtype: str = "float32", num_senders: int = 1, exchange: Exchange | None = None
    ) -> None:
        """Of `num_senders` gradients the sum must not overflow in `dtype`, a name.

        Small ones are summed by `exchange`, if there is one.
        """
        self._dtype = None if dtype == "float32" else tf.as_dtype(dtype)
        # Less than rounding may add.
        self._limit = 0.99 * float(self._dtype.max) / num_senders if self._dtype else 0.0
        self._exchange = exchange
        self._name = _new_name()

    @property
    def rounds(self) -> bool:
        """Whether gradients leave rests."""
        return self._dtype is not None

    def forget(self) -> None:
        """Begins without rests in graphs that are traced from now on."""
        self._name = _new_name()

    def update(self, learner: Learner, batch: Any) -> Tensor:
        """One step of `learner` on a replica's share of a batch; its metrics. In replica context.

        `gradients`, their sum over all replicas, `apply`.
        """
        gradients, sums = learner.gradients(batch)
        learner.apply(self.all_reduced(gradients))
        return sums

    @plain
    def all_reduced(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sum over all replicas of each of `gradients`. In replica context.

        The ring adds up in the type that travels.
        """
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1:
            return list(gradients)
        summed = list(gradients)
        # Those of one type travel as one: each transfer has a price of its own.
        together: dict[str, list[int]] = {}
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                summed[index] = context.all_reduce("sum", gradient)
            elif gradient is not None:
                together.setdefault(gradient.dtype.name, []).append(index)
        for dtype, indices in together.items():
            alike = [gradients[index] for index in indices]
            vector = tf.concat([tf.reshape(gradient, [-1]) for gradient in alike], axis=0)
            total = tf.cast(self._total(self._rounded(vector, indices[0])), dtype)
            parts = tf.split(total, [tf.size(gradient) for gradient in alike], num=len(alike))
            for index, part in zip(indices, parts, strict=True):
                summed[index] = tf.reshape(part, tf.shape(gradients[index]))
        return summed

    def _total(self, vector: Tensor) -> Tensor:
        """Its sum over all replicas."""
        if self._exchange and self._exchange.suits(vector):
            return self._exchange.summed(vector)
        return tf.distribute.get_replica_context().all_reduce("sum", vector)

    @plain
    def sent_to(self, variables: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Each of `gradients` on the device of its variable, as it arrives there."""
        arrived = list(gradients)
        for index, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            if isinstance(gradient, tf.IndexedSlices):
                with tf.device(variable.device):
                    values, indices = tf.identity(gradient.values), tf.identity(gradient.indices)
                arrived[index] = tf.IndexedSlices(values, indices, gradient.dense_shape)
        for parcel in self.parcels(variables, self.rounded(gradients)):
            for index, sent in parcel.gradients.items():
                with tf.device(parcel.device):
                    arrived[index] = tf.cast(sent, gradients[index].dtype)
        return arrived

    @plain
    def rounded(self, gradients: Sequence[Tensor], counts: Tensor | None = None) -> list[Tensor]:
        """Each of `gradients`, of all variables in their order, in the type that it travels in.

        Unless `counts`, a flag, they are nobody's, and rests stay what they are.
        """
        return [
            None if gradient is None else self._rounded(gradient, index, counts)
            for index, gradient in enumerate(gradients)
        ]

    @plain
    def parcels(
        self,
        variables: Sequence[Tensor],
        sent: Sequence[Tensor],
        beside: Sequence[Tensor] = (),
        devices: Iterable[str] = (),
    ) -> list["Parcel"]:
        """The dense ones of `sent`, gradients that were `rounded`, on the devices of `variables`.

        With them `beside`, to each device; also to those of `devices` that get no gradient.
        """
        places: dict[str, list[int]] = {device: [] for device in devices}
        for index, (variable, gradient) in enumerate(zip(variables, sent, strict=True)):
            if gradient is not None and not isinstance(gradient, tf.IndexedSlices):
                places.setdefault(variable.device, []).append(index)
        parcels = []
        for place, indices in places.items():
            arrived = carried([*beside, *(sent[index] for index in indices)], to=place)
            there = dict(zip(indices, arrived[len(beside) :], strict=True))
            parcels.append(Parcel(place, there, arrived[: len(beside)]))
        return parcels

    def _is_rounded(self, gradient: Any) -> bool:
        is_dense = not isinstance(gradient, tf.IndexedSlices)
        return bool(self._dtype and is_dense and gradient.dtype.size > self._dtype.size)

    def _rounded(self, gradient: Tensor, index: int, counts: Tensor | None = None) -> Tensor:
        if not self._is_rounded(gradient):
            return gradient
        # Each step of an unrolled graph has a handle of its own, which orders nothing: so a rest is
        # read after its gradient, and written before what is sent. From there to the next gradient
        # the order is the caller's.
        with tf.control_dependencies([gradient]):
            rest = tf.raw_ops.VarHandleOp(
                dtype=gradient.dtype, shape=gradient.shape, shared_name=f"{self._name}-{index}"
            )
            is_there = tf.raw_ops.VarIsInitializedOp(resource=rest)
        former = tf.cond(
            is_there,
            lambda: tf.raw_ops.ReadVariableOp(resource=rest, dtype=gradient.dtype),
            lambda: tf.zeros_like(gradient),
        )
        total = gradient + former
        sent, left = self._divided(total)
        if counts is not None:
            left = tf.cond(counts, lambda: left, lambda: former)
        written = tf.raw_ops.AssignVariableOp(resource=rest, value=left)
        with tf.control_dependencies([written]):
            return tf.identity(sent)

    def _divided(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """What is sent of `total`, and what is left of it."""

        def left_by(sent: Tensor) -> Tensor:
            return total - tf.cast(sent, total.dtype)

        def rounded() -> tuple[Tensor, Tensor]:
            sent = tf.cast(total, self._dtype)
            return sent, left_by(sent)

        def clipped() -> tuple[Tensor, Tensor]:
            # What the type cannot hold leaves no rest, which would be sent again and again; and
            # what is not finite is sent, so that all see it.
            within = tf.clip_by_value(total, -self._limit, self._limit)
            sent = tf.cast(tf.where(tf.math.is_finite(total), within, total), self._dtype)
            return sent, tf.where(is_held, left_by(sent), tf.zeros_like(total))

        is_held = tf.abs(total) <= self._limit
        divided: tuple[Tensor, Tensor] = tf.cond(tf.reduce_all(is_held), rounded, clipped)
        return divided


def _new_name() -> str:
    """Rests are found by name, and live as long as the process that they are in."""
    return f"rest-{os.getpid()}-{time.time_ns()}-{next(_numbers)}"
