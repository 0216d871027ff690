"""The checkpoint that a run resumes from, the same in all tasks: at its start, and after a NaN.

    saved = restore_newest(parts)
    step = train_recovering(parts, hooks)

After a NaN, training goes back to the newest complete checkpoint, and skips all examples that were
consumed since, as PaLM did at loss spikes (Chowdhery et al., 2022, section 5.1).
"""

import contextlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from data.system.files import exists, is_url, remove_tree
from strategies.base import Executor
from strategies.position import Position
from strategies.worker_stats import WorkerStats
from trainer.checkpoints.checkpointer import GIVEN_RATE, Checkpointer, ModelDirError
from trainer.checkpoints.finite import NonFiniteLossError
from trainer.checkpoints.last_step import save_left_step
from trainer.checkpoints.marks import Saved
from trainer.hooks.base import Hook
from trainer.hooks.building import Parts
from trainer.loop import train
from trainer.model_dir import disk_errors_explained
from trainer.run_files import RunFiles, progress_of

log = logging.getLogger(__name__)


def restore_newest(parts: Parts) -> Saved | None:
    """Restores the newest step at the start of a run, also one that is only on servers.

    Raises ModelDirError, DiskError: as restore_together; or the directory cannot be written, or is
    not the same for all tasks.
    """
    model_dir, executor, is_chief = parts.spec.model_dir, parts.executor, parts.spec.is_chief
    files = RunFiles(model_dir)
    _check_is_shared(model_dir, executor, is_chief=is_chief)
    given, former = parts.learner.optimizer_rate, None
    # Without it this is another run: whoever has deleted the directory wants to begin anew.
    if executor.recovery and exists(files.config):
        former = parts.checkpointer.newest()  # The next one has the rate that is given now.
        save_left_step(executor.recovery, parts.learner, parts.checkpointer)
    saved = restore_together(executor, parts.checkpointer)
    # What a callback has set continues, unless another rate is given now.
    if saved and given is not None and (former or saved).config.get(GIVEN_RATE) != given:
        parts.learner.optimizer.learning_rate = given
        parts.checkpointer.begun_step = -1  # It lacks what callbacks did to the former rate.
    if is_chief:
        with disk_errors_explained(model_dir):
            remove_tree(parts.checkpointer.staging)
        _, reported = progress_of(model_dir)
        if reported and not saved:  # A report needs a step.
            log.warning(
                "%s has reports up to step %s, but %s has no complete checkpoint: none was saved "
                "yet, or they were deleted. Training begins anew at step 0.",
                files.metrics,
                f"{reported:,}",
                files.checkpoints,
            )
    return saved


def _check_is_shared(model_dir: str, executor: Executor, *, is_chief: bool) -> None:
    """Raises ModelDirError if a task does not see what the chief writes in `model_dir`."""
    numbers = executor.gathered(secrets.randbits(52) if is_chief else 0)
    if len(numbers) == 1 or is_url(model_dir):
        return
    mark = Path(model_dir, f".shared-{max(numbers):x}")
    if is_chief:
        with contextlib.suppress(OSError):  # On a full disk nothing is compared.
            mark.touch()
    executor.gathered(0)  # A barrier: the file is there before any task looks for it.
    seen = executor.gathered(int(mark.exists()))
    if is_chief and seen[0]:
        mark.unlink()
    if seen[0] and not all(seen):
        blind = [replica for replica, sees in enumerate(seen) if not sees]
        raise ModelDirError(
            f"--model_dir={model_dir} is not one directory: what the chief writes there is not "
            f"there in the tasks of replica(s) {', '.join(map(str, blind))}. Give a directory of a "
            "file system that all hosts share, or s3://BUCKET/DIRECTORY."
        )


def restore_together(executor: Executor, checkpointer: Checkpointer) -> Saved | None:
    """Restores the newest checkpoint that is complete for all tasks that run the loop, if any.

    Raises:
        ModelDirError: as Checkpointer.restore; or the tasks do not see the same checkpoints.
    """
    checkpointer.wait()
    executor.gathered(0)  # A barrier: the chief has finished writing before any task reads.
    saved = checkpointer.restore()
    while len(set(steps := executor.gathered(saved.step if saved else 0))) > 1:
        # A checkpoint that one task cannot read is of no use to the others.
        if min(steps) == 0:
            raise ModelDirError(
                f"The tasks found checkpoints of different steps in --model_dir: {steps}, by "
                "replica. It must be one directory that all of them see, on a shared file system."
            )
        log.warning("The newest complete checkpoints are of steps %s, by replica.", steps)
        saved = checkpointer.restore(at_most=min(steps))
    return saved


def train_recovering(parts: Parts, hooks: Sequence[Hook]) -> int:
    """`train`, but goes back after a NonFiniteLossError, `recover_from_nan` times in a run at most.

    Raises it if no recovery is left, none is allowed, or there is no checkpoint to go back to.
    """
    executor, config = parts.executor, parts.spec.recipe.config
    steps, most_recoveries = config.train_steps, config.recover_from_nan
    while True:
        try:
            # Sums overlap within a call only; hooks say when it must end.
            per_call = steps if config.local_steps.overlap else config.steps_per_call
            return train(executor, parts.learner, hooks, steps=steps, steps_per_call=per_call)
        except NonFiniteLossError as error:
            num_recoveries = len(executor.position.skipped)
            if not most_recoveries:
                raise
            if num_recoveries >= most_recoveries:
                raise NonFiniteLossError(
                    f"{error} Training had gone back {num_recoveries} time(s) before "
                    f"(--config.recover_from_nan={most_recoveries})."
                ) from error
            _go_back(parts, error)


def _go_back(parts: Parts, error: NonFiniteLossError) -> None:
    def restore() -> tuple[Position, WorkerStats]:
        end = parts.executor.position
        rate = parts.learner.optimizer_rate
        saved = restore_together(parts.executor, parts.checkpointer)
        if rate is not None:  # Callbacks do not go back.
            parts.learner.optimizer.learning_rate = rate
        if saved is None:
            raise NonFiniteLossError(f"{error} There is no checkpoint to go back to.") from error
        position = saved.position.skip_to(end, parts.inputs.train.order)
        log.warning(
            "%s. Going back to step %s, and skipping the %s examples since (recovery %s).",
            str(error).partition(". ")[0],  # Without the advice for a run that ended.
            f"{saved.step:,}",
            f"{position.skipped[-1]:,}",
            len(position.skipped),
        )
        return position, saved.counts

    parts.executor.roll_back(restore)
