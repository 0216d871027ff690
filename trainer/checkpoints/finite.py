"""Raises NonFiniteLossError if a variable is not finite, before the state is saved."""

from data.system.errors import RunFailed
from trainer.learner import Learner
from trainer.step.loss_scale import all_finite


class NonFiniteLossError(RunFailed):
    """The loss or a variable is not finite: the run ends, or goes back to a checkpoint."""


def require_finite(learner: Learner, step: int) -> None:
    """Raises NonFiniteLossError if a trainable variable is not finite.

    Called before each save, except of the initial state. A finite loss proves nothing: the loss
    of a step is computed before the variables change.
    """
    for place, variable in enumerate(learner.variables, -learner.num_dense):
        part = learner.table_parts[place] if place >= 0 else None
        if not (part.is_finite() if part else all_finite([variable.read_value()])):
            raise NonFiniteLossError(
                f"At step {step} {variable.name} is no longer finite: a gradient overflowed. Lower "
                "--learning_rate. The last checkpoint is from before."
            )
