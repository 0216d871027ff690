"""SaveCheckpoint: the state of the run, at multiples of `every_steps` and at the last step.

hooks = [KeepConfig(files, document, every_steps=100), ..., SaveCheckpoint(..., every_steps=100)]

At the same steps KeepConfig checks that the model directory is still there.
"""

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from data.system.files import exists
from strategies.base import Executor
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.finite import require_finite
from trainer.hooks.base import PeriodicHook
from trainer.learner import Learner
from trainer.run_files import Document, RunFiles

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SaveCheckpoint(PeriodicHook):
    """Saves at multiples of `every_steps`, and the last step, also when training was interrupted.

    All tasks that run the loop must have it: each checks that its variables are finite.
    """

    executor: Executor
    learner: Learner
    checkpointer: Checkpointer | None  # Only the chief has one.

    @override
    def begin(self, step: int) -> None:
        super().begin(step)
        if self.checkpointer is not None:
            with self.executor.stopwatch.spend("graph"):
                self.checkpointer.prepare()

    @override
    def act(self, step: int) -> None:
        with self.executor.stopwatch.spend("checkpoint"):
            require_finite(self.learner, step)
            if self.checkpointer is not None:
                self.checkpointer.save(step, self.executor.position, self.executor.worker_stats())

    def save_now(self, step: int) -> bool:
        """Saves `step` if it is not saved yet, and waits until it is.

        Earlier checkpoints stay until the next `act`. Returns True if it saved `step`.
        """
        checkpointer = self.checkpointer
        with self.executor.stopwatch.spend("checkpoint"):
            if checkpointer is not None and checkpointer.has_saved(step):
                return False
            require_finite(self.learner, step)
            if checkpointer is not None:
                position, stats = self.executor.position, self.executor.worker_stats()
                checkpointer.save_for_restart(step, position, stats, is_complete=False)
                checkpointer.wait()
                with contextlib.suppress(OSError):  # It is not empty, or at a URL.
                    os.rmdir(checkpointer.staging)
        return True

    @override
    def end(self, step: int) -> None:
        """Saves `step` if it is not saved yet, waits, and tries a failed save once more."""
        if self._acted_step < step:
            self._act(step)
        if self.checkpointer is not None and not self.checkpointer.has_saved(step):
            self.act(step)
            with self.executor.stopwatch.spend("checkpoint"):
                self.checkpointer.wait()


@dataclass(eq=False)
class CopyToStandby(PeriodicHook):
    """Copies the state of parameter servers to other servers, at multiples of `every_steps`."""

    executor: Executor
    learner: Learner

    @override
    def act(self, step: int) -> None:
        with self.executor.stopwatch.spend("checkpoint"):
            require_finite(self.learner, step)  # The copy replaces an earlier one.
            assert self.executor.recovery is not None
            self.executor.recovery.copy_to_standby()


@dataclass(eq=False)
class KeepConfig(PeriodicHook):
    """Writes config.json anew, with a warning, if it was deleted: mostly with the whole directory.

    It is called before the writers, so that reports have their directory again.
    """

    files: RunFiles
    document: Document
    _steps: list[int] = field(default_factory=list, init=False)

    @override
    def act(self, step: int) -> None:
        if exists(self.files.config):
            return
        self._steps.append(step)
        log.warning(
            "%s was deleted before step %s, perhaps with the complete directory. It is written "
            "anew; earlier reports and checkpoints may be missing.",
            self.files.config,
            f"{step:,}",
        )
        try:
            self.files.write_config(self.document)
        except OSError as error:
            log.warning("%s could not be written: %s", self.files.config, error)

    @override
    def end(self, step: int) -> None:
        """Acts once more: the files of a finished run must be complete."""
        self._act(step)

    @override
    def result(self) -> Mapping[str, object]:
        return {"files_deleted_before_steps": self._steps} if self._steps else {}
