"""Evaluation while training, and early stopping.

evaluate = Evaluate(executor, learner, writers, every_steps=500, last_step=1000, ...)
hooks = [..., evaluate, ...]
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from typing_extensions import override

from strategies.base import Executor
from strategies.metrics import means
from strategies.position import Position
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.finite import NonFiniteLossError, require_finite
from trainer.hooks.base import PeriodicHook
from trainer.hooks.save import SaveCheckpoint
from trainer.hooks.writers import Values, Writer
from trainer.learner import Learner
from trainer.step.options import EarlyStoppingConfig


@dataclass(eq=False)
class Evaluate(PeriodicHook):
    """Writes evaluation metrics to all writers, and ends training that no longer improves.

    All tasks that run the loop, or none, have it. The chief decides to end training, and the other
    tasks follow: only the chief has the evaluations from before a resume.
    """

    executor: Executor
    learner: Learner
    writers: Sequence[Writer]
    _: KW_ONLY
    best_metric: str
    # The chief's; it saves the best state by `best_metric`.
    checkpointer: Checkpointer | None = None
    # Of the evaluated state, in the data; None: that of the executor.
    position: Callable[[], Position] | None = None
    history: Callable[[], Sequence[Values]] = list  # The reports of the run so far (the chief's).
    # Saves the state before the first evaluation, which may need more memory than there is, or
    # never end: then no error is left to save it after.
    save: SaveCheckpoint | None = None
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    latest: dict[str, float] = field(default_factory=dict, init=False)  # The last metrics.
    latest_step: int = field(default=-1, init=False)
    _best_score: float = field(default=-math.inf, init=False)
    _num_without_improvement: int = field(default=0, init=False)
    _counted_step: int = field(default=-1, init=False)

    @override
    def begin(self, step: int) -> None:
        super().begin(step)
        # Counts past evaluations, so a resumed run stops where an uninterrupted one does.
        self._best_score, self._num_without_improvement, self._counted_step = -math.inf, 0, -1
        for report in self.history() if self.early_stopping.patience else ():
            is_past = report["split"] == "eval" and report["step"] <= step
            if is_past and self.best_metric in report:  # It may be new.
                self._count(report["step"], report[self.best_metric])

    @override
    def catch_up(self, step: int) -> None:
        """Evaluates if that is due at `step`, and the chief has not reported it."""
        if step == 0 or self.next_step(step - 1) != step:
            return
        is_reported = any(r["split"] == "eval" and r["step"] == step for r in self.history())
        if not self.executor.gathered(int(is_reported))[0]:
            self._act(step)

    @override
    def act(self, step: int) -> None:
        if self.executor.stopping and step < self.last_step:
            return
        is_saved = self.save is not None and self.latest_step < 0 and self.save.save_now(step)
        started = time.monotonic()
        metrics = self.executor.evaluate(must_complete=step >= self.last_step)
        if not metrics:
            return
        self.latest, self.latest_step = means(metrics), step
        if not math.isfinite(self.latest["loss"]):
            if is_saved and self.checkpointer is not None:
                self.checkpointer.remove(step)  # A restart, or a recovery, would go back to it.
            raise NonFiniteLossError(
                f"The evaluation loss at step {step} is {self.latest['loss']}. Lower "
                "--learning_rate; the last checkpoint is from before."
            )
        seconds = time.monotonic() - started
        values = {**self.latest, "examples": int(metrics["loss"][1]), "seconds": seconds}
        for writer in self.writers:
            writer.write(step, "eval", values)
        # In every task, though only the chief saves: an error must end the run in all tasks.
        with self.executor.stopwatch.spend("checkpoint"):
            require_finite(self.learner, step)
            if self.checkpointer is not None:
                position = self.position() if self.position else self.executor.position
                score = self.score(self.latest[self.best_metric])
                is_lowest = self.learner.objective.is_lower_better(self.best_metric)
                self.checkpointer.save_best(step, position, score, is_lowest=is_lowest)
        if patience := self.early_stopping.patience:
            self._count(step, self.latest[self.best_metric])
            is_over = self._num_without_improvement >= patience
            if self.executor.gathered(int(is_over))[0]:
                metric = self.best_metric
                self.done = f"no better {metric} in {patience} evaluations: stopped early"

    def _count(self, step: int, value: float | None) -> None:
        if step <= self._counted_step:
            return  # A resumed run evaluates again at its last step.
        self._counted_step = step
        # JSON has no NaN, so it is None there. NaN is no improvement.
        score = self.score(math.nan if value is None else value)
        if score > self._best_score + self.early_stopping.min_delta:
            self._best_score, self._num_without_improvement = score, 0
        else:
            self._num_without_improvement += 1

    def score(self, value: float) -> float:
        """A number that is higher the better `value` of the best metric is."""
        return -value if self.learner.objective.is_lower_better(self.best_metric) else value

    @override
    def result(self) -> Mapping[str, object]:
        return {"eval": self.latest}
