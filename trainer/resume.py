"""Which checkpoint a run goes on from, in all tasks the same: at its start, and after a nan.

    saved = restore_together(executor, checkpointer, learner)
    step = train_recovering(executor, learner, checkpointer, hooks, order=order, steps=1000,
                            steps_per_call=50, most_recoveries=2)

After a nan training goes back to the newest whole checkpoint, and on behind the last batch that was
consumed when the nan was seen: what led to it is among the examples between the two, and they are
skipped. (PaLM was trained over its loss spikes in this way: Chowdhery et al., 2022, section 5.1.)
"""

import logging
from collections.abc import Sequence

import keras
import tensorflow as tf

from data.order import Order
from strategies.base import Executor, Position
from strategies.counts import Counts
from trainer.checkpoint import Checkpointer, ModelDirError, Saved
from trainer.hooks import Hook, NonFiniteLossError
from trainer.learner import Learner
from trainer.loop import train

log = logging.getLogger(__name__)


def restore_together(
    executor: Executor, checkpointer: Checkpointer, learner: Learner
) -> Saved | None:
    """Restores the newest checkpoint that is whole for every task that runs the loop; or None.

    All but the learning rate: that is the command's, which may have changed.

    Raises:
        ModelDirError: as Checkpointer.restore; or the tasks do not see the same checkpoints.
    """
    rate = learner.optimizer.learning_rate
    # Without the schedule's factor: `learner.learning_rate` is that of the next step.
    given = float(tf.convert_to_tensor(rate).numpy())
    checkpointer.wait()
    executor.everyones(0)  # Nobody looks before the chief has finished what it was writing.
    saved = checkpointer.restore()
    while len(set(steps := executor.everyones(saved.step if saved else 0))) > 1:
        # What is broken for one, on its disk or on its way from there, is no good for all.
        if min(steps) == 0:
            raise ModelDirError(
                f"The tasks found checkpoints of different steps in --model_dir: {steps}, by "
                "replica. It must be one directory that all of them see, on a shared file system."
            )
        log.warning("The newest whole checkpoints are of steps %s, by replica.", steps)
        saved = checkpointer.restore(at_most=min(steps))
    if saved and isinstance(rate, keras.Variable):
        rate.assign(given)
    return saved


def train_recovering(
    executor: Executor,
    learner: Learner,
    checkpointer: Checkpointer,
    hooks: Sequence[Hook],
    *,
    order: Order,
    steps: int,
    steps_per_call: int,
    most_recoveries: int,
) -> int:
    """`train`, but goes back when the loss is no number, at most `most_recoveries` times in a run.

    Raises:
        NonFiniteLossError: once more than that; or there is no checkpoint to go back to.
    """
    while True:
        try:
            return train(executor, learner, hooks, steps=steps, steps_per_call=steps_per_call)
        except NonFiniteLossError as error:
            num_recoveries = len(executor.position.skipped)
            if num_recoveries >= most_recoveries:
                if most_recoveries:
                    raise NonFiniteLossError(
                        f"{error} Training had gone back {num_recoveries} time(s) before "
                        f"(--config.recover_from_nan={most_recoveries})."
                    ) from error
                raise
            _go_back(executor, learner, checkpointer, order, error)


def _go_back(
    executor: Executor,
    learner: Learner,
    checkpointer: Checkpointer,
    order: Order,
    error: NonFiniteLossError,
) -> None:
    def restore() -> tuple[Position, Counts]:
        end = executor.position
        saved = restore_together(executor, checkpointer, learner)
        if saved is None:
            raise NonFiniteLossError(f"{error} There is no checkpoint to go back to.") from error
        position = saved.position.behind(end, order)
        log.warning(
            "%s. Going back to step %s, and on behind the %s examples since (recovery %s).",
            str(error).partition(". ")[0],  # Without the advice to those whose run has ended.
            f"{saved.step:,}",
            f"{position.skipped[-1]:,}",
            len(position.skipped),
        )
        return position, saved.counts

    executor.go_back(restore)
