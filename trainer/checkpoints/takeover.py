"""After the death of the chief of ps: the next chief saves the last complete step of its servers.

    save_left_step(executor.recovery, learner, checkpointer)     # before the run resumes

The variables are on the servers, and the servers live on. So a new chief finds the last complete
step there (`Recovery.take_over`), and writes it as a checkpoint, unless there is one of that step
or of a later step. The run then resumes from the newest checkpoint, as after any other end.
"""

import logging

from strategies.base import Recovery
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.file_checks import DiskError
from trainer.checkpoints.finite import NonFiniteLossError, require_finite
from trainer.exit_codes import first_line
from trainer.learner import Learner

log = logging.getLogger(__name__)


def save_left_step(recovery: Recovery, learner: Learner, checkpointer: Checkpointer) -> None:
    """Writes the state that a dead chief has left on the servers as a checkpoint, if it is newer.

    The variables have any values afterwards, so a checkpoint must be restored.

    Raises:
        PeerLostError: a server was lost.
        NonFiniteLossError, DiskError: the state cannot be saved, and there is no checkpoint.
    """
    newest = checkpointer.newest()
    after_step = newest.step if newest else 0
    reached = recovery.take_over(checkpointer.variables, checkpointer.run_identity, after_step)
    if reached is None:
        return
    try:
        require_finite(learner, reached.step)
        checkpointer.save_for_restart(*reached)
        if not checkpointer.has_saved(reached.step):
            raise DiskError(f"Step {reached.step:,} of the former chief could not be saved.")
        log.warning("Saved step %s from the memory of the servers.", f"{reached.step:,}")
    except (NonFiniteLossError, DiskError) as error:
        if newest is None:
            raise
        log.warning("%s The run resumes from step %s.", first_line(error), f"{newest.step:,}")
