"""Raises NonFiniteLossError if a variable is not finite, before the state is saved."""

import tensorflow as tf

from data.system.errors import RunFailed
from trainer.embeddings.optimizers import capacity, gather_rows
from trainer.learner import Learner
from trainer.step.loss_scale import all_finite

# Rows of a table that are read at a time.
_ROWS = 1 << 18


class NonFiniteLossError(RunFailed):
    """The loss or a variable is not finite: the run ends, or goes back to a checkpoint."""


def require_finite(learner: Learner, step: int) -> None:
    """Raises NonFiniteLossError if a trainable variable is not finite.

    Called before each save, except of the initial state. A finite loss proves nothing: the loss
    of a step is computed before the variables change.
    """
    for index, variable in enumerate(learner.variables):
        is_table = index >= learner.num_dense
        if not (_is_finite_table(variable) if is_table else all_finite([variable.read_value()])):
            raise NonFiniteLossError(
                f"At step {step} {variable.name} is no longer finite: a gradient overflowed. Lower "
                "--learning_rate. The last checkpoint is from before."
            )


def _is_finite_table(part: tf.Variable) -> bool:
    """Reads a part of a table on its device, a few rows at a time: it may be large."""
    with tf.device(part.device):
        num_rows = int(capacity(part))
        return all(
            all_finite([gather_rows(part, tf.range(start, min(start + _ROWS, num_rows)))])
            for start in range(0, num_rows, _ROWS)
        )
