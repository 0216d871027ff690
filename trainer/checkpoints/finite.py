"""Raises NonFiniteLossError if a variable is not finite, before the state is saved."""

import numpy as np
import tensorflow as tf

from data.system.errors import RunFailed
from trainer.learner import Learner
from trainer.step.loss_scale import all_finite


class NonFiniteLossError(RunFailed):
    """The loss or a variable is not finite: the run ends, or goes back to a checkpoint."""


def require_finite(learner: Learner, step: int) -> None:
    """Raises NonFiniteLossError if a trained variable is not finite, or layer state has a NaN.

    Layers may have infinite state, such as a minimum of nothing. Called before each save, except of
    the initial state. A finite loss proves nothing: the loss of a step is computed before the
    variables change, and without moving statistics.
    """
    for variable in learner.variables[: learner.num_dense]:
        if not all_finite([variable.read_value()]):
            raise _error(variable, step, "a gradient overflowed")
    for part in learner.table_parts:
        if not part.is_finite():
            raise _error(part.rows, step, "a gradient overflowed")
    for variable in learner.layer_state:
        if np.isnan(variable.read_value().numpy()).any():
            raise _error(variable, step, "an input or an activation overflowed")


def _error(variable: tf.Variable, step: int, reason: str) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"At step {step} {variable.name} is no longer finite: {reason}. Lower "
        "--learning_rate. The last checkpoint is from before."
    )
