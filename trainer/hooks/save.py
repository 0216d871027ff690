"""SaveCheckpoint: the state of the run, at multiples of `every_steps` and at the last step."""

from dataclasses import dataclass

from typing_extensions import override

from strategies.base import Executor
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.hooks.base import PeriodicHook
from trainer.hooks.finite import require_finite
from trainer.learner import Learner


@dataclass(eq=False)
class SaveCheckpoint(PeriodicHook):
    """Saves at multiples of `every_steps`, and the last step, also when training was interrupted.

    All tasks that run the loop must have it: each checks that its variables are finite.
    """

    executor: Executor
    learner: Learner
    checkpointer: Checkpointer | None  # Only the chief has one.

    @override
    def act(self, step: int) -> None:
        require_finite(self.learner, step)
        if self.checkpointer is not None:
            self.checkpointer.save(step, self.executor.position, self.executor.worker_stats())

    @override
    def end(self, step: int) -> None:
        """Saves `step` if it is not saved yet, waits, and tries a failed save once more."""
        if self._acted_step < step:
            self._act(step)
        if self.checkpointer is not None and not self.checkpointer.has_saved(step):
            self.act(step)
            self.checkpointer.wait()
