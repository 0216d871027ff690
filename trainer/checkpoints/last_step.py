"""After an error: saves the last complete step, so that a restart loses nothing.

save_last_complete_step(executor, learner, checkpointer, write_if_newer)     # then end
save_left_step(executor.recovery, learner, checkpointer)                     # the next chief of ps

Under ps the variables are on the servers, which live on when the chief dies. The next chief finds
the last complete step there (`ServerRecovery.take_over`), and saves it, unless there is a
checkpoint of that step or of a later one. Then the run resumes from the newest checkpoint, as after
any end.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from strategies.base import Executor
from strategies.position import Reached
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.file_checks import DiskError
from trainer.checkpoints.finite import NonFiniteLossError, require_finite
from trainer.checkpoints.marks import Saved
from trainer.exit_codes import first_line
from trainer.learner import Learner

if TYPE_CHECKING:
    from strategies.ps.recovery import ServerRecovery

log = logging.getLogger(__name__)


def save_last_complete_step(
    executor: Executor,
    learner: Learner,
    checkpointer: Checkpointer,
    write: Callable[[Reached, Checkpointer], None],
) -> None:
    """Returns when a checkpoint has the last complete step of this process, or cannot have it.

    Called in the main thread after an error. Its own errors are only logged: the first error
    matters more. `write` is `write_if_newer`, or survivors.py's function if there are other tasks.
    """
    what = "The last complete step"
    try:
        reached = executor.return_to_complete_step()
        if reached is None:
            log.warning(
                "The error came in the middle of a step, and the variables are of no complete "
                "step: this task saves nothing. Earlier checkpoints are complete."
            )
        elif reached.step:
            what = f"Step {reached.step:,}"
            require_finite(learner, reached.step)
            write(reached, checkpointer)
    except Exception as error:
        log.warning("%s is not saved: %s", what, first_line(error))


def write_if_newer(reached: Reached, checkpointer: Checkpointer) -> None:
    """Writes a checkpoint of `reached`, unless there is one of this step or of a later one."""
    checkpointer.wait()  # The chief may be writing it, or an earlier one.
    if not is_saved(reached, checkpointer):
        checkpointer.save_for_restart(*reached)
        if checkpointer.has_saved(reached.step):
            log.warning("Saved step %s, the last that this task completed.", f"{reached.step:,}")


def is_saved(reached: Reached, checkpointer: Checkpointer) -> bool:
    """Returns True, and logs it, if there is a checkpoint of this step or of a later one."""
    newest = checkpointer.newest()
    if reached.step > (newest.step if newest else 0):
        return False
    log.warning("Step %s, the last that this task completed, is saved.", f"{reached.step:,}")
    return True


def save_left_step(
    recovery: "ServerRecovery", learner: Learner, checkpointer: Checkpointer
) -> None:
    """Writes the state that a dead chief has left on the servers as a checkpoint, if it is newer.

    The variables have any values afterwards, so a checkpoint must be restored.

    Raises:
        PeerLostError: a server was lost.
        NonFiniteLossError, DiskError: the state cannot be saved, and there is no checkpoint.
    """
    newest: Saved | None = None

    def after_step() -> int:
        nonlocal newest
        # Once the servers have dropped their state, a damaged checkpoint cannot be made up for.
        newest = checkpointer.newest(reads=True)
        return newest.step if newest else 0

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
