"""The parts of a batch of `config.virtual_replicas`: a step has the same bits on any topology.

    share = Share(number=1, of=2, num_parts=4)          # The second of two replicas: parts 4 to 7.
    gradients, changes, totals = gradients_of_parts(compute, batch, share, num_dense=6)
    total = in_pairs([a, b, c, d].__getitem__, 4, operator.add)     # (a + b) + (c + d)

A batch has V parts, a power of two, however many replicas there are: R, a power of two, at most V.
Each replica computes the gradients of V / R parts, one after another, and all gradients are added
along one binary tree over the V parts. The lower levels of the tree are within a replica, the upper
ones between replicas. So each addition has the same two operands on any number of replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from data.system.compat.autograph import no_autograph
from strategies.base import Batch, Learner, Tensor, present

# Metric totals of a part are rounded to multiples of 2 ** -24. Sums of such numbers below 2 ** 29
# are exact in float64, so they may be added in any order.
_TOTALS_UNIT = 2.0**-24
# An odd number, for the weights of a digest.
_DIGEST_FACTOR = 0x1E3779B1

_Value = TypeVar("_Value")
# Gradients, and changes of the layers' state.
_Sums: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
# And metric totals.
_OfPart: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor], Tensor]


class Share(NamedTuple):
    """The parts of one replica: `num_parts`, of as many in each of `of` replicas."""

    number: int | Tensor  # Of the replica.
    of: int
    num_parts: int
    ends_report: bool | Tensor = True  # Only then digests of the parts are computed.


def in_pairs(
    value: Callable[[int], _Value], number: int, add: Callable[[_Value, _Value], _Value]
) -> _Value:
    """(value(0) + value(1)) + (value(2) + value(3)) ...: `number`, a power of two, of values.

    Each is computed when it is added, so that at most log2(number) + 1 of them are in memory.
    """

    def of_range(first: int, count: int) -> _Value:
        if count == 1:
            return value(first)
        left = of_range(first, count // 2)
        return add(left, of_range(first + count // 2, count // 2))

    return of_range(0, number)


# Any: a gradient is a tensor, tf.IndexedSlices or None; TensorFlow has no type information.
def add_gradients(left: Any, right: Any) -> Any:
    """Returns the sum of two gradients of one variable, which both are None or neither is."""
    if left is None:
        return right
    if isinstance(left, tf.IndexedSlices):
        values = tf.concat([left.values, right.values], axis=0)
        indices = tf.concat([left.indices, right.indices], axis=0)
        return tf.IndexedSlices(values, indices, left.dense_shape)
    return left + right


def part_of_batch(batch: Batch, index: int, num_parts: int) -> Batch:
    """Returns part `index` of the B examples of `batch`; the sizes differ by at most 1."""

    def part_of(tensor: tf.Tensor) -> tf.Tensor:
        size = tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]
        return tensor[index * size // num_parts : (index + 1) * size // num_parts]

    return batch if num_parts == 1 else tf.nest.map_structure(part_of, batch)


@no_autograph
def gradients_of_parts(
    compute: Callable[[Batch], _OfPart],
    batch: Batch,
    share: Share,
    num_dense: int,
) -> _OfPart:
    """The sums over the parts of this replica's part of a batch, each computed alone.

    `compute` returns the gradients of a part, the first `num_dense` for dense variables, the
    changes of the layers' state, and metric totals. So does this function; sums of its totals are
    exact. At their end is a digest of the dense gradients and the changes for each part of the
    complete batch: an integer, 0 for the parts of other replicas, and unless `share.ends_report`.
    """
    former: list[Tensor] = []
    totals: list[Tensor] = []
    digests: list[Tensor] = []

    def of_part(index: int) -> _Sums:
        # In sequence, so that the activations of only one part are in memory.
        with tf.control_dependencies(former):
            part = part_of_batch(batch, index, share.num_parts)
        gradients, changes, part_totals = compute(part)
        # Rows of an index that occurs several times are added within a part, as other gradients.
        dense = [
            tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
            for gradient in gradients[:num_dense]
        ]
        gradients = [*dense, *gradients[num_dense:]]
        former[:] = present([*gradients, *changes])
        digests.append(
            tf.cond(
                tf.convert_to_tensor(share.ends_report),
                lambda: _digest(present([*dense, *changes])),
                lambda: tf.constant(0, tf.int32),
            )
        )
        totals.append(part_totals)
        return gradients, changes

    def add(left: _Sums, right: _Sums) -> _Sums:
        gradients, changes = (list(map(add_gradients, left[i], right[i])) for i in range(2))
        return gradients, changes

    gradients, changes = in_pairs(of_part, share.num_parts, add)
    is_own = tf.one_hot(share.number, share.of, dtype=tf.float64)
    of_all = is_own[:, tf.newaxis] * tf.cast(tf.stack(digests), tf.float64)
    return gradients, changes, tf.concat([_exact_sum(totals), tf.reshape(of_all, [-1])], axis=0)


def gradients_of_virtual_replicas(
    learner: Learner,
    batch: Batch,
    num_parts: int,
    sums_of: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> tuple[Sequence[Tensor], Tensor]:
    """This replica's gradients and metric totals, of `num_parts` parts of a batch.

    The totals end with digests, as those of `gradients_of_parts`. `sums_of` sums the changes of the
    layers' state over replicas, along a tree.
    """
    state = learner.layer_state
    counters = [v for v in learner.forward_state if v.dtype.is_integer]
    before = [variable.read_value() for variable in (*state, *counters)]

    def compute(part: Batch) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        # Each part begins with the state before the step.
        for variable, value in zip((*state, *counters), before, strict=True):
            variable.assign(value)
        gradients, totals = learner.gradients(part)
        new = [variable.read_value() for variable in state]
        return gradients, [a - b for a, b in zip(new, before, strict=False)], totals

    context = tf.distribute.get_replica_context()
    number, num_replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    share = Share(number, num_replicas, num_parts, learner.ends_report(learner.step))
    gradients, changes, totals = gradients_of_parts(compute, batch, share, learner.num_dense)
    for variable, old, total in zip(state, before[: len(state)], sums_of(changes), strict=True):
        variable.assign(old + total / learner.virtual_replicas)
    return gradients, totals


@no_autograph
def totals_of_parts(evaluate: Callable[[Batch], Tensor], batch: Batch, num_parts: int) -> Tensor:
    """The sum of the metric totals of the parts of `batch`, which later sums keep exact."""
    totals = [evaluate(part_of_batch(batch, index, num_parts)) for index in range(num_parts)]
    return _exact_sum(totals)


def _digest(tensors: Sequence[Tensor]) -> Tensor:
    """32 bits of `tensors`, int32 []: a weighted sum of their bits, which other values change.

    Integers are added, so that any order gives the same sum. Each column (index in the last
    dimension) of a tensor has its own weight, which is odd: no change of a single bit is lost.
    """
    words = map(_words, tensors)
    columns = [tf.reduce_sum(word, axis=range(word.shape.rank - 1)) for word in words]
    vector = tf.concat([tf.zeros([0], tf.int32), *columns], axis=0)
    places = tf.range(1, tf.size(vector) + 1)
    weights = tf.bitwise.bitwise_or(places * places * _DIGEST_FACTOR, 1)
    return tf.reduce_sum(vector * weights)


def _words(tensor: Tensor) -> Tensor:
    """The bits of `tensor`, of 16 bits or more, as int32 of rank 1 or more."""
    if tensor.dtype.size < tf.int32.size:
        tensor = tf.cast(tf.bitcast(tensor, tf.int16), tf.int32)
    words = tf.bitcast(tensor, tf.int32)
    is_in_columns = words.shape.rank and tensor.dtype.size <= tf.int32.size
    return words if is_in_columns else tf.reshape(words, [-1])


def _exact_sum(totals: Sequence[Tensor]) -> Tensor:
    """The sum of metric totals, each rounded before, so that it is the same in any order."""
    rounded = tf.round(tf.stack(totals) / _TOTALS_UNIT) * _TOTALS_UNIT
    return tf.reduce_sum(rounded, axis=0)
