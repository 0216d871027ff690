"""State that layers change in training, such as moving statistics: equal on all replicas.

with averaged_over_replicas(learner.layer_state):      # in replica context
    gradients, totals = learner.gradients(batch)

Each replica changes its own copy, by its own part of the batch. Without the average, a replica
would evaluate with its own copy, but only the first one is saved and exported.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from strategies.base import Batch, Learner, Tensor
from strategies.gradients.all_reduce import all_reduced
from strategies.gradients.parts import Share, gradients_of_parts


@contextlib.contextmanager
def averaged_over_replicas(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Changes each of `variables` by the mean of what all replicas change it by within the block.

    A variable that does not change keeps its bits. Not to be converted by AutoGraph.
    """
    num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if num_replicas == 1 or not variables:
        yield
        return
    before = [variable.read_value() for variable in variables]
    yield
    changes = [new.read_value() - old for new, old in zip(variables, before, strict=True)]
    sums = all_reduced(changes)
    for variable, old, total in zip(variables, before, sums, strict=True):
        variable.assign(old + total / num_replicas)


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
